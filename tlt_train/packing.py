"""Windows to tensors without padding: rows one after another, with the offset where each document starts.

Owns the layout of a packed batch and the parting of a draw into micro-batches. Knows nothing of attention: who reads
``doc_starts`` isolates the documents. Invariant: row i of every tensor is the same position of the same document, and
positions are those of the sample, not of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tlt_train.sequence import TrainingWindow


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """D documents of N rows in all; T taps of a target with hidden size H.

    ``taps`` and ``hidden`` are the columns of one [N, (T+1)*H] buffer: rows are contiguous, the whole is not.
    """

    token_ids: Tensor  # [N] int64
    positions: Tensor  # [N] int64, true positions
    doc_starts: tuple[int, ...]  # D+1 offsets into N, the first 0, the last N
    taps: Tensor  # [N, T*H] bf16
    hidden: Tensor  # [N, H] bf16
    in_response: Tensor  # [N] bool, position >= prompt_len

    @property
    def num_tokens(self) -> int:
        return self.doc_starts[-1]

    @property
    def num_docs(self) -> int:
        return len(self.doc_starts) - 1


def pack(windows: Sequence[TrainingWindow], *, num_taps: int, hidden_size: int) -> PackedBatch:
    """Concatenate windows: one copy of their features, which may be memory-mapped and read-only.

    Raises:
        ValueError: no windows, or features of another width than (num_taps + 1) * hidden_size.
    """
    if not windows:
        raise ValueError("windows is empty; a batch needs at least one")
    width = (num_taps + 1) * hidden_size
    for window in windows:
        if window.features.shape[1] != width:
            raise ValueError(
                f"features of {window.sequence.key!r} have width {window.features.shape[1]}, expected {width} = "
                f"(num_taps={num_taps} + 1) * hidden_size={hidden_size}; collect them with the drafter's tap layers"
            )
    lengths = np.array([window.num_tokens for window in windows])
    starts = np.array([window.start for window in windows])
    prompt_lens = np.array([window.sequence.prompt_len for window in windows])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    positions = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
    token_ids = np.concatenate([window.token_ids for window in windows]).astype(np.int64)
    # Always a fresh array, also for one window: torch must not hold (or warn about) a read-only map.
    bits = np.empty((int(offsets[-1]), width), np.uint16)
    np.concatenate([window.features for window in windows], out=bits)
    features = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    return PackedBatch(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        doc_starts=tuple(offsets.tolist()),
        taps=features[:, : num_taps * hidden_size],
        hidden=features[:, num_taps * hidden_size :],
        in_response=torch.from_numpy(positions >= np.repeat(prompt_lens, lengths)),
    )


def split(windows: Sequence[TrainingWindow], max_tokens: int) -> list[list[TrainingWindow]]:
    """Micro-batches of at most ``max_tokens`` tokens, by first-fit decreasing; each window in exactly one.

    A window longer than ``max_tokens`` is alone in its micro-batch. At most 11/9 of the best number of micro-batches,
    plus one (Johnson 1973). Equal lengths keep the draw's order, so the result is a function of the draw.

    Raises:
        ValueError: max_tokens is not positive.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    batches: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(windows)), key=lambda i: -windows[i].num_tokens):
        num_tokens = windows[i].num_tokens
        for j, free in enumerate(room):
            if num_tokens <= free:
                batches[j].append(i)
                room[j] -= num_tokens
                break
        else:
            batches.append([i])
            room.append(max_tokens - num_tokens)
    return [[windows[i] for i in sorted(batch)] for batch in batches]


def padded_tokens(windows: Sequence[TrainingWindow], max_tokens: int) -> int:
    """Rows that a padding trainer of the same micro-batch size computes for ``windows``; what packing is compared with.

    It has a fixed number of rows, as many as fit into ``max_tokens`` when one of them is the longest, takes the windows
    in their order, and pads each micro-batch to its own longest.
    """
    if not windows:
        return 0
    lengths = [window.num_tokens for window in windows]
    num_rows = max(1, max_tokens // max(lengths))
    parts = (lengths[i : i + num_rows] for i in range(0, len(lengths), num_rows))
    return sum(len(part) * max(part) for part in parts)
