"""The cost tuner in a simulated rollout: near the best that fixed depths could do, never worse than plain decoding.

Judged by expected tokens at the prices of the world's curve, noise apart, so luck does not enter. Every bar is an
average over seeds; all is seeded, so a run repeats.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.spec.base import DraftPlan, Trial
from engine.spec.tree import DraftTree
from engine.spec.tuner import Candidates, Draft, OffTuner, StepRecord, Verified
from engine.spec.tuner_cost import CostTuner
from tests.spec.simulation import (
    PASS_MS,
    Guesser,
    Outcome,
    World,
    best_by_phase,
    best_depth,
    interpolated,
    rate,
)

PRICE = interpolated(PASS_MS)
MEASURED = {n: PRICE(n) for n in (1, 2, 4, 6, 8, 12, 16, 24, 32, 64)}
ENDLESS = 10**6  # tokens: the batch stays as it is


def free(num: int, depth: int) -> float:
    return 0.0


def costly(num: int, depth: int) -> float:
    return depth * (0.8e-3 + 0.05e-3 * num)


DRAFTING = {"free": free, "costly": costly}


def make(*drafters: str, measured: dict[int, float] | None = MEASURED, **options: Any) -> CostTuner:
    limits = {"max_depth": 16, "max_nodes": 16} | options
    return CostTuner(drafters or ("oracle",), measured=measured, **limits)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def over_plain(outcomes: Sequence[Outcome], price: Callable[[int], float]) -> dict[int, float]:
    """Expected tokens per second over those of plain decoding, by batch size, where there were 30 steps of it."""
    steps = defaultdict(list)
    for outcome in outcomes:
        for step in outcome.steps:
            steps[step.num].append(step)
    return {n: rate(s) * price(n) / n for n, s in steps.items() if len(s) >= 30}


# ---- the bars: a whole rollout


@pytest.mark.parametrize("drafting", DRAFTING)
@pytest.mark.parametrize("acceptance", [0.6, 0.7, 0.8])
def test_near_the_best_depth_of_every_phase(acceptance: float, drafting: str) -> None:
    world = World(PRICE, lambda i: acceptance, draft_s=DRAFTING[drafting])
    best, _, _ = best_by_phase(world, 16)
    found = [best / world.run(make(), seed).fair_s for seed in range(6)]
    assert mean(found) >= 0.97, found
    assert min(found) >= 0.94, found


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("drafting", DRAFTING)
@pytest.mark.parametrize("acceptance", [0.0, 0.05, 0.3, 0.8])
def test_never_worse_than_plain_decoding(acceptance: float, drafting: str, scored: bool) -> None:
    """A dead drafter, too, and one that is dear and asked at every step only to have its trees trimmed away."""
    world = World(PRICE, lambda i: acceptance, draft_s=DRAFTING[drafting], scored=scored)
    gains = over_plain([world.run(make(), seed) for seed in range(6)], PRICE)
    assert set(gains) >= {1, 4, 8, 16, 32}
    assert min(gains.values()) >= 0.98, gains


@pytest.mark.parametrize("num", [4, 8])
def test_scores_are_worth_having(num: int) -> None:
    """Tokens whose chances vary are told apart where the drafter knows them, and rows are scarce."""
    gains = []
    for scored in (False, True):
        world = World(PRICE, lambda i: 0.6, (ENDLESS,) * num, scored=scored)
        gains.append(mean([rate(world.run(make(), seed, 350).steps[150:]) for seed in range(3)]))
    assert gains[1] > 1.015 * gains[0]


# ---- requests differ


@pytest.mark.parametrize(("num", "least"), [(2, 1.3), (4, 1.3), (8, 1.15)])
def test_nodes_go_to_the_requests_that_can_be_guessed(num: int, least: float) -> None:
    def acceptance(i: int) -> float:
        return 0.9 if i % 2 == 0 else 0.1

    world = World(PRICE, acceptance, lengths=(ENDLESS,) * num)
    uniform, _ = best_depth(world, [acceptance(i) for i in range(num)], 16)
    for seed in range(2):
        steps = world.run(make(), seed, max_steps=500).steps[200:]
        assert rate(steps) >= least * uniform
        good, bad = (
            sum(n for s in steps for i, n in s.nodes.items() if i % 2 == parity)
            for parity in (0, 1)
        )
        assert good > 20 * bad


def test_a_request_of_another_kind_does_not_spoil_the_rest() -> None:
    """Acceptance of one in eight is nil; it must end with next to no nodes, the others keep theirs."""
    world = World(PRICE, lambda i: 0.0 if i == 3 else 0.85, lengths=(ENDLESS,) * 4)
    steps = world.run(make(), max_steps=400).steps[200:]
    nodes = [mean([s.nodes.get(i, 0) for s in steps]) for i in range(4)]
    assert nodes[3] < 0.1 < 1.5 < min(nodes[:3])


# ---- prices


def straight(slope: float) -> Callable[[int], float]:
    return lambda n: 8e-3 * (1.0 + slope * (n - 1))


@pytest.mark.parametrize("num", [1, 2, 8])
@pytest.mark.parametrize("believed", [None, 0.0, 0.25])
def test_dear_rows_are_found_out(believed: float | None, num: int) -> None:
    """A row costs a whole pass, so nothing pays. At one request every step has the same rows: only a plain step can
    tell dear rows from a slow machine."""
    price = straight(1.0)
    guess = None if believed is None else {n: straight(believed)(n) for n in MEASURED}
    world = World(price, lambda i: 0.8, lengths=(ENDLESS,) * num)
    outcomes = [world.run(make(measured=guess), seed, max_steps=500) for seed in range(3)]
    assert mean([rate(o.steps[200:]) * price(num) / num for o in outcomes]) >= 0.97


@pytest.mark.parametrize("num", [1, 2, 8])
def test_cheap_rows_are_found_out(num: int) -> None:
    """Measured three times as dear as they are."""
    wrong = {n: MEASURED[1] + 3.0 * (MEASURED[n] - MEASURED[1]) for n in MEASURED}
    world = World(PRICE, lambda i: 0.8, lengths=(ENDLESS,) * num)
    best, _ = best_depth(world, [0.8] * num, 16)
    outcomes = [world.run(make(measured=wrong), seed, max_steps=900) for seed in range(3)]
    assert mean([rate(o.steps[500:]) / best for o in outcomes]) >= 0.85


def test_without_measurements_a_rollout_teaches_the_prices() -> None:
    world = World(PRICE, lambda i: 0.8)
    best, _, _ = best_by_phase(world, 16)
    found = [best / world.run(make(measured=None), seed).fair_s for seed in range(6)]
    assert mean(found) >= 0.95, found


@pytest.mark.parametrize("drafting", DRAFTING)
@pytest.mark.parametrize("num", [1, 8])
def test_a_machine_that_becomes_slower_changes_nothing(num: int, drafting: str) -> None:
    """Twice as slow: the same depths are right, and no step of adjustment may be lost to plain decoding."""
    world = World(
        PRICE,
        lambda i: 0.8,
        lengths=(ENDLESS,) * num,
        draft_s=DRAFTING[drafting],
        slowness=lambda step: 2.0 if step >= 400 else 1.0,
    )
    best, _ = best_depth(world, [0.8] * num, 16)
    outcomes = [world.run(make(), seed, max_steps=800) for seed in range(3)]
    assert mean([2.0 * rate(o.steps[400:430]) / best for o in outcomes]) >= 0.93
    assert mean([2.0 * rate(o.steps[430:]) / best for o in outcomes]) >= 0.95


# ---- acceptance that changes


@pytest.mark.parametrize("drafting", DRAFTING)
@pytest.mark.parametrize("num", [1, 4])
def test_acceptance_falls_and_comes_back(num: int, drafting: str) -> None:
    """0.8, then 0.2, then 0.8: while it is low hardly anything is lost, and probes notice when it returns."""
    world = World(
        PRICE,
        lambda i: 0.8,
        lengths=(ENDLESS,) * num,
        draft_s=DRAFTING[drafting],
        fortune=lambda step: 0.25 if 500 <= step < 1300 else 1.0,
    )
    high, _ = best_depth(world, [0.8] * num, 16)
    low, _ = best_depth(world, [0.2] * num, 16)
    outcomes = [world.run(make(), seed, max_steps=2600) for seed in range(3)]

    def share(first: int, last: int, best: float) -> float:
        return mean([rate(o.steps[first:last]) / best for o in outcomes])

    assert share(200, 500, high) >= 0.96
    assert share(650, 1300, low) >= 0.96
    assert share(1300, 1800, high) >= 0.8
    assert share(1800, 2600, high) >= 0.95


def test_probes_are_single_short_and_rare() -> None:
    """Where speculation does not pay: a chain of two, for one request, one step at a time, in turns."""
    world = World(PRICE, lambda i: 0.0, lengths=(ENDLESS,) * 8)
    tuner = make()
    world.run(tuner, max_steps=100)
    steps = world.run(tuner, max_steps=1500).steps
    probes = [i for i, step in enumerate(steps) if step.nodes]
    assert 10 < len(probes) < 90
    assert all(list(steps[i].nodes.values()) == [2] for i in probes)
    assert all(b - a > 3 for a, b in zip(probes, probes[1:], strict=False))
    assert len({next(iter(steps[i].nodes)) for i in probes}) == 8
    lost = 1.0 - rate(steps) * PRICE(8) / 8
    assert lost < 0.01


def test_a_long_good_time_is_no_credit_for_probes() -> None:
    """Ten thousand steps of speculation, then the drafter dies: it is not probed at every step for a long time."""
    tuner = make()
    World(PRICE, lambda i: 0.8, lengths=(ENDLESS,)).run(tuner, max_steps=4000)
    dead = World(PRICE, lambda i: 0.0, lengths=(ENDLESS,))
    steps = dead.run(tuner, 1, max_steps=800).steps[300:]
    assert sum(bool(step.nodes) for step in steps) < 25


def test_new_weights_are_tried_anew() -> None:
    """A drafter known to be bad, then ``reset``: a better one is found within some tens of steps."""
    bad = World(PRICE, lambda i: 0.02, lengths=(ENDLESS,) * 2)
    good = World(PRICE, lambda i: 0.8, lengths=(ENDLESS,) * 2)
    best, _ = best_depth(good, [0.8] * 2, 16)
    told, untold = [], []
    for seed in range(4):
        for reset, rates in ((True, told), (False, untold)):
            tuner = make()
            bad.run(tuner, seed, max_steps=800)
            if reset:
                tuner.reset("oracle")
            rates.append(rate(good.run(tuner, seed, max_steps=150).steps) / best)
    assert mean(told) >= 0.9
    assert mean(told) > mean(untold) + 0.03


def test_reset_of_another_drafter_changes_nothing() -> None:
    tuner = make("oracle", "other")
    world = World(PRICE, lambda i: 0.8, others=[Guesser("other", lambda i: 0.5)])
    world.run(tuner)
    before = tuner.state_dict()
    tuner.reset("other")
    after = tuner.state_dict()
    assert after["drafters"]["oracle"] == before["drafters"]["oracle"]
    assert after["prices"] == before["prices"]
    tuner.reset()
    assert tuner.state_dict()["drafters"]["oracle"] != before["drafters"]["oracle"]


# ---- several drafters


@pytest.mark.parametrize(("num", "least"), [(2, 1.04), (4, 1.04), (8, 0.985)])
def test_of_two_drafters_each_request_gets_the_better(num: int, least: float) -> None:
    """Each is right about one half of the requests. At 8 the rows leave room for little more than one half."""

    def good(i: int) -> float:
        return 0.85 if i % 2 == 0 else 0.2

    def other(i: int) -> float:
        return 0.2 if i % 2 == 0 else 0.85

    lengths = (ENDLESS,) * num
    both = World(PRICE, good, lengths, drafter="a", others=[Guesser("b", other)])
    alone = World(PRICE, good, lengths, drafter="a")
    seeds = range(3)
    together = [rate(both.run(make("a", "b"), seed, 600).steps[200:]) for seed in seeds]
    single = [rate(alone.run(make("a"), seed, 600).steps[200:]) for seed in seeds]
    assert mean(together) >= least * mean(single)


def test_a_second_drafter_that_costs_too_much_is_not_asked() -> None:
    """What it adds to the first one's finds is set against its price, not the finds as a whole."""
    world = World(
        PRICE,
        lambda i: 0.8,
        (ENDLESS,) * 2,
        drafter="a",
        others=[Guesser("b", lambda i: 0.9, lambda num, depth: 5e-3 * depth)],
    )
    alone = World(PRICE, lambda i: 0.8, (ENDLESS,) * 2, drafter="a")
    together = mean([rate(world.run(make("a", "b"), s, 700).steps[300:]) for s in range(3)])
    single = mean([rate(alone.run(make("a"), s, 700).steps[300:]) for s in range(3)])
    assert together >= 0.98 * single


