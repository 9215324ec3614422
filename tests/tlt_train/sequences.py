"""Sequences that tell where they are from: every cell is a function of the key, the true position and the column.

Owns the making and the reading of them. Knows nothing of what is tested. Invariant: ``assert_true`` fails for rows of
another sequence or shifted by one.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from tlt_train.sequence import TrainingSequence, TrainingWindow

WIDTH = 6  # two taps and the final state of hidden size 2


def tokens_of(key: str, start: int, end: int) -> np.ndarray:
    seed = zlib.crc32(key.encode()) % 1000
    return ((np.arange(start, end) * 7 + seed) % 50_000).astype(np.int32)


def features_of(key: str, start: int, end: int, width: int = WIDTH) -> np.ndarray:
    seed = zlib.crc32(key.encode()) % 1000
    cells = np.arange(start, end)[:, None] * width + np.arange(width) + 31 * seed
    return (cells % 2**16).astype(np.uint16)


def make(
    key: str, num_tokens: int, *, start: int = 0, prompt_len: int = 3, version: int = 0, **more: Any
) -> TrainingSequence:
    end = start + num_tokens
    return TrainingSequence(
        key=key,
        start=start,
        prompt_len=prompt_len,
        token_ids=tokens_of(key, start, end),
        features=features_of(key, start, end, more.pop("width", WIDTH)),
        target_version=version,
        **more,
    )


def assert_true(window: TrainingWindow) -> None:
    key, start, end = window.sequence.key, window.start, window.start + window.num_tokens
    np.testing.assert_array_equal(window.token_ids, tokens_of(key, start, end))
    width = window.features.shape[1]
    np.testing.assert_array_equal(window.features, features_of(key, start, end, width))


def whole(sequence: TrainingSequence) -> TrainingWindow:
    return TrainingWindow(sequence, 0, sequence.num_tokens)


def names(windows: list[TrainingWindow]) -> list[tuple[str, int, int]]:
    """What a draw gave, to compare."""
    return [(w.sequence.key, w.begin, w.end) for w in windows]
