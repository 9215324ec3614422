"""How a draft tree grows, level by level, best nodes first (EAGLE-2, arXiv 2406.16858, sections 4.1 and 4.2).

Owns the choice of nodes: which are worth expanding, which are kept. Knows nothing of models: tokens and scores come
from outside. A node is worth the product of the scores from the root down to it, so a node never beats its parent and
the best nodes always form a tree. Invariant: what is not among the best ``num_nodes`` so far is never expanded, since
neither it nor what would follow it can be kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.spec.base import DraftPlan
from engine.spec.tree import NO_TREE, ROOT, DraftTree

_LEAST_SCORE = 1e-9


class TreeGrowth:
    """The nodes proposed so far for one request, in order of creation: a parent before its children."""

    def __init__(self, plan: DraftPlan) -> None:
        self._plan = plan
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self._scores: list[float] = []
        self._joint: list[float] = []
        self._newest = 0  # first node of the newest level

    def next_level(self) -> None:
        """What is added from now on is one level deeper."""
        self._newest = len(self.token_ids)

    def add(self, parent: int, token_ids: Sequence[int], scores: Sequence[float]) -> None:
        """Children of a node (or of ``ROOT``), best first; an id below 0 ends them."""
        above = 1.0 if parent == ROOT else self._joint[parent]
        for token_id, score in zip(token_ids[: self._plan.width], scores, strict=False):
            score = min(max(score, _LEAST_SCORE), 1.0)
            if token_id < 0 or above * score < self._plan.min_score:
                break
            self.token_ids.append(token_id)
            self.parents.append(parent)
            self._scores.append(score)
            self._joint.append(above * score)

    def frontier(self, limit: int) -> list[int]:
        """Nodes of the newest level that are worth expanding, best first, at most ``limit`` and at most the width."""
        nodes = range(self._newest, len(self.token_ids))
        joint, most = self._joint, self._plan.num_nodes
        if len(joint) > most:
            least = sorted(joint, reverse=True)[most - 1]
            nodes = [node for node in nodes if joint[node] >= least]
        best = sorted(nodes, key=lambda node: -joint[node])
        return best[: min(limit, self._plan.width)]

    def tree(self) -> DraftTree:
        """The best ``num_nodes`` nodes, best first."""
        if not self.token_ids:
            return NO_TREE
        order = sorted(range(len(self._joint)), key=lambda node: -self._joint[node])
        order = order[: self._plan.num_nodes]
        number = {ROOT: ROOT, **{node: i for i, node in enumerate(order)}}
        return DraftTree(
            tuple(self.token_ids[node] for node in order),
            tuple(number[self.parents[node]] for node in order),
            tuple(self._scores[node] for node in order),
        )
