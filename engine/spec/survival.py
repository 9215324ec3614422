"""How likely a draft token is accepted: estimates by drafter, depth, score and request, learnt from verifications.

Owns counts, discounted so that they follow the text and the weights. Knows no prices. A *trial* is a node whose parent
was accepted: verifying a chain of five shows the outcome of every shorter one. A drafter's estimates are by depth, and
where it gives scores by score (a calibration: what became of proposals with such a score). With scores only the better
nodes are verified, so what a proposal brings at a depth is learnt from the scores of all that were proposed. A request
differs from the average by one factor, accepted over expected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from engine.spec.tree import ROOT, DraftTree

NUM_SCORES = 16
NUM_DEPTHS = 24
LEAST, MOST = 0.005, 0.98  # a walk can always end, and never surely
_PRIOR = 0.6  # first token of a drafter that nothing is known of: worth a try where rows are cheap
_PRIOR_WEIGHT = 4.0
_DEPTH_PRIOR_WEIGHT = 6.0  # a depth starts as the one before it
_SPAN = 600.0  # trials that an estimate looks back over
_REQUEST_SPAN = 80.0
_REQUEST_PRIOR = 5.0  # expected acceptances before a request's own record counts half
_KEEP = 1.0 - 1.0 / _SPAN
_REQUEST_KEEP = 1.0 - 1.0 / _REQUEST_SPAN


class _Counts:
    """Trials and hits of some buckets."""

    __slots__ = ("hits", "trials")

    def __init__(self, size: int) -> None:
        self.trials = [0.0] * size
        self.hits = [0.0] * size

    def add(self, bucket: int, hit: float) -> None:
        self.trials[bucket] = self.trials[bucket] * _KEEP + 1.0
        self.hits[bucket] = self.hits[bucket] * _KEEP + hit

    def fade(self, weight: float) -> None:
        """Keep the shares, but as if no bucket had seen more than ``weight`` trials."""
        for bucket, trials in enumerate(self.trials):
            if trials > weight:
                self.hits[bucket] *= weight / trials
                self.trials[bucket] = weight


class Survival:
    """Acceptance of one drafter."""

    def __init__(self) -> None:
        self._depths = _Counts(NUM_DEPTHS)
        self._scores = _Counts(NUM_SCORES)
        self._requests: dict[str, list[float]] = {}  # accepted, expected
        self._by_depth: list[float] = []
        self._by_score: list[float] = []
        self.num_trials = 0
        self._is_stale = False
        self._refresh()

    # ---- what is believed

    def factor(self, request_id: str) -> float:
        """How much likelier than on average a proposal for this request is accepted."""
        record = self._requests.get(request_id)
        if record is None:
            return 1.0
        return (record[0] + _REQUEST_PRIOR) / (record[1] + _REQUEST_PRIOR)

    def chain(self, request_id: str, depth: int) -> list[float]:
        """P(the first j tokens of a chain are accepted), j = 1 .. depth."""
        if self._is_stale:
            self._refresh()
        factor, alive, result = self.factor(request_id), 1.0, []
        by_depth = self._by_depth
        for j in range(depth):
            p = by_depth[j if j < NUM_DEPTHS else -1] * factor
            alive *= LEAST if p < LEAST else MOST if p > MOST else p
            result.append(alive)
        return result

    def first(self, request_id: str, tree: DraftTree) -> float:
        """P(the first node of a tree with scores is accepted): no other node is likelier."""
        return self._by_score[int(tree.scores[0] * (NUM_SCORES - 1e-6))] * self.factor(request_id)

    def nodes(self, request_id: str, tree: DraftTree) -> list[float]:
        """P(a walk reaches each node of a tree)."""
        factor, alive = self.factor(request_id), []
        if not tree.scores:
            chances = [self._by_depth[min(d, NUM_DEPTHS) - 1] for d in tree.depths]
        else:
            by_score = self._by_score
            chances = [by_score[int(score * (NUM_SCORES - 1e-6))] for score in tree.scores]
        for parent, chance in zip(tree.parents, chances, strict=True):
            p = chance * factor
            p = LEAST if p < LEAST else MOST if p > MOST else p
            alive.append(p if parent == ROOT else alive[parent] * p)
        return alive

    # ---- what happened

    def expect(self, tree: DraftTree) -> None:
        """A proposal with scores, verified or not: by its depths, what will be said of its nodes on average."""
        best: dict[int, float] = {}
        for depth, score in zip(tree.depths, tree.scores, strict=True):
            chance = self._by_score[int(score * (NUM_SCORES - 1e-6))]
            place = min(depth, NUM_DEPTHS) - 1
            best[place] = max(best.get(place, 0.0), chance)
        for place, chance in best.items():
            self._depths.add(place, chance)
        self._is_stale = True

    def observe(self, request_id: str, tree: DraftTree, accepted: Sequence[int]) -> None:
        """Every node whose parent was reached is a trial."""
        reached, passed = {ROOT, *accepted}, set(accepted)
        record = self._requests.setdefault(request_id, [0.0, 0.0])
        best: dict[int, bool] = {}  # depth -> whether any of the nodes there was accepted
        for node, parent in enumerate(tree.parents):
            if parent not in reached:
                continue
            hit = node in passed
            depth = min(tree.depths[node], NUM_DEPTHS) - 1
            best[depth] = best.get(depth, False) or hit
            if tree.scores:
                bucket = int(tree.scores[node] * (NUM_SCORES - 1e-6))
                self._add_score(record, bucket, hit)
            else:
                _count(record, hit, self._by_depth[depth])
        if not tree.scores:
            for depth, hit in best.items():
                self._depths.add(depth, hit)
        self.num_trials += len(best)
        self._is_stale = True

    def observe_trial(self, request_id: str, score: float, accepted: bool) -> None:
        """A guess that was scored for free, as of depth 1."""
        record = self._requests.setdefault(request_id, [0.0, 0.0])
        self._add_score(record, int(score * (NUM_SCORES - 1e-6)), accepted)
        self.num_trials += 1

    def _add_score(self, record: list[float], bucket: int, hit: bool) -> None:
        _count(record, hit, self._by_score[bucket])
        counts = self._scores
        counts.add(bucket, hit)
        middle = (bucket + 0.5) / NUM_SCORES
        trials, hits = counts.trials[bucket], counts.hits[bucket]
        self._by_score[bucket] = (hits + _PRIOR_WEIGHT * middle) / (trials + _PRIOR_WEIGHT)

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def forget_all(self) -> None:
        self._requests.clear()

    def reset(self) -> None:
        """Weights have changed: what was learnt is a first guess, no more."""
        self._depths.fade(_PRIOR_WEIGHT)
        self._scores.fade(_PRIOR_WEIGHT)
        self._requests.clear()
        self._refresh()

    def _refresh(self) -> None:
        self._is_stale = False
        by_depth, before, weight = [], _PRIOR, _PRIOR_WEIGHT
        for trials, hits in zip(self._depths.trials, self._depths.hits, strict=True):
            before = (hits + weight * before) / (trials + weight)
            by_depth.append(before)
            weight = _DEPTH_PRIOR_WEIGHT
        self._by_depth = by_depth
        if not self._by_score:
            self._by_score = [(bucket + 0.5) / NUM_SCORES for bucket in range(NUM_SCORES)]

    def explain(self) -> dict[str, Any]:
        if self._is_stale:
            self._refresh()
        return {
            "trials": self.num_trials,
            "by_depth": [round(p, 3) for p in self._by_depth[:8]],
            "by_score": [round(p, 3) for p in self._by_score],
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "depth_trials": list(self._depths.trials),
            "depth_hits": list(self._depths.hits),
            "score_trials": list(self._scores.trials),
            "score_hits": list(self._scores.hits),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        loaded: list[_Counts] = []
        for kind, size in (("depth", NUM_DEPTHS), ("score", NUM_SCORES)):
            counts = _Counts(size)
            counts.trials = [float(x) for x in state[f"{kind}_trials"]]
            counts.hits = [float(x) for x in state[f"{kind}_hits"]]
            pairs = list(zip(counts.hits, counts.trials, strict=False))
            if not (
                len(counts.trials) == len(counts.hits) == size
                and all(0.0 <= hits <= trials + 1e-6 < math.inf for hits, trials in pairs)
            ):
                raise ValueError(f"{kind} counts must be {size} trials and as many hits or fewer")
            loaded.append(counts)
        self._depths, self._scores = loaded
        self._by_score = [
            (hits + _PRIOR_WEIGHT * (bucket + 0.5) / NUM_SCORES) / (trials + _PRIOR_WEIGHT)
            for bucket, (trials, hits) in enumerate(
                zip(self._scores.trials, self._scores.hits, strict=True)
            )
        ]
        self._refresh()


def _count(record: list[float], hit: bool, expected: float) -> None:
    record[0] = record[0] * _REQUEST_KEEP + hit
    record[1] = record[1] * _REQUEST_KEEP + expected
