"""A token tree: what a drafter proposes for one request, and the target verifies in one pass.

Owns the shape and its checks. Knows nothing of drafters, prices or caches. The root, the request's newest token, is
not a node: node ``i`` follows node ``parents[i]``, or the root where that is ``ROOT``. Invariants: a parent comes
before its children, so that any first k nodes are a tree themselves; the children of one parent are different
tokens, so that a walk has one way to go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

ROOT = -1


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Proposed tokens. ``DraftTree()`` proposes nothing.

    Args:
        token_ids: token of each node.
        parents: number of the node before it, or ``ROOT``.
        scores: the drafter's own estimate, in (0, 1], that the node is accepted once its parent has been; empty
            where it has none. The tuner calibrates it against what happens.

    Raises:
        ValueError: lengths that differ, a parent that does not come before its child, a token twice under one
            parent, a score outside (0, 1].
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    depths: tuple[int, ...] = field(init=False)
    """Of each node; 1 follows the root."""

    def __post_init__(self) -> None:
        count = len(self.token_ids)
        if len(self.parents) != count or len(self.scores) not in (0, count):
            raise ValueError(
                f"draft tree: {count} token_ids need as many parents, and as many scores or none; "
                f"got {len(self.parents)} and {len(self.scores)}"
            )
        depths: list[int] = []
        seen: set[tuple[int, int]] = set()
        for node, edge in enumerate(zip(self.parents, self.token_ids, strict=True)):
            parent = edge[0]
            if not ROOT <= parent < node:
                raise ValueError(
                    f"draft tree: parents[{node}] must be {ROOT} (the root) or an earlier node, got {parent}"
                )
            if edge in seen:
                raise ValueError(f"draft tree: token {edge[1]} stands twice under node {parent}")
            seen.add(edge)
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        for node, score in enumerate(self.scores):
            if not 0.0 < score <= 1.0:
                raise ValueError(f"draft tree: scores[{node}] must be in (0, 1], got {score}")
        object.__setattr__(self, "depths", tuple(depths))

    @classmethod
    def chain(cls, token_ids: Sequence[int], scores: Sequence[float] = ()) -> DraftTree:
        """One token after the other."""
        return cls(tuple(token_ids), tuple(range(-1, len(token_ids) - 1)), tuple(scores))

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def depth(self) -> int:
        """Most tokens that one walk can accept."""
        return max(self.depths, default=0)

    @property
    def chain_len(self) -> int:
        """How many nodes from the first on are a chain: node i behind node i - 1."""
        for node, parent in enumerate(self.parents):
            if parent != node - 1:
                return node
        return len(self.parents)

    def first(self, count: int) -> DraftTree:
        """The tree of the first ``count`` nodes."""
        if count >= len(self):
            return self
        return _trusted(
            self.token_ids[:count],
            self.parents[:count],
            self.scores[:count],
            self.depths[:count],
        )

    def take(self, nodes: Sequence[int]) -> DraftTree:
        """The tree of some nodes, in their order; each parent must be among those before."""
        number = {ROOT: ROOT}
        parents: list[int] = []
        for i, node in enumerate(nodes):
            parents.append(number[self.parents[node]])
            number[node] = i
        if len(number) <= len(nodes):
            raise ValueError(f"draft tree: a node is taken twice: {list(nodes)}")
        token_ids, scores, depths = self.token_ids, self.scores, self.depths
        return _trusted(
            tuple([token_ids[node] for node in nodes]),
            tuple(parents),
            tuple([scores[node] for node in nodes]) if scores else (),
            tuple([depths[node] for node in nodes]),
        )

    def ancestors(self, node: int) -> list[int]:
        """Nodes from the root's child down to ``node``, itself included."""
        line: list[int] = []
        while node != ROOT:
            line.append(node)
            node = self.parents[node]
        line.reverse()
        return line

    def path(self, node: int) -> tuple[int, ...]:
        """Tokens from behind the root down to ``node``, its own included."""
        return tuple(self.token_ids[n] for n in self.ancestors(node))


def _trusted(
    token_ids: tuple[int, ...],
    parents: tuple[int, ...],
    scores: tuple[float, ...],
    depths: tuple[int, ...],
) -> DraftTree:
    """A part of a tree, which has been checked as a whole; every step makes some of these."""
    tree = object.__new__(DraftTree)
    object.__setattr__(tree, "token_ids", token_ids)
    object.__setattr__(tree, "parents", parents)
    object.__setattr__(tree, "scores", scores)
    object.__setattr__(tree, "depths", depths)
    return tree


NO_TREE = DraftTree()
