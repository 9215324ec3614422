"""FixedData: epochs, mixing of lengths, resuming, ranks; and the split by prompt."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tests.tlt_train.sequences import assert_true, make, names
from tlt_train.fixed_data import FixedData, split_held_out
from tlt_train.strata import stratum_of

Name = tuple[str, int, int]


def long_tailed(num: int = 300, seed: int = 0) -> list:
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.lognormal(4, 1.3, num).astype(int) + 2, 3000)
    return [make(f"s{i}", int(n), start=i % 3) for i, n in enumerate(lengths)]


def epoch(data: FixedData, num_tokens: int, number: int) -> list[list[Name]]:
    first, last = (data.steps_in_epochs(num_tokens, number + i) for i in (0, 1))
    return [names(data.draw(num_tokens, key)) for key in range(first, last)]


def rows_of(steps: list[list[Name]]) -> Counter:
    return Counter((key, i) for step in steps for key, a, b in step for i in range(a, b))


@pytest.mark.parametrize("num_tokens", [7, 512, 4096, 10**6])
def test_each_epoch_sees_each_row_once(num_tokens: int) -> None:
    sequences = long_tailed(60)
    data = FixedData(sequences, seed=3, max_window=700)
    every_row = Counter((s.key, i) for s in sequences for i in range(s.num_tokens))
    orders = []
    for number in range(3):
        steps = epoch(data, num_tokens, number)
        assert rows_of(steps) == every_row
        for step in steps:
            assert 0 < sum(b - a for _, a, b in step) <= num_tokens
            assert all(b - a <= 700 for _, a, b in step)
        orders.append([name for step in steps for name in step])
        assert data.epoch_of(num_tokens, data.steps_in_epochs(num_tokens, number)) == number
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]


def test_windows_tell_true_positions() -> None:
    data = FixedData(long_tailed(40), max_window=100)
    for key in range(data.steps_in_epochs(500, 1)):
        for window in data.draw(500, key):
            assert_true(window)


def test_steps_are_few_and_even() -> None:
    """Bug: the last step of an epoch is a handful of tokens with a whole step's learning rate."""
    data = FixedData([make(f"s{i}", 10) for i in range(103)])
    sizes = [sum(b - a for _, a, b in step) for step in epoch(data, 100, 0)]
    assert len(sizes) == 11
    assert (sum(sizes), max(sizes)) == (1030, 100)
    assert FixedData([make("a", 5)]).steps_in_epochs(100, 7) == 7
    data = FixedData([make(f"s{i}", 10) for i in range(102)])
    sizes = [sum(b - a for _, a, b in step) for step in epoch(data, 1000, 0)]
    assert sizes == [510, 510]


def test_lengths_are_mixed_within_an_epoch() -> None:
    """Bug: a plain shuffle leaves stretches without a long sample; sorted lengths leave epochs of one kind."""
    sequences = [make(f"s{i}", 20) for i in range(400)]
    sequences += [make(f"l{i}", 1000) for i in range(20)]
    for seed in range(3):
        steps = epoch(FixedData(sequences, seed=seed), 1400, 0)
        assert len(steps) >= 20
        for a, b in zip(steps, steps[1:], strict=False):
            keys = [key[0] for key, _, _ in a + b]
            assert 1 <= keys.count("l") <= 3
            assert keys.count("s") >= 10


def test_samples_of_one_length_change_places_between_epochs() -> None:
    data = FixedData([make(f"s{i}", 10) for i in range(50)])
    orders = [[name for step in epoch(data, 100, number) for name in step] for number in (0, 1)]
    num_moved = sum(a != b for a, b in zip(*orders, strict=True))
    assert num_moved > 40


def test_a_draw_is_a_function_of_its_arguments() -> None:
    """Resume: a new object asked for step 57 first gives what the old one gave after 56 others."""
    sequences = long_tailed()
    data = FixedData(sequences, seed=1, max_window=500)
    found = [names(data.draw(1000, key)) for key in range(90)]
    fresh = FixedData(sequences, seed=1, max_window=500)
    for key in (57, 3, 89, 57):
        assert names(fresh.draw(1000, key)) == found[key]
        fresh.draw(333, 20)  # another size of step in between
    assert names(FixedData(sequences, seed=2, max_window=500).draw(1000, 0)) != found[0]


def test_ranks_part_a_step() -> None:
    data = FixedData(long_tailed(), seed=1)
    for key in range(5):
        parts = [names(data.draw(4096, key, rank=rank, world=3)) for rank in range(3)]
        assert sorted(name for part in parts for name in part) == sorted(
            names(data.draw(4096, key))
        )


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="sequences is empty"):
        FixedData([])
    with pytest.raises(ValueError, match="max_window"):
        FixedData([make("a", 5)], max_window=0)
    data = FixedData([make("a", 5)])
    with pytest.raises(ValueError, match="num_tokens"):
        data.draw(0, 0)
    with pytest.raises(ValueError, match="key"):
        data.draw(5, -1)


def test_strata_are_powers_of_two() -> None:
    lengths = np.array([1, 2, 3, 4, 127, 128, 2**20 - 1, 2**20])
    assert stratum_of(lengths).tolist() == [0, 1, 1, 2, 6, 7, 19, 20]


# ---- the split


def grouped(num_groups: int, samples: int = 4) -> list:
    return [
        make(f"{g}-{i}", 8, start=5, group=f"g{g}")
        for g in range(num_groups)
        for i in range(samples)
    ]


def test_samples_of_a_prompt_stay_together() -> None:
    sequences = grouped(400)
    kept, held = split_held_out(sequences, 0.1, seed=0)
    assert sorted(s.key for s in kept + held) == sorted(s.key for s in sequences)
    assert not {s.group for s in kept} & {s.group for s in held}
    assert 80 < len(held) < 240
    assert [s.key for s in kept] == [s.key for s in sequences if s in kept]
    other = split_held_out(sequences, 0.1, seed=1)[1]
    assert {s.group for s in other} != {s.group for s in held}


def test_more_data_moves_no_prompt() -> None:
    """Bug: a share of a shuffled list; with more data, prompts that were trained on are evaluated on."""
    held = {s.group for s in split_held_out(grouped(200), 0.1)[1]}
    more = {s.group for s in split_held_out(grouped(400), 0.1)[1]}
    assert held == {group for group in more if int(group[1:]) < 200}


def test_the_same_prompt_under_other_names_is_one() -> None:
    """Bug: two runs number their groups anew, and the prompt of one side is trained on in the other."""
    sequences = []
    for prompt in range(40):
        for run in range(3):
            sequence = make(f"p{prompt}", 20, prompt_len=6, group=f"run{run}-{prompt}")
            object.__setattr__(sequence, "key", f"{run}-{prompt}")
            sequences.append(sequence)
    sequences += [make(f"tail{p}", 9, start=6, prompt_len=6, group=f"run1-{p}") for p in range(40)]
    kept, held = split_held_out(sequences, 0.3)
    assert held
    assert not {s.group.split("-")[1] for s in kept} & {s.group.split("-")[1] for s in held}


def test_split_edges() -> None:
    two = [make("a", 5, start=5), make("b", 5, start=5)]
    for seed in range(20):
        assert [len(side) for side in split_held_out(two, 0.01, seed)] == [1, 1]
        assert [len(side) for side in split_held_out(two, 0.99, seed)] == [1, 1]
        assert [len(side) for side in split_held_out(two, 0.0, seed)] == [2, 0]
        assert [len(side) for side in split_held_out(two[:1], 0.0, seed)] == [1, 0]
    with pytest.raises(ValueError, match="share"):
        split_held_out(two, 1.0)
