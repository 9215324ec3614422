"""A rollout on disk: one sample a line, with all that it takes to make its tokens once more.

Owns the format. A line is a JSON object with ``prompt_token_ids``, ``seed`` and ``token_ids`` (all that the oracle
drafter reads), and ``sampling`` (parameters other than n and seed, where they differ from the defaults; those that
speculation knows nothing of may be there too), ``finish_reason`` and ``model``. Knows nothing of engines. Invariant: a
sample is found by its prompt and its seed, so a file holds that pair once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from engine.sampling_params import SamplingParams

_UNWRITTEN = ("n", "seed", "logprobs", "prompt_logprobs", "logits_processors", "speculation")


@dataclass(frozen=True, slots=True)
class RolloutSample:
    """One sample: ``params`` are those it was made with; ``line`` is where it stands, from 1."""

    line: int
    prompt_token_ids: tuple[int, ...]
    seed: int
    token_ids: tuple[int, ...]
    params: SamplingParams
    finish_reason: str | None = None
    model: str | None = None


def write_rollout(path: str | os.PathLike[str], samples: Sequence[RolloutSample]) -> None:
    """Write a rollout, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    target = Path(path)
    part = target.with_name(target.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        for sample in samples:
            entry = {
                "prompt_token_ids": sample.prompt_token_ids,
                "seed": sample.seed,
                "token_ids": sample.token_ids,
                "finish_reason": sample.finish_reason,
                "sampling": sampling_of(sample.params),
                "model": sample.model,
            }
            file.write(json.dumps(entry) + "\n")
    part.replace(target)


def sampling_of(params: SamplingParams) -> dict[str, Any]:
    """The parameters that decide tokens, as plain values: temperature and max_tokens, and what is not a default."""
    found: dict[str, Any] = {}
    for field in fields(params):
        value = getattr(params, field.name)
        if field.name in _UNWRITTEN or value == ():
            continue
        if field.name in ("temperature", "max_tokens") or value not in (field.default, None):
            found[field.name] = dict(value) if isinstance(value, Mapping) else value
    if params.structure is not None:
        names = [field.name for field in fields(params.structure)]
        given = {name: getattr(params.structure, name) for name in names}
        found["structured_outputs"] = {k: v for k, v in given.items() if v not in (None, False)}
    return found


def read_rollout(path: str | os.PathLike[str]) -> list[RolloutSample]:
    """The samples of a file, in its order.

    Raises:
        ValueError: names the file and the line, what is wrong with it, and what it must be.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(
            f"rollout {os.fspath(path)!r} cannot be read: {error.strerror or error}"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"rollout {os.fspath(path)!r} is not UTF-8 text: {error}") from error
    samples: list[RolloutSample] = []
    seen: dict[tuple[tuple[int, ...], int], int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            sample = _sample(number, json.loads(line))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"rollout {os.fspath(path)!r}, line {number}: {error}") from error
        before = seen.setdefault((sample.prompt_token_ids, sample.seed), number)
        if before != number:
            raise ValueError(
                f"rollout {os.fspath(path)!r}, line {number}: it has the prompt and the seed of line {before}; "
                f"they are how a sample is found, so give it another seed or leave one out"
            )
        samples.append(sample)
    if not samples:
        raise ValueError(
            f"rollout {os.fspath(path)!r} holds no samples; make one with tlt replay record"
        )
    return samples


def _sample(line: int, entry: Any) -> RolloutSample:
    if not isinstance(entry, dict):
        raise ValueError(f"it must be a JSON object, got {type(entry).__name__}")
    for key in ("prompt_token_ids", "seed", "token_ids"):
        if key not in entry:
            raise ValueError(f"{key} is missing; it has {', '.join(entry) or 'no keys'}")
    prompt, output = (_ids(name, entry[name]) for name in ("prompt_token_ids", "token_ids"))
    sampling = entry.get("sampling") or {}
    if not isinstance(sampling, dict):
        raise ValueError(f"sampling must be an object of sampling parameters, got {sampling!r}")
    if isinstance(sampling.get("logit_bias"), dict):  # JSON's keys are text
        bias = sampling["logit_bias"]
        sampling = sampling | {
            "logit_bias": {int(k) if k.isdecimal() else k: v for k, v in bias.items()}
        }
    given: dict[str, Any] = {"max_tokens": len(output)} | sampling | {"seed": entry["seed"]}
    params = SamplingParams(**given)
    if params.seed is None:
        raise ValueError("seed must be an integer, got null")
    if params.max_tokens is not None and len(output) > params.max_tokens:
        raise ValueError(
            f"token_ids has {len(output)} tokens, sampling allows max_tokens={params.max_tokens}"
        )
    for key in ("finish_reason", "model"):
        if not isinstance(entry.get(key), (str, type(None))):
            raise ValueError(f"{key} must be text or null, got {entry[key]!r}")
    return RolloutSample(
        line, prompt, params.seed, output, params, entry.get("finish_reason"), entry.get("model")
    )


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name} must be a list of at least one token id, got {value!r}")
    for i, token_id in enumerate(value):
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise ValueError(f"{name}[{i}] must be a token id, got {token_id!r}")
    return tuple(value)
