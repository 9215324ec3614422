"""TLT's bandit: every algorithm learns what there is to learn, in buckets that leave something to learn."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.spec.base import DraftPlan, Trial
from engine.spec.config import BEG_ALGORITHMS
from engine.spec.tuner import Candidates, StepRecord
from engine.spec.tuner_beg import BegTuner, default_arms
from tests.spec.simulation import PASS_MS, World, depth_rate, interpolated, rate

PRICE = interpolated(PASS_MS)
ARMS = default_arms(16, 1, 16)


def make(algorithm: str = "BEG", **options: Any) -> BegTuner:
    return BegTuner("oracle", arms=ARMS, algorithm=algorithm, **options)


def candidates(num: int, **more: Any) -> Candidates:
    params = SamplingParams(max_tokens=50)
    requests = [Request(str(i), [1], params, seed=i, max_total_len=100) for i in range(num)]
    return Candidates(requests, [40] * num, num, **more)


@pytest.mark.parametrize("algorithm", ["BEG", "EG", "UCB1"])
@pytest.mark.parametrize("arms", [[(4, 1, 4)], [(4, 1, 4), (8, 4, 48)], ARMS])
@pytest.mark.parametrize("thresholds", [(1,), (1, 2, 5, 21), tuple(range(1, 20))])
def test_every_bucket_has_something_to_learn(
    algorithm: str, arms: list[tuple[int, int, int]], thresholds: tuple[int, ...]
) -> None:
    """Two arms at least, off among them: the reference release had one arm a bucket."""
    tuner = BegTuner("oracle", arms=arms, thresholds=thresholds, algorithm=algorithm)
    buckets = tuner.explain()["buckets"]
    assert list(buckets) == ([1] if algorithm == "EG" else list(thresholds))
    for bucket in buckets.values():
        assert "off" in bucket
        assert len(bucket) >= 2
        assert len(bucket) >= min(3, 1 + len(arms))


def test_arms_with_many_nodes_go_with_small_batches() -> None:
    buckets = list(make().explain()["buckets"].values())
    most = [max(int(label.split("_")[-1]) for label in b if label != "off") for b in buckets]
    assert most == sorted(most, reverse=True)
    assert most[0] == 16
    assert {label for bucket in buckets for label in bucket} >= {f"{d}_{w}_{n}" for d, w, n in ARMS}


# EG not at one request: there a median of tokens says little, and its one bucket holds every arm
@pytest.mark.parametrize(
    ("algorithm", "num", "acceptance"),
    [
        (algorithm, num, acceptance)
        for algorithm in ("BEG", "EG", "UCB1")
        for num, acceptance in ((1, 0.8), (1, 0.3), (4, 0.8), (16, 0.8), (8, 0.0))
        if (algorithm, num) != ("EG", 1)
    ],
)
def test_the_best_arm_is_learnt(algorithm: str, num: int, acceptance: float) -> None:
    """In a stationary world the arm played most is the best of its bucket or next to it; exploration goes on."""
    world = World(PRICE, lambda i: acceptance, (10**6,) * num)
    tuner = make(algorithm)
    bucket = tuner._bucket(num)  # what it may play

    def worth(depth: int) -> float:
        return depth_rate(world, [acceptance] * num, depth)

    rates = {0 if arm.plan is None else arm.plan.depth: 0.0 for arm in bucket}
    rates = {depth: worth(depth) for depth in rates}
    assert min(rates.values()) < 0.8 * max(rates.values())
    steps = world.run(tuner, max_steps=1500).steps[600:]
    depths = [max(step.nodes.values(), default=0) for step in steps]
    favourite = max(set(depths), key=depths.count)
    if (
        algorithm != "EG"
    ):  # medians of 16 steps do not tell so many arms apart: its plays are spread over the good
        assert rates[favourite] >= 0.85 * max(rates.values()), rates
    assert rate(steps) > sum(rates.values()) / len(rates)


def test_predefined_plays_the_first_arm_of_the_bucket() -> None:
    arms = [(8, 4, 48), (4, 2, 8), (3, 2, 6), (2, 1, 2), (1, 1, 1)]
    tuner = BegTuner("oracle", arms=arms, thresholds=(1, 5), algorithm="PREDEFINED")
    assert tuner.plan(candidates(1))[0] == DraftPlan("oracle", 8, 48, 4)
    assert tuner.plan(candidates(4))[0] == DraftPlan("oracle", 8, 48, 4)
    assert tuner.plan(candidates(5))[0] != DraftPlan("oracle", 8, 48, 4)


@pytest.mark.parametrize("algorithm", BEG_ALGORITHMS)
def test_off_from_a_batch_size_on(algorithm: str) -> None:
    tuner = make(algorithm, off_from=8)
    for _ in range(50):
        assert tuner.plan(candidates(8)) == [None] * 8
        assert tuner.plan(candidates(40)) == [None] * 40
    plans = []
    for _ in range(50):
        plans += tuner.plan(candidates(7))
        tuner.observe(StepRecord(7, 7, num_tokens=7, target_s=0.01))
    assert any(plans)


def test_others_that_decode_decide_the_bucket() -> None:
    tuner = make(off_from=8)
    batch = candidates(1)
    crowded = Candidates(batch.requests, batch.max_depths, 8)
    assert tuner.plan(crowded) == [None]


@pytest.mark.parametrize("algorithm", BEG_ALGORITHMS)
def test_ranks_that_are_told_the_same_decide_the_same(algorithm: str) -> None:
    outcomes = [
        World(PRICE, lambda i: 0.7).run(make(algorithm, seed=5), seed=3).steps for _ in range(2)
    ]
    assert outcomes[0] == outcomes[1]


def test_the_seed_decides_the_random_plays() -> None:
    outcomes = [World(PRICE, lambda i: 0.7).run(make(seed=seed)).steps for seed in (0, 1)]
    assert outcomes[0] != outcomes[1]


@pytest.mark.parametrize("algorithm", BEG_ALGORITHMS)
def test_a_state_that_went_through_json_decides_the_same(algorithm: str) -> None:
    world = World(PRICE, lambda i: 0.7)
    learnt, restored = make(algorithm), make(algorithm)
    world.run(learnt)
    restored.load_state_dict(json.loads(json.dumps(learnt.state_dict())))
    assert restored.state_dict() == learnt.state_dict()
    assert world.run(learnt, 1).steps == world.run(restored, 1).steps


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: s.update(tuner="cost"),
        lambda s: s.pop("arms"),
        lambda s: s.pop("num_draws"),
        lambda s: s["arms"].pop(),
        lambda s: s["arms"][0].__setitem__(0, "9_9_9"),
        lambda s: s["arms"][0].__setitem__(1, "many"),
        lambda s: s["arms"][0].__setitem__(1, float("inf")),
        lambda s: s["arms"][0].__setitem__(2, [1e308]),
        lambda s: s.update(num_draws=float("inf")),
        lambda s: s.update(num_draws=-1),
        lambda s: s.update(num_draws=1.5),
        lambda s: s["arms"][0].__setitem__(1, 0),
        lambda s: s["arms"][0].__setitem__(2, None),
        lambda s: s["arms"][0].__setitem__(2, [float("nan")]),
        lambda s: s["arms"][0].__setitem__(2, []),
        lambda s: s["arms"].__setitem__(0, 7),
    ],
)
def test_a_bad_state_is_refused_whole(spoil: Callable[[dict[str, Any]], Any]) -> None:
    tuner = make()
    World(PRICE, lambda i: 0.7).run(tuner)
    state = json.loads(json.dumps(tuner.state_dict()))
    spoil(state)
    fresh = make()
    before = fresh.state_dict()
    with pytest.raises(ValueError, match="tuner state"):
        fresh.load_state_dict(state)
    assert fresh.state_dict() == before


@pytest.mark.parametrize("state", [None, 3, [], "beg"])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(ValueError, match="expected one of the 'beg' tuner"):
        make().load_state_dict(state)


def test_arms_are_needed() -> None:
    with pytest.raises(ValueError, match="arms"):
        BegTuner("oracle", arms=[])


def rewards(tuner: BegTuner) -> int:
    return sum(len(rewards) for _, _, rewards in tuner.state_dict()["arms"])


def test_only_the_step_that_was_planned_is_an_arms_reward() -> None:
    """Not the next one, for which nobody asked (no request may speculate), nor one that prefill shared."""
    tuner = make()
    tuner.plan(candidates(2))
    tuner.observe(StepRecord(2, 2, num_tokens=2, target_s=0.01))
    assert rewards(tuner) == 1
    tuner.observe(StepRecord(2, 2, num_tokens=2, target_s=5.0))
    assert rewards(tuner) == 1
    tuner.plan(candidates(2, has_prefill=True))
    tuner.observe(StepRecord(66, 2, num_tokens=2, target_s=5.0))
    assert rewards(tuner) == 1


def test_new_weights_let_every_arm_be_tried_again() -> None:
    tuner = make()
    World(PRICE, lambda i: 0.7).run(tuner)
    assert rewards(tuner)
    tuner.reset("oracle")
    assert rewards(tuner) == 0


def test_without_its_drafter_it_is_off() -> None:
    tuner = make()
    tuner.remove("another")
    tuner.observe_trials("oracle", [Trial("0", 0.5, True)])
    plans = []
    for _ in range(30):
        plans += tuner.plan(candidates(1))
        tuner.observe(StepRecord(1, 1, num_tokens=1, target_s=0.01))
    assert any(plans)
    tuner.remove("oracle")
    for _ in range(30):
        assert tuner.plan(candidates(1)) == [None]


@pytest.mark.parametrize(("depth", "width", "nodes"), [(1, 1, 1), (5, 1, 5), (16, 4, 48)])
def test_default_arms_are_within_limits(depth: int, width: int, nodes: int) -> None:
    arms = default_arms(depth, width, nodes)
    assert arms[-1][0] == depth
    assert all(d <= depth and w == width and 1 <= n <= nodes for d, w, n in arms)
    assert len({d for d, _, _ in arms}) == len(arms)
