"""Training sequences and windows: true positions, whole coverage by random windows, disjoint parts for ranks."""

from __future__ import annotations

import numpy as np
import pytest

from tests.tlt_train.sequences import assert_true, make, names, whole
from tlt_train.sequence import TrainingSequence, TrainingWindow, share_of_rank, window_begin


def test_positions_of_a_window_are_those_of_the_sample() -> None:
    """Bug: positions of the piece (from 0) instead of the sample, so that a long tail looks like a beginning."""
    sequence = make("a", 50, start=1000)
    window = TrainingWindow(sequence, 7, 20)
    assert (window.start, window.num_tokens, sequence.total_len) == (1007, 13, 1050)
    assert_true(window)
    assert sequence.num_bytes == 50 * (4 + 2 * 6)


@pytest.mark.parametrize(("begin", "end"), [(-1, 3), (3, 3), (4, 2), (0, 51)])
def test_a_window_lies_in_its_sequence(begin: int, end: int) -> None:
    with pytest.raises(ValueError, match="50 rows of 'a'"):
        TrainingWindow(make("a", 50), begin, end)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": ""}, "key is empty"),
        ({"start": -1}, "start and prompt_len"),
        ({"token_ids": np.zeros(4, np.int64)}, "token_ids must be a numpy array of int32.*int64"),
        ({"features": np.zeros((4, 2), np.float32)}, "features must be .* uint16.*float32"),
        ({"features": np.zeros(4, np.uint16)}, "2 dimension"),
        ({"features": np.zeros((5, 2), np.uint16)}, "4 and 5"),
        (
            {"token_ids": np.zeros(0, np.int32), "features": np.zeros((0, 2), np.uint16)},
            "at least 1",
        ),
    ],
)
def test_bad_sequences_are_refused(changes: dict, message: str) -> None:
    good = {
        "key": "a",
        "start": 0,
        "prompt_len": 1,
        "token_ids": np.zeros(4, np.int32),
        "features": np.zeros((4, 2), np.uint16),
        "target_version": 0,
    }
    TrainingSequence(**good)
    with pytest.raises(ValueError, match=message):
        TrainingSequence(**(good | changes))


def test_random_windows_show_every_row() -> None:
    """Bug: begins drawn uniformly show the first and the last row in 1 of 61 windows, those between in 40 of 61."""
    num_tokens, window_len, num_draws = 100, 40, 2000
    seen = np.zeros(num_tokens)
    for i in range(num_draws):
        begin = window_begin(num_tokens, window_len, (i + 0.5) / num_draws)
        assert 0 <= begin <= num_tokens - window_len
        seen[begin : begin + window_len] += 1
    assert seen.min() > 0.15 * num_draws
    assert np.all(np.diff(np.flatnonzero(seen)) == 1)
    assert window_begin(10, 10, 0.999) == 0


def test_ranks_part_a_draw() -> None:
    lengths = [500, 3, 70, 70, 200, 31, 8, 90, 44, 120, 5]
    windows = [whole(make(str(i), n)) for i, n in enumerate(lengths)]
    for world in (1, 2, 3, 20):
        parts = [share_of_rank(windows, rank, world) for rank in range(world)]
        found = [name for part in parts for name in names(part)]
        assert sorted(found) == sorted(names(windows))
        loads = [sum(w.num_tokens for w in part) for part in parts]
        assert max(loads) - min(loads) <= 500
        order = names(windows)
        assert all(names(part) == sorted(names(part), key=order.index) for part in parts)
    even = [whole(make(str(i), n)) for i, n in enumerate([64] * 7 + [61, 3])]
    loads = [sum(w.num_tokens for w in share_of_rank(even, rank, 4)) for rank in range(4)]
    assert loads == [128] * 4
    with pytest.raises(ValueError, match="rank=2, world=2"):
        share_of_rank(windows, 2, 2)
