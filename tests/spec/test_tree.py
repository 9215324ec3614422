"""Token trees: every check, and every question put to them against brute force."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.spec.tree import NO_TREE, ROOT, DraftTree


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 12, max_token: int = 4) -> DraftTree:
    """Any valid tree; few tokens, so that siblings and paths collide often."""
    tokens: list[int] = []
    parents: list[int] = []
    for node in range(draw(st.integers(0, max_nodes))):
        parent = draw(st.integers(ROOT, node - 1))
        token = draw(st.integers(0, max_token))
        if (parent, token) not in set(zip(parents, tokens, strict=True)):
            # behind an edge that was left out, the numbers are those of the nodes that are there
            if parent >= len(tokens):
                parent = ROOT
            if (parent, token) in set(zip(parents, tokens, strict=True)):
                continue
            tokens.append(token)
            parents.append(parent)
    scores = draw(st.lists(st.floats(0.01, 1.0), min_size=len(tokens), max_size=len(tokens)))
    return DraftTree(tuple(tokens), tuple(parents), tuple(scores) if draw(st.booleans()) else ())


@pytest.mark.parametrize(
    ("token_ids", "parents", "scores", "message"),
    [
        ((1, 2), (-1,), (), "as many parents"),
        ((1,), (-1, 0), (), "as many parents"),
        ((1, 2), (-1, 0), (0.5,), "as many scores or none"),
        ((), (), (0.5,), "as many scores or none"),
        ((1,), (0,), (), r"parents\[0\] must be -1 \(the root\) or an earlier node, got 0"),
        ((1, 2), (-1, 1), (), r"parents\[1\] .* got 1"),
        ((1, 2), (1, -1), (), r"parents\[0\] .* got 1"),
        ((1, 2), (-1, -2), (), r"parents\[1\] .* got -2"),
        ((7, 7), (-1, -1), (), "token 7 stands twice under node -1"),
        ((1, 7, 7), (-1, 0, 0), (), "token 7 stands twice under node 0"),
        ((1,), (-1,), (0.0,), r"scores\[0\] must be in \(0, 1\], got 0.0"),
        ((1,), (-1,), (1.01,), r"scores\[0\]"),
        ((1,), (-1,), (-0.5,), r"scores\[0\]"),
        ((1, 2), (-1, 0), (0.5, float("nan")), r"scores\[1\]"),
    ],
)
def test_what_is_not_a_tree_is_refused(token_ids, parents, scores, message) -> None:
    with pytest.raises(ValueError, match=message):
        DraftTree(token_ids, parents, scores)


def test_the_same_token_may_stand_under_different_parents() -> None:
    tree = DraftTree((7, 7, 7), (ROOT, 0, 1), (1.0, 0.5, 1e-6))
    assert tree.depths == (1, 2, 3)


def test_a_chain() -> None:
    tree = DraftTree.chain([5, 6, 5], [0.9, 0.8, 0.7])
    assert (tree.parents, tree.scores, tree.chain_len) == ((-1, 0, 1), (0.9, 0.8, 0.7), 3)
    assert DraftTree.chain([]) == NO_TREE
    assert (len(NO_TREE), NO_TREE.depth, NO_TREE.chain_len) == (0, 0, 0)


@given(tree=trees())
def test_depths_paths_and_chain(tree: DraftTree) -> None:
    for node in range(len(tree)):
        line, at = [], node
        while at != ROOT:
            line.insert(0, at)
            at = tree.parents[at]
        assert tree.ancestors(node) == line
        assert tree.path(node) == tuple(tree.token_ids[n] for n in line)
        assert tree.depths[node] == len(line)
    paths = [tree.path(node) for node in range(len(tree))]
    assert len(set(paths)) == len(paths)
    assert tree.depth == max((len(path) for path in paths), default=0)
    assert tree.chain_len == max(
        k for k in range(len(tree) + 1) if tree.parents[:k] == tuple(range(-1, k - 1))
    )


@given(tree=trees(), count=st.integers(0, 14))
def test_the_first_nodes_are_a_tree(tree: DraftTree, count: int) -> None:
    part = tree.first(count)
    assert len(part) == min(count, len(tree))
    assert [part.path(n) for n in range(len(part))] == [tree.path(n) for n in range(len(part))]
    assert part.scores == tree.scores[:count]


@given(tree=trees(), data=st.data())
def test_taken_nodes_keep_their_paths_and_scores(tree: DraftTree, data: st.DataObject) -> None:
    """Any order in which parents stand before their children."""
    order = data.draw(st.permutations(range(len(tree))))
    taken: list[int] = []
    for node in order[: data.draw(st.integers(0, len(tree)))]:
        taken += [n for n in tree.ancestors(node) if n not in taken]
    part = tree.take(taken)
    assert [part.path(i) for i in range(len(part))] == [tree.path(n) for n in taken]
    assert part.scores == (tuple(tree.scores[n] for n in taken) if tree.scores else ())


def test_a_child_is_not_taken_without_its_parent() -> None:
    with pytest.raises(KeyError):
        DraftTree.chain([1, 2]).take([1])
