"""DataBuffer under anything that can happen, against two sorted lists.

Owns the model. Knows nothing of how the buffer keeps its books. Invariant: after every step the buffer holds the very
sequences of the model, in memory and on disk as it says, and draws no other.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from unittest import mock

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.tlt_train.sequences import assert_true, make, names
from tlt_train.buffer import DataBuffer
from tlt_train.sequence import TrainingSequence
from tlt_train.spill import SpillStore

ROW_BYTES = make("x", 1).num_bytes


class BufferMachine(RuleBasedStateMachine):
    """Against lists: two of them, memory and disk, each sorted by (version, arrival)."""

    @initialize(memory=st.integers(0, 60), disk=st.sampled_from([None, 0, 15, 60]))
    def begin(self, memory: int, disk: int | None) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.memory_rows, self.disk_rows = memory, 0 if disk is None else disk
        self.buffer = DataBuffer(
            memory * ROW_BYTES,
            spill_dir=None if disk is None else self.directory,
            max_spill_bytes=self.disk_rows * ROW_BYTES,
            max_window=8,
        )
        self.has_disk = disk is not None
        self.arrivals = 0
        self.memory: list[tuple[int, int, TrainingSequence]] = []
        self.disk: list[tuple[int, int, TrainingSequence]] = []
        self.step = (0, 0)

    @rule(
        key=st.integers(0, 9),
        rows=st.integers(1, 25),
        version=st.integers(0, 5),
        fails=st.booleans(),
    )
    def add(self, key: int, rows: int, version: int, fails: bool) -> None:
        sequence = make(str(key), rows, version=version, rl_step=version)
        fails = fails and key % 3 == 0
        for place in (self.memory, self.disk):
            place[:] = [item for item in place if item[2].key != sequence.key]
        self.memory.append((version, self.arrivals, sequence))
        self.arrivals += 1
        self.memory.sort(key=lambda item: item[:2])
        while sum(item[2].num_tokens for item in self.memory) > self.memory_rows:
            self.leave(self.memory.pop(0), fails)
        if fails:
            with mock.patch.object(SpillStore, "write", side_effect=OSError("full")):
                self.buffer.add(sequence)
        else:
            self.buffer.add(sequence)

    def leave(self, item: tuple[int, int, TrainingSequence], fails: bool) -> None:
        """Memory to disk, or away."""
        size = item[2].num_tokens
        if not self.has_disk or size > self.disk_rows:
            return
        while sum(other[2].num_tokens for other in self.disk) + size > self.disk_rows:
            if self.disk[0][:2] > item[:2]:
                return
            self.disk.pop(0)
        if not fails:
            self.disk.append(item)
            self.disk.sort(key=lambda other: other[:2])

    @rule(by=st.integers(0, 2))
    def go_on(self, by: int) -> None:
        self.step = (self.step[0] + by, self.step[1] + by)
        self.buffer.set_step(*self.step)

    @rule(num_tokens=st.integers(1, 80), key=st.integers(0, 1000))
    def draw(self, num_tokens: int, key: int) -> None:
        fresh = {
            item[2].key: min(item[2].num_tokens, 8, num_tokens)
            for item in self.memory + self.disk
            if self.step[1] - item[0] <= 4
        }
        windows = self.buffer.draw(num_tokens, key)
        assert names(windows) == names(self.buffer.draw(num_tokens, key))
        keys = [window.sequence.key for window in windows]
        assert len(set(keys)) == len(keys)
        assert set(keys) <= set(fresh)
        size = sum(window.num_tokens for window in windows)
        assert size <= num_tokens
        if sum(fresh.values()) <= num_tokens:
            assert size == sum(fresh.values())
        for window in windows:
            assert_true(window)

    @invariant()
    def holds_what_it_should(self) -> None:
        if not hasattr(self, "buffer"):
            return
        self.buffer.check()
        found = {(s.key, s.num_tokens, s.target_version) for s in self.buffer.sequences()}
        expected = {(s.key, s.num_tokens, s.target_version) for _, _, s in self.memory + self.disk}
        assert found == expected
        stats = self.buffer.stats()
        assert stats.num_spilled == len(self.disk)
        assert stats.memory_bytes == ROW_BYTES * sum(s.num_tokens for _, _, s in self.memory)

    def teardown(self) -> None:
        if hasattr(self, "buffer"):
            self.buffer.close()
            shutil.rmtree(self.directory)


TestBufferMachine = BufferMachine.TestCase
TestBufferMachine.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
