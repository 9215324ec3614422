"""The walk against its definition, and against what plain decoding would have given."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from engine.spec.tree import NO_TREE, ROOT, DraftTree
from engine.spec.verify import walk
from tests.spec.test_tree import trees


def defined(tree: DraftTree, drawn: Sequence[int | None], at: int = ROOT) -> list[int]:
    """From a node on: the child that is the token drawn there, and so on from it."""
    for node, parent in enumerate(tree.parents):
        if parent == at and drawn[1 + at] is not None and tree.token_ids[node] == drawn[1 + at]:
            return [node, *defined(tree, drawn, node)]
    return []


@given(tree=trees(max_nodes=16, max_token=2), data=st.data())
def test_the_walk_is_its_definition(tree: DraftTree, data: st.DataObject) -> None:
    drawn = data.draw(
        st.lists(
            st.one_of(st.none(), st.integers(0, 3)), min_size=1 + len(tree), max_size=1 + len(tree)
        )
    )
    assert walk(tree, drawn) == defined(tree, drawn)


@given(tree=trees(max_nodes=16, max_token=2), text=st.lists(st.integers(0, 2), min_size=20))
def test_the_tokens_are_those_of_plain_decoding(tree: DraftTree, text: list[int]) -> None:
    """A target whose next token is a function of the text before it: accepted tokens and bonus are what it says."""

    def draw(path: Sequence[int]) -> int:
        return text[(len(path) + sum(path)) % 20]

    drawn = [draw(()), *(draw(tree.path(node)) for node in range(len(tree)))]
    accepted = walk(tree, drawn)
    bonus = drawn[1 + accepted[-1]] if accepted else drawn[0]
    tokens = [*(tree.token_ids[node] for node in accepted), bonus]
    plain: list[int] = []
    for _ in tokens:
        plain.append(draw(plain))
    assert tokens == plain
    # and it went as far as the tree did
    assert tuple(tokens) not in {tree.path(node) for node in range(len(tree))}


def test_plain_decoding_is_the_walk_of_an_empty_tree() -> None:
    assert walk(NO_TREE, [5]) == []
    assert walk(NO_TREE, [None]) == []


def test_nothing_is_accepted_behind_a_row_that_could_not_be_drawn() -> None:
    tree = DraftTree((1, 2, 3, 4), (-1, 0, 1, -1))
    assert walk(tree, [1, 2, None, 4, 5]) == [0, 1]
    assert walk(tree, [None, 2, 3, 4, 5]) == []
    assert walk(tree, [4, None, None, None, 9]) == [3]
