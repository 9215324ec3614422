"""A ring of bytes in shared memory: one process writes records, one reads them where they lie, nobody waits.

Owns the segment, its two cursors and its counters. Knows nothing of what a record means. No lock lives in the segment:
the writer alone moves ``head``, the reader alone moves ``tail``, so whoever dies leaves nothing held. Where there is no
room the writer is told so at once and drops; a record that was not committed was never there.

    segment = header of 4096 bytes, then ``capacity`` bytes
    header  = magic, capacity, head, tail, closed, reader, records, items, dropped records, dropped items; 64 bytes each
    frame   = payload length u64, own stream position u64, payload; from an address divisible by 64, in one piece

Cursors count bytes since the start and never fall; the place of one is its remainder by the capacity. A frame that does
not fit before the end of the ring is preceded by padding to that end. Invariant: bytes ``[tail, head)`` are frames, whole,
and are not written to until the reader has released them.

The writer's segment is registered with multiprocessing's resource tracker, so it goes when a killed writer's family of
processes has gone. A reader maps the segment's file instead of opening a ``SharedMemory``: before Python 3.13 that would
register it a second time, and the tracker would unlink it under the writer when the reader ends.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import threading
import weakref
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory

import numpy as np

ALIGN = 64
HEADER_BYTES = 4096
FRAME = struct.Struct("<QQ")
_DIRECTORY = "/dev/shm"  # where Linux keeps POSIX shared memory
_MAGIC = int.from_bytes(b"TLTring1", "little")
_PADDING = 2**64 - 1  # in place of a payload length: go on at the start of the ring
_STEP = ALIGN // 8
_MAGIC_AT, _CAPACITY, _HEAD, _TAIL, _CLOSED, _READER = (i * _STEP for i in range(6))
_RECORDS, _ITEMS, _DROPPED_RECORDS, _DROPPED_ITEMS = (i * _STEP for i in range(6, 10))


class RingWriter:
    """Makes a ring and writes to it; the segment is gone when it is closed, collected, or when Python ends.

    Args:
        capacity_bytes: of all frames together, rounded down to 64 bytes. All of it is taken from the machine at once,
            since memory that is missing later would end the process.
        name: of the segment; None makes one up.

    Raises:
        ValueError: the capacity is too small or more than there is, or the name is bad or in use.
    """

    def __init__(self, capacity_bytes: int, name: str | None = None) -> None:
        capacity = capacity_bytes // ALIGN * ALIGN if isinstance(capacity_bytes, int) else 0
        if capacity < 4 * ALIGN:
            raise ValueError(
                f"capacity_bytes must be an integer of at least {4 * ALIGN}, got {capacity_bytes!r}"
            )
        if name is not None:
            _check_name(name)
        self.name = f"tlt-ring-{secrets.token_hex(8)}" if name is None else name
        self.capacity_bytes = capacity
        _create(self.name, HEADER_BYTES + capacity, self)
        self._map = _Mapping(self.name)
        self._words = self._map.words
        self._words[_CAPACITY] = capacity
        self._words[_MAGIC_AT] = _MAGIC
        self._head = 0
        self._pending = 0
        self._fence = _Fence()

    @property
    def memory(self) -> memoryview:
        """The frames' bytes, for views that are made once; what ``reserve`` gives lies in here."""
        return self._map.data

    @property
    def max_payload_bytes(self) -> int:
        """Largest payload that an empty ring takes, wherever its cursors are."""
        return self.capacity_bytes // 2 // ALIGN * ALIGN - FRAME.size

    @property
    def used_bytes(self) -> int:
        """Bytes not yet released by the reader, frames and padding included."""
        used = self._head - int(self._words[_TAIL])
        assert 0 <= used <= self.capacity_bytes, (self._head, used, self.capacity_bytes)
        return used

    def reserve(self, payload_bytes: int, spare_bytes: int = 0) -> int | None:
        """Room for one record, which is not there before ``commit``; a second call without it takes the first back.

        Args:
            payload_bytes: at most ``max_payload_bytes``.
            spare_bytes: that must still be free behind it.

        Returns:
            where its payload starts in ``memory``, or None: no room.
        """
        assert 0 <= payload_bytes <= self.max_payload_bytes, payload_bytes
        size = frame_bytes(payload_bytes)
        at = self._head % self.capacity_bytes
        padding = self.capacity_bytes - at if self.capacity_bytes - at < size else 0
        if self.used_bytes + padding + size + spare_bytes > self.capacity_bytes:
            return None
        start = self._head
        if padding:
            FRAME.pack_into(self._map.data, at, _PADDING, start)
            start, at = start + padding, 0
        FRAME.pack_into(self._map.data, at, payload_bytes, start)
        self._pending = start + size
        return at + FRAME.size

    def commit(self, num_items: int = 1) -> None:
        """Let the reader see the record last reserved; ``num_items`` is only counted."""
        assert self._pending > self._head, "commit() without reserve()"
        self._words[_RECORDS] += np.uint64(1)
        self._words[_ITEMS] += np.uint64(num_items)
        self._fence.pass_through()
        self._words[_HEAD] = self._head = self._pending

    def drop(self, num_items: int = 1) -> None:
        """Count a record that found no room."""
        self._words[_DROPPED_RECORDS] += np.uint64(1)
        self._words[_DROPPED_ITEMS] += np.uint64(num_items)

    def stats(self) -> dict[str, int]:
        """As ``RingReader.stats``."""
        return _stats(self._words, self.capacity_bytes)

    def close(self) -> None:
        """Tell the reader that no more comes, and remove the name; a reader keeps what it has mapped. Idempotent."""
        self._words[_CLOSED] = 1
        self._finalizer()

    _finalizer: weakref.finalize[[SharedMemory, int], RingWriter]  # set by _create


