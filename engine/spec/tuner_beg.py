"""The ``beg`` tuner: TLT's bucketed epsilon-greedy bandit (arXiv 2511.16665, section on the adaptive rollout engine).

An arm is one setting (steps, children, nodes) for the whole batch, or off. Batch sizes fall into buckets, each with
arms of its own: few nodes where the batch is large. The reward of a step is its tokens per second, that of an arm the
median over a window of its steps; with probability epsilon a random arm is played. EG is the same without buckets,
UCB1 plays by an upper confidence bound, PREDEFINED plays the first arm of each bucket. Every bucket has several arms,
off among them: with one there would be nothing to learn.

Owns the arms and their rewards. For those who know TLT and for comparison; ``cost`` is the default.
"""

from __future__ import annotations

import bisect
import math
import random
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.spec.base import DraftPlan, Trial
from engine.spec.saved import MOST, within
from engine.spec.tree import DraftTree
from engine.spec.tuner import Candidates, Draft, StepRecord, check_state

_WINDOW = 16  # steps whose rewards an arm remembers
_REWARDS = (1e-12, 1e15)  # tokens per second that are believed of a saved state
_TRIES = 2  # of every arm before any is preferred


@dataclass(slots=True)
class _Arm:
    """A plan for everyone, or off, and the tokens per second that it brought."""

    plan: DraftPlan | None
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    num_plays: int = 0

    @property
    def reward(self) -> float:
        return statistics.median(self.rewards) if self.rewards else math.inf

    @property
    def label(self) -> str:
        plan = self.plan
        return "off" if plan is None else f"{plan.depth}_{plan.width}_{plan.num_nodes}"


