"""Runs of an evaluation: the same requests with different speculation on one engine, watched step by step.

Owns how a run is driven and what is written down of it. Knows nothing of tables, of depths that pay or of prompts as
text. Invariants: the engine's own speculation stands again after every run; every run of one temperature has the same
seeds, so its tokens can be compared.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine import LLM, SamplingParams
from engine.prompts import TokenPrompt
from engine.request_group import RequestGroup
from engine.spec.base import DraftPlan
from engine.spec.config import SpeculativeConfig
from engine.spec.tuner import Candidates, FixedTuner, StepRecord
from engine.spec_assembly import build_speculator
from engine.speculation import Speculator
from tlt_train.acceptance import Answer, ChainCounts


@dataclass(frozen=True, slots=True)
class Trial:
    """A request: its prompt and the seed of its sampler."""

    prompt_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A step that only decoded one request: nodes of its chain, tokens gained, seconds of drafting and in all."""

    num_nodes: int
    num_tokens: int
    draft_s: float
    seconds: float


@dataclass(slots=True)
class RunLog:
    """One run of all requests. ``histogram[a]``: steps behind a request's first token that committed a draft tokens."""

    token_ids: list[tuple[int, ...]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    counts: ChainCounts = field(default_factory=ChainCounts)
    histogram: list[int] = field(default_factory=list)
    steps: list[DecodeStep] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def decode_s(self) -> float:
        """Seconds of the steps in which nothing was prefilled."""
        return sum(step.seconds for step in self.steps)

    @property
    def tokens_per_step(self) -> float:
        """Tokens of a decoding step, the bonus token included, last steps as short as they were."""
        steps = sum(self.histogram)
        return (steps + sum(a * n for a, n in enumerate(self.histogram))) / steps if steps else 0.0


class SweepTuner(FixedTuner):
    """Every chain length from 0 to ``depth`` in turn, shuffled from round to round: prices of steps side by side."""

    name = "sweep"

    def __init__(self, drafter: str, depth: int) -> None:
        super().__init__(DraftPlan(drafter, depth, depth))
        self._plans = [DraftPlan(drafter, d, d) if d else None for d in range(depth + 1)]
        self._turns: list[DraftPlan | None] = []
        self._random = random.Random(depth)

    def plan(self, batch: Candidates) -> list[DraftPlan | None]:
        if not self._turns:
            self._turns = list(self._plans)
            self._random.shuffle(self._turns)
        turn = self._turns.pop()
        return [turn if self._plan is not None else None] * len(batch.requests)


class _Watched:
    """A tuner that is heard: counts of chains and the seconds of drafting go to the log."""

    def __init__(self, tuner: Any, stop_ids: frozenset[int]) -> None:
        self._tuner = tuner
        self._stop_ids = stop_ids
        self.log = RunLog()
        self.draft_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tuner, name)

    def observe(self, record: StepRecord) -> None:
        self._tuner.observe(record)
        self.draft_s = sum(record.draft_s.values())
        for entry in record.verified:
            length, accepted = len(entry.tree), len(entry.accepted)
            for place in range(accepted):
                if entry.tree.token_ids[place] in self._stop_ids:
                    length = accepted = place + 1  # what follows the end of a text is no text
                    break
            self.log.counts.add(length, accepted)


class TrialRuns:
    """Runs of one set of requests on an engine without speculation of its own.

    Args:
        llm: its prefix cache is off, since the requests come again and again.
        head: "eagle" or "eagle3", what ``drafter`` holds.
        drafter: directory of the head.
        depth: of chains.
        max_tokens: of every request.
    """

    def __init__(self, llm: LLM, *, head: str, drafter: str, depth: int, max_tokens: int) -> None:
        self._llm = llm
        self._head, self._drafter, self._depth = head, drafter, depth
        self._max_tokens = max_tokens
        self._num_requests = 0
        self._stop_ids = frozenset(llm.config.model.eos_token_ids)
        self.failures: dict[str, str] = {}

    def speculator(self, tuner: str, draft_sampling: str) -> Speculator:
        """A new one: "plain", "fixed", "cost" or "sweep" over the head. It may serve several runs."""
        config = None
        if tuner != "plain":
            values: Mapping[str, Any] = {
                "method": self._head,
                "model": self._drafter,
                "tuner": "fixed" if tuner == "sweep" else tuner,
                "num_speculative_tokens": self._depth,
                "draft_sampling": draft_sampling,
            }
            config = SpeculativeConfig.of(values)
        found = build_speculator(config, self._llm.config, self._llm.engine.runner)
        if tuner == "sweep":
            found.tuner = SweepTuner(next(iter(found.drafters)), self._depth)
        return found

    def together(
        self, speculator: Speculator, trials: Sequence[Trial], temperature: float
    ) -> RunLog:
        """All requests in one batch: fast, and by batch invariance of the same tokens and acceptance as alone."""
        return self._run(speculator, [list(trials)], temperature)

    def alone(self, speculator: Speculator, trials: Sequence[Trial], temperature: float) -> RunLog:
        """One request after the other, at batch 1, every decoding step timed."""
        return self._run(speculator, [[trial] for trial in trials], temperature)

    def _run(
        self, speculator: Speculator, batches: Sequence[Sequence[Trial]], temperature: float
    ) -> RunLog:
        engine = self._llm.engine
        before, tuner = engine.speculator, speculator.tuner
        watched = _Watched(tuner, self._stop_ids)
        speculator.tuner = watched  # type: ignore[assignment]
        engine.speculator = speculator
        try:
            for batch in batches:
                self._drive(batch, temperature, watched)
        finally:
            engine.speculator, speculator.tuner = before, tuner
        self.failures |= speculator.failures
        return watched.log

    def _drive(self, batch: Sequence[Trial], temperature: float, watched: _Watched) -> None:
        engine, log = self._llm.engine, watched.log
        groups = [self._add(trial, temperature) for trial in batch]
        counters = engine.counters
        while engine.has_unfinished:
            before = counters.num_draft_tokens, counters.num_generated_tokens
            prefills = engine.scheduler.has_prefill
            watched.draft_s = 0.0
            start = time.perf_counter()
            engine.step()
            seconds = time.perf_counter() - start
            log.seconds += seconds
            if not prefills and len(batch) == 1:
                nodes = counters.num_draft_tokens - before[0]
                tokens = counters.num_generated_tokens - before[1]
                log.steps.append(DecodeStep(nodes, tokens, watched.draft_s, seconds))
        for group in groups:
            self._keep(group, log)

    def _add(self, trial: Trial, temperature: float) -> RequestGroup:
        params = SamplingParams(
            temperature=temperature, max_tokens=self._max_tokens, seed=trial.seed
        )
        self._num_requests += 1
        prompt = TokenPrompt(None, list(trial.prompt_ids))
        return self._llm.engine.add(f"trial-{self._num_requests}", prompt, params)

    def _keep(self, group: RequestGroup, log: RunLog) -> None:
        (output,), (metrics,) = group.output().outputs, group.output().metrics
        log.token_ids.append(tuple(output.token_ids))
        has_stopped = output.finish_reason == "stop"
        log.answers.append(Answer(len(output.token_ids) - 1, has_stopped))
        assert metrics.speculative_decoding is not None
        histogram = list(metrics.speculative_decoding.acceptance_histogram)
        histogram[0] -= 1  # the step that prefilled and gave the first token
        log.histogram += [0] * (len(histogram) - len(log.histogram))
        for accepted, num_steps in enumerate(histogram):
            log.histogram[accepted] += num_steps
