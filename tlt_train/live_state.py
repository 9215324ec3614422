"""What a live run leaves for the next one beside its checkpoints: its buffer's sequences, and how far rollouts were.

Owns ``live.json`` and the directory of sequences, which is one like those of ``tlt drafter data``. Knows nothing of
engines or trainers. Invariant: each is replaced as a whole, so that a kill leaves the former or the new one.
"""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from tlt_train.buffer import DataBuffer
from tlt_train.generate import DataOptions
from tlt_train.shards import ShardReader, ShardWriter

logger = logging.getLogger(__name__)

_FILE = "live.json"


@dataclass(slots=True)
class LiveState:
    """How far rollouts are.

    Attributes:
        round: the next one.
        version: of the drafter's weights last published.
        num_asked: prompts taken.
    """

    round: int = 0
    version: int = 0
    num_asked: int = 0


def refill(
    buffer: DataBuffer, directory: Path, state: LiveState, target_fingerprint: str = ""
) -> None:
    """Put back what the buffer of a former run held; data that are damaged or of other weights stay out, with a warning."""
    buffer.set_step(max(state.round - 1, 0), 0)
    _finish_swap(directory)
    if not directory.exists():
        return
    try:
        reader = ShardReader(directory, verify=True)
    except ValueError as error:
        logger.warning("the buffer begins empty: %s", error)
        return
    if reader.meta.target_fingerprint not in ("", target_fingerprint):
        logger.warning(
            "the buffer begins empty: %s has hidden states of other weights than the target has now",
            directory,
        )
        return
    for sequence in reader:
        buffer.add(sequence)


def _aside(directory: Path) -> tuple[Path, Path]:
    """(what is to become ``directory``, what it was before): a kill may leave either, or both and no ``directory``."""
    return directory.with_name(".data-new"), directory.with_name(".data-former")


def _finish_swap(directory: Path) -> None:
    """What a kill between the two renames of ``write_data`` left: the new one is whole, since its writer renamed it."""
    for path in _aside(directory):
        if not directory.exists() and path.exists():
            path.rename(directory)


def write_data(
    directory: Path,
    buffer: DataBuffer,
    tap_layers: tuple[int, ...],
    hidden_size: int,
    target: str,
    wanted: DataOptions,
    target_fingerprint: str = "",
) -> None:
    """The buffer's sequences as a directory like those of ``tlt drafter data``, in place of a former one."""
    sequences = buffer.sequences()
    if not sequences:
        return
    new, former = _aside(directory)
    for path in (new, former):
        shutil.rmtree(path, ignore_errors=True)
    with ShardWriter(
        new,
        tap_layers=tap_layers,
        hidden_size=hidden_size,
        target=target,
        target_fingerprint=target_fingerprint,
        sampling={"temperatures": list(wanted.temperatures), "max_tokens": wanted.max_tokens},
        tasks=wanted.tasks,
    ) as writer:
        for sequence in sequences:
            writer.add(sequence)
    if directory.exists():
        directory.rename(former)
    new.rename(directory)
    shutil.rmtree(former, ignore_errors=True)


def read_state(out: Path) -> LiveState:
    """How far the last run in ``out`` was; the beginning where there was none.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        return LiveState(**json.loads((out / _FILE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return LiveState()
    except (ValueError, TypeError) as error:
        raise ValueError(f"{out / _FILE} is damaged ({error}); give another --out") from error


def write_state(out: Path, state: LiveState) -> None:
    """In place of a former one."""
    temporary = out / f".{_FILE}.tmp"
    temporary.write_text(json.dumps(asdict(state)), encoding="utf-8")
    temporary.replace(out / _FILE)