class BegTuner:
    """See the module.

    Args:
        drafter: name.
        arms: (steps, children of a node, nodes) of each; off is added.
        thresholds: batch sizes at which a new bucket begins, ascending.
        off_from: batch size from which it is always off.
        algorithm: "BEG", "EG", "UCB1" or "PREDEFINED".
        epsilon: share of random plays.
        seed: of the random plays.
    """

    name = "beg"

    def __init__(
        self,
        drafter: str,
        *,
        arms: Sequence[tuple[int, int, int]],
        thresholds: Sequence[int] = (1, 2, 5, 21),
        off_from: int = 32,
        algorithm: str = "BEG",
        epsilon: float = 0.1,
        seed: int = 0,
    ) -> None:
        self._drafter: str | None = drafter
        self._algorithm, self._epsilon, self._off_from = algorithm, epsilon, off_from
        if not arms:
            raise ValueError(
                "beg tuner: arms must hold one (steps, children, nodes) at least, got none"
            )
        self._thresholds = [1] if algorithm == "EG" else list(thresholds)
        plans = [DraftPlan(drafter, steps, nodes, width) for steps, width, nodes in arms]
        shares = _shares(plans, len(self._thresholds))
        self._buckets = [[_Arm(None), *(_Arm(plan) for plan in share)] for share in shares]
        if algorithm == "PREDEFINED":
            self._buckets = [bucket[1:] for bucket in self._buckets]
        self._seed = seed
        self._num_draws = 0
        self._played: _Arm | None = None

    def plan(self, batch: Candidates) -> list[DraftPlan | None]:
        self._played = None
        if self._drafter is None or batch.num_decoding >= self._off_from:
            return [None] * len(batch.requests)
        arm = self._choose(self._bucket(batch.num_decoding))
        if not batch.has_prefill:  # else its time is not the arm's doing
            self._played = arm
        return [arm.plan] * len(batch.requests)

    def _bucket(self, num_decoding: int) -> list[_Arm]:
        return self._buckets[max(bisect.bisect_right(self._thresholds, num_decoding) - 1, 0)]

    def _choose(self, arms: Sequence[_Arm]) -> _Arm:
        if self._algorithm == "PREDEFINED":
            return arms[0]
        fresh = [arm for arm in arms if arm.num_plays < _TRIES]
        if fresh:
            return fresh[0]
        if self._algorithm == "UCB1":
            total = sum(arm.num_plays for arm in arms)
            best = max(arm.reward for arm in arms)
            return max(
                arms,
                key=lambda arm: (
                    arm.reward / best + math.sqrt(2.0 * math.log(total) / arm.num_plays) / 4.0
                ),
            )
        self._num_draws += 1
        rng = random.Random(
            self._seed * 1_000_003 + self._num_draws
        )  # so that a number is all its state
        if rng.random() < self._epsilon:
            return rng.choice(list(arms))
        return max(arms, key=lambda arm: arm.reward)

    def reconsider(self, batch: Candidates, drafts: Sequence[Draft]) -> list[DraftPlan | None]:
        return [None] * len(drafts)

    def trim(self, batch: Candidates, drafts: Sequence[Draft]) -> list[DraftTree]:
        return [draft.tree for draft in drafts]

    def observe(self, record: StepRecord) -> None:
        seconds = record.target_s + sum(record.draft_s.values())
        if self._played is not None and record.num_decoding and seconds > 0.0:
            self._played.num_plays += 1
            self._played.rewards.append(record.num_tokens / seconds)
        self._played = None  # the next step may be one for which nothing was planned

    def observe_trials(self, drafter: str, trials: Sequence[Trial]) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass

    def forget_all(self) -> None:
        pass

    def reset(self, drafter: str | None = None) -> None:
        """Rewards were earned with other weights: every arm is tried again."""
        for arm in self._arms():
            arm.rewards.clear()
            arm.num_plays = 0

    def remove(self, drafter: str) -> None:
        if drafter == self._drafter:
            self._drafter = None

    def _arms(self) -> list[_Arm]:
        return [arm for bucket in self._buckets for arm in bucket]

    def explain(self) -> dict[str, Any]:
        buckets: dict[int, dict[str, Any]] = {}
        for start, bucket in zip(self._thresholds, self._buckets, strict=True):
            buckets[start] = {
                arm.label: {
                    "plays": arm.num_plays,
                    "tokens_per_s": round(arm.reward, 1) if arm.rewards else None,
                }
                for arm in bucket
            }
        return {"tuner": self.name, "algorithm": self._algorithm, "buckets": buckets}

    def state_dict(self) -> dict[str, Any]:
        return {
            "tuner": self.name,
            "num_draws": self._num_draws,
            "arms": [[arm.label, arm.num_plays, list(arm.rewards)] for arm in self._arms()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state(state, self.name)
        arms = self._arms()
        try:
            saved = [
                (
                    str(label),
                    within("plays", num, 0, MOST),
                    [within("rewards", x, *_REWARDS) for x in rewards],
                )
                for label, num, rewards in state["arms"]
            ]
            num_draws = within("num_draws", state["num_draws"], 0, MOST)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"tuner state: it is malformed: {error!r}") from error
        if [label for label, _, _ in saved] != [arm.label for arm in arms]:
            raise ValueError(
                f"tuner state: it has arms {[label for label, _, _ in saved]}, this tuner "
                f"{[arm.label for arm in arms]}; configure the same arms"
            )
        for label, num, rewards in saved:
            if num < len(rewards) or bool(num) != bool(rewards):
                raise ValueError(f"tuner state: arm {label} has {num} plays, of rewards {rewards}")
        self._num_draws, self._played = num_draws, None
        for arm, (_, num_plays, rewards) in zip(arms, saved, strict=True):
            arm.num_plays = num_plays
            arm.rewards = deque(rewards, maxlen=_WINDOW)


def default_arms(max_depth: int, width: int, max_nodes: int) -> list[tuple[int, int, int]]:
    """Chains, or trees of ``width``, of some depths up to the longest."""
    depths = sorted({d for d in (1, 2, 3, 4, 6, 8, 12, 16) if d < max_depth} | {max_depth})
    return [(depth, width, min(depth * width, max_nodes)) for depth in depths]


def _shares(plans: Sequence[DraftPlan], num_buckets: int) -> list[list[DraftPlan]]:
    """The arms of each bucket, two at least where there are two: many nodes go with small batches."""
    order = sorted(plans, key=lambda plan: -plan.num_nodes)
    size = max(2, math.ceil(len(order) / num_buckets) + 1)
    last = max(len(order) - size, 0)
    shares: list[list[DraftPlan]] = []
    for bucket in range(num_buckets):
        at = round(bucket * last / max(num_buckets - 1, 1))
        shares.append(order if num_buckets == 1 else order[at : at + size])
    return shares
