"""The ring against a queue, its edges, and what is left when one of the two sides dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.shared_ring import ALIGN, FRAME, RingReader, RingWriter, frame_bytes

SHM = Path("/dev/shm")


def put(ring: RingWriter, payload: bytes, spare_bytes: int = 0) -> bool:
    at = ring.reserve(len(payload), spare_bytes)
    if at is None:
        ring.drop()
        return False
    ring.memory[at : at + len(payload)] = payload
    ring.commit()
    return True


def content(number: int, size: int) -> bytes:
    return np.random.default_rng(number).bytes(size)


class Model:
    """What a bounded queue of frames in a circle does, in the plainest words: which cells are taken."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.at = capacity, 0
        self.held: deque[tuple[set[int], bytes]] = deque()  # its cells and payload; not released
        self.num_read = 0

    def put(self, payload: bytes) -> bool:
        size = frame_bytes(len(payload))
        at = self.at if self.at + size <= self.capacity else 0
        cells = set(range(at, at + size, ALIGN))
        if at != self.at:  # what is left over before the end belongs to it
            cells |= set(range(self.at, self.capacity, ALIGN))
        if any(cells & other for other, _ in self.held):
            return False
        self.held.append((cells, payload))
        self.at = (at + size) % self.capacity
        return True


actions = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 500)),
        st.tuples(st.just("read"), st.integers(0, 4)),
        st.tuples(st.just("release"), st.just(0)),
        st.tuples(st.just("new reader"), st.just(0)),
    ),
    max_size=80,
)


