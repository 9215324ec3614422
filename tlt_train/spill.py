"""Sequences on disk, one file each, for as long as their owner lives.

Owns the files of one directory and their layout: token ids (int32), then features (uint16), in the machine's byte
order. Knows nothing of why a sequence is written or which goes first. Invariant: a file that ``write`` returned is
whole; one that could not be written is not there. Windows of a sequence stay readable after its file was removed, since
its pages stay mapped.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tlt_train.sequence import TrainingSequence


@dataclass(frozen=True, slots=True)
class SpilledSequence:
    """Where a sequence is: its fields but for the arrays, and the file."""

    path: Path
    fields: dict[str, object]
    num_tokens: int
    width: int


class SpillStore:
    """A private directory below ``directory``, removed with the store.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        self.directory = Path(tempfile.mkdtemp(prefix="sequences-", dir=directory))
        self._num_written = 0
        self._finalizer = weakref.finalize(self, shutil.rmtree, self.directory, True)

    def write(self, sequence: TrainingSequence) -> SpilledSequence:
        """Write one sequence.

        Raises:
            OSError: it could not be written; no part of it is left.
        """
        path = self.directory / f"{self._num_written:08d}.bin"
        self._num_written += 1
        try:
            with path.open("xb") as file:
                for array in (sequence.token_ids, sequence.features):
                    file.write(np.ascontiguousarray(array).data.cast("B"))
        except OSError:
            path.unlink(missing_ok=True)
            raise
        fields = {
            field.name: getattr(sequence, field.name)
            for field in dataclasses.fields(sequence)
            if field.name not in ("token_ids", "features")
        }
        return SpilledSequence(path, fields, sequence.num_tokens, sequence.features.shape[1])

    def load(self, spilled: SpilledSequence) -> TrainingSequence:
        """The sequence, its arrays memory-mapped and read-only.

        Raises:
            OSError: the file is gone or has another size.
        """
        num_tokens, width = spilled.num_tokens, spilled.width
        expected = num_tokens * (4 + 2 * width)
        if (size := spilled.path.stat().st_size) != expected:
            raise OSError(f"{spilled.path} has {size} bytes, expected {expected}")
        cells = np.asarray(np.memmap(spilled.path, np.uint8, mode="r"))
        return TrainingSequence(
            **spilled.fields,  # type: ignore[arg-type]
            token_ids=cells[: 4 * num_tokens].view(np.int32),
            features=cells[4 * num_tokens :].view(np.uint16).reshape(num_tokens, width),
        )

    def remove(self, spilled: SpilledSequence) -> None:
        """Remove its file, if it is there."""
        spilled.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the directory. Idempotent."""
        self._finalizer()
