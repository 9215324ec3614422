"""DataBuffer: the sequences that a drafter learns from while rollouts go on, bounded in memory and on disk.

Owns which sequences are kept, and where. What a draw takes of them is ``stratified_draw.choose``; files are
``SpillStore``'s. Knows nothing of engines or tensors. Invariants: never more than ``max_bytes`` in memory and
``max_spill_bytes`` on disk once ``add`` returns; sequences are kept whole; what must go is the stalest by target
version, then the oldest; nothing but want of room removes a sequence: no session, no new step.
"""

from __future__ import annotations

import heapq
import logging
import os
import threading
from collections import Counter
from dataclasses import dataclass

import numpy as np

from tlt_train.sequence import TrainingSequence, TrainingWindow, share_of_rank
from tlt_train.spill import SpilledSequence, SpillStore
from tlt_train.strata import stratum_of
from tlt_train.stratified_draw import Columns, DrawRule, choose

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BufferStats:
    """Counts of a buffer: what it holds now, then, from ``num_evicted`` to ``num_replaced``, events since it was made.

    Strata are named by their least length, 2**k tokens.
    """

    num_sequences: int
    num_tokens: int
    memory_bytes: int
    spilled_bytes: int
    num_spilled: int  # on disk now
    num_evicted: int  # dropped for want of room
    num_failed_writes: int  # dropped because they could not be written
    num_lost_files: int  # dropped because their file was gone
    num_replaced: int  # added again under the same key
    sequences_by_stratum: dict[int, int]
    sequences_by_step: dict[int, int]
    drawn_tokens_by_stratum: dict[int, int]


@dataclass(slots=True, eq=False)
class _Entry:
    """One sequence: in memory, or on disk."""

    key: str
    order: int  # of arrival
    num_bytes: int
    num_tokens: int
    total_len: int
    version: int
    rl_step: int
    place: TrainingSequence | SpilledSequence

    @property
    def is_spilled(self) -> bool:
        return isinstance(self.place, SpilledSequence)

    @property
    def goes_first(self) -> tuple[int, int]:
        """The least of these is given up first."""
        return (self.version, self.order)


