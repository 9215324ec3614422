"""A rollout without a model: requests of given lengths, tokens accepted with given probabilities, passes that take what
a given price curve says, times noise. Tuners run on it behind the engine's own ``Speculator``, in milliseconds and
repeatably.

Owns the world and the books of what happened in it. Tuners are judged by *expected* tokens, the sum over the verified
nodes of the probability that a walk reaches them, so that luck does not enter.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

from bench import optimum
from engine.request import Request, RequestStatus
from engine.sampling_params import SamplingParams
from engine.spec.base import DraftJob, Trial
from engine.spec.tree import DraftTree
from engine.spec.tuner import StepRecord, Tuner, Verified
from engine.speculation import Drafts, Speculator

# One pass by rows, ms: SmolLM2 in bf16 on two Zen 4 cores with slow memory
PASS_MS = {
    1: 8.5,
    2: 9.3,
    4: 9.9,
    6: 9.9,
    8: 9.9,
    16: 14.4,
    32: 27.0,
    64: 54.0,
    128: 108.0,
    512: 440.0,
}
TAIL = (32,) * 16 + (64,) * 8 + (128,) * 4 + (256,) * 3 + (768,)

Price = Callable[[int], float]


def interpolated(points: Mapping[int, float]) -> Price:
    """Seconds by rows."""
    rows = sorted(points)

    def price(n: int) -> float:
        below = max((r for r in rows if r <= n), default=rows[0])
        above = min((r for r in rows if r >= n), default=rows[-1])
        if below == above:
            return points[below] / 1e3
        share = (n - below) / (above - below)
        return (points[below] + share * (points[above] - points[below])) / 1e3

    return price


class Step(NamedTuple):
    """One step. ``seconds`` are those of the price curve and of drafting, without noise."""

    num: int  # requests decoding
    seconds: float
    tokens: int
    expected: float
    nodes: dict[int, int]  # request -> verified


@dataclass
class Outcome:
    """All steps of a run."""

    steps: list[Step] = field(default_factory=list)

    def of(self, num: int) -> list[Step]:
        return [step for step in self.steps if step.num == num]

    @property
    def sizes(self) -> list[int]:
        return sorted({step.num for step in self.steps})

    @property
    def total_s(self) -> float:
        return sum(step.seconds for step in self.steps)

    @property
    def fair_s(self) -> float:
        """What the run would have taken with average luck at every number of requests."""
        total = 0.0
        for num in self.sizes:
            steps = self.of(num)
            luck = sum(s.tokens for s in steps) / sum(s.expected for s in steps)
            total += luck * sum(s.seconds for s in steps)
        return total


def rate(steps: Sequence[Step]) -> float:
    """Expected tokens per second."""
    return sum(s.expected for s in steps) / sum(s.seconds for s in steps)


@dataclass
class Guesser:
    """A drafter of known worth.

    Args:
        name: as in plans.
        acceptance: of request i at each token.
        draft_s: seconds of drafting, by requests and depth.
        scored: whether it says how likely its tokens are; then each token's chance varies around the request's.
        trials: whether it is scored for free besides.
    """

    name: str
    acceptance: Callable[[int], float]
    draft_s: Callable[[int, int], float] = lambda num, depth: 0.0
    scored: bool = False
    trials: bool = False

    version = 0
    tap_layers: tuple[int, ...] = ()
    wants_hidden = False
    rng: random.Random = field(default_factory=random.Random)
    scale: float = 1.0  # of its acceptance, now
    chances: dict[str, list[float]] = field(default_factory=dict)

    def _chance(self, request: Request) -> float:
        mean = self.scale * self.acceptance(int(request.request_id))
        if not self.scored:
            return mean
        return min(max(mean + self.rng.uniform(-0.3, 0.3), 0.02), 0.98)

    def propose(self, jobs: Sequence[DraftJob]) -> list[DraftTree]:
        trees: list[DraftTree] = []
        for job in jobs:
            count = min(job.plan.depth, job.plan.num_nodes)
            line = [self._chance(job.request) for _ in range(count)]
            if self.scored:
                line = line[: sum(s >= job.plan.min_score for s in accumulate(line, mul))]
            self.chances[job.request.request_id] = line
            scores = [round(p, 3) for p in line] if self.scored else []
            trees.append(DraftTree.chain(range(len(line)), scores))
        return trees

    def observe(self, requests: Sequence[Request]) -> Sequence[Trial]:
        if not self.trials:
            return ()
        drawn = [(request.request_id, self._chance(request)) for request in requests]
        return [Trial(i, round(p, 3), self.rng.random() < p) for i, p in drawn]

    def forget(self, request: Request) -> None:
        self.chances.pop(request.request_id, None)

    def reset(self) -> None:
        self.chances.clear()

    def load(self, weights: Mapping[str, Any], version: int) -> None:
        raise ValueError("no weights")

    def stats(self) -> dict[str, float]:
        return {}


@dataclass
class World:
    """What tuners run in.

    Args:
        price: seconds of a pass by rows.
        acceptance, draft_s, scored, drafter: of the ``Guesser``.
        lengths: tokens of each request, ascending.
        noise: sigma of the log of the time a pass takes; one in a hundred takes three times as long.
        others: further drafters.
        slowness: of the machine at step i, times the price.
        fortune: of the drafters at step i, times their acceptance.
    """

    price: Price
    acceptance: Callable[[int], float]
    lengths: Sequence[int] = TAIL
    draft_s: Callable[[int, int], float] = lambda num, depth: 0.0
    noise: float = 0.05
    scored: bool = False
    drafter: str = "oracle"
    trials: bool = False
    others: Sequence[Guesser] = ()
    slowness: Callable[[int], float] = lambda step: 1.0
    fortune: Callable[[int], float] = lambda step: 1.0

    def run(self, tuner: Tuner, seed: int = 0, max_steps: int = 1 << 30) -> Outcome:
        rng = random.Random(seed)
        first = Guesser(self.drafter, self.acceptance, self.draft_s, self.scored, self.trials)
        guessers = {guesser.name: guesser for guesser in (first, *self.others)}
        speculator = Speculator(list(guessers.values()), tuner, vocab_size=1 << 20)
        requests = [_request(i, length) for i, length in enumerate(self.lengths)]
        outcome = Outcome()
        while requests and len(outcome.steps) < max_steps:
            for guesser in guessers.values():
                guesser.rng, guesser.scale = rng, self.fortune(len(outcome.steps))
            drafts = speculator.draft(requests, has_prefill=False)
            record = self._verify(requests, drafts, guessers, rng, outcome)
            going = [request for request in requests if not request.is_finished]
            speculator.observe(record, going)
            for request in requests:
                if request.is_finished:
                    speculator.forget(request)
            requests = going
        assert not speculator.failures, speculator.failures
        return outcome

    def _verify(
        self,
        requests: Sequence[Request],
        drafts: Drafts,
        guessers: Mapping[str, Guesser],
        rng: random.Random,
        outcome: Outcome,
    ) -> StepRecord:
        num, slowness = len(requests), self.slowness(len(outcome.steps))
        verified, num_tokens, expected = [], 0, float(num)
        for request in requests:
            accepted = 0
            if request.request_id in drafts.trees:
                plan, tree = drafts.trees[request.request_id]
                line = guessers[plan.drafter].chances[request.request_id][: len(tree)]
                expected += sum(accumulate(line, mul))
                accepted = next((i for i, p in enumerate(line) if rng.random() >= p), len(line))
                verified.append(Verified(request.request_id, plan, tree, range(accepted)))
            num_tokens += request.append_tokens([0] * (1 + accepted))
        nodes = {int(entry.request_id): len(entry.tree) for entry in verified}
        rows = num + sum(nodes.values())
        draft_s = {
            name: slowness * guessers[name].draft_s(*size) for name, size in drafts.sizes.items()
        }
        seconds = slowness * self.price(rows)
        outcome.steps.append(
            Step(num, seconds + sum(draft_s.values()), num_tokens, expected, nodes)
        )
        hiccup = 3.0 if rng.random() < 0.01 else 1.0
        return StepRecord(
            num_rows=rows,
            num_decoding=num,
            num_nodes=rows - num,
            num_context=drafts.num_context,
            num_tokens=num_tokens,
            draft_s=draft_s,
            target_s=seconds * rng.lognormvariate(0.0, self.noise) * hiccup,
            drafted=drafts.sizes,
            verified=verified,
        )


def _request(number: int, length: int) -> Request:
    params = SamplingParams(max_tokens=length, ignore_eos=True)
    request = Request(str(number), [0], params, seed=number, max_total_len=length + 2)
    request.append_tokens([0])
    request.num_computed = 1
    request.status = RequestStatus.RUNNING
    return request


def best_by_phase(world: World, max_depth: int) -> tuple[float, dict[int, int], dict[int, float]]:
    """(seconds of the rollout, best depth, tokens/s) where for each number of requests the best fixed depth is known.

    In expectation: no tuner that gives every request the same depth can do better.
    """
    acceptance = [world.acceptance(i) for i in range(len(world.lengths))]
    best = optimum.best_by_phase(
        _by_rows(world), world.lengths, acceptance, max_depth=max_depth, draft_s=world.draft_s
    )
    return best.seconds, best.depths, best.rates


def best_depth(world: World, acceptance: Sequence[float], max_depth: int) -> tuple[float, int]:
    """(expected tokens/s, depth) of the best depth that all requests share; 0 is plain decoding."""
    return optimum.best_depth(
        _by_rows(world), acceptance, max_depth=max_depth, draft_s=world.draft_s
    )


def depth_rate(world: World, acceptance: Sequence[float], depth: int) -> float:
    """Expected tokens per second where every request drafts a chain of ``depth``."""
    return optimum.chain_rate(_by_rows(world), acceptance, depth, world.draft_s)


def _by_rows(world: World) -> optimum.PhasePrice:
    return lambda num, rows: world.price(rows)
