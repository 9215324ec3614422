"""Training sequences on disk: one directory, written whole or not at all, features memory-mapped when read.

Owns the format (version 1):
- ``meta.json``: the version, ``ShardMeta``, and for every other file its bytes and CRC-32;
- ``index.json``: one entry a sequence (its fields, number of tokens, shard and first row there);
- ``tokens.bin``: int32, little-endian, the tokens of all sequences in the order of the index;
- ``shard-00000.bin``...: uint16, little-endian, rows of (taps + 1) * hidden size, the bits of bf16; a sequence lies
  whole in one shard.
Knows nothing of engines or sampling. Invariant: a directory of the given name is complete; files are written and synced
under a temporary name beside it, and the directory is renamed last.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from tlt_train.sequence import TrainingSequence

FORMAT_VERSION = 1
_META, _INDEX, _TOKENS = "meta.json", "index.json", "tokens.bin"
_FIELDS = ("key", "group", "start", "prompt_len", "target_version", "rl_step", "is_finished")


@dataclass(frozen=True, slots=True)
class ShardMeta:
    """What the sequences of a directory share. ``target`` names the model, ``target_fingerprint`` its weights."""

    tap_layers: tuple[int, ...]
    hidden_size: int
    target: str
    target_fingerprint: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    tasks: tuple[str, ...] = ()
    num_sequences: int = 0
    num_tokens: int = 0

    @property
    def width(self) -> int:
        """Features of a row: the taps and the final hidden state."""
        return (len(self.tap_layers) + 1) * self.hidden_size


class _CheckedFile:
    """A new file that counts its bytes and their CRC-32 as they are written."""

    def __init__(self, path: Path) -> None:
        self.name, self.num_bytes, self.crc = path.name, 0, 0
        self._file: BinaryIO = path.open("xb")

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self.num_bytes += len(data)
        self.crc = zlib.crc32(data, self.crc)

    def close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        self._file.close()


class ShardWriter:
    """Writes one directory; nothing of that name exists before ``close``. Not for several threads.

    As a context manager it closes at the end of the block, and leaves nothing behind if the block raises.

    Raises:
        ValueError: the directory is there already and not empty.
        OSError: it cannot be written.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        tap_layers: Sequence[int],
        hidden_size: int,
        target: str,
        target_fingerprint: str = "",
        sampling: Mapping[str, Any] | None = None,
        tasks: Sequence[str] = (),
        max_shard_bytes: int = 1 << 30,
    ) -> None:
        self.directory = Path(directory)
        _refuse_existing(self.directory)
        self._meta = ShardMeta(
            tuple(tap_layers),
            hidden_size,
            target,
            target_fingerprint,
            dict(sampling or {}),
            tuple(tasks),
        )
        self._max_shard_bytes = max_shard_bytes
        self._entries: list[dict[str, Any]] = []
        self._keys: set[str] = set()
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{self.directory.name}.part-"
        self._part: Path | None = Path(tempfile.mkdtemp(prefix=prefix, dir=self.directory.parent))
        self._tokens = _CheckedFile(self._part / _TOKENS)
        self._shards: list[_CheckedFile] = []
        self._num_tokens = 0

    def add(self, sequence: TrainingSequence) -> None:
        """Write one sequence.

        Raises:
            ValueError: the writer is closed, the width is another than the directory's, or the key was added before.
        """
        part = self._open_part()
        if sequence.features.shape[1] != self._meta.width:
            raise ValueError(
                f"sequence {sequence.key!r} has features of width {sequence.features.shape[1]}, {self.directory} holds "
                f"{self._meta.width} = ({len(self._meta.tap_layers)} taps + 1) * hidden_size {self._meta.hidden_size}"
            )
        if sequence.key in self._keys:
            raise ValueError(
                f"sequence key {sequence.key!r} was added to {self.directory} before; keys are unique"
            )
        row_bytes = self._meta.width * 2
        if not self._shards or self._shards[-1].num_bytes >= self._max_shard_bytes:
            if self._shards:
                self._shards[-1].close()
            self._shards.append(_CheckedFile(part / f"shard-{len(self._shards):05d}.bin"))
        shard = self._shards[-1]
        entry = {name: getattr(sequence, name) for name in _FIELDS}
        entry |= {
            "num_tokens": sequence.num_tokens,
            "shard": shard.name,
            "row": shard.num_bytes // row_bytes,
        }
        shard.write(_little_endian(sequence.features))
        self._tokens.write(_little_endian(sequence.token_ids))
        self._entries.append(entry)
        self._keys.add(sequence.key)
        self._num_tokens += sequence.num_tokens

    def close(self) -> None:
        """Finish the files and give the directory its name.

        Raises:
            ValueError: nothing was added, or the directory has come to exist meanwhile; nothing is left behind.
        """
        part = self._open_part()
        try:
            if not self._entries:
                raise ValueError(
                    f"{self.directory}: no sequence was added; there is nothing to write"
                )
            self._shards[-1].close()
            self._tokens.close()
            index = _CheckedFile(part / _INDEX)
            index.write(json.dumps(self._entries).encode())
            index.close()
            meta = dataclasses.replace(
                self._meta, num_sequences=len(self._entries), num_tokens=self._num_tokens
            )
            files = {
                file.name: {"bytes": file.num_bytes, "crc32": file.crc}
                for file in (index, self._tokens, *self._shards)
            }
            document = {
                "format_version": FORMAT_VERSION,
                **dataclasses.asdict(meta),
                "files": files,
            }
            last = _CheckedFile(part / _META)
            last.write(json.dumps(document, indent=1).encode())
            last.close()
            _refuse_existing(self.directory)
            part.rename(self.directory)
            self._part = None
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Forget what was written; without effect once closed."""
        part, self._part = self._part, None
        if part is not None:
            for file in (self._tokens, *self._shards):
                file.abandon()
            shutil.rmtree(part, ignore_errors=True)

    def _open_part(self) -> Path:
        if self._part is None:
            raise ValueError(f"the writer of {self.directory} is closed")
        return self._part

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.abandon()
        elif self._part is not None:
            self.close()


class ShardReader(Sequence[TrainingSequence]):
    """The sequences of a directory, in the order they were written; features are read-only memory maps.

    Sizes of all files and the checksums of index and tokens are always compared; ``verify`` reads the features as
    well to compare theirs.

    Raises:
        ValueError: names the file that is missing, cut off, damaged or of another format.
    """

    def __init__(self, directory: str | os.PathLike[str], *, verify: bool = False) -> None:
        self.directory = Path(directory)
        document = _read_json(self.directory / _META)
        self.meta, self._files = _parse_meta(self.directory / _META, document)
        for name in self._files:
            self._check_size(name)
        for name in self._files if verify else (_INDEX, _TOKENS):
            self._check_crc(name)
        self.sequences = self._load()

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: Any) -> Any:
        return self.sequences[index]

    def __iter__(self) -> Iterator[TrainingSequence]:
        return iter(self.sequences)

    def _check_size(self, name: str) -> None:
        path = self.directory / name
        if not path.is_file():
            raise ValueError(
                f"{path} is missing; {self.directory} is not whole, make the data again"
            )
        size, expected = path.stat().st_size, self._files[name][0]
        if size != expected:
            what = "is cut off" if size < expected else "is too long"
            raise ValueError(
                f"{path} {what}: it has {size} bytes, meta.json says {expected}; make the data again"
            )

    def _check_crc(self, name: str) -> None:
        crc = 0
        with (self.directory / name).open("rb") as file:
            while block := file.read(1 << 22):
                crc = zlib.crc32(block, crc)
        if crc != self._files[name][1]:
            raise ValueError(
                f"{self.directory / name} is damaged: its checksum is not that of meta.json; make the data again"
            )

    def _load(self) -> list[TrainingSequence]:
        path = self.directory / _INDEX
        maps = {
            name: np.memmap(self.directory / name, dtype="<u2", mode="r").reshape(
                -1, self.meta.width
            )
            for name in self._files
            if name.startswith("shard-")
        }
        tokens = np.fromfile(self.directory / _TOKENS, dtype="<i4").astype(np.int32, copy=False)
        tokens.flags.writeable = False
        sequences: list[TrainingSequence] = []
        at = 0
        try:
            for entry in _read_json(path):
                num_tokens, row = entry["num_tokens"], entry["row"]
                sequences.append(
                    TrainingSequence(
                        **{name: entry[name] for name in _FIELDS},
                        token_ids=tokens[at : at + num_tokens],
                        features=np.asarray(maps[entry["shard"]][row : row + num_tokens]),
                    )
                )
                at += num_tokens
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is not an index of format {FORMAT_VERSION}: {error!r}"
            ) from error
        if (at, len(sequences)) != (self.meta.num_tokens, self.meta.num_sequences):
            raise ValueError(
                f"{path} has {len(sequences)} sequences of {at} tokens, meta.json says "
                f"{self.meta.num_sequences} of {self.meta.num_tokens}; make the data again"
            )
        return sequences


def _refuse_existing(directory: Path) -> None:
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} exists already; choose another name or remove it")


def _little_endian(array: np.ndarray) -> memoryview:
    if sys.byteorder == "big":
        array = array.byteswap()
    return np.ascontiguousarray(array).data.cast("B")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{path} is cut off or damaged: {error}") from error


def _parse_meta(path: Path, document: Any) -> tuple[ShardMeta, dict[str, tuple[int, int]]]:
    """The meta data, and (bytes, CRC-32) by file name."""
    version = document.get("format_version") if isinstance(document, dict) else None
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path}: format_version is {version!r}, this program reads {FORMAT_VERSION}; make the data again"
        )
    try:
        values = {entry.name: document[entry.name] for entry in dataclasses.fields(ShardMeta)}
        values |= {name: tuple(values[name]) for name in ("tap_layers", "tasks")}
        files = {name: (at["bytes"], at["crc32"]) for name, at in document["files"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a description of format {version}: {error!r}") from error
    for name in (_INDEX, _TOKENS):
        if name not in files:
            raise ValueError(f"{path} names no {name}; make the data again")
    return ShardMeta(**values), files
