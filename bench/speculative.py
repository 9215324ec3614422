"""Rollouts with speculation: variants of tuner and drafter on one engine, every step written down.

Owns the names of variants (``plain``, ``cost:oracle:0.8``, ``fixed4:suffix``, ``beg:eagle3:DIR``) and the log of a run.
Knows nothing of tables or plots. Invariant: every variant runs the same requests at the same seeds, and its tokens are
compared with those of plain decoding: a bench of other text would be a bench of other work.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from bench.contestant import Generation
from bench.workloads import Job
from engine import LLM, SamplingParams
from engine.prompts import TokenPrompt
from engine.spec.config import SpeculativeConfig
from engine.spec.oracle import Recorded, write_records
from engine.spec_assembly import build_speculator
from engine.speculation import Speculator

PLAIN = "plain"
_EPOCH_SEEDS = 1_000_003


@dataclass(frozen=True, slots=True)
class StepLog:
    """One step. ``num_decoding`` 0 is prefill, alone or mixed."""

    seconds: float
    num_decoding: int
    num_rows: int
    num_nodes: int
    num_tokens: int


@dataclass(slots=True)
class RolloutLog:
    """One run of all requests."""

    token_ids: list[list[int]]
    steps: list[StepLog] = field(default_factory=list)
    explained: dict[str, Any] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    @property
    def num_tokens(self) -> int:
        return sum(len(ids) for ids in self.token_ids)

    @property
    def tail_s(self) -> float:
        """Seconds in which one request ran alone."""
        return sum(step.seconds for step in self.steps if step.num_decoding == 1)

    @property
    def off_share(self) -> float:
        """Share of the decoding time in which nothing was drafted."""
        decoding = [step for step in self.steps if step.num_decoding]
        off = sum(step.seconds for step in decoding if not step.num_nodes)
        return off / max(sum(step.seconds for step in decoding), 1e-9)

    @property
    def acceptance_length(self) -> float:
        """Tokens of a request's step, the bonus token included, over decoding steps."""
        decoding = [step for step in self.steps if step.num_decoding]
        return sum(s.num_tokens for s in decoding) / max(sum(s.num_decoding for s in decoding), 1)

    def by_phase(self) -> dict[int, tuple[float, int]]:
        """(seconds, tokens) by number of requests decoding."""
        phases: dict[int, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
        for step in self.steps:
            seconds, tokens = phases[step.num_decoding]
            phases[step.num_decoding] = (seconds + step.seconds, tokens + step.num_tokens)
        return dict(phases)


def pass_curve(
    logs: Sequence[RolloutLog], num_decoding: range = range(1, 1 << 20), least: int = 3
) -> dict[int, float]:
    """Rows -> median seconds of a decoding step of that many rows and requests, where there were at least so many."""
    found: dict[int, list[float]] = defaultdict(list)
    for log in logs:
        for step in log.steps:
            if step.num_decoding in num_decoding:
                found[step.num_rows].append(step.seconds)
    return {rows: median(s) for rows, s in sorted(found.items()) if len(s) >= least}


class Variants:
    """Makes the speculators of variants on one engine, and runs them.

    Args:
        llm: the engine; its prefix cache should be off, since a bench repeats its prompts.
        jobs: the requests.
        temperature: of all.
        trace: where the recorded rollout is written for the oracle drafter.
        max_depth: longest chain.
        num_earlier: earlier epochs, of other seeds, that the suffix drafter has seen; not timed.
        on_step: called behind every step with its log, outside of its time.
    """

    def __init__(
        self,
        llm: LLM,
        jobs: Sequence[Job],
        temperature: float,
        *,
        trace: Path,
        max_depth: int,
        num_earlier: int = 0,
        on_step: Callable[[StepLog], None] = lambda step: None,
    ) -> None:
        self.llm = llm
        self.jobs = list(jobs)
        self._temperature = temperature
        self._trace = trace
        self._max_depth = max_depth
        self._num_earlier = num_earlier
        self._on_step = on_step
        self._num_jobs = 0
        self._plain = build_speculator(None, llm.config, llm.engine.runner)
        self.plain_log = self.run(PLAIN)
        self.expected = self.plain_log.token_ids
        records = [
            Recorded(job.prompt_ids, job.seed, tuple(ids))
            for job, ids in zip(self.jobs, self.expected, strict=True)
        ]
        write_records(trace, records)

    def speculator(self, name: str) -> Speculator:
        """A new one, cold, as an engine would start with.

        Raises:
            ValueError: the name is not ``plain`` or ``TUNER:DRAFTER[:...]``.
        """
        if name == PLAIN:
            return self._plain
        tuner, _, drafter = name.partition(":")
        method, _, rest = drafter.partition(":")
        config: dict[str, Any] = {"tuner": tuner, "method": method}
        config["num_speculative_tokens"] = self._max_depth
        if tuner.startswith("fixed") and tuner[5:].isdecimal():
            config |= {"tuner": "fixed", "num_speculative_tokens": int(tuner[5:])}
        if method == "oracle":
            config |= {"trace": str(self._trace), "acceptance": _number(name, rest or "1")}
        elif rest:
            config["model"] = rest
        if not method:
            raise ValueError(
                f"variant {name!r}: expected plain or TUNER:DRAFTER, such as cost:suffix"
            )
        return build_speculator(
            SpeculativeConfig.of(config), self.llm.config, self.llm.engine.runner
        )

    def run(self, name: str) -> RolloutLog:
        """One rollout; afterwards the engine does not speculate."""
        engine = self.llm.engine
        speculator = self.speculator(name)
        engine.speculator = speculator
        try:
            for epoch in range(self._num_earlier if name.partition(":")[2] == "suffix" else 0):
                self._drive((1 + epoch) * _EPOCH_SEEDS)
            log = self._drive()
        finally:
            engine.speculator = self._plain
        log.explained, log.failures = speculator.tuner.explain(), dict(speculator.failures)
        return log

    def _drive(self, seed_offset: int = 0) -> RolloutLog:
        engine = self.llm.engine
        groups = []
        for job in self.jobs:
            params = SamplingParams(
                temperature=self._temperature,
                max_tokens=job.num_tokens,
                ignore_eos=True,
                seed=job.seed + seed_offset,
            )
            self._num_jobs += 1
            prompt = TokenPrompt(None, list(job.prompt_ids))
            groups.append(engine.add(f"variant-{self._num_jobs}", prompt, params))
        steps: list[StepLog] = []
        counters = engine.counters
        while engine.has_unfinished:
            before = (
                counters.num_target_rows,
                counters.num_draft_tokens,
                counters.num_generated_tokens,
            )
            num_decoding = 0 if engine.scheduler.has_prefill else len(engine.scheduler.decoding)
            start = time.perf_counter()
            engine.step()
            seconds = time.perf_counter() - start
            rows, nodes, tokens = (
                counters.num_target_rows - before[0],
                counters.num_draft_tokens - before[1],
                counters.num_generated_tokens - before[2],
            )
            steps.append(StepLog(seconds, num_decoding, rows, nodes, tokens))
            self._on_step(steps[-1])
        return RolloutLog([list(g.samples[0].request.output_token_ids) for g in groups], steps)


class VariantContestant:
    """A variant as a contestant of a bench; keeps the logs of its runs."""

    def __init__(self, name: str, variants: Variants) -> None:
        self.name = name
        self.logs: list[RolloutLog] = []
        self._variants = variants

    @property
    def settings(self) -> str:
        return f"speculation {self.name}"

    def prepare(self, *, num_seqs: int, max_len: int) -> None:
        """Nothing to choose: a tuner learns as it runs."""

    def generate(self, jobs: Sequence[Job], temperature: float) -> Generation:
        log = self._variants.run(self.name)
        self.logs.append(log)
        prefill = [step for step in log.steps if not step.num_decoding]
        prefill_s = sum(step.seconds for step in prefill)
        return Generation(
            log.token_ids,
            prefill_s=prefill_s,
            decode_s=log.seconds - prefill_s,
            num_decode_tokens=log.num_tokens - sum(step.num_tokens for step in prefill),
            tail_s=log.tail_s,
        )

    def prefill_s(self, prompt_ids: Sequence[int]) -> float:
        raise NotImplementedError(
            "speculation changes nothing of prefill; measure the plain engine"
        )

    def pass_s(
        self, context_ids: Sequence[int], rows: Sequence[Sequence[int]], repeats: int
    ) -> list[float]:
        raise NotImplementedError("speculation changes nothing of a pass; measure the plain engine")


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"variant {name!r}: {text!r} is not an acceptance from 0 to 1") from error
