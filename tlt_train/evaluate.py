"""``tlt drafter eval``: how far a head's chains are accepted on held-out prompts, and what that is worth here.

Owns the order of the measurement and its record. For each temperature, with coupled and with mode proposals:

    acceptance     all prompts in one batch, chains of fixed depth: by position, and the length with the bonus token
    speed-up       at batch 1, plain decoding, the fixed chain and the cost tuner in interleaved rounds, medians
    bound          what the prices of steps allow at that acceptance: the best depth, from steps of every depth that
                   were run side by side in the same rounds, over the texts as long as they were

Every run's tokens are compared with those of plain decoding: a speed-up of other text would be of other work. At
temperature 0 both kinds of proposals are the same and one is run. Invariant: the record says nothing that was not
measured in its own run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from bench.harness import interleave, paired_median, table
from engine import LLM
from engine.models.eagle_checkpoint import open_drafter
from engine.models.loader import Checkpoint, open_checkpoint
from engine.spec.config import DRAFT_SAMPLING, MAX_DEPTH
from tlt_train.acceptance import depth_gains
from tlt_train.fingerprint import check_data
from tlt_train.prompts import prompts_of
from tlt_train.shards import ShardReader
from tlt_train.trial_runs import DecodeStep, RunLog, Trial, TrialRuns

_LEAST_STEPS = 3  # of a depth, for a price
_SEEDS = 900_001  # not those of the data


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """What to measure.

    Args:
        tasks, prompts, data: where prompts come from, one of the three: the held-out side of tasks or of a file, or the
            prompts of a directory of training data, which are *not* held out.
        temperatures: each is measured.
        draft_sampling: kinds of proposals, "coupled" or "mode".
        depth: of chains.
        num_prompts: for acceptance.
        num_timed: of these, decoded one by one for the speed-up.
        max_tokens: longest answer.
        rounds: of the timing; 0 measures acceptance only.
        seed: of the sampler, and of which questions tasks ask.
        split_seed: of the split of ``prompts.py``.

    Raises:
        ValueError: names the option, what came, and the fix.
    """

    tasks: tuple[str, ...] = ()
    prompts: str | None = None
    data: str | None = None
    temperatures: tuple[float, ...] = (0.0, 0.6, 1.0)
    draft_sampling: tuple[str, ...] = DRAFT_SAMPLING
    depth: int = 5
    num_prompts: int = 32
    num_timed: int = 8
    max_tokens: int = 128
    rounds: int = 3
    seed: int = 0
    split_seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("num_prompts", 1), ("num_timed", 1), ("max_tokens", 2), ("rounds", 0)):
            if getattr(self, name) < low:
                raise ValueError(
                    f"--{name.replace('_', '-')} must be at least {low}, got {getattr(self, name)}"
                )
        if not 1 <= self.depth <= MAX_DEPTH:
            raise ValueError(f"--depth must be from 1 to {MAX_DEPTH}, got {self.depth}")
        if not self.temperatures or min(self.temperatures) < 0.0:
            raise ValueError(
                f"--temperatures must be one or more numbers from 0 up, got {self.temperatures}"
            )
        for name in self.draft_sampling or ("",):
            if name not in DRAFT_SAMPLING:
                raise ValueError(
                    f"--draft-sampling must be of {', '.join(DRAFT_SAMPLING)}, got {name!r}"
                )
        if sum(map(bool, (self.tasks, self.prompts, self.data))) != 1:
            raise ValueError("prompts come from --tasks, --prompts or --data: give one of them")


def evaluate(
    target: str, drafter: str, options: EvalOptions, **engine_options: Any
) -> dict[str, Any]:
    """Measure a head.

    Args:
        target: "smollm2", an HF directory or a GGUF file.
        drafter: a directory that ``open_drafter`` reads.
        engine_options: of ``LLM``.

    Returns:
        The record; ``verified`` says whether every token was plain decoding's. ``results`` has one entry for each
        temperature and kind of proposals; ``report`` makes the table of it.

    Raises:
        ValueError: an option is bad, head, target or prompts are missing, or data are of another target.
    """
    checkpoint = open_checkpoint(target)
    head = open_drafter(drafter, checkpoint.config).config
    trials = _trials(checkpoint, target, options)
    longest = max(len(trial.prompt_ids) for trial in trials) + options.max_tokens
    limit = checkpoint.config.max_position_embeddings
    model = checkpoint.config
    page_bytes = 8 * model.num_layers * model.num_kv_heads * model.head_dim * 16
    llm = LLM(
        target,
        enable_prefix_caching=False,
        max_num_seqs=len(trials),
        max_model_len=min(longest, limit),
        kv_cache_bytes=(len(trials) + 1) * (longest // 16 + 8) * page_bytes,
        **engine_options,
    )
    runs = TrialRuns(
        llm, head=head.kind, drafter=drafter, depth=options.depth, max_tokens=options.max_tokens
    )
    results: list[dict[str, Any]] = []
    for temperature in options.temperatures:
        results += _at_temperature(runs, trials, temperature, options)
    source = {"tasks": list(options.tasks), "prompts": options.prompts, "data": options.data}
    return {
        "verified": all(result["verified"] for result in results) and not runs.failures,
        "failures": dict(runs.failures),
        "target": target,
        "drafter": str(drafter),
        "kind": head.kind,
        "depth": options.depth,
        "max_tokens": options.max_tokens,
        "num_prompts": len(trials),
        "num_timed": min(options.num_timed, len(trials)),
        "rounds": options.rounds,
        "held_out": options.data is None,
        "source": {name: value for name, value in source.items() if value},
        "num_threads": llm.config.num_threads,
        "results": results,
    }


@contextmanager
def opened_record(path: str | None) -> Iterator[TextIO | None]:
    """The file that a record is to be appended to, open before anything is measured; None where none is wanted.

    Raises:
        ValueError: it cannot be written.
    """
    if path is None:
        yield None
        return
    with ExitStack() as stack:
        try:
            file = stack.enter_context(Path(path).open("a", encoding="utf-8"))
        except OSError as error:
            raise ValueError(
                f"--json {path} cannot be written: {error.strerror or error}; give a file in a directory that is there"
            ) from error
        yield file


def _trials(checkpoint: Checkpoint, target: str, options: EvalOptions) -> list[Trial]:
    most = checkpoint.config.max_position_embeddings - options.max_tokens
    if options.data is not None:
        reader = ShardReader(options.data)
        check_data(reader, target)
        whole = (s for s in reader if s.start == 0 and s.num_tokens >= s.prompt_len)
        prompts = dict.fromkeys(tuple(s.token_ids[: s.prompt_len].tolist()) for s in whole)
    else:
        tokenizer = checkpoint.tokenizer
        if tokenizer is None:
            raise ValueError("prompts are text, but the model has no tokenizer; give --data")
        stream = prompts_of(
            tasks=options.tasks,
            file=options.prompts,
            held_out=True,
            seed=options.seed if options.tasks else 0,
            split_seed=options.split_seed,
        )
        first = itertools.islice(stream, options.num_prompts)
        prompts = dict.fromkeys(tuple(prompt.token_ids(tokenizer)) for prompt in first)
    fitting = [ids for ids in prompts if 2 <= len(ids) <= most][: options.num_prompts]
    if not fitting:
        raise ValueError(f"no prompt leaves room for {options.max_tokens} tokens (--max-tokens)")
    seed = _SEEDS + options.seed * len(fitting)
    return [Trial(ids, seed + number) for number, ids in enumerate(fitting)]


def _at_temperature(
    runs: TrialRuns, trials: Sequence[Trial], temperature: float, options: EvalOptions
) -> list[dict[str, Any]]:
    kinds = list(dict.fromkeys(options.draft_sampling))[: 1 if temperature == 0.0 else None]
    plain = runs.speculator("plain", kinds[0])
    expected = runs.together(plain, trials, temperature)
    results: dict[str, dict[str, Any]] = {}
    for kind in kinds:
        log = runs.together(runs.speculator("fixed", kind), trials, temperature)
        results[kind] = {
            "temperature": temperature,
            "draft_sampling": kind if temperature else "greedy",
            "verified": log.token_ids == expected.token_ids,
            **_acceptance(log, options.depth),
        }
    if options.rounds:
        timed = trials[: options.num_timed]
        logs = _timed(runs, plain, kinds, timed, temperature, options.rounds)
        wanted = expected.token_ids[: len(timed)]
        for kind in kinds:
            own = {name: logs[f"{name} {kind}"] for name in ("fixed", "cost", "sweep")}
            found = _speed(logs["plain"], own, options.depth)
            same = all(log.token_ids == wanted for name in logs for log in logs[name])
            results[kind] |= found | {"verified": results[kind]["verified"] and same}
    return list(results.values())


def _acceptance(log: RunLog, depth: int) -> dict[str, Any]:
    counts = log.counts
    return {
        "acceptance_length": counts.length(depth),
        "acceptance_by_position": counts.conditional(depth),
        "survival": counts.survival(depth),
        "trials_by_position": (counts.trials + [0] * depth)[:depth],
        "tokens_per_step": log.tokens_per_step,
        "num_steps": sum(log.histogram),
        "num_tokens": sum(len(ids) for ids in log.token_ids),
    }


def _timed(
    runs: TrialRuns,
    plain: Any,
    kinds: Sequence[str],
    trials: Sequence[Trial],
    temperature: float,
    rounds: int,
) -> dict[str, list[RunLog]]:
    """Logs of every variant, one a round. A round before the first is thrown away: tuners learn, caches warm up."""
    speculators = {"plain": plain}
    for kind in kinds:
        for name in ("fixed", "cost", "sweep"):
            speculators[f"{name} {kind}"] = runs.speculator(name, kind)
    variants = {
        name: lambda s=speculator: runs.alone(s, trials, temperature)
        for name, speculator in speculators.items()
    }
    logs = interleave(variants, 1 + rounds)
    return {name: found[1:] for name, found in logs.items()}


def _speed(plain: Sequence[RunLog], own: dict[str, list[RunLog]], depth: int) -> dict[str, Any]:
    """Speed-ups over plain decoding within the rounds, and what the prices of steps allow."""
    prices = step_prices(plain, own["sweep"], depth)
    counts = own["fixed"][0].counts  # all rounds have the same tokens
    survival = counts.survival(depth)
    # within each round, so that a slow minute of the machine hits both sides
    gains = [
        depth_gains(p.answers, survival, step_prices([p], [s], depth))
        for p, s in zip(plain, own["sweep"], strict=True)
    ]
    by_depth = [median(at) for at in zip(*gains, strict=False)]
    best = max(range(len(by_depth)), key=lambda d: by_depth[d])
    bounds = [gain[best] for gain in gains]
    draft_s = {
        d: median(step.draft_s for step in steps)
        for d, steps in _by_depth(own["sweep"]).items()
        if d and len(steps) >= _LEAST_STEPS
    }
    found: dict[str, Any] = {
        "plain_tokens_per_s": median(_tokens(log) / log.decode_s for log in plain),
        "plain_step_ms": 1e3 * prices[0],
        "step_ms": {d: 1e3 * s for d, s in prices.items()},
        "draft_ms": {d: 1e3 * s for d, s in sorted(draft_s.items())},
        "timed_acceptance_length": counts.length(depth),
        "bound": median(bounds),
        "bound_depth": best,
        "bound_by_depth": by_depth,
    }
    for name in ("fixed", "cost"):
        faster = [p.decode_s / log.decode_s for log, p in zip(own[name], plain, strict=True)]
        found[f"{name}_speedup"] = median(faster)
        found[f"{name}_speedup_with_prefill"] = paired_median(
            lambda log, p: p.seconds / log.seconds, own[name], plain
        )
        found[f"{name}_of_bound"] = paired_median(lambda gain, most: gain / most, faster, bounds)
    return found


def _tokens(log: RunLog) -> int:
    return sum(step.num_tokens for step in log.steps)


def _by_depth(logs: Sequence[RunLog]) -> dict[int, list[DecodeStep]]:
    found: dict[int, list[DecodeStep]] = {}
    for log in logs:
        for step in log.steps:
            found.setdefault(step.num_nodes, []).append(step)
    return found


def step_prices(plain: Sequence[RunLog], sweep: Sequence[RunLog], depth: int) -> dict[int, float]:
    """Median seconds of a step by the length of its chain, drafting included, up to the first depth without enough.

    A plain step's price is that of plain decoding itself; the steps without a chain of a sweep stand between others.
    """
    prices = {0: median([step.seconds for log in plain for step in log.steps] or [1.0])}
    found = _by_depth(sweep)
    for d in range(1, depth + 1):
        if len(found.get(d, ())) < _LEAST_STEPS:
            break
        prices[d] = median(step.seconds for step in found[d])
    return prices


def report(record: dict[str, Any]) -> str:
    """The record as text for a terminal."""
    depth = record["depth"]
    kind = "held-out prompts" if record["held_out"] else "prompts of the data, NOT held out"
    lines = [
        f"acceptance on {record['num_prompts']} {kind}, chains of {depth}, up to {record['max_tokens']} tokens",
        "",
    ]
    header = ["temperature", "proposals", "length", *(f"pos {j}" for j in range(1, depth + 1))]
    rows = [
        [
            *(f"{r['temperature']:g}", r["draft_sampling"], r["acceptance_length"]),
            *(p if t else None for p, t in zip(*_by_position(r), strict=True)),
        ]
        for r in record["results"]
    ]
    lines += [
        table(header, rows),
        "",
        "length: tokens of a step of a full chain, the bonus token included; pos j: P(draft token j is accepted once",
        "those before it were)",
    ]
    if record["rounds"]:
        header = ["temperature", "proposals", "plain tokens/s", f"chain of {depth}", "cost tuner"]
        header += ["bound", "at depth", "chain of it", "tuner of it", "tuner with prefill"]
        rows = [_speed_row(r) for r in record["results"]]
        lines += [
            "",
            f"decode speed-up at batch 1, {record['num_timed']} prompts one by one, medians of {record['rounds']} "
            f"interleaved rounds, {record['num_threads']} threads",
            "",
            table(header, rows),
            "",
            "bound: the best fixed depth at that acceptance, by the prices of steps measured in the same rounds",
        ]
    outcome = "identical" if record["verified"] else "NOT identical, or a drafter failed"
    lines += ["", f"check: tokens of all runs against plain decoding: {outcome}"]
    lines += [f"failed: {name}: {why}" for name, why in record["failures"].items()]
    return "\n".join(lines)


def _by_position(r: dict[str, Any]) -> tuple[list[float], list[int]]:
    return r["acceptance_by_position"], r["trials_by_position"]


def _speed_row(r: dict[str, Any]) -> list[Any]:
    times = [r["fixed_speedup"], r["cost_speedup"], r["bound"]]
    shares = [r["fixed_of_bound"], r["cost_of_bound"]]
    return [
        *(f"{r['temperature']:g}", r["draft_sampling"], r["plain_tokens_per_s"]),
        *(f"{t:.2f}x" for t in times),
        r["bound_depth"],
        *(f"{share:.0%}" for share in shares),
        f"{r['cost_speedup_with_prefill']:.2f}x",
    ]