def test_a_drafter_that_is_gone_is_never_named_again() -> None:
    names: set[str] = set()

    class Spy(CostTuner):
        def plan(self, batch: Candidates) -> list[DraftPlan | None]:
            plans = super().plan(batch)
            names.update(plan.drafter for plan in plans if plan is not None)
            return plans

    tuner = Spy(["a", "b"], max_depth=8, max_nodes=8, measured=MEASURED)
    World(PRICE, lambda i: 0.9, (ENDLESS,), drafter="a", others=[Guesser("b", lambda i: 0.5)]).run(
        tuner, max_steps=60
    )
    assert "a" in names
    tuner.remove("a")
    names.clear()
    World(PRICE, lambda i: 0.9, (ENDLESS,), drafter="b").run(tuner, max_steps=60)
    assert names == {"b"}
    tuner.remove("b")
    names.clear()
    World(PRICE, lambda i: 0.9, (ENDLESS,), drafter="b").run(tuner, max_steps=20)
    assert not names
    assert tuner.explain()["drafters"] == {}


# ---- records in, decisions out


class Twins(OffTuner):
    """Two tuners that are told the same, and must say the same."""

    def __init__(self, first: CostTuner, second: CostTuner) -> None:
        self.pair = first, second
        self.num_plans = 0

    def _both(self, method: str, *args: Any) -> Any:
        one, two = (getattr(tuner, method)(*args) for tuner in self.pair)
        assert one == two, (method, args)
        return one

    def plan(self, batch: Candidates) -> list[DraftPlan | None]:
        self.num_plans += 1
        return self._both("plan", batch)

    def reconsider(self, batch: Candidates, drafts: Sequence[Draft]) -> list[DraftPlan | None]:
        return self._both("reconsider", batch, drafts)

    def trim(self, batch: Candidates, drafts: Sequence[Draft]) -> list[DraftTree]:
        return self._both("trim", batch, drafts)

    def observe(self, record: StepRecord) -> None:
        self._both("observe", record)

    def observe_trials(self, drafter: str, trials: Sequence[Trial]) -> None:
        self._both("observe_trials", drafter, trials)

    def forget(self, request_id: str) -> None:
        self._both("forget", request_id)


