"""DataBuffer: what a draw gives, by length, step and version; what is kept, in memory and on disk."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO
from unittest import mock

import numpy as np
import pytest

from tests.tlt_train.sequences import assert_true, make, names, whole
from tlt_train.buffer import DataBuffer
from tlt_train.sequence import TrainingSequence
from tlt_train.spill import SpillStore
from tlt_train.strata import fill, wanted_tokens

ROW_BYTES = make("x", 1).num_bytes
PLENTY = 1 << 30


def filled(*sequences: TrainingSequence, max_bytes: int = PLENTY, **more: Any) -> DataBuffer:
    buffer = DataBuffer(max_bytes, **more)
    for sequence in sequences:
        buffer.add(sequence)
    buffer.check()
    return buffer


def drawn(buffer: DataBuffer, num_tokens: int, num_keys: int) -> Counter:
    """Tokens by the first letter of the key."""
    tokens: Counter = Counter()
    for key in range(num_keys):
        for window in buffer.draw(num_tokens, key):
            tokens[window.sequence.key[0]] += window.num_tokens
    return tokens


# ---- strata


def test_the_long_tail_is_seen() -> None:
    """Bug of the reference release: uniform sampling, so the tail is never seen; here 3 samples of 1003.

    By the rule: shares in proportion to the root of the tokens, 24 000 long ones and 65 000 short ones.
    """
    sequences = [make(f"s{i}", 65) for i in range(1000)] + [make(f"l{i}", 8000) for i in range(3)]
    buffer = filled(*sequences, max_window=1024)
    num_keys = 400
    tokens = drawn(buffer, 2000, num_keys)
    expected = 24_000**0.5 / (24_000**0.5 + 65_000**0.5)
    share = tokens["l"] / tokens.total()
    assert abs(share - expected) < 0.06, (share, expected)  # 400 draws of 0 or 1024: sd 0.013
    assert tokens.total() > 0.98 * 2000 * num_keys
    drawn_by_stratum = buffer.stats().drawn_tokens_by_stratum
    assert drawn_by_stratum == {64: tokens["s"], 4096: tokens["l"]}


@pytest.mark.parametrize("power", [0.0, 1.0])
def test_the_power_of_the_strata(power: float) -> None:
    sequences = [make(f"s{i}", 70) for i in range(300)] + [make(f"l{i}", 700) for i in range(10)]
    buffer = filled(*sequences, stratum_power=power)
    tokens = drawn(buffer, 2000, 300)
    expected = 0.5 if power == 0.0 else 7000 / 28_000
    assert abs(tokens["l"] / tokens.total() - expected) < 0.05


def test_windows_are_whole_or_long_and_true() -> None:
    """Bugs: sequences cut to a fixed 512; windows that always begin at 0; positions from the window's begin."""
    buffer = filled(make("s", 300, start=9), make("l", 5000, start=100), max_window=1000)
    begins, seen = set(), np.zeros(5000)
    for key in range(300):
        windows = buffer.draw(4000, key)
        assert sorted(w.num_tokens for w in windows) == [300, 1000]
        for window in windows:
            assert_true(window)
            if window.sequence.key == "l":
                begins.add(window.begin)
                seen[window.begin : window.end] += 1
    assert len(begins) > 150
    assert seen.min() > 10


def test_a_draw_never_has_more_than_asked_nor_one_sequence_twice() -> None:
    rng = np.random.default_rng(0)
    sequences = [make(f"s{i}", int(n)) for i, n in enumerate(rng.integers(1, 900, 80))]
    buffer = filled(*sequences, max_window=500)
    total = sum(min(s.num_tokens, 500) for s in sequences)
    for key, num_tokens in enumerate([1, 2, 63, 64, 100, 999, 5000, total - 1, total, 10 * total]):
        windows = buffer.draw(num_tokens, key)
        size = sum(w.num_tokens for w in windows)
        assert size <= num_tokens
        assert size >= min(num_tokens, total) - 64
        assert len({w.sequence.key for w in windows}) == len(windows)
        if num_tokens >= total:
            assert size == total
    assert filled().draw(100, 0) == []


