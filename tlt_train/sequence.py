"""What a drafter learns from: contiguous positions of one sample, and windows of them.

Owns the two records, the rule by which a random window is cut, and how ranks part a draw. Knows nothing of files,
buffers or tensors. Invariant: row i of a sequence is the true position start + i, for the tokens as for the features;
a window is a range of such rows, so its positions are true as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSequence:
    """Contiguous positions of one sample.

    ``token_ids`` int32 [n], the tokens at positions start..start+n; ``features`` uint16 [n, W], the bits of bf16: the
    taps in the order of the drafter's tap layers, then the final normed hidden state, W = (taps + 1) * hidden size; it
    may be a read-only memory map. ``target_version`` is the oldest that made any of it; ``group`` is shared by the
    samples of one prompt. Two sequences are equal only if they are the same object; ``key`` names one.

    Raises:
        ValueError: names the field, what came and what it must be.
    """

    key: str
    start: int
    prompt_len: int
    token_ids: np.ndarray
    features: np.ndarray
    target_version: int
    rl_step: int = 0
    is_finished: bool = True
    group: str = ""

    def __post_init__(self) -> None:
        if not self.key:
            raise ValueError("key is empty; give each sequence a unique name")
        if self.start < 0 or self.prompt_len < 0:
            raise ValueError(
                f"sequence {self.key!r}: start and prompt_len must be >= 0, got {self.start} and {self.prompt_len}"
            )
        for name, dtype, ndim in (("token_ids", np.int32, 1), ("features", np.uint16, 2)):
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != ndim:
                came = f"{getattr(array, 'dtype', type(array).__name__)} of shape {np.shape(array)}"
                raise ValueError(
                    f"sequence {self.key!r}: {name} must be a numpy array of {np.dtype(dtype)} with {ndim} "
                    f"dimension(s), got {came}"
                )
        if not 0 < len(self.token_ids) == len(self.features):
            raise ValueError(
                f"sequence {self.key!r}: token_ids and features must have the same number of rows, at least 1, "
                f"got {len(self.token_ids)} and {len(self.features)}"
            )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def total_len(self) -> int:
        """Length of the sample up to the last position here, in tokens from position 0."""
        return self.start + len(self.token_ids)

    @property
    def num_bytes(self) -> int:
        return self.token_ids.nbytes + self.features.nbytes


@dataclass(frozen=True, slots=True)
class TrainingWindow:
    """Rows begin..end of a sequence."""

    sequence: TrainingSequence
    begin: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.begin < self.end <= self.sequence.num_tokens:
            raise ValueError(
                f"window [{self.begin}, {self.end}) must be a part, not empty, of the "
                f"{self.sequence.num_tokens} rows of {self.sequence.key!r}"
            )

    @property
    def num_tokens(self) -> int:
        return self.end - self.begin

    @property
    def start(self) -> int:
        """True position of the first row."""
        return self.sequence.start + self.begin

    @property
    def token_ids(self) -> np.ndarray:
        return self.sequence.token_ids[self.begin : self.end]

    @property
    def features(self) -> np.ndarray:
        return self.sequence.features[self.begin : self.end]


def window_begin(num_tokens: int, window_len: int, uniform: float) -> int:
    """Where a window of ``window_len`` rows begins in a sequence of ``num_tokens``, for ``uniform`` in [0, 1).

    The middle of the window falls anywhere in the sequence and the window is then pushed inside it, so that the first
    and the last rows are seen about as often as those between (a begin drawn uniformly would hardly ever show them).
    """
    middle = uniform * num_tokens
    return int(min(max(middle - window_len / 2, 0), num_tokens - window_len))


def share_of_rank(windows: Sequence[TrainingWindow], rank: int, world: int) -> list[TrainingWindow]:
    """The windows of ``rank`` out of ``world``: disjoint parts of one draw, about equal in tokens.

    Longest first, each to the rank that has the fewest tokens so far; the order within a rank is the draw's. Ranks
    differ by at most the longest window. A draw of fewer windows than ranks leaves some ranks with none.

    Raises:
        ValueError: the rank is none of the world's.
    """
    if not 0 <= rank < world:
        raise ValueError(f"rank must be in [0, world), got rank={rank}, world={world}")
    if world == 1:
        return list(windows)
    loads = [0] * world
    mine: list[int] = []
    for i in sorted(range(len(windows)), key=lambda i: -windows[i].num_tokens):
        least = min(range(world), key=loads.__getitem__)
        loads[least] += windows[i].num_tokens
        if least == rank:
            mine.append(i)
    return [windows[i] for i in sorted(mine)]
