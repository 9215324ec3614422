"""Collector: records of a FeatureTap become training sequences.

Owns the pieces of requests that are not complete, and the joining of records to them. Knows nothing of engines, of
the ring, or of where sequences go: a sink takes them. Invariant: a piece is contiguous positions of one sample in
one step, each once; no view of the ring is kept beyond ``release``; what is waiting is bounded.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from engine.tap_record import TapRecord
from tlt_train.sequence import TrainingSequence

logger = logging.getLogger(__name__)

_COMPLETE = ("stop", "length")  # any other end leaves a sample unfinished
_RECORDS_AT_ONCE = 64  # copied before their room is given back to the tap


class RecordSource(Protocol):
    """What is needed of ``engine.tap_record.TapReader``."""

    def read(self, max_records: int | None = None) -> Sequence[TapRecord]: ...

    def release(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CollectorStats:
    """Counts since the collector was made, but for ``num_open`` and ``open_bytes``, which wait now."""

    num_records: int
    num_tokens: int
    num_sequences: int
    num_gaps: int  # within a request, not those at its start
    num_too_short: int  # pieces below min_tokens
    num_too_short_tokens: int
    num_cut_for_room: int
    num_open: int
    open_bytes: int


@dataclass(slots=True)
class _Piece:
    """Contiguous rows of a request, copied."""

    request_id: str
    sample_index: int
    group: str
    prompt_len: int
    start: int
    version: int
    rl_step: int
    end: int
    num_bytes: int = 0
    token_ids: list[np.ndarray] = field(default_factory=list)
    features: list[np.ndarray] = field(default_factory=list)


class Collector:
    """Joins the records of each request and hands whole sequences on. All methods may be called from any thread.

    A gap (positions that the tap dropped, or a cached prefix) ends a piece and begins another. The key of a sequence is
    ``source``, step, request, sample and first position, so a later and longer version of a piece replaces it.

    Args:
        reader: a ``TapReader``, or what reads as one.
        sink: takes each sequence, ``DataBuffer.add`` for example; called by the thread that polls.
        min_tokens: shorter pieces are dropped and counted.
        source: tells apart collectors that feed one sink.
        max_open_bytes: of pieces that wait for their end; beyond it, the one that has waited longest is handed on as it
            is (a request whose last record is lost would wait forever) and goes on as a new piece.

    Raises:
        ValueError: min_tokens or max_open_bytes is not positive.
    """

    def __init__(
        self,
        reader: RecordSource,
        sink: Callable[[TrainingSequence], None],
        *,
        min_tokens: int,
        source: str = "",
        max_open_bytes: int = 4 << 30,
    ) -> None:
        for name, value in (("min_tokens", min_tokens), ("max_open_bytes", max_open_bytes)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self._reader = reader
        self._sink = sink
        self._min_tokens = min_tokens
        self._source = source
        self._max_open_bytes = max_open_bytes
        self._lock = threading.RLock()
        self._rl_step = 0
        self._open: dict[tuple[str, int], _Piece] = {}  # the one that has waited longest first
        self._open_bytes = 0
        self._counts = dict.fromkeys(
            ("records", "tokens", "sequences", "gaps", "too_short", "too_short_tokens", "cut"), 0
        )
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._error: BaseException | None = None

    # ---- collecting

    def poll(self, max_records: int | None = None) -> int:
        """Take what the tap has; the number of records."""
        num_read = 0
        while max_records is None or num_read < max_records:
            limit = _RECORDS_AT_ONCE
            if max_records is not None:
                limit = min(limit, max_records - num_read)
            with self._lock:
                records = self._reader.read(limit)
                done: list[tuple[_Piece, bool]] = []
                try:
                    for record in records:
                        done += self._take(record)
                finally:
                    num_records = len(records)
                    records = record = None  # no view of the ring may outlive the release
                    self._reader.release()
                self._hand_on(done + self._cut_for_room())
            num_read += num_records
            if num_records < limit:
                break
        return num_read

    def set_step(self, rl_step: int) -> None:
        """Step of reinforcement learning of the requests that begin from here on."""
        with self._lock:
            self._rl_step = rl_step

    def flush(self, *, keep_open: bool = False) -> int:
        """Hand on the pieces of requests that are still running; how many were long enough.

        Args:
            keep_open: go on with them: each is handed on again, longer and under the same key, when it ends. Otherwise
                what comes of a request afterwards is a new piece.
        """
        with self._lock:
            before = self._counts["sequences"]
            if keep_open:
                long = [p for p in self._open.values() if p.end - p.start >= self._min_tokens]
                self._hand_on([(piece, False) for piece in long])
            else:
                pieces = list(self._open.values())
                self._open.clear()
                self._open_bytes = 0
                self._hand_on([(piece, False) for piece in pieces])
            return self._counts["sequences"] - before

    def stats(self) -> CollectorStats:
        with self._lock:
            counts = self._counts
            return CollectorStats(
                num_records=counts["records"],
                num_tokens=counts["tokens"],
                num_sequences=counts["sequences"],
                num_gaps=counts["gaps"],
                num_too_short=counts["too_short"],
                num_too_short_tokens=counts["too_short_tokens"],
                num_cut_for_room=counts["cut"],
                num_open=len(self._open),
                open_bytes=self._open_bytes,
            )

    def _take(self, record: TapRecord) -> list[tuple[_Piece, bool]]:
        """Copy a record's rows; the pieces that it ends, and whether their sample is complete."""
        self._counts["records"] += 1
        self._counts["tokens"] += len(record.token_ids)
        name = (record.request_id, record.sample_index)
        piece = self._open.pop(name, None)
        done: list[tuple[_Piece, bool]] = []
        if len(record.token_ids):
            if piece is not None and record.start != piece.end:
                self._counts["gaps"] += 1
                self._open_bytes -= piece.num_bytes
                done.append((piece, False))
                piece = None
            piece = piece or self._begin(record)
            piece.token_ids.append(np.array(record.token_ids, np.int32))
            piece.features.append(np.array(record.features, np.uint16))
            num_bytes = piece.token_ids[-1].nbytes + piece.features[-1].nbytes
            piece.num_bytes += num_bytes
            self._open_bytes += num_bytes
            piece.end = record.start + len(record.token_ids)
            piece.version = min(piece.version, record.target_version)
        if piece is None:
            return done
        if record.finish_reason is None:
            self._open[name] = piece
        else:
            self._open_bytes -= piece.num_bytes
            done.append((piece, record.finish_reason in _COMPLETE))
        return done

    def _begin(self, record: TapRecord) -> _Piece:
        return _Piece(
            request_id=record.request_id,
            sample_index=record.sample_index,
            group=record.group_id,
            prompt_len=record.prompt_len,
            start=record.start,
            version=record.target_version,
            rl_step=self._rl_step,
            end=record.start,
        )

    def _cut_for_room(self) -> list[tuple[_Piece, bool]]:
        cut: list[tuple[_Piece, bool]] = []
        while self._open_bytes > self._max_open_bytes:
            piece = self._open.pop(next(iter(self._open)))
            self._open_bytes -= piece.num_bytes
            self._counts["cut"] += 1
            cut.append((piece, False))
        return cut

    def _hand_on(self, pieces: Sequence[tuple[_Piece, bool]]) -> None:
        for piece, is_finished in pieces:
            num_tokens = piece.end - piece.start
            if num_tokens < self._min_tokens:
                self._counts["too_short"] += 1
                self._counts["too_short_tokens"] += num_tokens
                continue
            sequence = TrainingSequence(
                key=f"{self._source}/{piece.rl_step}/{piece.request_id}/{piece.sample_index}@{piece.start}",
                start=piece.start,
                prompt_len=piece.prompt_len,
                token_ids=np.concatenate(piece.token_ids),
                features=np.concatenate(piece.features),
                target_version=piece.version,
                rl_step=piece.rl_step,
                is_finished=is_finished,
                group=piece.group,
            )
            self._counts["sequences"] += 1
            self._sink(sequence)

    # ---- in the background

    def start(self, interval_s: float = 0.05) -> None:
        """Poll in a thread, ``interval_s`` apart while there is nothing.

        Raises:
            ValueError: it is running already.
        """
        if self._thread is not None:
            raise ValueError("the collector is running already; stop it first")
        self._stop.clear()
        self._error = None
        self._thread = threading.Thread(
            target=self._run, args=(interval_s,), name="tlt-collector", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread, after what the tap holds now. Without effect when none runs.

        Raises:
            BaseException: what ended the thread before, if it did: an error of the reader or of the sink. The engine does
                not notice: its tap drops what nobody reads.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stop.set()
        thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        self.poll()

    @property
    def error(self) -> BaseException | None:
        """What has ended the thread, None while it runs."""
        return self._error

    def _run(self, interval_s: float) -> None:
        try:
            while not self._stop.is_set():
                if not self.poll(_RECORDS_AT_ONCE):
                    self._stop.wait(interval_s)
        except BaseException as error:  # handed to who calls stop()
            logger.error("the collector has ended: %r", error)
            self._error = error
