"""``tlt check lossless``: the promise that speculation changes no token, put to the test on this model and machine.

Plain decoding, each sample alone, is the oracle; against it, every drafter with every tuner at every batch size. Owns
the cases, the comparison and what is printed. Knows nothing of how speculation works: it sees what a user sees.
Invariants: exit status 0 means that every sample was compared and none differs; a run in which a drafter failed, and a
check in which no draft was ever accepted, are no proof and count as failures.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the command line must not wait for torch
    from engine.llm import LLM
    from engine.outputs import CompletionOutput

PROMPTS = (  # some that text repeats itself in, some that it does not
    "1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3,",
    "The capital of France is Paris. The capital of Spain is Madrid. The capital of Italy is",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return",
    "Once upon a time, in a land far away,",
    '[{"name": "Ann", "age": 31}, {"name": "Bob", "age": 44}, {"name":',
    "Les oiseaux chantent",
)
_ORACLE_ACCEPTANCE = 0.8
_AROUND = 6  # tokens shown on each side of a difference
_TOLERANCE_OFF_CPU = 1e-4
_MOST_SEQS = 2**20
_MOST_SEEDS = 4096  # of each prompt and temperature


@dataclass(frozen=True, slots=True)
class Case:
    """One sample. Seeds are all different: prompt and seed are how a recorded rollout is looked up."""

    prompt: str | list[int]
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Setting:
    """How a run speculates: ``drafter`` as on the command line, ``batch_size`` the most samples at once."""

    drafter: str
    tuner: str
    batch_size: int


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a sample first leaves plain decoding: ``position`` counts output tokens."""

    setting: Setting
    case: Case
    position: int
    what: str
    plain: str
    speculated: str


@dataclass(frozen=True, slots=True)
class Run:
    """What came of a setting."""

    setting: Setting
    num_samples: int
    num_different: int
    num_tokens: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    acceptance_length: float
    max_logprob_difference: float
    failure: str | None
    seconds: float


def add_parser(
    commands: Any, add_engine_options: Callable[[argparse.ArgumentParser], None]
) -> argparse.ArgumentParser:
    """Add ``check lossless`` to the sub-commands of ``tlt``."""
    check = commands.add_parser("check", help="put a promise to the test on this machine")
    kinds = check.add_subparsers(dest="kind", required=True)
    parser = kinds.add_parser(
        "lossless", help="speculation changes no token and no log-probability"
    )
    add_engine_options(parser)
    parser.add_argument(
        "--drafters",
        default="suffix,oracle",
        help="of suffix, oracle, oracle:ACCEPTANCE, auto[:DIR], eagle:DIR, eagle3:DIR (default %(default)s)",
    )
    parser.add_argument("--tuners", default="fixed,cost,beg", help="default %(default)s")
    parser.add_argument("--batch-sizes", default="1,4,8", help="default %(default)s")
    parser.add_argument("--temperatures", default="0,1", help="default %(default)s")
    parser.add_argument("--seeds", type=int, default=2, help="of each prompt and temperature")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument(
        "--prompt", action="append", default=None, help="may be given several times"
    )
    parser.add_argument("--num-speculative-tokens", type=int, default=5, help="depth of trees")
    parser.add_argument("--top-k", type=int, default=2, help="most children of a node")
    parser.add_argument("--num-nodes", type=int, default=10, help="most nodes of a tree")
    parser.add_argument(
        "--logprob-tolerance",
        type=float,
        default=None,
        help=f"most difference of a log-probability; default 0 on a CPU, else {_TOLERANCE_OFF_CPU}",
    )
    return parser


def run_check(engine_arguments: Mapping[str, Any], options: argparse.Namespace) -> int:
    """Compare, print the table, the first difference and one JSON line. 0: nothing differs; 1: something does."""
    from engine.llm import LLM

    _check_numbers(options)
    settings = list(_settings(options))
    plain = LLM(**engine_arguments, max_num_seqs=1, enable_prefix_caching=False)
    cases = _cases(options, plain)
    expected, prompt_ids = _generate(plain, cases, options.max_tokens)
    isa, dtype = plain.engine.runner.decoder.ops.isa, plain.config.dtype
    tolerance = options.logprob_tolerance
    if tolerance is None:
        tolerance = 0.0 if str(plain.config.device) == "cpu" else _TOLERANCE_OFF_CPU
    del plain
    print(f"{engine_arguments['model']}, {dtype}, {isa}: {len(cases)} samples decoded alone")
    print(_HEADER)
    runs: list[Run] = []
    first: Difference | None = None
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory) / "plain.jsonl"
        _record(trace, cases, prompt_ids, expected)
        for setting in settings:
            config = _speculative_config(setting, options, trace)
            llm = LLM(
                **engine_arguments, max_num_seqs=setting.batch_size, speculative_config=config
            )
            run, difference = _compare(llm, setting, cases, expected, options.max_tokens, tolerance)
            runs.append(run)
            first = first or difference
            print(_line(run), flush=True)
            del llm
    if first is not None:
        print(_story(first))
    summary = _summary(runs, first, tolerance) | {"isa": isa, "dtype": dtype}
    for failure in summary["failures"]:
        print(f"no proof: {failure}")
    print(json.dumps({"check": "lossless", "model": engine_arguments["model"], **summary}))
    return 0 if summary["lossless"] else 1