def test_a_draw_is_a_function_of_contents_seed_and_key(tmp_path: Path) -> None:
    """Neither the order of arrival, nor draws in between, nor what lies on disk has a part in it."""
    sequences = [make(f"s{i}", 20 + 9 * i, rl_step=i % 2) for i in range(60)]
    one = filled(*sequences, seed=5)
    other = filled(*reversed(sequences), seed=5, max_bytes=3000, spill_dir=tmp_path)
    assert other.stats().num_spilled > 20
    for buffer in (one, other):
        buffer.set_step(1, 0)
    for key in (3, 17, 3, 4):
        assert names(one.draw(800, key)) == names(other.draw(800, key))
        one.draw(123, 99)
    assert names(one.draw(800, 3)) != names(one.draw(800, 4))
    assert names(filled(*sequences, seed=6).draw(800, 3)) != names(one.draw(800, 3))
    one.add(make("new", 50))
    assert any("new" in dict.fromkeys(n[0] for n in names(one.draw(800, k))) for k in range(30))


def test_ranks_part_a_draw() -> None:
    buffer = filled(*(make(f"s{i}", 20 + 9 * i) for i in range(60)))
    for key in range(5):
        parts = [names(buffer.draw(4000, key, rank=rank, world=3)) for rank in range(3)]
        assert sorted(n for part in parts for n in part) == sorted(names(buffer.draw(4000, key)))


# ---- steps and versions


def test_the_previous_step_covers_lengths_that_this_step_has_not_finished() -> None:
    """One step off: the current step has short samples only, so the long ones come from the step before."""
    buffer = filled(
        *(make(f"a{i}", 70) for i in range(100)), *(make(f"b{i}", 700) for i in range(10))
    )
    buffer.set_step(1, 1)
    for i in range(50):
        buffer.add(make(f"c{i}", 70, rl_step=1, version=1))
    tokens = drawn(buffer, 2000, 300)
    share = {name: tokens[name] / tokens.total() for name in "abc"}
    # c = (1, 0), p = (1/2, 1/2), m = (1, 1/2): shares as 1 to sqrt(1/2); the short ones are all of this step.
    expected = 0.5**0.5 / (1 + 0.5**0.5)
    assert abs(share["b"] - expected) < 0.05, share
    assert share["a"] < 0.03, share
    # Once this step has its long ones, the previous one is needed no more.
    for i in range(10):
        buffer.add(make(f"d{i}", 700, rl_step=1, version=1))
    tokens = drawn(buffer, 2000, 300)
    assert tokens["d"] > 0.3 * tokens.total()
    assert tokens["a"] + tokens["b"] < 0.2 * tokens.total(), tokens


def test_the_previous_step_has_at_most_its_share() -> None:
    buffer = filled(*(make(f"b{i}", 700) for i in range(30)), previous_step_share=0.1)
    assert drawn(buffer, 2000, 5)["b"] > 9000
    buffer.set_step(1, 1)
    assert drawn(buffer, 2000, 5)["b"] > 9000  # nothing else is there
    for i in range(200):
        buffer.add(make(f"c{i}", 70, rl_step=1, version=1))
    tokens = drawn(buffer, 2000, 400)
    assert abs(tokens["b"] / tokens.total() - 0.1) < 0.03, tokens
    assert tokens.total() > 0.95 * 2000 * 400


def test_staleness() -> None:
    """Weight falls with the lag, by half each; what is beyond the limit is kept but not drawn."""
    sequences = [make(f"{v}-{i}", 70, version=v) for v in range(4) for i in range(200)]
    buffer = filled(*sequences, max_version_lag=2)
    buffer.set_step(0, 3)
    tokens = drawn(buffer, 1000, 300)
    assert tokens["0"] == 0
    assert 1.8 < tokens["3"] / tokens["2"] < 2.2
    assert 1.8 < tokens["2"] / tokens["1"] < 2.2
    buffer.set_step(9, 9)
    assert buffer.draw(1000, 0) == []
    assert buffer.stats().num_sequences == 800
    buffer.add(make("fresh", 70, rl_step=9, version=9))
    assert [n[0] for n in names(buffer.draw(1000, 0))] == ["fresh"]