def world_of_two() -> World:
    b = Guesser("b", lambda i: 0.3 + 0.1 * (i % 5), costly)
    return World(PRICE, lambda i: 0.7, drafter="a", scored=True, trials=True, others=[b])


def test_ranks_that_are_told_the_same_decide_the_same() -> None:
    twins = Twins(make("a", "b"), make("a", "b"))
    world_of_two().run(twins)
    assert twins.num_plans > 200


@pytest.mark.parametrize("world", ["two", "one", "dead"])
def test_a_state_that_went_through_json_decides_the_same(world: str) -> None:
    worlds = {
        "two": world_of_two(),
        "one": World(PRICE, lambda i: 0.7, draft_s=costly, drafter="a"),
        "dead": World(PRICE, lambda i: 0.0, draft_s=costly, drafter="a"),
    }
    names = ("a", "b") if world == "two" else ("a",)
    learnt = make(*names)
    worlds[world].run(learnt)
    restored = make(*names, measured=None)
    restored.load_state_dict(json.loads(json.dumps(learnt.state_dict())))
    assert restored.state_dict() == learnt.state_dict()
    worlds[world].run(Twins(learnt, restored), seed=1)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: s.clear(),
        lambda s: s.update(tuner="beg"),
        lambda s: s.pop("prices"),
        lambda s: s.pop("turns"),
        lambda s: s["prices"].update(raw=[1.0]),
        lambda s: s["prices"].update(unit_s=0.0),
        lambda s: s["prices"].update(unit_s=float("nan")),
        lambda s: s["prices"].update(unit_s="fast"),
        lambda s: s["prices"]["weights"].__setitem__(3, float("nan")),
        lambda s: s["prices"]["raw"].__setitem__(3, -1.0),
        lambda s: s["prices"].update(unit_s=1e-320),
        lambda s: s["prices"].update(num_compared=-1),
        lambda s: s["prices"].update(raw=[2.0 * value for value in s["prices"]["raw"]]),
        lambda s: s["prices"]["raw"].__setitem__(3, 1e308),
        lambda s: s["prices"]["weights"].__setitem__(3, 1e308),
        lambda s: s["prices"]["units"].__setitem__(0, 1e-320),
        lambda s: s["prices"]["steps"].__setitem__(0, [1, float("inf"), 1.0]),
        lambda s: s["prices"]["steps"].__setitem__(0, [-1, 1, 1.0]),
        lambda s: s["prices"]["surprises"].__setitem__(0, float("inf")),
        lambda s: s["turns"].update(probe_turn="first"),
        lambda s: s["turns"].update(probe_turn=-1),
        lambda s: s["turns"].update(plain_every=0),
        lambda s: s["turns"].update(plain_every=-5),
        lambda s: s["turns"].update(plain_every=151),
        lambda s: s["turns"].update(plain_every=6.0),
        lambda s: s["turns"].update(plain_every=True),
        lambda s: s["turns"].update(steps_since_plain=-1),
        lambda s: s["turns"].update(probe_credit_s=float("nan")),
        lambda s: s["turns"].update(probe_credit_s=-1e9),
        lambda s: s["drafters"]["oracle"].update(has_trials="no"),
        lambda s: s["drafters"]["oracle"].update(price={"1": 1e308}),
        lambda s: s["drafters"]["oracle"].update(price={"-1": 1.0}),
        lambda s: s["drafters"]["oracle"]["survival"]["depth_trials"].__setitem__(0, 1e308),
        lambda s: s["drafters"].update(oracle=None),
        lambda s: s["drafters"]["oracle"].pop("survival"),
        lambda s: s["drafters"]["oracle"].update(price={"one": 1.0}),
        lambda s: s["drafters"]["oracle"].update(price={"1": -1.0}),
        lambda s: s["drafters"]["oracle"]["survival"].update(depth_trials=[1.0]),
        lambda s: s["drafters"]["oracle"]["survival"]["depth_trials"].__setitem__(0, float("nan")),
        lambda s: s["drafters"]["oracle"]["survival"]["depth_hits"].__setitem__(0, 1e9),
        lambda s: s["drafters"]["oracle"]["survival"]["score_hits"].__setitem__(2, -1.0),
    ],
)
def test_a_bad_state_is_refused_whole(spoil: Callable[[dict[str, Any]], Any]) -> None:
    tuner, world = make(), World(PRICE, lambda i: 0.7, draft_s=costly)
    world.run(tuner)
    state = json.loads(json.dumps(tuner.state_dict()))
    spoil(state)
    fresh = make()
    world.run(fresh, seed=3)
    before = fresh.state_dict()
    with pytest.raises(ValueError, match="tuner state"):
        fresh.load_state_dict(state)
    assert fresh.state_dict() == before