class RingReader:
    """Reads the records of a ring, in this process or another. The newest reader of a ring is the one that counts.

    Args:
        name: of the writer's segment.

    Raises:
        ValueError: there is no such segment, or it is no ring.
    """

    def __init__(self, name: str) -> None:
        _check_name(name)
        self._map = _Mapping(name)
        self._words = words = self._map.words
        self.name = name
        self.capacity_bytes = capacity = int(words[_CAPACITY])
        if int(words[_MAGIC_AT]) != _MAGIC or capacity != len(self._map.data):
            raise ValueError(f"shared memory {name!r} is no ring of this version; check the name")
        self._token = secrets.randbits(63)
        words[_READER] = self._token
        self._next = int(words[_TAIL])
        self._fence = _Fence()

    def read(self, max_records: int | None = None) -> list[memoryview]:
        """Payloads of the records that have come since the last call, oldest first, without a copy.

        They are read-only, and good until ``release``.
        """
        self._check_reader()
        head = int(self._words[_HEAD])
        self._fence.pass_through()
        found: list[memoryview] = []
        limit = head - self._next if max_records is None else max_records
        while self._next < head and len(found) < limit:
            at = self._next % self.capacity_bytes
            size, position = FRAME.unpack_from(self._map.data, at)
            assert position == self._next, ("frame", position, self._next)
            if size == _PADDING:
                self._next += self.capacity_bytes - at
                continue
            start = at + FRAME.size
            found.append(self._map.data[start : start + size].toreadonly())
            self._next += frame_bytes(size)
        return found

    def release(self) -> None:
        """Give the room of all records read so far back to the writer: views of them are no longer good."""
        self._check_reader()
        self._fence.pass_through()
        self._words[_TAIL] = self._next

    @property
    def writer_closed(self) -> bool:
        """The writer has said that no more comes. One that was killed says nothing."""
        return bool(self._words[_CLOSED])

    def stats(self) -> dict[str, int]:
        """num_records, num_items, num_dropped_records, num_dropped_items, bytes_used, capacity_bytes."""
        return _stats(self._words, self.capacity_bytes)

    def close(self) -> None:
        """Let go of the segment; memory stays mapped as long as there are views. Later reads are refused."""
        self._map.data = self._map.data[:0]
        self._map.words = self._words = self._words[_MAGIC_AT:].copy()

    def _check_reader(self) -> None:
        if not len(self._map.data):
            raise ValueError(f"the reader of ring {self.name!r} is closed")
        if int(self._words[_READER]) != self._token:
            raise ValueError(
                f"ring {self.name!r} has a newer reader; a ring is read by one at a time"
            )


