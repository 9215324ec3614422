"""FeatureTap: accepted tokens and the target's hidden states of them leave the engine through shared memory.

Owns the writing end and its books: positions of each request that are done, and the room kept for the record that
ends a request. Layout and reader are in ``tap_record.py``, the ring in ``shared_ring.py``, which rows are accepted in
``tap_socket.py``. Knows nothing of who reads or trains.

Invariants: the features of a record are the target's at the very positions of its tokens, computed by one version;
a position of a request is handed out or counted as dropped once, unless its keys came from the prefix cache: then
never; a request of which anything was handed out gets its last record, whatever room is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.decoder import ForwardOutput
from engine.request import Request
from engine.shared_ring import RingWriter, frame_bytes
from engine.tap_record import RecordHead, TapReader, TapRecord, named_stats

__all__ = ["FeatureTap", "Features", "TapReader", "TapRecord"]

_RECORD_SHARE = 8  # a record takes at most this part of the ring, so that a long prompt is lost in pieces or not at all
_SERIAL = 32767  # elements that torch copies without waking its threads, which the engine's kernels compete with
_ID_BYTES = 256  # of both ids of a request; longer ones count against the rows of a record


@dataclass(slots=True)
class _Progress:
    """A request that the tap has seen. ``end_bytes``: frame of its last record, kept free once ``is_open``."""

    head: RecordHead
    end_bytes: int
    next: int = 0  # first position that was neither handed out nor dropped
    is_open: bool = False  # something was handed out, so the reader waits for the end
    version: int = 0


class FeatureTap:
    """The writing end. Attach it with ``LLM.attach_tap``; read with ``TapReader(tap.name)`` in any process.

    Args:
        tap_layers: layers of the target whose input is handed out; 0 is the embedding, ``num_layers`` what leaves the
            last layer. The final normed hidden state comes with them always. Layers that the drafter reads too cost
            no second copy in the forward.
        capacity_bytes: of the ring. A reader that is behind by more loses records; the engine never waits.
        name: of the shared memory; None makes one up.

    Raises:
        ValueError: names the argument, what came, and the fix.
    """

    def __init__(
        self, tap_layers: Sequence[int], *, capacity_bytes: int, name: str | None = None
    ) -> None:
        self.tap_layers = tuple(tap_layers)
        for layer in self.tap_layers:
            if not isinstance(layer, int) or isinstance(layer, bool) or layer < 0:
                raise ValueError(f"tap_layers must be layer numbers from 0 up, got {tap_layers!r}")
        self._ring = RingWriter(capacity_bytes, name)
        self._cells = torch.frombuffer(self._ring.memory, dtype=torch.bfloat16)
        self._width = 0
        self._requests: dict[str, _Progress] = {}
        self._ends_bytes = 0  # frames of the ends of open requests
        self._longest_end = 0
        self._is_closed = False
        self._in_use = False

    @property
    def name(self) -> str:
        """Of the shared memory."""
        return self._ring.name

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def stats(self) -> dict[str, int]:
        """num_records, num_tokens, num_dropped_records, num_dropped_tokens, bytes_used, capacity_bytes."""
        return named_stats(self._ring.stats())

    def close(self) -> None:
        """Remove the shared memory; readers keep what they have mapped. An engine takes a closed tap off. Idempotent."""
        self._is_closed = True
        self._ring.close()

    def __enter__(self) -> FeatureTap:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- for the engine

    def bind(self, num_layers: int, hidden_size: int) -> None:
        """Serve a target of that size.

        Raises:
            ValueError: a layer that it does not have, a ring too small for its rows, or the tap is in use or closed.
        """
        if self._in_use or self._is_closed:
            state = "closed; make a new one" if self._is_closed else "attached to an engine already"
            raise ValueError(f"tap {self.name!r} is {state}")
        beyond = [layer for layer in self.tap_layers if layer > num_layers]
        if beyond:
            raise ValueError(
                f"tap_layers {beyond} do not exist: the target has {num_layers} layers"
            )
        width = (len(self.tap_layers) + 1) * hidden_size
        least = _RECORD_SHARE * RecordHead(b"", bytes(_ID_BYTES), 0, 0).payload_bytes(1, width)
        if self._ring.capacity_bytes < least:
            raise ValueError(
                f"capacity_bytes is {self._ring.capacity_bytes}, but rows of {2 * width} bytes need at least {least}; "
                f"some hundred rows ({600 * width}) are a good size"
            )
        self._width = width
        self._requests.clear()
        self._ends_bytes = 0
        self._in_use = True

    def unbind(self) -> None:
        """The engine lets go of it."""
        self._in_use = False

    def emit(self, request: Request, start: int, rows: Sequence[int], features: Features) -> None:
        """Hand out accepted rows, and the end of a request that has ended.

        Args:
            start: position of the first of ``rows``; they are contiguous.
            rows: numbers of rows of the forward.
            features: of the forward.
        """
        progress = self._requests.get(request.request_id)
        if progress is None:
            progress = self._requests[request.request_id] = _begin(request)
        progress.version = features.version
        done = max(progress.next - start, 0)
        rows, start = rows[done:], start + done
        progress.next = max(progress.next, start + len(rows))
        limit = self._rows_of_a_record(progress.head)
        is_ended = False
        for at in range(0, len(rows), limit):
            part = rows[at : at + limit]
            is_last = at + len(part) == len(rows)
            reason = request.finish_reason if is_last else None
            tokens = request.token_ids[start + at : start + at + len(part)]
            is_written = self._write(progress, start + at, tokens, part, features, reason)
            is_ended = is_written and reason is not None
        if request.is_finished:
            self._forget(request.request_id, None if is_ended else request.finish_reason)

    def end(self, request: Request) -> None:
        """The request has ended between two steps."""
        self._forget(request.request_id, request.finish_reason)

    def end_all(self, reason: str) -> None:
        """Every request has ended."""
        for request_id in list(self._requests):
            self._forget(request_id, reason)

    def _forget(self, request_id: str, reason: str | None) -> None:
        """Forget a request; its end is said if a reason is given and the reader knows the request."""
        progress = self._requests.pop(request_id, None)
        if progress is None or not progress.is_open:
            return
        self._ends_bytes -= progress.end_bytes
        if reason is not None:
            at = self._ring.reserve(progress.head.payload_bytes(0, self._width))
            assert at is not None, ("no room was kept for an end", self.stats())
            self._write_head(progress, at, progress.next, [], reason)
            self._ring.commit(0)

    def _write(
        self,
        progress: _Progress,
        start: int,
        tokens: Sequence[int],
        rows: Sequence[int],
        features: Features,
        reason: str | None,
    ) -> bool:
        """One record, if there is room beside the ends of all open requests."""
        spare = self._ends_bytes
        if not progress.is_open:
            spare += progress.end_bytes
        # The ends may meet the end of the ring once, and leave as much before it as one of them takes.
        spare += max(self._longest_end, progress.end_bytes)
        size = progress.head.payload_bytes(len(tokens), self._width)
        at = None
        if size <= self._ring.max_payload_bytes:
            at = self._ring.reserve(size, spare)
        if at is None:
            self._ring.drop(len(tokens))
            return False
        first = self._write_head(progress, at, start, tokens, reason) // 2
        cells = self._cells[first : first + len(tokens) * self._width]
        features.copy(rows, cells.view(len(tokens), len(self.tap_layers) + 1, -1))
        self._ring.commit(len(tokens))
        if not progress.is_open:
            progress.is_open = True
            self._ends_bytes += progress.end_bytes
            self._longest_end = max(self._longest_end, progress.end_bytes)
        return True

    def _write_head(
        self, progress: _Progress, at: int, start: int, tokens: Sequence[int], reason: str | None
    ) -> int:
        return progress.head.write(
            self._ring.memory,
            at,
            start,
            tokens,
            width=self._width,
            target_version=progress.version,
            finish_reason=reason,
        )

    def _rows_of_a_record(self, head: RecordHead) -> int:
        room = self._ring.capacity_bytes // _RECORD_SHARE - head.payload_bytes(0, self._width)
        return max(1, room // (2 * self._width + 4))


class Features:
    """The hidden states of one forward, as a tap sees them.

    Args:
        output: of the forward.
        columns: of ``output.taps`` that are the tap's, in its order.
        version: of the target.
    """

    def __init__(self, output: ForwardOutput, columns: Sequence[int], version: int) -> None:
        assert output.hidden is not None, "the forward was not asked for hidden states"
        self.version = version
        self._hidden = output.hidden
        # (columns of the record, where they come from), in as few stretches as there are
        self._parts: list[tuple[int, int, Tensor]] = []
        done = 0
        for first, count in _runs(columns):
            assert output.taps is not None, "the forward was not asked for taps"
            self._parts.append((done, done + count, output.taps[:, first : first + count]))
            done += count

    def copy(self, rows: Sequence[int], to: Tensor) -> None:
        """to [n, T + 1, H] bf16 = taps and hidden states of ``rows``, rounded once."""
        most = max(1, _SERIAL // (to.shape[1] * to.shape[2]))
        hidden = to.shape[1] - 1
        done = 0
        for first, count in _runs(rows):
            for row in range(first, first + count, most):
                end = min(row + most, first + count)
                part = to[done : done + end - row]
                for begin, stop, taps in self._parts:
                    part[:, begin:stop].copy_(taps[row:end])
                part[:, hidden].copy_(self._hidden[row:end])
                done += end - row


def _begin(request: Request) -> _Progress:
    request_id = request.request_id.encode("utf-8", "surrogatepass")
    group_id = (request.group_id or "").encode("utf-8", "surrogatepass")
    head = RecordHead(request_id, group_id, request.sample_index, request.prompt_len)
    return _Progress(head, frame_bytes(head.payload_bytes(0, 0)))


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, count) of stretches of consecutive numbers."""
    if isinstance(rows, range):
        if len(rows):
            yield rows.start, len(rows)
        return
    first = 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or rows[i] != rows[i - 1] + 1:
            yield rows[first], i - first
            first = i