def test_no_new_step_clears_it() -> None:
    """Bug of the reference release: cleared at every session, so the long samples of the step before are lost."""
    buffer = filled(*(make(f"s{i}", 70) for i in range(10)))
    for step in range(5):
        buffer.set_step(step, step)
    assert buffer.stats().sequences_by_step == {0: 10}
    with pytest.raises(ValueError, match="steps and versions go up"):
        buffer.set_step(3, 4)


def test_wanted_tokens_by_hand() -> None:
    current, earlier = np.array([100.0, 0.0, 0.0]), np.array([50.0, 50.0, 0.0])
    room = np.array([1e6, 1e6, 0.0])
    found = wanted_tokens(
        current, earlier, room, room, num_tokens=300, power=1.0, max_earlier_share=1.0
    )
    np.testing.assert_allclose(found, [[200, 0, 0], [0, 100, 0]])
    found = wanted_tokens(
        current, earlier, room, room, num_tokens=300, power=1.0, max_earlier_share=0.1
    )
    np.testing.assert_allclose(found[1], [0, 30, 0])
    np.testing.assert_allclose(np.sum(found), 300)
    nothing = np.zeros(3)
    found = wanted_tokens(
        nothing, nothing, nothing, nothing, num_tokens=9, power=1.0, max_earlier_share=1.0
    )
    assert np.sum(found) == 0


