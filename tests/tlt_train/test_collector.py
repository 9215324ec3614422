"""Collector: any cutting of requests into records gives whole sequences back; gaps, losses and threads."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from engine.shared_ring import RingWriter
from engine.tap_record import RecordHead, TapReader, TapRecord
from tests.tlt_train.sequences import WIDTH, features_of, make, tokens_of
from tlt_train.collector import Collector
from tlt_train.sequence import TrainingSequence


class FakeReader:
    """A ring that overwrites what was released, and refuses a second read before that."""

    def __init__(self) -> None:
        self.waiting: list[TapRecord] = []
        self.given: list[TapRecord] = []
        self.lock = threading.Lock()

    def push(self, *records: TapRecord) -> None:
        with self.lock:
            self.waiting += records

    def read(self, max_records: int | None = None) -> list[TapRecord]:
        with self.lock:
            assert not self.given, "the last records were not released"
            self.given, self.waiting = self.waiting[:max_records], self.waiting[max_records:]
            return list(self.given)

    def release(self) -> None:
        with self.lock:
            for record in self.given:
                record.token_ids[:] = -1
                record.features[:] = 0xDEAD
            self.given = []


def record(
    name: str,
    start: int,
    end: int,
    *,
    finish: str | None = None,
    version: int = 1,
    sample_index: int = 0,
) -> TapRecord:
    """Rows whose content tells the request's name."""
    return TapRecord(
        request_id=name,
        group_id=name.split("#")[0],
        sample_index=sample_index,
        prompt_len=4,
        start=start,
        token_ids=tokens_of(name, start, end),
        features=features_of(name, start, end),
        target_version=version,
        finish_reason=finish,
    )


def check(sequence: TrainingSequence, name: str, start: int, end: int) -> None:
    """The very rows of the request."""
    assert (sequence.start, sequence.total_len) == (start, end)
    np.testing.assert_array_equal(sequence.token_ids, tokens_of(name, start, end))
    np.testing.assert_array_equal(sequence.features, features_of(name, start, end))


def collect(*records: TapRecord, min_tokens: int = 1) -> tuple[Collector, list[TrainingSequence]]:
    found: list[TrainingSequence] = []
    reader = FakeReader()
    reader.push(*records)
    collector = Collector(reader, found.append, min_tokens=min_tokens)
    assert collector.poll() == len(records)
    return collector, found


