"""Acceptance by position and what it is worth, against simulated chains."""

from __future__ import annotations

import random

import pytest

from tlt_train.acceptance import Answer, ChainCounts, depth_gains, expected_decode_s

CHANCES = (0.8, 0.6, 0.5, 0.3)


def test_counts_by_hand() -> None:
    counts = ChainCounts()
    counts.add(3, 3)
    counts.add(3, 1)
    counts.add(1, 1)  # cut short: says nothing of position 2
    counts.add(0, 0)
    assert counts.trials == [3, 2, 1]
    assert counts.hits == [3, 1, 1]
    assert counts.conditional(4) == [1.0, 0.5, 1.0, 0.0]
    assert counts.survival(3) == [1.0, 0.5, 0.5]
    assert counts.length(3) == 3.0
    assert counts.length(0) == 1.0
    assert ChainCounts().length(5) == 1.0


def walk(rng: random.Random, length: int) -> int:
    accepted = 0
    while accepted < length and rng.random() < CHANCES[accepted]:
        accepted += 1
    return accepted


def simulated(rng: random.Random, answer: Answer, depth: int, counts: ChainCounts) -> list[int]:
    """Chain lengths of the steps of one text."""
    left, steps = answer.num_tokens, []
    while left > 0:
        length = depth if answer.has_stopped else min(depth, left - 1)
        accepted = walk(rng, length)
        counts.add(length, accepted)
        steps.append(length)
        left -= accepted + 1
    return steps


def test_short_texts_do_not_bias_the_estimate() -> None:
    """Tokens over steps of texts of six tokens is far from what long texts give: the last steps are cut."""
    rng, counts = random.Random(1), ChainCounts()
    steps = sum(len(simulated(rng, Answer(6, False), 4, counts)) for _ in range(20_000))
    truth = 1 + 0.8 + 0.48 + 0.24 + 0.072
    assert counts.length(4) == pytest.approx(truth, abs=0.02)
    assert counts.conditional(4) == pytest.approx(CHANCES, abs=0.02)
    assert 6 * 20_000 / steps < 0.9 * truth


@pytest.mark.parametrize("has_stopped", [False, True])
@pytest.mark.parametrize(("num_tokens", "depth"), [(1, 4), (2, 2), (7, 4), (40, 3), (5, 0)])
def test_expected_seconds_are_those_of_simulated_texts(
    num_tokens: int, depth: int, has_stopped: bool
) -> None:
    rng, answer = random.Random(2), Answer(num_tokens, has_stopped)
    step_s = {0: 1.0, 1: 1.3, 2: 1.5, 3: 1.6, 4: 2.5}
    survival = (0.8, 0.48, 0.24, 0.072)
    runs = 4000
    total = sum(
        step_s[n] for _ in range(runs) for n in simulated(rng, answer, depth, ChainCounts())
    )
    assert expected_decode_s(answer, survival, step_s, depth) == pytest.approx(
        total / runs, rel=0.02
    )


def test_gains_rise_until_another_token_stops_paying() -> None:
    survival, long = (0.8, 0.64, 0.1, 0.01), [Answer(4000, True)]
    found = depth_gains(long, survival, {0: 1.0, 1: 1.1, 2: 1.2, 3: 1.6, 4: 2.0})
    assert found == pytest.approx([1.0, 1.8 / 1.1, 2.44 / 1.2, 2.54 / 1.6, 2.55 / 2.0], rel=1e-3)
    short = depth_gains([Answer(3, False)], survival, {0: 1.0, 1: 1.1, 2: 1.2, 3: 1.6, 4: 2.0})
    assert short[2] < 0.95 * found[2]  # its last steps have no room for a chain


def test_where_nothing_pays_plain_decoding_is_the_best() -> None:
    found = depth_gains([Answer(50, False)], (0.1, 0.01), {0: 1.0, 1: 1.5, 2: 2.0})
    assert max(found) == found[0] == 1.0
    assert depth_gains([Answer(0, True)], (0.5,), {0: 1.0, 1: 1.0}) == [1.0, 1.0]


def test_depths_without_a_price_or_a_survival_have_no_gain() -> None:
    assert len(depth_gains([Answer(9, True)], (0.9,) * 5, {0: 1.0, 1: 1.0})) == 2
    assert len(depth_gains([Answer(9, True)], (0.9,), {0: 1.0, 1: 1.0, 2: 1.0})) == 2
