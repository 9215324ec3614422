"""Growth of draft trees against a search over everything, and what it does not spend."""

from __future__ import annotations

import random

import pytest

from engine.spec.base import DraftPlan
from engine.spec.eagle_tree import TreeGrowth
from engine.spec.tree import NO_TREE, ROOT


def grown(plan: DraftPlan, seed: int) -> tuple[TreeGrowth, list[tuple[float, tuple[int, ...]]]]:
    """A tree over random scores, and every path that a search without pruning finds."""

    def children(path: tuple[int, ...]) -> tuple[list[int], list[float]]:
        own = random.Random(str((seed, path)))
        scores = sorted((own.random() ** 2 for _ in range(4)), reverse=True)
        total = sum(scores)
        return own.sample(range(100), 4), [score / total for score in scores]

    growth = TreeGrowth(plan)
    paths: dict[int, tuple[int, ...]] = {ROOT: ()}
    frontier = [ROOT]
    for depth in range(1, plan.depth + 1):
        growth.next_level()
        for node in frontier:
            before = len(growth.token_ids)
            growth.add(node, *children(paths[node]))
            for child in range(before, len(growth.token_ids)):
                paths[child] = (*paths[node], growth.token_ids[child])
        if depth < plan.depth:
            frontier = growth.frontier(100)
    every: list[tuple[float, tuple[int, ...]]] = []
    level: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    for _ in range(plan.depth):
        found = []
        for joint, path in level:
            ids, scores = children(path)
            found += [
                (joint * s, (*path, i))
                for i, s in list(zip(ids, scores, strict=True))[: plan.width]
                if joint * s >= plan.min_score
            ]
        every += found
        level = sorted(found, key=lambda entry: -entry[0])[: plan.width]
    return growth, every


@pytest.mark.parametrize("seed", range(40))
def test_the_best_nodes_are_kept_best_first(seed: int) -> None:
    rng = random.Random(1000 + seed)
    plan = DraftPlan(
        "eagle",
        depth=rng.randint(1, 5),
        num_nodes=rng.randint(1, 14),
        width=rng.randint(1, 4),
        min_score=rng.choice([0.0, 0.05]),
    )
    growth, every = grown(plan, seed)
    tree = growth.tree()
    best = sorted(every, key=lambda entry: -entry[0])[: plan.num_nodes]
    assert [tree.path(node) for node in range(len(tree))] == [path for _, path in best]
    assert all(count <= plan.width for count in map(tree.parents.count, set(tree.parents)))


def test_a_node_that_cannot_be_kept_is_not_expanded() -> None:
    growth = TreeGrowth(DraftPlan("eagle", depth=3, num_nodes=2, width=3))
    growth.add(ROOT, [7, 8, 9], [0.6, 0.3, 0.1])
    assert growth.frontier(10) == [0, 1]
    assert growth.frontier(1) == [0]
    growth.next_level()
    growth.add(0, [5, 6], [0.4, 0.3])  # 0.24 and 0.18: both behind 0.6 and 0.3
    assert growth.frontier(10) == []
    assert growth.tree().token_ids == (7, 8)


def test_empty_places_and_small_scores() -> None:
    growth = TreeGrowth(DraftPlan("eagle", depth=1, num_nodes=5, width=4, min_score=0.01))
    growth.add(ROOT, [-1, -1], [0.0, 0.0])
    assert growth.tree() is NO_TREE
    growth.add(ROOT, [3, 4, -1], [0.9, 0.001, 0.0])
    assert growth.tree().token_ids == (3,)
    certain = TreeGrowth(DraftPlan("eagle", depth=1, num_nodes=5, width=4))
    certain.add(ROOT, [3, 4], [1.0 + 1e-7, 0.0])  # rounding of a softmax
    assert certain.tree().scores[0] == 1.0
    assert certain.tree().scores[1] > 0.0