class DataBuffer:
    """A pool of sequences to draw windows from; ``add`` and ``draw`` may be called from different threads.

    Trainers that share a draw by rank must hold the same sequences.

    Args:
        max_bytes: of token ids and features in memory.
        spill_dir: where sequences beyond go, into a directory of the buffer's own that is removed with it; None drops
            them.
        max_spill_bytes: of them on disk.
        seed, max_window, stratum_power, max_version_lag, lag_decay, previous_step_share: of ``DrawRule``.

    Raises:
        ValueError: names the argument, what came and what is accepted.
        OSError: spill_dir cannot be made.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        spill_dir: str | os.PathLike[str] | None = None,
        max_spill_bytes: int = 16 << 30,
        seed: int = 0,
        max_window: int = 4096,
        stratum_power: float = 0.5,
        max_version_lag: int = 4,
        lag_decay: float = 0.5,
        previous_step_share: float = 0.5,
    ) -> None:
        for name, value in (("max_bytes", max_bytes), ("max_spill_bytes", max_spill_bytes)):
            if value < 0:
                raise ValueError(f"{name} must be at least 0, got {value}")
        self.max_bytes = max_bytes
        self.max_spill_bytes = max_spill_bytes
        self.rule = DrawRule(
            seed, max_window, stratum_power, max_version_lag, lag_decay, previous_step_share
        )
        self._spill = None if spill_dir is None else SpillStore(spill_dir)
        self._adding = threading.Lock()  # one adder at a time; taken before _lock
        self._lock = threading.Lock()  # of everything below; never held while a sequence is written
        self._rl_step = 0
        self._version = 0
        self._entries: dict[str, _Entry] = {}
        self._in_memory: list[tuple[tuple[int, int], str]] = []  # heaps; an item whose entry has
        self._on_disk: list[tuple[tuple[int, int], str]] = []  # moved or gone is passed over
        self._memory_bytes = 0
        self._spilled_bytes = 0
        self._num_added = 0
        self._counts: Counter[str] = Counter()
        self._drawn: Counter[int] = Counter()
        self._columns: tuple[list[_Entry], Columns] | None = None

    # ---- filling

    def add(self, sequence: TrainingSequence) -> None:
        """Take a sequence; one of the same key (a longer version of it) is replaced.

        Raises:
            ValueError: its features have another width than those here.
        """
        with self._adding:
            with self._lock:
                self._insert(sequence)
            while self._memory_bytes > self.max_bytes:
                self._make_room()

    def set_step(self, rl_step: int, target_version: int) -> None:
        """A new step of reinforcement learning begins; nothing is removed.

        Raises:
            ValueError: the step or the version goes back.
        """
        with self._lock:
            if rl_step < self._rl_step or target_version < self._version:
                raise ValueError(
                    f"steps and versions go up: the buffer is at step {self._rl_step}, version {self._version}, got "
                    f"rl_step={rl_step}, target_version={target_version}"
                )
            self._rl_step, self._version = rl_step, target_version

    def _insert(self, sequence: TrainingSequence) -> None:
        width = sequence.features.shape[1]
        for other in self._entries.values():
            place = other.place
            here = place.width if isinstance(place, SpilledSequence) else place.features.shape[1]
            if here != width:
                raise ValueError(
                    f"sequence {sequence.key!r} has features of width {width}, the buffer holds {here}; a buffer "
                    f"serves one drafter"
                )
            break
        if sequence.key in self._entries:
            self._remove(self._entries[sequence.key], "replaced")
        entry = _Entry(
            key=sequence.key,
            order=self._num_added,
            num_bytes=sequence.num_bytes,
            num_tokens=sequence.num_tokens,
            total_len=sequence.total_len,
            version=sequence.target_version,
            rl_step=sequence.rl_step,
            place=sequence,
        )
        self._num_added += 1
        self._entries[entry.key] = entry
        self._memory_bytes += entry.num_bytes
        heapq.heappush(self._in_memory, (entry.goes_first, entry.key))
        self._columns = None

    def _make_room(self) -> None:
        """One sequence leaves memory. Only an adder comes here, so the entry stays while it is written."""
        with self._lock:
            entry = self._first(self._in_memory, is_spilled=False)
            assert entry is not None, (self._memory_bytes, self.max_bytes)
            if self._spill is None or not self._clear_disk(entry):
                self._remove(entry, "evicted")
                return
        assert isinstance(entry.place, TrainingSequence)
        try:
            spilled = self._spill.write(entry.place)
        except OSError as error:
            logger.warning(
                "sequence %s is lost, it cannot be written to disk: %s", entry.key, error
            )
            with self._lock:
                self._remove(entry, "failed_writes")
            return
        with self._lock:
            entry.place = spilled
            self._memory_bytes -= entry.num_bytes
            self._spilled_bytes += entry.num_bytes
            heapq.heappush(self._on_disk, (entry.goes_first, entry.key))

    def _clear_disk(self, entry: _Entry) -> bool:
        """Make room on disk for ``entry`` out of what goes before it; whether there is room."""
        while self._spilled_bytes + entry.num_bytes > self.max_spill_bytes:
            first = self._first(self._on_disk, is_spilled=True)
            if (
                entry.num_bytes > self.max_spill_bytes
                or first is None
                or first.goes_first > entry.goes_first
            ):
                return False
            self._remove(first, "evicted")
        return True

    def _first(self, heap: list[tuple[tuple[int, int], str]], *, is_spilled: bool) -> _Entry | None:
        """The one that goes first; it stays on the heap."""
        while heap:
            goes_first, key = heap[0]
            entry = self._entries.get(key)
            if (
                entry is not None
                and entry.goes_first == goes_first
                and entry.is_spilled == is_spilled
            ):
                return entry
            heapq.heappop(heap)
        return None

    def _remove(self, entry: _Entry, why: str) -> None:
        del self._entries[entry.key]
        self._counts[why] += 1
        self._columns = None
        if isinstance(entry.place, SpilledSequence):
            assert self._spill is not None
            self._spilled_bytes -= entry.num_bytes
            self._spill.remove(entry.place)
        else:
            self._memory_bytes -= entry.num_bytes

    # ---- drawing

    def draw(
        self, num_tokens: int, key: int, *, rank: int = 0, world: int = 1
    ) -> list[TrainingWindow]:
        """Windows of at most ``num_tokens`` tokens over all ranks; a function of contents, step, seed and key.

        Neither the order of arrival nor what is on disk has a part in it. Fewer tokens come if there are not as many, or
        if files are lost; where a draw has lost all that it chose, it is made again from what is left. None come if
        nothing is fresh enough.

        Raises:
            ValueError: num_tokens is not positive, key is negative, or the rank is none of the world's.
        """
        if num_tokens < 1 or key < 0:
            raise ValueError(
                f"num_tokens must be at least 1 and key at least 0, got num_tokens={num_tokens}, key={key}"
            )
        with self._lock:
            windows: list[TrainingWindow] = []
            is_lost = True
            while is_lost and not windows:  # ends: what is lost is not there the next time
                windows, is_lost = self._windows(num_tokens, key)
            mine = share_of_rank(windows, rank, world)
            for window in mine:
                stratum = 1 << (window.sequence.total_len.bit_length() - 1)
                self._drawn[stratum] += window.num_tokens
        return mine

    def _windows(self, num_tokens: int, key: int) -> tuple[list[TrainingWindow], bool]:
        """What is chosen of the sequences here, and whether any of it turned out to be lost."""
        entries, columns = self._contents()
        choices = choose(
            columns,
            self.rule,
            rl_step=self._rl_step,
            version=self._version,
            num_tokens=num_tokens,
            key=key,
        )
        windows: list[TrainingWindow] = []
        for choice in choices:
            sequence = self._load(entries[choice.index])
            if sequence is not None:
                end = choice.begin + choice.num_tokens
                windows.append(TrainingWindow(sequence, choice.begin, end))
        return windows, len(windows) < len(choices)

    def sequences(self) -> list[TrainingSequence]:
        """All of them, by key: for a shard, or for ``FixedData``."""
        with self._lock:
            found = [self._load(entry) for entry in self._contents()[0]]
        return [sequence for sequence in found if sequence is not None]

    def _contents(self) -> tuple[list[_Entry], Columns]:
        if self._columns is None:
            entries = sorted(self._entries.values(), key=lambda entry: entry.key)
            table = np.array(
                [[e.num_tokens, e.total_len, e.version, e.rl_step] for e in entries], np.int64
            )
            self._columns = entries, Columns(*table.reshape(-1, 4).T)
        return self._columns

    def _load(self, entry: _Entry) -> TrainingSequence | None:
        if not isinstance(entry.place, SpilledSequence):
            return entry.place
        assert self._spill is not None
        try:
            return self._spill.load(entry.place)
        except OSError as error:
            logger.warning("sequence %s is lost: %s", entry.key, error)
            self._remove(entry, "lost_files")
            return None

    # ---- books

    def stats(self) -> BufferStats:
        with self._lock:
            entries, columns = self._contents()
            strata = Counter((1 << stratum_of(columns.total_lens)).tolist())
            return BufferStats(
                num_sequences=len(entries),
                num_tokens=int(columns.num_tokens.sum()),
                memory_bytes=self._memory_bytes,
                spilled_bytes=self._spilled_bytes,
                num_spilled=sum(entry.is_spilled for entry in entries),
                num_evicted=self._counts["evicted"],
                num_failed_writes=self._counts["failed_writes"],
                num_lost_files=self._counts["lost_files"],
                num_replaced=self._counts["replaced"],
                sequences_by_stratum=dict(sorted(strata.items())),
                sequences_by_step=dict(sorted(Counter(columns.rl_steps.tolist()).items())),
                drawn_tokens_by_stratum=dict(sorted(self._drawn.items())),
            )

    def check(self) -> None:
        """Assert the invariants; call it while no ``add`` runs."""
        with self._lock:
            spilled = {e.key: e.place for e in self._entries.values() if e.is_spilled}
            sizes = [0, 0]
            for entry in self._entries.values():
                sizes[entry.is_spilled] += entry.num_bytes
            assert sizes == [self._memory_bytes, self._spilled_bytes], (sizes, self._memory_bytes)
            assert self._memory_bytes <= self.max_bytes, (self._memory_bytes, self.max_bytes)
            assert self._spilled_bytes <= self.max_spill_bytes, self._spilled_bytes
            paths = {p.path for p in spilled.values() if isinstance(p, SpilledSequence)}
            assert len(paths) == len(spilled)
            if self._spill is not None:
                assert set(self._spill.directory.iterdir()) == paths, paths
            heaps = {key for _, key in self._in_memory} | {key for _, key in self._on_disk}
            assert set(self._entries) <= heaps

    def close(self) -> None:
        """Forget everything and remove the files. Windows that were drawn stay readable."""
        with self._adding, self._lock:
            for entry in list(self._entries.values()):
                self._remove(entry, "closed")
            if self._spill is not None:
                self._spill.close()
                self._spill = None

    def __enter__(self) -> DataBuffer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