@settings(max_examples=500, deadline=None)
@given(capacity=st.sampled_from([256, 512, 1024, 1088]), script=actions)
def test_ring_is_a_bounded_queue(capacity: int, script: list[tuple[str, int]]) -> None:
    """Bytes come out as they went in, once, in order; what is held is not overwritten; a refusal has a reason."""
    ring = RingWriter(capacity)
    reader, model, views = RingReader(ring.name), Model(capacity), []
    num_put = num_refused = 0
    try:
        for number, (action, value) in enumerate(script):
            if action == "put":
                payload = content(number, value * ring.max_payload_bytes // 500)
                expected = model.put(payload)
                assert put(ring, payload) == expected, (number, model.held, model.at)
                num_put, num_refused = num_put + expected, num_refused + (not expected)
            elif action == "read":
                found = reader.read(value)
                end = min(len(model.held), model.num_read + value)
                expected = [model.held[i][1] for i in range(model.num_read, end)]
                assert [bytes(view) for view in found] == expected
                model.num_read = end
                views += found
            elif action == "release":
                unread = [payload for _, payload in list(model.held)[: model.num_read]]
                assert [bytes(view) for view in views] == unread[len(unread) - len(views) :]
                reader.release()
                for _ in range(model.num_read):
                    model.held.popleft()
                model.num_read, views = 0, []
            else:  # it finds what was not released
                reader, views, model.num_read = RingReader(ring.name), [], 0
        stats = ring.stats()
        assert (stats["num_records"], stats["num_dropped_records"]) == (num_put, num_refused)
        assert reader.stats() == stats
        assert 0 <= stats["bytes_used"] == ring.used_bytes <= capacity
    finally:
        ring.close()


def test_views_are_the_segment_itself() -> None:
    ring = RingWriter(4096)
    reader = RingReader(ring.name)
    assert put(ring, b"abc")
    (view,) = reader.read()
    whole = np.frombuffer(reader._map.data, np.uint8)
    assert np.shares_memory(np.frombuffer(view, np.uint8), whole)
    assert view.readonly
    ring.memory[FRAME.size : FRAME.size + 3] = (
        b"xyz"  # the writer's mapping is another one of the same memory
    )
    assert bytes(view) == b"xyz"
    ring.close()


def test_room_that_is_kept_stays_free_and_the_largest_record_fits_anywhere() -> None:
    ring = RingWriter(1024)
    assert not put(ring, bytes(100), spare_bytes=1024)
    assert put(ring, bytes(100), spare_bytes=1024 - frame_bytes(100))
    reader = RingReader(ring.name)
    for size in range(1, ring.max_payload_bytes, 37):  # wherever the cursors are
        reader.read()
        reader.release()
        assert put(ring, bytes(size))
        reader.read()
        reader.release()
        assert put(ring, bytes(ring.max_payload_bytes)), size
    ring.close()


def test_padding_counts_as_taken() -> None:
    """Room enough in all, but not in one piece: what is held must not be written over."""
    ring = RingWriter(256)
    reader = RingReader(ring.name)
    assert put(ring, b"")
    assert put(ring, bytes(range(112)))
    reader.read(1)
    reader.release()
    assert not put(ring, bytes(112))  # 64 bytes before the end, 64 from the start
    assert [bytes(view) for view in reader.read()] == [bytes(range(112))]
    ring.close()


def test_what_was_not_committed_was_never_there() -> None:
    ring = RingWriter(1024)
    reader = RingReader(ring.name)
    assert ring.reserve(100) is not None
    assert reader.read() == []
    assert put(ring, b"after")
    assert [bytes(view) for view in reader.read()] == [b"after"]
    ring.close()


def test_the_newest_reader_counts() -> None:
    ring = RingWriter(1024)
    first = RingReader(ring.name)
    second = RingReader(ring.name)
    for call in (first.read, first.release):
        with pytest.raises(ValueError, match="newer reader"):
            call()
    assert second.read() == []
    second.close()
    with pytest.raises(ValueError, match="closed"):
        second.read()
    ring.close()


def test_views_outlive_close() -> None:
    ring = RingWriter(1024)
    put(ring, b"still here")
    reader = RingReader(ring.name)
    (view,) = reader.read()
    ring.close()
    ring.close()
    assert reader.writer_closed
    reader.close()
    del ring, reader
    assert bytes(view) == b"still here"


def test_bad_input_is_refused() -> None:
    for capacity in (0, 255, -1, 1.5, None):
        with pytest.raises(ValueError, match="capacity_bytes"):
            RingWriter(capacity)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not free"):
        RingWriter(1 << 50)
    for name in ("", "a/b", "n" * 300, "ä"):
        with pytest.raises(ValueError, match="name must be"):
            RingWriter(1024, name)
    with pytest.raises(ValueError, match="no shared memory"):
        RingReader("tlt-test-nothing")
    ring = RingWriter(1024)
    with pytest.raises(ValueError, match="exists"):
        RingWriter(1024, ring.name)
    RingReader(ring.name)  # the clash has not harmed it
    ring.close()


def test_a_segment_that_is_no_ring_is_refused() -> None:
    for size in (64, 8192):
        other = SharedMemory(create=True, size=size)
        with pytest.raises(ValueError, match="no ring"):
            RingReader(other.name)
        other.close()
        other.unlink()


def test_nothing_is_left_behind() -> None:
    before = set(SHM.iterdir())
    ring = RingWriter(1024)
    assert (SHM / ring.name).exists()
    del ring  # collected
    with pytest.raises(ValueError, match="not free"):
        RingWriter(1 << 50)
    assert set(SHM.iterdir()) <= before


READER = """
import sys
from engine.shared_ring import RingReader
reader = RingReader(sys.argv[1])
print([bytes(view) for view in reader.read()])
"""
WRITER = """
import sys
from engine.shared_ring import RingWriter
ring = RingWriter(1 << 20, sys.argv[1])
for i in range(20):
    at = ring.reserve(4)
    ring.memory[at : at + 4] = i.to_bytes(4, "little")
    ring.commit()
at = ring.reserve(1000)
ring.memory[at : at + 500] = bytes(500)
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_reader_that_ends_takes_nothing_with_it() -> None:
    """Before Python 3.13 the resource tracker of a process that attached would unlink the writer's segment."""
    ring = RingWriter(1024)
    put(ring, b"one")
    for _ in range(2):  # it did not release, so the next one finds the same
        done = subprocess.run(
            [sys.executable, "-c", READER, ring.name], capture_output=True, text=True, timeout=60
        )
        assert done.stdout.strip() == "[b'one']", done.stderr
        assert done.stderr == ""
    assert (SHM / ring.name).exists()
    assert len(RingReader(ring.name).read()) == 1
    ring.close()


def test_a_killed_writer_leaves_what_it_committed_and_no_segment() -> None:
    name = f"tlt-test-{os.getpid()}"
    command = [sys.executable, "-c", WRITER, name]
    writer = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"ready\n"
    reader = RingReader(name)
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    assert [int.from_bytes(view, "little") for view in reader.read()] == list(range(20))
    reader.release()
    assert reader.read() == []
    assert not reader.writer_closed
    deadline = time.monotonic() + 20
    while (SHM / name).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not (SHM / name).exists()  # its resource tracker saw it die
