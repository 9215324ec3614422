"""Verification by equality: which nodes of a tree the target would have made itself.

Owns the walk. Knows nothing of sampling: tokens were drawn at every node by the one sampler, each on its own path,
so a node that equals the draw at its parent *is* the token that plain decoding would have given. No rejection
sampling, no residual distribution, no rule for greedy (see docs/design.md). Plain decoding is the walk of an empty
tree.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.spec.tree import ROOT, DraftTree


def walk(tree: DraftTree, drawn: Sequence[int | None]) -> list[int]:
    """The accepted nodes, from the root on.

    Args:
        tree: what was verified.
        drawn: the target's token behind the root, then behind each node; None where none could be drawn.

    Returns:
        node numbers; the tokens of a step are those of the nodes and then ``drawn[1 + last node]`` (``drawn[0]``
        where no node was accepted), the bonus token.
    """
    accepted: list[int] = []
    at, token = ROOT, drawn[0]
    for node, (parent, token_id) in enumerate(zip(tree.parents, tree.token_ids, strict=True)):
        if parent == at and token_id == token:  # parents come first, so one pass is the whole walk
            accepted.append(node)
            at, token = node, drawn[1 + node]
    return accepted