@pytest.mark.parametrize("seed", range(20))
def test_fill_shares_all_within_capacities(seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.random(8) * (rng.random(8) < 0.7)
    room = np.floor(rng.exponential(100, 8)) * (rng.random(8) < 0.8)
    for total in (0.0, 10.0, room.sum() / 2, room.sum(), room.sum() + 50):
        taken = fill(weights, room, total)
        assert np.all(taken <= room + 1e-6)
        assert np.isclose(taken.sum(), min(total, room.sum()))
        free = (taken < room - 1e-6) & (weights > 0)
        if free.any():  # those that are not full have shares as their weights
            rates = taken[free] / weights[free]
            np.testing.assert_allclose(rates, rates[0], rtol=1e-6)
            assert np.all(taken[weights == 0] == 0)


# ---- memory and disk


def test_bytes_are_bounded_and_the_stalest_and_oldest_go_first(tmp_path: Path) -> None:
    buffer = DataBuffer(30 * ROW_BYTES, spill_dir=tmp_path, max_spill_bytes=20 * ROW_BYTES)
    for key, version in (("a", 2), ("b", 1), ("c", 2), ("d", 3), ("e", 2), ("f", 3)):
        buffer.add(make(key, 10, version=version))
        buffer.check()
    stats = buffer.stats()
    assert (stats.memory_bytes, stats.spilled_bytes) == (30 * ROW_BYTES, 20 * ROW_BYTES)
    assert (stats.num_spilled, stats.num_evicted) == (2, 1)
    assert [s.key for s in buffer.sequences()] == ["a", "c", "d", "e", "f"]  # b was the stalest
    in_memory = [s.key for s in buffer.sequences() if s.features.flags.writeable]
    assert in_memory == ["d", "e", "f"]
    buffer.add(make("g", 10, version=0))  # staler than all: it goes itself
    assert [s.key for s in buffer.sequences()] == ["a", "c", "d", "e", "f"]
    for sequence in buffer.sequences():
        assert_true(whole(sequence))
    buffer.close()
    assert not list(tmp_path.iterdir())


def test_without_disk_the_rest_is_dropped() -> None:
    buffer = filled(*(make(str(i), 10) for i in range(5)), max_bytes=25 * ROW_BYTES)
    assert [s.key for s in buffer.sequences()] == ["3", "4"]
    buffer.add(make("big", 26))
    assert [s.key for s in buffer.sequences()] == []
    assert buffer.stats().num_evicted == 6


def test_one_too_big_for_the_disk_takes_nobody_with_it(tmp_path: Path) -> None:
    buffer = filled(
        *(make(str(i), 10) for i in range(4)),
        max_bytes=20 * ROW_BYTES,
        spill_dir=tmp_path,
        max_spill_bytes=25 * ROW_BYTES,
    )
    buffer.add(make("big", 60, version=5))
    buffer.check()
    assert "big" not in [s.key for s in buffer.sequences()]
    assert [s.key for s in buffer.sequences()] == ["2", "3"]


def test_the_same_key_is_replaced() -> None:
    buffer = filled(make("a", 10), make("b", 10), make("a", 15))
    assert [(s.key, s.num_tokens) for s in buffer.sequences()] == [("a", 15), ("b", 10)]
    stats = buffer.stats()
    assert (stats.num_replaced, stats.memory_bytes) == (1, 25 * ROW_BYTES)


def test_a_failed_write_loses_only_what_was_written(tmp_path: Path) -> None:
    buffer = DataBuffer(20 * ROW_BYTES, spill_dir=tmp_path)
    for key in "abc":
        buffer.add(make(key, 10))
    with mock.patch.object(SpillStore, "write", side_effect=OSError("disk is full")):
        buffer.add(make("d", 10))
    buffer.check()
    assert [s.key for s in buffer.sequences()] == ["a", "c", "d"]
    buffer.add(make("e", 10))
    buffer.check()
    assert [s.key for s in buffer.sequences()] == ["a", "c", "d", "e"]
    assert buffer.stats().num_failed_writes == 1


def test_a_write_that_fails_halfway_leaves_no_file(tmp_path: Path) -> None:
    store = SpillStore(tmp_path)
    sequence = make("a", 10)

    class Halfway:
        def __init__(self, file: BinaryIO) -> None:
            self.file = file

        def __enter__(self) -> Halfway:
            return self

        def __exit__(self, *exc: object) -> None:
            self.file.close()

        def write(self, data: memoryview) -> None:
            self.file.write(data[:7])
            raise OSError(28, "No space left on device")

    real = Path.open
    with (
        mock.patch.object(Path, "open", lambda path, mode: Halfway(real(path, mode))),
        pytest.raises(OSError, match="No space"),
    ):
        store.write(sequence)
    assert not list(store.directory.iterdir())


def test_a_file_that_is_gone_is_counted_and_the_draw_goes_on(tmp_path: Path) -> None:
    buffer = filled(
        *(make(str(i), 10) for i in range(4)), max_bytes=20 * ROW_BYTES, spill_dir=tmp_path
    )
    gone, cut = sorted(tmp_path.glob("*/*.bin"))
    gone.unlink()
    cut.write_bytes(cut.read_bytes()[:-2])
    assert sorted(n[0] for n in names(buffer.draw(1000, 0))) == ["2", "3"]
    assert buffer.stats().num_lost_files == 2
    buffer.check()


def test_windows_outlive_their_file(tmp_path: Path) -> None:
    buffer = filled(make("a", 10), make("b", 10), max_bytes=10 * ROW_BYTES, spill_dir=tmp_path)
    windows = buffer.draw(100, 0)
    buffer.close()
    assert len(windows) == 2
    for window in windows:
        assert_true(window)


def test_another_width_is_refused() -> None:
    buffer = filled(make("a", 10))
    with pytest.raises(ValueError, match="width 9, the buffer holds 6"):
        buffer.add(make("b", 10, width=9))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_bytes": -1}, "max_bytes must be at least 0"),
        ({"max_window": 0}, "max_window"),
        ({"stratum_power": 1.5}, "stratum_power must be at least 0 and at most 1, got 1.5"),
        ({"lag_decay": 0.0}, "lag_decay"),
        ({"previous_step_share": -0.1}, "previous_step_share"),
    ],
)
def test_bad_arguments(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        filled(**arguments)
    with pytest.raises(ValueError, match="num_tokens"):
        filled(make("a", 10)).draw(0, 0)


def test_adding_beside_drawing(tmp_path: Path) -> None:
    """Every window drawn while another thread adds, spills and evicts has the rows that it claims."""
    buffer = DataBuffer(
        4000 * ROW_BYTES, spill_dir=tmp_path, max_spill_bytes=4000 * ROW_BYTES, max_window=100
    )
    errors: list[BaseException] = []

    def fill_up(name: str) -> None:
        try:
            for i in range(150):
                buffer.add(make(f"{name}{i % 120}", 20 + i, version=i // 20))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=fill_up, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    num_windows, key = 0, 0
    while any(thread.is_alive() for thread in threads) or key < 20:
        for window in buffer.draw(500, key):
            assert_true(window)
            num_windows += 1
        key += 1
    for thread in threads:
        thread.join()
    assert not errors
    assert num_windows > 20
    buffer.check()
    assert buffer.stats().num_evicted > 0