@pytest.mark.parametrize("seed", range(10))
def test_any_cutting_and_mixing_gives_whole_samples(seed: int) -> None:
    """Bug of the reference release: what is collected is shifted, or never collected at all."""
    rng = random.Random(seed)
    lengths = {f"g{i % 3}#r{i}": rng.randint(1, 90) for i in range(12)}
    queues: list[list[TapRecord]] = []
    for name, length in lengths.items():
        cuts = sorted({0, length, *(rng.randrange(length + 1) for _ in range(rng.randrange(8)))})
        parts = [record(name, a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
        if rng.random() < 0.5:
            parts.append(record(name, length, length, finish="stop"))
        else:
            parts[-1] = replace(parts[-1], finish_reason="length")
        queues.append(parts)
    reader, found = FakeReader(), []
    collector = Collector(reader, found.append, min_tokens=1)
    num_records = sum(map(len, queues))
    while queues:
        queue = rng.choice(queues)
        reader.push(queue.pop(0))
        queues = [q for q in queues if q]
        if rng.random() < 0.3:
            collector.poll(rng.choice([None, 1, 2]))
    collector.poll()
    assert {s.key.split("/")[2] for s in found} == set(lengths)
    assert len(found) == len(lengths)
    for sequence in found:
        name = sequence.key.split("/")[2]
        check(sequence, name, 0, lengths[name])
        assert sequence.is_finished
        assert sequence.group == name.split("#")[0]
        assert sequence.prompt_len == 4
    stats = collector.stats()
    assert (stats.num_open, stats.open_bytes, stats.num_gaps) == (0, 0, 0)
    assert (stats.num_records, stats.num_tokens) == (num_records, sum(lengths.values()))


def test_a_gap_ends_a_piece() -> None:
    """Bug: rows on both sides of a gap are joined, and positions behind it are wrong. A cached prefix is no gap."""
    collector, found = collect(
        record("a", 16, 20),
        record("a", 20, 30),
        record("a", 33, 40),
        record("a", 40, 44, finish="stop"),
    )
    check(found[0], "a", 16, 30)
    check(found[1], "a", 33, 44)
    assert [s.is_finished for s in found] == [False, True]
    assert len({s.key for s in found}) == 2
    assert collector.stats().num_gaps == 1


def test_samples_of_a_request_are_kept_apart() -> None:
    _, found = collect(
        record("a", 0, 9),
        record("a", 0, 7, sample_index=1),
        record("a", 9, 12, finish="stop"),
        record("a", 7, 8, sample_index=1, finish="stop"),
    )
    check(found[0], "a", 0, 12)
    check(found[1], "a", 0, 8)


@pytest.mark.parametrize(
    ("reason", "is_finished"),
    [("stop", True), ("length", True), ("abort", False), ("error", False), ("detached", False)],
)
def test_only_a_complete_sample_is_finished(reason: str, is_finished: bool) -> None:
    _, found = collect(record("a", 0, 9, finish=reason))
    assert [s.is_finished for s in found] == [is_finished]


def test_the_oldest_version_is_the_piece_s() -> None:
    _, found = collect(
        record("a", 0, 5, version=3),
        record("a", 5, 9, version=4),
        record("a", 9, 9, version=4, finish="stop"),
    )
    assert [s.target_version for s in found] == [3]


def test_short_pieces_are_dropped_and_counted() -> None:
    collector, found = collect(
        record("a", 0, 9, finish="stop"),
        record("b", 0, 10, finish="stop"),
        record("c", 5, 5, finish="abort"),
        min_tokens=10,
    )
    assert [s.key for s in found] == ["/0/b/0@0"]
    stats = collector.stats()
    assert (stats.num_too_short, stats.num_too_short_tokens, stats.num_sequences) == (1, 9, 1)


def test_steps_and_sources_are_in_the_key() -> None:
    """Bug: request ids start anew with each step, and the second step replaces the first in the buffer."""
    reader, found = FakeReader(), []
    collector = Collector(reader, found.append, min_tokens=1, source="w3")
    for step in (0, 1):
        collector.set_step(step)
        reader.push(record("0", 0, 9, finish="stop"))
        collector.poll()
    assert [(s.key, s.rl_step) for s in found] == [("w3/0/0/0@0", 0), ("w3/1/0/0@0", 1)]


def test_flush_keeps_or_forgets() -> None:
    reader, found = FakeReader(), []
    collector = Collector(reader, found.append, min_tokens=5)
    reader.push(record("a", 0, 9), record("b", 0, 3))
    collector.poll()
    assert collector.flush(keep_open=True) == 1
    check(found[0], "a", 0, 9)
    assert not found[0].is_finished
    reader.push(record("a", 9, 15))
    collector.poll()
    assert collector.flush() == 1
    check(found[1], "a", 0, 15)
    assert found[1].key == found[0].key
    assert (collector.stats().num_open, collector.stats().open_bytes) == (0, 0)
    assert collector.stats().num_too_short == 1
    reader.push(record("a", 15, 22, finish="stop"))
    collector.poll()
    check(found[2], "a", 15, 22)
    assert found[2].key != found[0].key


def test_what_waits_is_bounded() -> None:
    """A request whose last record is lost would be kept for ever; it is the one that has waited longest."""
    row_bytes = make("x", 1).num_bytes
    reader, found = FakeReader(), []
    collector = Collector(reader, found.append, min_tokens=1, max_open_bytes=30 * row_bytes)
    reader.push(record("alive", 0, 4), record("lost", 0, 20))
    for at in range(4, 40, 4):
        reader.push(record("alive", at, at + 4))
        collector.poll()
        assert collector.stats().open_bytes <= 30 * row_bytes
    reader.push(record("alive", 40, 41, finish="stop"))
    collector.poll()
    check(found[0], "lost", 0, 20)
    pieces = found[1:]
    assert [s.start for s in pieces] == [0, *(s.total_len for s in pieces[:-1])]
    assert pieces[-1].total_len == 41
    assert collector.stats().num_cut_for_room == len(found) - 1


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited for 20 s"
        time.sleep(0.002)


def test_in_the_background() -> None:
    reader, found = FakeReader(), []
    collector = Collector(reader, found.append, min_tokens=1)
    collector.start(interval_s=0.001)
    with pytest.raises(ValueError, match="running already"):
        collector.start()
    for i in range(200):
        reader.push(record(f"r{i}", 0, 5), record(f"r{i}", 5, 9, finish="stop"))
    wait_for(lambda: len(found) == 200)
    collector.stop()
    reader.push(record("late", 0, 9, finish="stop"))
    collector.start()
    collector.stop()
    assert len(found) == 201
    for sequence in found:
        check(sequence, sequence.key.split("/")[2], 0, 9)
    collector.stop()


def test_an_error_of_the_sink_is_not_swallowed() -> None:
    def sink(sequence: TrainingSequence) -> None:
        raise ValueError("of another width")

    reader = FakeReader()
    collector = Collector(reader, sink, min_tokens=1)
    collector.start(interval_s=0.001)
    reader.push(record("a", 0, 9, finish="stop"))
    wait_for(lambda: collector.error is not None)
    assert not reader.given
    with pytest.raises(ValueError, match="of another width"):
        collector.stop()


def test_bad_arguments() -> None:
    for min_tokens, room in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="must be at least 1, got 0"):
            Collector(
                FakeReader(), lambda sequence: None, min_tokens=min_tokens, max_open_bytes=room
            )


def test_from_a_real_ring() -> None:
    """The views of ``TapReader`` are of memory that the writer takes back."""
    found: list[TrainingSequence] = []
    with contextlib.closing(RingWriter(1 << 14, None)) as ring:
        reader = TapReader(ring.name)
        collector = Collector(reader, found.append, min_tokens=1)
        for i in range(60):
            for start, end, reason in ((0, 20, None), (20, 33, "stop")):
                head = RecordHead(f"r{i}".encode(), b"g", 0, 4)
                at = ring.reserve(head.payload_bytes(end - start, WIDTH))
                assert at is not None
                rows = features_of(f"r{i}", start, end)
                where = head.write(
                    ring.memory,
                    at,
                    start,
                    tokens_of(f"r{i}", start, end).tolist(),
                    width=WIDTH,
                    target_version=2,
                    finish_reason=reason,
                )
                ring.memory[where : where + rows.nbytes] = rows.tobytes()
                ring.commit(end - start)
            collector.poll()
        reader.close()
    assert len(found) == 60
    for i, sequence in enumerate(found):
        check(sequence, f"r{i}", 0, 33)
        assert (sequence.group, sequence.target_version) == ("g", 2)
