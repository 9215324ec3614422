"""What a training run measured, step by step: lines of JSON always, TensorBoard where it is installed.

Owns ``metrics.jsonl`` and the event files below ``tensorboard/`` of one directory. Knows nothing of what the numbers
mean. Invariant: the steps of the lines never go down, also after a resume: lines of steps that a run is going to do
again are cut off before it writes its first one.

A line is ``{"step": 12, "unix_s": 1.7e9, "loss": 2.5, ...}``. JSON has no NaN and no infinities: they are written as
the strings "nan", "inf" and "-inf", which ``read_rows`` turns back into floats.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)

FILE = "metrics.jsonl"
RESERVED = ("step", "unix_s")


class MetricsLog:
    """The writer of one run. Not for several threads; one process writes."""

    def __init__(
        self, directory: str | Path, *, tensorboard: bool = True, resume_step: int | None = None
    ) -> None:
        """Opens the log of a new run, or that of a run which goes on after ``resume_step``.

        Args:
            tensorboard: write event files too; without the package ``tensorboard`` one warning says so.
            resume_step: last step that counts, from the checkpoint; lines of later steps are dropped (the file is
                replaced at once or not at all), and TensorBoard is told to. None is a new run.

        Raises:
            ValueError: a new run in a directory that has lines of another.
        """
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.path = self.directory / FILE
        self.num_failed = 0
        if resume_step is None and self.path.exists() and self.path.stat().st_size:
            raise ValueError(
                f"{self.path} has the lines of another run; resume that run, or give another directory"
            )
        self._last_step = -1
        if resume_step is not None:
            self._last_step = _cut(self.path, resume_step)
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the log
        self._is_torn = False
        self._events = _summary_writer(self.directory, resume_step) if tensorboard else None

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def has_tensorboard(self) -> bool:
        return self._events is not None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One line, handed to the operating system when this returns, and one event for each value.

        A line that cannot be written (a full disk) is counted in ``num_failed`` and warned of once: it must not end
        the run. Several lines of one step are fine.

        Raises:
            ValueError: a step below that of the last line, or a value named ``step`` or ``unix_s``.
        """
        if step < self._last_step:
            raise ValueError(
                f"step is {step}, the last line has {self._last_step}; steps never go down"
            )
        if taken := sorted(set(RESERVED) & set(values)):
            raise ValueError(
                f"a value is named {taken[0]!r}, which each line has already; rename it"
            )
        self._last_step = step
        now_s = time.time()
        plain = {name: float(value) for name, value in values.items()}
        row = {"step": step, "unix_s": now_s} | {name: _as_json(x) for name, x in plain.items()}
        try:
            self._append(json.dumps(row, allow_nan=False).encode() + b"\n")
            if self._events is not None:
                for name, value in plain.items():
                    self._events.add_scalar(name, value, step, walltime=now_s)
                self._events.flush()
        except OSError as error:
            if not self.num_failed:
                logger.warning("metrics are not written to %s: %s", self.directory, error)
            self.num_failed += 1

    def close(self) -> None:
        """Closes the files; a second time does nothing."""
        self._file.close()
        if self._events is not None:
            self._events.close()

    def _append(self, line: bytes) -> None:
        if self._is_torn:  # ends what a failed write left, so that it spoils one line only
            line = b"\n" + line
        self._is_torn = True
        num_written = self._file.write(line)
        if num_written != len(line):
            raise OSError(f"{num_written} of {len(line)} bytes of a line were written")
        self._is_torn = False


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a ``metrics.jsonl``, in order: ``step`` an int, all else floats.

    A line that a kill or a full disk cut off is left out with a warning.
    """
    rows = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        try:
            row = json.loads(line)
            rows.append({key: row[key] if key == "step" else float(row[key]) for key in row})
        except (ValueError, TypeError):
            logger.warning("%s: line %d is cut off or damaged; left out", path, number)
    return rows


def _cut(path: Path, resume_step: int) -> int:
    """Drops lines of later steps and broken ones; the last step that stays, or -1."""
    if not path.exists():
        return -1
    kept, last_step = [], -1
    lines = path.read_bytes().splitlines(keepends=True)
    for line in lines:
        try:
            step = json.loads(line)["step"]
        except (ValueError, TypeError, KeyError):
            logger.warning("%s: a line that is cut off or damaged is dropped", path)
            continue
        if step <= resume_step and line.endswith(b"\n"):
            kept.append(line)
            last_step = max(last_step, step)
    if len(kept) != len(lines):
        temporary = path.with_name(f".{path.name}.tmp")
        with open(temporary, "wb") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    return last_step


def _as_json(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _summary_writer(directory: Path, resume_step: int | None) -> SummaryWriter | None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        logger.warning(
            "TensorBoard is not installed: metrics go to %s only; for event files: pip install 'tlt-engine[train]'",
            directory / FILE,
        )
        return None
    return SummaryWriter(
        str(directory / "tensorboard"),
        purge_step=None if resume_step is None else resume_step + 1,
    )
