"""Prices of passes and of drafting: shape and speed told apart, outliers survived, nothing falls with rows."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.spec.price import KNOTS, NEWS, DraftPrice, TargetPrice, _rising
from engine.spec.tuner import Candidates
from engine.spec.worth import MIN_GAIN, Worth, likeliest
from tests.spec.simulation import PASS_MS, interpolated

PRICE = interpolated(PASS_MS)
MEASURED = {n: PRICE(n) for n in (1, 2, 4, 8, 16, 32, 64)}


@given(rows=st.integers(1, 2000))
def test_measured_prices_are_met_and_never_fall(rows: int) -> None:
    price = TargetPrice(MEASURED)
    assert price.relative(rows) <= price.relative(rows + 1) + 1e-12
    if rows in MEASURED:
        assert price.seconds(rows, 0) == pytest.approx(MEASURED[rows])


def test_between_and_beyond_what_was_measured() -> None:
    price = TargetPrice({1: 0.010, 3: 0.012})
    assert price.seconds(2, 0) == pytest.approx(0.011)
    assert price.seconds(128, 0) == pytest.approx(0.012 + 125 * 0.001)
    assert price.seconds(1024, 0) == pytest.approx(0.012 + 1021 * 0.001)


@pytest.mark.parametrize("measured", [None, {}, {4: 0.02}, {1: 0.0, 2: -1.0}])
def test_with_little_or_nothing_measured_more_rows_cost_more(measured) -> None:
    price = TargetPrice(measured)
    assert price.relative(1) == pytest.approx(1.0)
    assert price.relative(64) > price.relative(8) > price.relative(1) * (measured != {4: 0.02})


def test_context_adds_to_the_price() -> None:
    price = TargetPrice(MEASURED, context_s=1e-6)
    assert price.seconds(1, 1000) == pytest.approx(MEASURED[1] + 1e-3)
    price.observe(1, 1000, 2 * (MEASURED[1] + 1e-3), is_mixed=False)
    assert price.unit_s == pytest.approx(2 * MEASURED[1])
    assert price.relative(8) == pytest.approx(MEASURED[8] / MEASURED[1], rel=0.2)


def test_a_slower_machine_keeps_the_shape() -> None:
    price, rng = TargetPrice(MEASURED), random.Random(0)
    before = [price.relative(n) for n in range(1, 65)]
    for _ in range(300):
        n = rng.choice((1, 4, 8, 16))
        price.observe(n, 0, 3.0 * PRICE(n), is_mixed=False)
    price.settle()
    assert price.unit_s == pytest.approx(3.0 * MEASURED[1], rel=0.02)
    assert [price.relative(n) for n in range(1, 65)] == pytest.approx(before, rel=0.05)


def test_another_shape_is_learnt_through_outliers() -> None:
    price, rng = TargetPrice(MEASURED), random.Random(0)
    for _ in range(2000):
        n = rng.choice((1, 1, 1, 1, 2, 4, 8))
        hiccup = 5.0 if rng.random() < 0.01 else 1.0
        price.observe(n, 0, 0.01 * n * hiccup * rng.lognormvariate(0, 0.05), is_mixed=False)
        price.settle()
    for n in (2, 4, 8):
        assert price.relative(n) == pytest.approx(n, rel=0.2)


def test_a_plain_step_tells_dear_rows_from_a_slow_machine() -> None:
    """Always six rows: alone these steps say nothing of the shape, and the unit takes all of it."""
    price = TargetPrice(MEASURED)
    for _ in range(50):
        price.observe(6, 0, 0.060, is_mixed=False)
    price.settle()
    assert price.relative(6) == pytest.approx(PRICE(6) / PRICE(1), rel=0.02)
    news = [0.0]
    for _ in range(12):
        price.observe(1, 0, 0.010, is_mixed=False)
        news.append(price.compare(1, 0, 0.010))
        for _ in range(9):
            price.observe(6, 0, 0.060, is_mixed=False)
    price.settle()
    assert news[1] > NEWS
    assert abs(news[-1]) < NEWS
    assert price.relative(6) == pytest.approx(6.0, rel=0.1)
    assert price.unit_s == pytest.approx(0.010, rel=0.1)
    assert price.relative(64) > 2.0 * PRICE(64) / PRICE(1)


def test_prices_do_not_run_away_where_nobody_settles_them() -> None:
    """Steps are observed also while no request may speculate, so that nothing is planned for a long time."""
    price, rng = TargetPrice(MEASURED), random.Random(0)
    for _ in range(5000):
        n = rng.choice((1, 1, 1, 8))
        price.observe(n, 0, 0.01 * (1.0 + 0.2 * (n - 1)), is_mixed=False)
    price.settle()
    assert price.relative(8) == pytest.approx(2.4, rel=0.1)


def test_one_slow_plain_step_does_not_make_rows_cheap() -> None:
    price = TargetPrice(MEASURED)
    for _ in range(20):
        price.observe(6, 0, PRICE(6), is_mixed=False)
    price.observe(1, 0, 3.0 * PRICE(1), is_mixed=False)
    assert price.compare(1, 0, 3.0 * PRICE(1)) < -NEWS
    price.settle()
    assert price.relative(6) == pytest.approx(PRICE(6) / PRICE(1), rel=0.02)


def test_mixed_passes_leave_the_unit_alone() -> None:
    price = TargetPrice(MEASURED)
    for _ in range(50):
        price.observe(128, 0, 0.3, is_mixed=True)
    assert price.unit_s == pytest.approx(MEASURED[1])
    price.settle()
    assert price.relative(128) > 30


@given(
    pairs=st.lists(st.tuples(st.floats(0.1, 9.0), st.floats(0.5, 25.0)), min_size=1, max_size=10)
)
def test_rising_is_the_isotonic_regression(pairs: list[tuple[float, float]]) -> None:
    """Against its min-max formula: max over i <= k of min over j >= k of the weighted mean of i .. j."""
    values, weights = [v for v, _ in pairs], [w for _, w in pairs]

    def average(i: int, j: int) -> float:
        mass = sum(weights[i : j + 1])
        return sum(v * w for v, w in pairs[i : j + 1]) / mass

    n = len(pairs)
    expected = [
        max(min(average(i, j) for j in range(k, n)) for i in range(k + 1)) for k in range(n)
    ]
    assert _rising(values, weights) == pytest.approx(expected)


def test_state_round_trip() -> None:
    price = TargetPrice(MEASURED, context_s=1e-7)
    for n in (1, 6, 6, 6, 1):
        price.observe(n, 10, 2.0 * PRICE(n), is_mixed=False)
    other = TargetPrice(context_s=0.0)
    other.load_state_dict(json.loads(json.dumps(price.state_dict())))
    price.settle()
    assert [other.relative(n) for n in KNOTS] == [price.relative(n) for n in KNOTS]
    assert other.unit_s == price.unit_s


def test_states_that_come_and_go_leave_the_price_of_context() -> None:
    """It is known in seconds: no chain of states wears it out, and a tiny unit does not lose it."""
    price = TargetPrice(MEASURED, context_s=1e-7)
    state = json.loads(json.dumps(price.state_dict()))
    expected = price.context(1000) * price.unit_s
    for unit_s in (1e-15, 1e9, state["unit_s"]):
        price.load_state_dict(state | {"unit_s": unit_s})
        assert price.context(1000) * price.unit_s == pytest.approx(expected)
    with pytest.raises(ValueError, match="unit_s must be a number from"):
        price.load_state_dict(state | {"unit_s": 1e-320})
    assert price.context(1000) * price.unit_s == pytest.approx(expected)


# ---- drafting


def test_draft_prices_by_requests_and_depth() -> None:
    price = DraftPrice()
    assert price.seconds(4, 3) == 0.0
    price.observe(1, 2, 0.002)
    assert price.seconds(1, 5) == pytest.approx(0.005)
    assert price.seconds(9, 5) == pytest.approx(0.005)  # the nearest known
    price.observe(8, 2, 0.010)
    assert price.seconds(9, 1) == pytest.approx(0.005)
    assert price.seconds(1, 1) == pytest.approx(0.001)
    assert price.seconds(0, 4) == 0.0
    for _ in range(100):
        price.observe(1, 1, 0.003)
    assert price.seconds(1, 1) == pytest.approx(0.003, rel=0.01)
    price.observe(1, 1, 9.0)
    assert price.seconds(1, 1) < 0.005


# ---- what nodes are worth


@given(
    survivals=st.lists(st.floats(0.01, 0.99), max_size=40).map(lambda s: sorted(s, reverse=True)),
    num=st.integers(1, 12),
    draft=st.floats(0.0, 0.3),
)
def test_the_choice_is_the_best_count(survivals: list[float], num: int, draft: float) -> None:
    """Against trying all counts, up to the patience with which it looks over steps of the price."""
    price = TargetPrice(MEASURED)
    found = Worth(price, Candidates((), (), num)).choose(survivals, draft)

    def gain(count: int) -> float:
        tokens = num + sum(survivals[:count])
        cost = price.relative(num + count) + (draft if count else 0.0)
        return tokens / cost * price.relative(num) / num

    assert found.gain == pytest.approx(gain(found.count))
    assert found.gain >= max(gain(c) for c in range(min(10, len(survivals)) + 1)) - 1e-12
    assert found.gain >= 1.0


@given(
    chances=st.lists(st.lists(st.floats(0.1, 0.99), max_size=6), max_size=5),
    limit=st.integers(1, 20),
)
def test_the_likeliest_nodes(chances: list[list[float]], limit: int) -> None:
    chains: list[list[float]] = []
    for line in chances:
        alive, chain = 1.0, []
        for p in line:
            alive *= p
            chain.append(alive)
        chains.append(chain)
    order = likeliest(chains, limit)
    every = sorted((s for chain in chains for s in chain), reverse=True)
    assert [node.survival for node in order] == every[:limit]
    for number, chain in enumerate(chains):
        places = [node.place for node in order if node.request == number]
        assert places == list(range(len(places)))
        assert [n.survival for n in order if n.request == number] == chain[: len(places)]


def test_beside_prefill_nodes_pay_by_their_own_rows() -> None:
    """The prefill is run anyway; a row beside it costs its slope, not a share of the whole pass."""
    price = TargetPrice({1: 0.010, 2: 0.010, 64: 0.0163, 512: 0.0611})
    batch = Candidates((), (), 1, True)
    choice = Worth(price, batch).choose([0.9, 0.8, 0.005])
    assert choice.count == 2
    assert choice.gain > MIN_GAIN
    steep = TargetPrice({n: 0.01 * n for n in (1, 2, 64, 512)})
    assert Worth(steep, batch).choose([0.9, 0.8]).count == 0