def _check_numbers(options: argparse.Namespace) -> None:
    """Refuse at once what would only be found out, or prove nothing, after a long run."""
    if not 1 <= options.seeds <= _MOST_SEEDS:
        raise ValueError(f"--seeds must be from 1 to {_MOST_SEEDS}, got {options.seeds}")
    tolerance = options.logprob_tolerance
    if tolerance is not None and not 0.0 <= tolerance < math.inf:
        raise ValueError(f"--logprob-tolerance must be a finite number from 0, got {tolerance}")


def _settings(options: argparse.Namespace) -> Iterator[Setting]:
    for drafter in _words("--drafters", options.drafters):
        for tuner in _words("--tuners", options.tuners):
            for size in _words("--batch-sizes", options.batch_sizes):
                if not size.isdecimal() or not 1 <= int(size) <= _MOST_SEQS:
                    raise ValueError(
                        f"--batch-sizes must be integers from 1 to {_MOST_SEQS}, got {size!r}"
                    )
                setting = Setting(drafter, tuner, int(size))
                _speculative_config(setting, options, None)  # whatever is wrong is said at once
                yield setting


def _words(name: str, text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ValueError(f"{name} must name at least one, separated by commas, got {text!r}")
    return words


def _speculative_config(setting: Setting, options: argparse.Namespace, trace: Path | None) -> Any:
    from engine.spec.config import SpeculativeConfig

    method, _, detail = setting.drafter.partition(":")
    config: dict[str, Any] = {
        "method": method,
        "tuner": setting.tuner,
        "num_speculative_tokens": options.num_speculative_tokens,
        "top_k": options.top_k,
        "num_nodes": options.num_nodes,
    }
    if method == "oracle":
        config["trace"] = str(trace or "recorded by the check itself")
        try:
            config["acceptance"] = float(detail) if detail else _ORACLE_ACCEPTANCE
        except ValueError:
            raise ValueError(f"--drafters: oracle:{detail} must end in a number") from None
    elif detail:
        config["model"] = detail
    return SpeculativeConfig.of(config)


def _cases(options: argparse.Namespace, llm: LLM) -> list[Case]:
    prompts: Sequence[str | list[int]] = options.prompt or PROMPTS
    if llm.engine.tokenizer is None:  # ids with a period, and the model's own continuation
        size = llm.config.model.vocab_size
        prompts = [[(7 * i + j % 5) % size for j in range(12)] for i in range(len(PROMPTS))]
    try:
        temperatures = [float(t) for t in _words("--temperatures", options.temperatures)]
    except ValueError:
        raise ValueError(f"--temperatures must be numbers, got {options.temperatures!r}") from None
    kinds = [(p, t) for p in prompts for t in temperatures for _ in range(options.seeds)]
    return [Case(prompt, temperature, seed) for seed, (prompt, temperature) in enumerate(kinds)]


def _generate(
    llm: LLM, cases: Sequence[Case], max_tokens: int
) -> tuple[list[CompletionOutput], list[list[int]]]:
    from engine.sampling_params import SamplingParams

    params = [
        SamplingParams(temperature=c.temperature, seed=c.seed, max_tokens=max_tokens, logprobs=2)
        for c in cases
    ]
    outputs = llm.generate([case.prompt for case in cases], params, use_tqdm=False)
    return [o.outputs[0] for o in outputs], [list(o.prompt_token_ids) for o in outputs]


def _record(
    path: Path,
    cases: Sequence[Case],
    prompt_ids: Sequence[list[int]],
    outputs: Sequence[CompletionOutput],
) -> None:
    """The rollout that the oracle drafter replays."""
    with path.open("w", encoding="utf-8") as file:
        for case, ids, output in zip(cases, prompt_ids, outputs, strict=True):
            entry = {"prompt_token_ids": ids, "seed": case.seed, "token_ids": output.token_ids}
            file.write(json.dumps(entry) + "\n")


def _compare(
    llm: LLM,
    setting: Setting,
    cases: Sequence[Case],
    expected: Sequence[CompletionOutput],
    max_tokens: int,
    tolerance: float,
) -> tuple[Run, Difference | None]:
    start = time.perf_counter()
    outputs, _ = _generate(llm, cases, max_tokens)
    seconds = time.perf_counter() - start
    first: Difference | None = None
    num_different, largest = 0, 0.0
    for case, got, want in zip(cases, outputs, expected, strict=True):
        at, what, gap = _first_difference(got, want, tolerance)
        largest = max(largest, gap)
        if what is not None:
            num_different += 1
            shown = [_around(llm, output, at) for output in (want, got)]
            first = first or Difference(setting, case, at, what, *shown)
    stats = llm.stats()
    failures = [f"{name}: {why}" for name, why in llm.engine.speculator.failures.items()]
    run = Run(
        setting,
        len(cases),
        num_different,
        sum(len(output.token_ids) for output in outputs),
        stats["num_draft_tokens"],
        stats["num_accepted_draft_tokens"],
        stats["acceptance_length"],
        largest,
        "; ".join(failures) or None,
        seconds,
    )
    return run, first


def _first_difference(
    got: CompletionOutput, want: CompletionOutput, tolerance: float
) -> tuple[int, str | None, float]:
    """(output position, what differs there, largest difference of a log-probability before it or there).

    What cannot be compared, such as NaN, differs.
    """
    largest = 0.0
    length = min(len(got.token_ids), len(want.token_ids))
    for at in range(length):
        token = want.token_ids[at]
        if got.token_ids[at] != token:
            return at, "token", largest
        gap = abs(got.logprobs[at][token].logprob - want.logprobs[at][token].logprob)  # type: ignore[index]
        largest = gap if gap != gap else max(largest, gap)
        if not gap <= tolerance:
            return at, f"log-probability, by {gap:.3g}", largest
    if len(got.token_ids) != len(want.token_ids):
        return length, "number of tokens", largest
    if (got.finish_reason, got.text) != (want.finish_reason, want.text):
        return length, "finish_reason or text", largest
    return length, None, largest


def _around(llm: LLM, output: CompletionOutput, at: int) -> str:
    """Tokens about a position and the log-probabilities there, for reading."""
    tokenizer = llm.engine.tokenizer

    def text(token_id: int) -> str:
        if tokenizer is None:
            return str(token_id)
        return f"{token_id} {tokenizer.decode([token_id], skip_special_tokens=False)!r}"

    tokens = output.token_ids
    before = ", ".join(text(t) for t in tokens[max(0, at - _AROUND) : at])
    here = text(tokens[at]) if at < len(tokens) else f"end ({output.finish_reason})"
    after = ", ".join(text(t) for t in tokens[at + 1 : at + 1 + _AROUND])
    known = output.logprobs[at] if output.logprobs and at < len(output.logprobs) else {}
    logprobs = ", ".join(f"{text(t)}: {entry.logprob:.9g}" for t, entry in known.items())
    return f"{before} >>> {here} <<< {after}\n             log-probabilities: {logprobs or 'none'}"


_HEADER = (
    f"{'drafter':<20} {'tuner':<6} {'batch':>5} {'samples':>7} {'tokens':>7} {'drafted':>7} {'accepted':>8} "
    f"{'per step':>8} {'different':>9} {'logprobs':>9} {'s':>6}"
)


def _line(run: Run) -> str:
    setting = run.setting
    line = (
        f"{setting.drafter[-20:]:<20} {setting.tuner:<6} {setting.batch_size:>5} {run.num_samples:>7} "
        f"{run.num_tokens:>7} {run.num_draft_tokens:>7} {run.num_accepted_draft_tokens:>8} "
        f"{run.acceptance_length:>8.2f} {run.num_different:>9} {run.max_logprob_difference:>9.2g} {run.seconds:>6.1f}"
    )
    return line if run.failure is None else f"{line}\n  FAILED {run.failure}"


def _story(first: Difference) -> str:
    setting, case = first.setting, first.case
    return (
        f"\nfirst difference: {first.what} at output position {first.position}\n"
        f"  drafter {setting.drafter}, tuner {setting.tuner}, batch size {setting.batch_size}, "
        f"temperature {case.temperature}, seed {case.seed}\n"
        f"  prompt     {case.prompt!r}\n"
        f"  plain      {first.plain}\n"
        f"  speculated {first.speculated}\n"
    )


def _summary(runs: Sequence[Run], first: Difference | None, tolerance: float) -> dict[str, Any]:
    failures = [run.failure for run in runs if run.failure is not None]
    if not any(run.num_accepted_draft_tokens for run in runs):
        failures.append("no draft token was accepted in any run, so nothing was put to the test")
    return {
        "lossless": first is None and not failures,
        "num_runs": len(runs),
        "num_samples": sum(run.num_samples for run in runs),
        "num_tokens": sum(run.num_tokens for run in runs),
        "num_accepted_draft_tokens": sum(run.num_accepted_draft_tokens for run in runs),
        "num_different": sum(run.num_different for run in runs),
        "max_logprob_difference": max(run.max_logprob_difference for run in runs),
        "logprob_tolerance": tolerance,
        "failures": failures,
        "first_difference": None if first is None else asdict(first),
    }
