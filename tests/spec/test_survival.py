"""Acceptance estimates: they meet the truth by depth, score and request, and follow it when it changes."""

from __future__ import annotations

import json
import random

import pytest

from engine.spec.survival import LEAST, MOST, NUM_DEPTHS, Survival
from engine.spec.tree import DraftTree


def feed(
    survival: Survival, chances: list[float], num: int, seed: int = 0, name: str = "r"
) -> None:
    """Chains whose tokens are accepted with these probabilities, each given the one before."""
    rng = random.Random(seed)
    tree = DraftTree.chain(range(len(chances)))
    for _ in range(num):
        accepted = next((i for i, p in enumerate(chances) if rng.random() >= p), len(chances))
        survival.observe(name, tree, range(accepted))


def test_chances_are_learnt_by_depth() -> None:
    survival, chances = Survival(), [0.9, 0.5, 0.8]
    feed(survival, chances, 4000)
    alive = survival.chain("other", 3)
    assert alive[0] == pytest.approx(0.9, abs=0.05)
    assert alive[1] == pytest.approx(0.45, abs=0.06)
    assert alive[2] == pytest.approx(0.36, abs=0.06)


def test_depths_beyond_what_was_seen_follow_the_last() -> None:
    survival = Survival()
    feed(survival, [0.8, 0.8], 2000)
    alive = survival.chain("other", 40)
    assert len(alive) == 40
    steps = [b / a for a, b in zip(alive, alive[1:], strict=False)]
    assert steps == pytest.approx([0.8] * 39, abs=0.06)
    assert all(b < a for a, b in zip(alive, alive[1:], strict=False))


def test_only_nodes_whose_parent_was_reached_are_trials() -> None:
    """Behind a rejected node nothing is learnt: its children would look worse than they are."""
    survival = Survival()
    tree = DraftTree.chain(range(8))
    for _ in range(100):
        survival.observe("r", tree, [])
    state = survival.state_dict()
    assert state["depth_trials"][0] > 50
    assert state["depth_trials"][1:] == [0.0] * (NUM_DEPTHS - 1)


def test_of_siblings_one_hit_is_a_hit() -> None:
    survival = Survival()
    tree = DraftTree((1, 2, 3), (-1, -1, -1))
    for i in range(300):
        survival.observe("r", tree, [i % 3])
    assert survival.chain("other", 1)[0] > 0.95


def test_a_request_differs_by_its_own_record() -> None:
    survival = Survival()
    for i in range(300):
        feed(survival, [0.9] * 4, 1, seed=i, name="good")
        feed(survival, [0.1] * 4, 1, seed=i, name="bad")
    good, bad, new = (survival.chain(name, 1)[0] for name in ("good", "bad", "new"))
    assert good == pytest.approx(0.9, abs=0.2)
    assert bad == pytest.approx(0.1, abs=0.12)
    assert bad < new < good
    survival.forget("good")
    assert survival.chain("good", 1)[0] == new


def test_scores_are_calibrated() -> None:
    """A drafter that says 0.9 where 0.5 comes true, and 0.3 where 0.3 does."""
    survival, rng = Survival(), random.Random(0)
    for _ in range(3000):
        score, truth = rng.choice(((0.9, 0.5), (0.3, 0.3)))
        survival.observe_trial(f"r{rng.randrange(40)}", score, rng.random() < truth)
    found = survival.nodes("new", DraftTree((1, 2), (-1, -1), (0.9, 0.3)))
    assert found == pytest.approx([0.5, 0.3], abs=0.08)


def test_survival_of_a_tree_is_that_of_its_paths() -> None:
    survival = Survival()
    tree = DraftTree((1, 2, 3, 4), (-1, 0, -1, 1), (0.9, 0.8, 0.1, 0.7))
    alive = survival.nodes("r", tree)
    single = survival.nodes("r", DraftTree((1, 2, 3, 4), (-1,) * 4, tree.scores))
    assert alive == pytest.approx(
        [single[0], single[0] * single[1], single[2], single[0] * single[1] * single[3]]
    )
    plain = DraftTree(tree.token_ids, tree.parents)
    chain = survival.chain("r", 3)
    assert survival.nodes("r", plain) == pytest.approx([chain[0], chain[1], chain[0], chain[2]])


def test_proposals_teach_what_a_depth_brings_verified_or_not() -> None:
    """With scores the better ones are verified; what is asked of the drafter next is not better for it."""
    survival = Survival()
    poor, fine = (DraftTree.chain([1], [score]) for score in (0.05, 0.95))
    for i in range(400):
        tree = fine if i % 4 == 0 else poor
        survival.expect(tree)
        if tree is fine:
            survival.observe(f"r{i}", tree, [0])
    assert survival.chain("new", 1)[0] == pytest.approx(0.25 * 0.97 + 0.75 * 0.03, abs=0.06)


def test_chances_stay_between_bounds() -> None:
    survival = Survival()
    feed(survival, [1.0] * 3, 2000)
    assert survival.chain("r", 1)[0] == MOST
    assert survival.nodes("r", DraftTree.chain([1], [1.0]))[0] <= MOST
    survival = Survival()
    feed(survival, [0.0], 5000)
    assert survival.chain("r", 1)[0] == LEAST


def test_it_follows_a_change() -> None:
    survival = Survival()
    feed(survival, [0.9], 3000, name="a")
    feed(survival, [0.1], 100, seed=1, name="a")
    assert survival.chain("a", 1)[0] < 0.5  # this request
    feed(survival, [0.1], 1500, seed=2, name="b")
    assert survival.chain("new", 1)[0] == pytest.approx(0.15, abs=0.08)  # and the drafter


def test_after_reset_the_old_is_a_first_guess() -> None:
    survival = Survival()
    feed(survival, [0.9], 3000)
    survival.reset()
    assert survival.chain("r", 1)[0] == pytest.approx(0.75, abs=0.15)
    feed(survival, [0.1], 40)
    assert survival.chain("new", 1)[0] < 0.35


def test_state_round_trip() -> None:
    survival = Survival()
    feed(survival, [0.9, 0.4], 500)
    survival.observe_trial("r", 0.7, True)
    other = Survival()
    other.load_state_dict(json.loads(json.dumps(survival.state_dict())))
    assert other.state_dict() == survival.state_dict()
    assert other.chain("new", 5) == survival.chain("new", 5)
    scored = DraftTree.chain([1, 2], [0.7, 0.2])
    assert other.nodes("new", scored) == pytest.approx(survival.nodes("new", scored))