class _Mapping:
    """A segment in this process's memory; it lives as long as there are views of it."""

    def __init__(self, name: str) -> None:
        try:
            fd = os.open(f"{_DIRECTORY}/{name}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ValueError(f"there is no shared memory {name!r}: {error.strerror}") from error
        try:
            size = os.fstat(fd).st_size
            if size <= HEADER_BYTES:
                raise ValueError(f"shared memory {name!r} of {size} bytes is no ring")
            view = memoryview(mmap.mmap(fd, size))
        finally:
            os.close(fd)
        self.words = np.frombuffer(view[:HEADER_BYTES], dtype=np.uint64)
        self.data = view[HEADER_BYTES:]


class _Fence:
    """Orders memory accesses before it against those behind it, for the other process.

    x86 needs none for stores after stores. Elsewhere: what came before stays before a release of the lock, what comes
    behind stays behind the second taking of it, and those two are ordered.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def pass_through(self) -> None:
        with self._lock:
            pass
        with self._lock:
            pass


def frame_bytes(payload_bytes: int) -> int:
    """Bytes that a record takes, padding at the end of the ring apart."""
    return (FRAME.size + payload_bytes + ALIGN - 1) // ALIGN * ALIGN


def _create(name: str, size: int, owner: RingWriter) -> None:
    """Make the segment; it is unlinked when ``owner`` is closed or collected."""
    space = os.statvfs(_DIRECTORY)
    if size > space.f_bavail * space.f_frsize:
        raise _no_space(size, "too large for what is left")
    try:
        segment = SharedMemory(name, create=True, size=size)
    except FileExistsError as error:
        raise ValueError(
            f"shared memory {name!r} exists; choose another name, or delete {_DIRECTORY}/{name} if its owner is dead"
        ) from error
    except OSError as error:
        raise ValueError(f"shared memory {name!r} cannot be made: {error.strerror}") from error
    try:
        _fill(name, size)
    except OSError as error:
        segment.close()
        segment.unlink()
        raise _no_space(size, str(error.strerror)) from error
    segment.close()  # this mapping is not used; the name stays, and so does the tracker's note of it
    owner._finalizer = weakref.finalize(owner, _unlink, segment, os.getpid())


def _no_space(size: int, why: str) -> ValueError:
    return ValueError(
        f"capacity_bytes: {size} bytes of shared memory are not free ({why}); ask for less, or make {_DIRECTORY} "
        "larger (docker: --shm-size)"
    )


def _fill(name: str, size: int) -> None:
    fd = os.open(f"{_DIRECTORY}/{name}", os.O_RDWR | os.O_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, size)
    finally:
        os.close(fd)


def _unlink(segment: SharedMemory, pid: int) -> None:
    if os.getpid() != pid:
        return  # a fork's copy
    try:
        segment.unlink()
    except FileNotFoundError:  # somebody cleaned up; the tracker does not know
        resource_tracker.unregister(f"/{segment.name}", "shared_memory")


def _check_name(name: str) -> None:
    if (
        not isinstance(name, str)
        or not name
        or "/" in name
        or len(name) > 200
        or not name.isascii()
    ):
        raise ValueError(f"name must be up to 200 ASCII characters without a slash, got {name!r}")


def _stats(words: np.ndarray, capacity: int) -> dict[str, int]:
    return {
        "num_records": int(words[_RECORDS]),
        "num_items": int(words[_ITEMS]),
        "num_dropped_records": int(words[_DROPPED_RECORDS]),
        "num_dropped_items": int(words[_DROPPED_ITEMS]),
        "bytes_used": int(words[_HEAD]) - int(words[_TAIL]),
        "capacity_bytes": capacity,
    }