def test_a_state_without_one_of_the_drafters_leaves_it_fresh() -> None:
    tuner = make("oracle")
    World(PRICE, lambda i: 0.7).run(tuner)
    wider = make("oracle", "new")
    wider.load_state_dict(tuner.state_dict())
    explained = wider.explain()["drafters"]
    assert explained["oracle"]["by_depth"] == tuner.explain()["drafters"]["oracle"]["by_depth"]
    assert explained["new"]["trials"] == 0


# ---- plans


def candidates(num: int, max_depth: int, **more: Any) -> Candidates:
    params = SamplingParams(max_tokens=99)
    requests = [Request(str(i), [1], params, seed=i, max_total_len=100) for i in range(num)]
    more = {"num_decoding": num} | more
    return Candidates(requests, [max_depth] * num, **more)


@pytest.mark.parametrize("max_depth", [1, 2, 5, 40])
def test_plans_keep_within_limits(max_depth: int) -> None:
    tuner = make(max_depth=6, max_nodes=4)
    plan = tuner.plan(candidates(1, max_depth))[0]
    assert plan is not None
    assert 1 <= plan.depth <= min(max_depth, 6)
    assert 1 <= plan.num_nodes <= 4


def test_others_that_decode_count_though_they_do_not_speculate() -> None:
    """A plan made for one request alone does not stand when thirty others join, whoever may speculate."""
    tuner = make()
    batch = candidates(1, 16)
    assert tuner.plan(batch)[0] is not None
    crowded = Candidates(batch.requests, batch.max_depths, 64)
    assert tuner.plan(crowded) == [None]


