"""A rollout without a model: requests of given lengths, tokens accepted with given probabilities, passes that take what
a given price curve says, times noise. Tuners run on it as they do in the engine, in milliseconds and repeatably.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from engine.request import Request, RequestStatus
from engine.sampling_params import SamplingParams
from engine.spec.tree import NO_TREE, DraftTree
from engine.spec.tuner import Candidates, Draft, StepRecord, Tuner, Verified

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


def interpolated(points: dict[int, float]) -> Price:
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


@dataclass
class Outcome:
    """Seconds, noise apart, and tokens, by the number of requests decoding."""

    seconds: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    num_nodes: dict[int, int] = field(default_factory=dict)

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    def rate(self, num: int) -> float:
        return self.tokens[num] / self.seconds[num]


@dataclass
class World:
    """What tuners run in.

    Args:
        price: seconds of a pass by rows.
        acceptance: of request i at each token.
        lengths: tokens of each request.
        draft_s: seconds of drafting, by requests and depth.
        noise: sigma of the log of the time a pass takes; one in a hundred takes three times as long.
        scored: whether the drafter says how likely its tokens are; then each token's chance varies around the
            request's.
        offset_s: added to every pass that is observed: a machine that has become slower.
    """

    price: Price
    acceptance: Callable[[int], float]
    lengths: Sequence[int] = TAIL
    draft_s: Callable[[int, int], float] = lambda num, depth: 0.0
    noise: float = 0.05
    scored: bool = False
    drafter: str = "oracle"

    def run(self, tuner: Tuner, seed: int = 0) -> Outcome:
        rng = random.Random(seed)
        requests = [_request(i, length) for i, length in enumerate(self.lengths)]
        outcome = Outcome()
        while requests:
            self._step(tuner, requests, rng, outcome)
            for request in [r for r in requests if r.is_finished]:
                tuner.forget(request.request_id)
                requests.remove(request)
        return outcome

    def _step(
        self, tuner: Tuner, requests: list[Request], rng: random.Random, outcome: Outcome
    ) -> None:
        num = len(requests)
        eligible = [r for r in requests if r.num_remaining_tokens > 1]
        context = sum(len(r.token_ids) for r in requests)
        batch = Candidates(
            eligible, [r.num_remaining_tokens - 1 for r in eligible], num, False, context
        )
        plans = tuner.plan(batch) if eligible else []
        drafts, chances = [], {}
        for request, plan in zip(eligible, plans, strict=True):
            tree = NO_TREE
            if plan is not None:
                count = min(plan.depth, plan.num_nodes)
                mean = self.acceptance(int(request.request_id))
                spread = [min(max(mean + rng.uniform(-0.3, 0.3), 0.02), 0.98) for _ in range(count)]
                line = spread if self.scored else [mean] * count
                chances[request.request_id] = line
                if self.scored:
                    joint = list(accumulate(line, mul))
                    line = line[: sum(s >= plan.min_score for s in joint)]
                    count = len(line)
                scores = [round(p, 3) for p in line] if self.scored else []
                tree = DraftTree.chain(range(count), scores)
            drafts.append(Draft(request, plan, tree))
        drafted = [d.plan for d in drafts if d.plan is not None]
        trees = tuner.trim(batch, drafts) if drafted else [NO_TREE] * len(drafts)
        num_nodes = sum(len(tree) for tree in trees)
        verified, num_tokens = [], num
        gained = dict.fromkeys((r.request_id for r in requests), 1)
        for draft, tree in zip(drafts, trees, strict=True):
            if draft.plan is None or not len(tree):
                continue
            accepted = 0
            for chance in chances[draft.request.request_id][: len(tree)]:
                if rng.random() >= chance:
                    break
                accepted += 1
            gained[draft.request.request_id] += accepted
            num_tokens += accepted
            verified.append(
                Verified(draft.request.request_id, draft.plan, tree, list(range(accepted)))
            )
        depth = max((plan.depth for plan in drafted), default=0)
        draft_s = self.draft_s(len(drafted), depth) if drafted else 0.0
        seconds = self.price(num + num_nodes)
        outcome.seconds[num] = outcome.seconds.get(num, 0.0) + seconds + draft_s
        outcome.tokens[num] = outcome.tokens.get(num, 0) + num_tokens
        outcome.num_nodes[num] = outcome.num_nodes.get(num, 0) + num_nodes
        for request in requests:
            request.append_tokens([0] * gained[request.request_id])
        observed = (
            seconds * rng.lognormvariate(0.0, self.noise) * (3.0 if rng.random() < 0.01 else 1.0)
        )
        tuner.observe(
            StepRecord(
                num_rows=num + num_nodes,
                num_decoding=num,
                num_nodes=num_nodes,
                num_context=context,
                num_tokens=num_tokens,
                draft_s={self.drafter: draft_s} if drafted else {},
                target_s=observed,
                drafted={self.drafter: (len(drafted), depth)} if drafted else {},
                verified=verified,
            )
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
    lengths = sorted(world.lengths)
    total, depths, rates = 0.0, {}, {}
    done = 1  # the prompt's own token
    for finished, length in enumerate(lengths):
        num = len(lengths) - finished
        if length <= done:
            continue
        mean = [world.acceptance(i) for i in range(finished, len(lengths))]
        best = max(
            (_rate(world, mean, num, depth), -depth, depth) for depth in range(max_depth + 1)
        )
        depths[num], rates[num] = best[2], best[0]
        total += num * (length - done) / best[0]
        done = length
    return total, depths, rates


def _rate(world: World, acceptance: Sequence[float], num: int, depth: int) -> float:
    tokens = sum(sum(p**j for j in range(depth + 1)) for p in acceptance)
    draft_s = world.draft_s(num, depth) if depth else 0.0
    return tokens / (world.price(num * (1 + depth)) + draft_s)
