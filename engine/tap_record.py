"""What a FeatureTap hands out, as a record and as bytes, and who reads it: ``TapReader``.

Owns the layout of a record in the ring. Knows nothing of engines, and needs no torch. Invariant: a record holds
contiguous positions of one request, computed by one version of the target.

    48 bytes   format, rows, width, start, prompt_len, sample_index, lengths of the ids, why it ended, version
    features   [rows, width] bf16, from an address divisible by 64
    token ids  [rows] int32, from the next address divisible by 4
    ids        of the request and of its group, UTF-8
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.shared_ring import RingReader

DETACHED = "detached"
"""Why a request ended for the tap, though it went on: the tap was taken off."""

_ENDS = (None, "stop", "length", "abort", "error", DETACHED)
_HEAD = struct.Struct("<4sIIIIIIIB3xq4x")
_FORMAT = b"tap1"


@dataclass(frozen=True, slots=True)
class TapRecord:
    """Accepted tokens of one request at contiguous positions, and what the target made of them.

    The arrays are read-only views of the ring: copy what is to outlive ``TapReader.release``.

    Attributes:
        request_id, group_id, sample_index: whose; the n samples of a prompt are a group.
        prompt_len: positions below it are the prompt.
        start: position of the first row.
        token_ids: int32 [n], the tokens *at* positions ``start : start + n``.
        features: uint16 [n, W], bits of bf16: the taps of each position in the order of ``FeatureTap.tap_layers``,
            then the final normed hidden state; W = (number of taps + 1) * hidden size. A tap of layer i is what enters
            layer i (``ForwardOutput.taps``).
        target_version: of the weights that computed the rows.
        finish_reason: on the last record of a request, which may have n = 0: "stop", "length", "abort", "error", or
            "detached" where the request goes on without the tap.
    """

    request_id: str
    group_id: str
    sample_index: int
    prompt_len: int
    start: int
    token_ids: np.ndarray
    features: np.ndarray
    target_version: int
    finish_reason: str | None


class TapReader:
    """Reads a FeatureTap's records, in the engine's process or another one.

    Only one reader counts, the newest. A reader that comes late finds what was not released before.

    Args:
        name: ``FeatureTap.name``.

    Raises:
        ValueError: there is no such tap.
    """

    def __init__(self, name: str) -> None:
        self._ring = RingReader(name)
        self.name = name

    def read(self, max_records: int | None = None) -> list[TapRecord]:
        """The records that have come since the last call, oldest first, as views; good until ``release``.

        Args:
            max_records: at most so many; None is all.

        Raises:
            ValueError: another reader has taken over, this one is closed, or the ring holds something else.
        """
        return [decode(payload) for payload in self._ring.read(max_records)]

    def release(self) -> None:
        """Give the room of all records read so far back to the tap."""
        self._ring.release()

    @property
    def writer_closed(self) -> bool:
        """The tap is closed: what can be read now is all. An engine that was killed leaves this False."""
        return self._ring.writer_closed

    def stats(self) -> dict[str, int]:
        """As ``FeatureTap.stats``."""
        return named_stats(self._ring.stats())

    def close(self) -> None:
        """Let go of the ring; it keeps what was not released."""
        self._ring.close()


def named_stats(stats: dict[str, int]) -> dict[str, int]:
    """A ring's counts in the words of a tap."""
    return {
        "num_records": stats["num_records"],
        "num_tokens": stats["num_items"],
        "num_dropped_records": stats["num_dropped_records"],
        "num_dropped_tokens": stats["num_dropped_items"],
        "bytes_used": stats["bytes_used"],
        "capacity_bytes": stats["capacity_bytes"],
    }


@dataclass(frozen=True, slots=True)
class RecordHead:
    """A record but for its rows. The ids are encoded; ``start`` and ``num_rows`` say which rows follow."""

    request_id: bytes
    group_id: bytes
    sample_index: int
    prompt_len: int

    def payload_bytes(self, num_rows: int, width: int) -> int:
        """Bytes of a record of ``num_rows`` rows."""
        ids = len(self.request_id) + len(self.group_id)
        return _token_offset(num_rows, width) + 4 * num_rows + ids

    def write(
        self,
        memory: memoryview,
        at: int,
        start: int,
        token_ids: Sequence[int],
        *,
        width: int,
        target_version: int,
        finish_reason: str | None,
    ) -> int:
        """Everything but the features, for the rows ``start : start + len(token_ids)``; where those belong."""
        count = len(token_ids)
        request_id, group_id = self.request_id, self.group_id
        ids = (len(request_id), len(group_id))
        _HEAD.pack_into(
            memory,
            at,
            _FORMAT,
            count,
            width,
            start,
            self.prompt_len,
            self.sample_index,
            *ids,
            _ENDS.index(finish_reason),
            target_version,
        )
        to = at + _token_offset(count, width)
        struct.pack_into(
            f"<{count}i{ids[0]}s{ids[1]}s", memory, to, *token_ids, request_id, group_id
        )
        return at + _HEAD.size


def decode(payload: memoryview) -> TapRecord:
    """The record of a payload, as views of it.

    Raises:
        ValueError: it is none, or of another version.
    """
    if len(payload) < _HEAD.size or bytes(payload[:4]) != _FORMAT:
        raise ValueError("the ring holds no records of a FeatureTap of this version")
    _, count, width, start, prompt_len, sample_index, id_len, group_len, end, version = (
        _HEAD.unpack_from(payload)
    )
    tokens = _token_offset(count, width)
    ids = tokens + 4 * count
    if len(payload) != ids + id_len + group_len or end >= len(_ENDS):
        raise ValueError(f"a record of {len(payload)} bytes does not add up: {count} x {width}")
    features = np.frombuffer(payload, np.uint16, count * width, _HEAD.size)
    return TapRecord(
        request_id=str(payload[ids : ids + id_len], "utf-8", "surrogatepass"),
        group_id=str(payload[ids + id_len :], "utf-8", "surrogatepass"),
        sample_index=sample_index,
        prompt_len=prompt_len,
        start=start,
        token_ids=np.frombuffer(payload, np.int32, count, tokens),
        features=features.reshape(count, width),
        target_version=version,
        finish_reason=_ENDS[end],
    )


def _token_offset(num_rows: int, width: int) -> int:
    return (_HEAD.size + 2 * num_rows * width + 3) // 4 * 4
