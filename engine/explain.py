"""``tlt explain``: which backend runs each op and why; with ``--tuner``, what the tuner believes and would choose.

Owns the words of the read-out. Knows nothing of how choices are made: it prints ``Ops.explain`` and
``Tuner.explain``, which a running engine gives too (``LLM.stats()["speculation"]``).
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.llm import LLM
from engine.ops import resolve_ops
from engine.sampling_params import SamplingParams

_PROMPTS = ("Once upon a time", "The capital of France is", "1 2 3 4 5 6 7 8 9", "Dear neighbour,")


def explain_ops(options: Namespace) -> int:
    ops = resolve_ops(options.ops, num_threads=options.num_threads)
    print(ops)
    print(f"instruction set: {ops.isa}; threads: {ops.num_threads}")
    return 0


def explain_tuner(options: Namespace, engine_arguments: Mapping[str, Any]) -> int:
    """Run a short batch with the tuner that was asked for, and print what it makes of this machine and model.

    Raises:
        ValueError: the config or the saved state is bad.
    """
    llm = LLM(
        **engine_arguments,
        speculative_config=_json("--speculative-config", options.speculative_config),
    )
    if options.tuner_state:
        llm.load_tuner_state(_json("--tuner-state", _text(options.tuner_state)))
    params = SamplingParams(max_tokens=options.max_tokens, temperature=1.0, ignore_eos=True, seed=0)
    for num in (len(_PROMPTS), 1):
        llm.generate(list(_PROMPTS[:num]), params, use_tqdm=False)
    speculation = llm.stats()["speculation"]
    print("\n".join(_lines(speculation["tuner"])))
    for name, drafter in speculation["drafters"].items():
        print(f"drafter {name}: {drafter}")
    for name, failure in speculation["failures"].items():
        print(f"drafter {name} was switched off: {failure}")
    return 0


def _lines(explained: Mapping[str, Any]) -> list[str]:
    """A dict of dicts as indented lines; dicts of plain values on one line."""
    lines: list[str] = []
    for key, value in explained.items():
        if isinstance(value, Mapping) and any(isinstance(v, Mapping) for v in value.values()):
            lines.append(f"{key}:")
            lines += ["  " + line for line in _lines(value)]
        elif isinstance(value, Mapping):
            lines.append(f"{key}: " + ", ".join(f"{k} {_plain(v)}" for k, v in value.items()))
        else:
            lines.append(f"{key}: {_plain(value)}")
    return lines


def _plain(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " ".join(str(v) for v in value)
    return str(value)


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name} must be JSON, got {text[:80]!r}: {error}") from error


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--tuner-state: cannot read {path!r}: {error.strerror}") from error
