"""Checkpoints of what trains: staged in memory, written in the background, whole or not there.

Owns a directory of ``step-00000123`` directories: who writes, in which order, what stays, what is resumed. Knows
nothing of the files' layout, nor of what tensors and state mean: the trainer gives only what trains (weights of the
drafter, moments of its optimiser) and gets it back bit by bit. Invariant: a directory of that name was written, synced
and renamed as a whole; whatever happens to it afterwards is found by its checksums, and then an older one is used.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from tlt_train.checkpoint_file import (
    Checkpoint,
    Layout,
    fill,
    layout_of,
    load_checkpoint,
    step_name,
    sync_directory,
    write_checkpoint,
)

logger = logging.getLogger(__name__)

LOCK_WAIT_S = 5.0  # a reader that opens the store holds the lock for as long as it cleans up

_STEP_NAME = re.compile(r"step-(\d{8,})")


@dataclass(slots=True)
class _Slot:
    """One staging buffer, reused; ``write`` is the write that reads it."""

    buffer: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    write: Future[None] | None = None

    @property
    def is_writing(self) -> bool:
        return self.write is not None and not self.write.done()

    def make_room(self, tensors: Mapping[str, Tensor], layout: Layout) -> None:
        """Pinned where tensors come from an accelerator; touched, since the first touch of a page is what costs."""
        if self.buffer.numel() < layout.num_bytes:
            pinned = any(tensor.is_cuda for tensor in tensors.values())
            self.buffer = torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=pinned)
            self.buffer.zero_()


class CheckpointStore:
    """The checkpoints in one directory; one process saves, any may read."""

    def __init__(self, directory: str | Path, *, keep: int = 3) -> None:
        """Makes the directory, and clears what a writer that died has left.

        Args:
            keep: whole checkpoints to leave, the newest ones, at least 1.

        Raises:
            ValueError: keep below 1.
        """
        if keep < 1:
            raise ValueError(f"keep is {keep}; give the number of checkpoints to leave, at least 1")
        self.directory, self.keep = Path(directory), keep
        self.directory.mkdir(parents=True, exist_ok=True)
        self.stall_s = 0.0  # of the last save: what the caller waited
        self.write_s = 0.0  # of the last finished write, in the background
        self.num_saved = self.num_failed = 0
        self._error: Exception | None = None
        self._slots = [
            _Slot(),
            _Slot(),
        ]  # one is filled while the other is written; [0] was used last
        self._writer = ThreadPoolExecutor(1, "checkpoint")  # finishes its work before Python exits
        self._lock_fd = self._lock(wait_s=0.0)
        if self._lock_fd is not None:
            self._clear_leftovers()
            self._unlock()

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def own(self) -> None:
        """Takes the directory for this store until ``close``, as the first save does.

        Raises:
            ValueError: another process saves here.
        """
        try:
            self._own()
        except OSError as error:
            raise ValueError(f"{error}, or wait until it has ended") from error

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Makes the staging memory for such tensors now, so that the first save is not the one that waits for it."""
        self._slots[0].make_room(tensors, layout_of(tensors))

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Copies everything and returns; the write goes on in the background, in the order of the calls.

        Waits only while both staging buffers are still being written; ``stall_s`` has what this call took. A write
        that fails is logged and counted (``num_failed``), and raised by the next ``wait`` or ``close`` unless a later
        one has succeeded by then; saving goes on meanwhile. The same step again replaces the former. Checkpoints of later steps, which a run that resumed
        from an older one has abandoned, are set aside under another name, so that no later resume takes them up.

        Args:
            tensors: any device; copied, so training may go on in place.
            state: what JSON can hold; copied as JSON text here.

        Raises:
            ValueError: a negative step, a state that is no JSON, a dtype that the file format lacks.
            OSError: another process saves here.
        """
        begin_s = time.perf_counter()
        if step < 0:
            raise ValueError(f"step is {step}; give the number of steps taken, at least 0")
        layout = layout_of(tensors)
        try:
            state_text = json.dumps(dict(state))
        except TypeError as error:
            raise ValueError(
                f"state cannot be written as JSON: {error}; give plain values"
            ) from error
        self._own()
        if self._slots[0].is_writing:
            self._slots.reverse()  # the other one is free, or the first to become so
        slot = self._slots[0]
        if slot.write is not None:
            slot.write.exception()  # waits; the error itself is kept by the writer
        slot.make_room(tensors, layout)
        parts = [layout.head, fill(slot.buffer, tensors, layout)]
        slot.write = self._writer.submit(self._write, step, parts, state_text)
        self.stall_s = time.perf_counter() - begin_s

    def wait(self) -> None:
        """Returns when every save so far has ended. Raises OSError, once, if the newest of them failed."""
        for slot in self._slots:
            if slot.write is not None:
                slot.write.exception()
        error, self._error = self._error, None
        if error is not None:
            raise OSError(f"a checkpoint in {self.directory} was not written: {error}") from error

    def close(self) -> None:
        """Waits, and lets another process save here; raises like ``wait``. Saving again opens it again."""
        try:
            self.wait()
        finally:
            self._unlock()

    def steps(self) -> list[int]:
        """Steps of the checkpoints on disk, ascending, unverified."""
        names = (_STEP_NAME.fullmatch(path.name) for path in self.directory.iterdir())
        return sorted(int(name[1]) for name in names if name and name[0] == step_name(int(name[1])))

    def load(self, step: int) -> Checkpoint:
        """The checkpoint of ``step``; every byte is checked first. Raises ValueError that says what is damaged."""
        return load_checkpoint(self.directory / step_name(step))

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint on disk, or None; damaged ones are skipped with a warning that says why.

        What is still being written is not looked at: ``wait`` first.
        """
        for step in reversed(self.steps()):
            try:
                return self.load(step)
            except ValueError as error:
                if (self.directory / step_name(step)).exists():  # else a writer has just pruned it
                    logger.warning("checkpoint skipped: %s", error)
        return None

    def _write(self, step: int, parts: list[bytes | memoryview], state_text: str) -> None:
        """In the writer's thread. The broad except is the trainer's boundary: a full disk must not end a run."""
        begin_s = time.perf_counter()
        temporary = self.directory / f".tmp-{step_name(step)}"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            write_checkpoint(temporary, step, parts, state_text)
            self._publish(temporary, step)
            self.num_saved += 1
            self._error = None  # what failed before is no loss any more
            self.write_s = time.perf_counter() - begin_s
        except Exception as error:
            self.num_failed += 1
            self._error = error
            logger.error("checkpoint of step %d was not written: %s", step, error)
            with contextlib.suppress(OSError):
                self._clear_leftovers()

    def _publish(self, temporary: Path, step: int) -> None:
        """Renames into place, then prunes; a former one of that step stands until the new one can take its name."""
        path = self.directory / step_name(step)
        former = self.directory / f".old-{path.name}"
        if path.exists():
            shutil.rmtree(former, ignore_errors=True)
            path.rename(former)
        temporary.rename(path)
        sync_directory(self.directory)
        shutil.rmtree(former, ignore_errors=True)
        steps = self.steps()
        for later in (other for other in steps if other > step):
            _set_aside(self.directory / step_name(later))
        for old in [other for other in steps if other <= step][: -self.keep]:
            # renamed first, so that a kill in between leaves no half of one under its name
            pruned = self.directory / f".tmp-pruned-{old}"
            shutil.rmtree(pruned, ignore_errors=True)
            (self.directory / step_name(old)).rename(pruned)
            shutil.rmtree(pruned, ignore_errors=True)

    def _clear_leftovers(self) -> None:
        """Of a dead writer, under the lock: half-written ones go, one whose replacement never came returns."""
        for path in self.directory.glob(".old-step-*"):
            replaced = self.directory / path.name.removeprefix(".old-")
            if not replaced.exists():
                path.rename(replaced)
        for path in [*self.directory.glob(".old-step-*"), *self.directory.glob(".tmp-*")]:
            logger.info("removing what an interrupted save left: %s", path)
            shutil.rmtree(path, ignore_errors=True)

    def _own(self) -> None:
        if self._lock_fd is None:
            self._lock_fd = self._lock(LOCK_WAIT_S)
            if self._lock_fd is None:
                raise OSError(
                    f"another process saves checkpoints in {self.directory}; give another directory"
                )

    def _lock(self, wait_s: float) -> int | None:
        """The directory's lock, or None; the kernel drops it with the process, however that ends."""
        fd = os.open(self.directory / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        deadline_s = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return fd
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    os.close(fd)
                    return None
                time.sleep(0.01)

    def _unlock(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def _set_aside(path: Path) -> None:
    """Renames a checkpoint of a course that was left."""
    number = 1
    while (target := path.with_name(f"abandoned-{number}-{path.name}")).exists():
        number += 1
    logger.warning("%s is of a later step than the one saved now; renamed to %s", path, target.name)
    path.rename(target)