def test_without_drafters_nothing_is_planned() -> None:
    tuner = CostTuner([], max_depth=4, max_nodes=4)
    assert tuner.plan(candidates(2, 9)) == [None, None]
    tuner.observe(StepRecord(2, 2, num_tokens=2, target_s=0.01))
    assert tuner.explain()["choice"] == {}


def test_trim_keeps_parents_and_drops_what_does_not_pay() -> None:
    tuner = make(width=2, measured={n: straight(0.1)(n) for n in MEASURED})
    plan = DraftPlan("oracle", 3, 6, 2)
    tree = DraftTree((1, 2, 3, 4, 5), (-1, -1, 0, 1, 2), (0.9, 0.05, 0.9, 0.05, 0.9))
    batch = candidates(1, 9)
    kept = tuner.trim(batch, [Draft(batch.requests[0], plan, tree)])[0]
    assert kept.token_ids == (1, 3, 5)
    dear = CostTuner(
        ["oracle"], max_depth=9, max_nodes=9, measured={n: 1e-2 * n for n in (1, 2, 4, 8, 16)}
    )
    assert len(dear.trim(batch, [Draft(batch.requests[0], plan, tree)])[0]) == 0


def test_records_of_a_prefill_alone_or_an_unknown_drafter_are_harmless() -> None:
    tuner = make()
    plan, tree = DraftPlan("ghost", 1, 1), DraftTree.chain([1])
    tuner.observe(StepRecord(64, 0, target_s=0.1))
    tuner.observe(
        StepRecord(
            2,
            1,
            1,
            num_tokens=1,
            target_s=0.01,
            draft_s={"ghost": 0.1},
            drafted={"ghost": (1, 1)},
            verified=[Verified("0", plan, tree, [])],
        )
    )
    tuner.observe_trials("ghost", [Trial("0", 0.5, True)])
    tuner.forget("unknown")
    assert set(tuner.explain()["drafters"]) == {"oracle"}
