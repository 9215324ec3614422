"""The files of one checkpoint: how tensors lie in memory and on disk, and what proves that they are whole.

Owns the layout and the checksums. Knows nothing of directories of checkpoints or of threads. Invariant: a flip of
any byte that is read, a missing byte or a missing file makes ``load_checkpoint`` raise, never return other values.

``tensors.safetensors`` loads with the safetensors package; it is written by hand because a staging buffer in the
format's own layout goes to disk without a second copy, and because write, fsync and crc32 let other threads run.
``state.json`` has step, state, and size and CRC-32 of the tensors, under a CRC-32 of its own.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

TENSORS, STATE = "tensors.safetensors", "state.json"
FORMAT = 1
WRITE_BYTES = 8 << 20  # of one checksum and write

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One that was verified and loaded."""

    step: int
    tensors: dict[str, Tensor]  # on the CPU, private to the caller
    state: dict[str, Any]  # as JSON gives it back: tuples are lists, keys are strings
    path: Path


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each tensor lies in the data of a file, and the file's head, which says so."""

    spans: Mapping[str, tuple[int, int]]  # begin and end in bytes
    head: bytes
    num_bytes: int


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """Wide items first, so that each offset is aligned. Raises ValueError for a dtype that the format lacks."""
    spans: dict[str, tuple[int, int]] = {}
    entries: dict[str, Any] = {}
    end = 0
    for name in sorted(tensors, key=lambda key: (-tensors[key].element_size(), key)):
        tensor = tensors[name]
        if tensor.dtype not in _DTYPES:
            raise ValueError(
                f"tensor {name!r} is {tensor.dtype}; give one of {', '.join(map(str, _DTYPES))}"
            )
        begin, end = end, end + tensor.numel() * tensor.element_size()
        spans[name] = (begin, end)
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the data to 8 bytes
    return Layout(spans, len(text).to_bytes(8, "little") + text, end)


def fill(buffer: Tensor, tensors: Mapping[str, Tensor], layout: Layout) -> memoryview:
    """Copies the tensors into the buffer (uint8, at least layout.num_bytes); the view of what is the file's data."""
    on_cuda = any(tensor.is_cuda for tensor in tensors.values())
    for name, (begin, end) in layout.spans.items():
        tensor, target = tensors[name].detach(), buffer[begin:end]
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            # one thread: a parallel copy of each tensor waits for whichever core is busy, and on a busy machine
            # that took ten times as long, against 13 ms and 5 ms for 120 MB on an idle one
            np.copyto(target.numpy(), tensor.view(-1).view(torch.uint8).numpy())
        else:
            target.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=on_cuda)
    if on_cuda:
        torch.cuda.synchronize()
    return buffer.numpy().data[: layout.num_bytes]


def write_checkpoint(
    path: Path, step: int, parts: Iterable[bytes | memoryview], state: str
) -> None:
    """Writes and syncs both files into the empty directory ``path``; ``state`` is JSON text."""
    num_bytes, checksum = _write_file(path / TENSORS, parts)
    body = (
        f'{{"format": {FORMAT}, "step": {step}, "num_bytes": {num_bytes}, "crc32": {checksum}, '
        f'"state": {state}}}'
    ).encode()
    _write_file(path / STATE, [_state_head(body), body, b"}\n"])
    sync_directory(path)


def load_checkpoint(path: Path) -> Checkpoint:
    """One directory, verified byte by byte and loaded.

    Raises:
        ValueError: names the file and what is wrong with it.
    """
    state_path, tensors_path = path / STATE, path / TENSORS
    try:
        raw = state_path.read_bytes()
        body = raw[len(_state_head(b"")) : -2]
        if raw != _state_head(body) + body + b"}\n":
            raise ValueError(f"{state_path} is damaged (its checksum differs)")
        record = json.loads(body)
        if record["format"] != FORMAT or path.name != step_name(record["step"]):
            raise ValueError(
                f"{state_path} is of step {record['step']} in format {record['format']};"
                f" its directory says otherwise, or this version reads only format {FORMAT}"
            )
        num_bytes, checksum = _checksum(tensors_path)
        if num_bytes != record["num_bytes"]:
            raise ValueError(
                f"{tensors_path} has {num_bytes} bytes, {record['num_bytes']} were written"
            )
        if checksum != record["crc32"]:
            raise ValueError(f"{tensors_path} is damaged (its checksum differs)")
        return Checkpoint(record["step"], load_file(tensors_path), record["state"], path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _state_head(body: bytes) -> bytes:
    return f'{{"crc32": "{zlib.crc32(body):08x}", "body": '.encode()


def _write_file(path: Path, parts: Iterable[bytes | memoryview]) -> tuple[int, int]:
    """(bytes, CRC-32) of what was written and synced."""
    num_bytes = checksum = 0
    with open(path, "wb", buffering=0) as file:
        for part in parts:
            view = memoryview(part)
            for begin in range(0, len(view), WRITE_BYTES):
                chunk = view[begin : begin + WRITE_BYTES]
                checksum = zlib.crc32(chunk, checksum)
                num_bytes += len(chunk)
                while len(chunk):
                    chunk = chunk[file.write(chunk) :]
        os.fsync(file.fileno())
    return num_bytes, checksum


def _checksum(path: Path) -> tuple[int, int]:
    num_bytes = checksum = 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(WRITE_BYTES):
            num_bytes += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return num_bytes, checksum
