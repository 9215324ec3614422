"""What a head learns from, as it comes from directories of ``tlt drafter data``: read, checked, counted.

Owns which recorded sequences a run takes, and by what they are known again when it goes on. Knows nothing of heads
beyond the features that they read, nor of steps. Invariant: no sequence that leaves here has a number that is not
finite, since one of them makes every sum that it is in worthless.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.models.eagle_layout import EagleConfig
from tlt_train.fingerprint import check_data
from tlt_train.sequence import TrainingSequence
from tlt_train.shards import ShardReader

logger = logging.getLogger(__name__)

_EXPONENT = np.uint16(0x7F80)  # of bf16: all ones in infinities and NaN


def read_sequences(
    directories: Sequence[str], target: str
) -> tuple[list[TrainingSequence], tuple[int, ...]]:
    """(sequences of all directories, which must be of one kind; the layers that are tapped).

    Raises:
        ValueError: the data are of another target, of several kinds, or have nothing to learn from.
    """
    sequences: list[TrainingSequence] = []
    first = None
    for directory in directories:
        reader = ShardReader(directory)
        first = first or reader.meta
        if (reader.meta.tap_layers, reader.meta.hidden_size) != (
            first.tap_layers,
            first.hidden_size,
        ):
            raise ValueError(
                f"--data {directory} taps layers {list(reader.meta.tap_layers)} of hidden size "
                f"{reader.meta.hidden_size}, {directories[0]} layers {list(first.tap_layers)} of "
                f"{first.hidden_size}; train on data of one kind"
            )
        check_data(reader, target)
        sequences += [s for s in reader if s.num_tokens > 2]
    assert first is not None
    if not sequences:
        raise ValueError("the data have no sequence of more than two positions; generate more")
    finite = [s for s in sequences if _is_finite(s)]
    if not finite:
        raise ValueError(
            f"all {len(sequences)} sequences of the data have features that are not finite (NaN or infinite); "
            f"generate the data again"
        )
    if len(finite) < len(sequences):
        logger.warning(
            "%d of %d sequences have features that are not finite; left out",
            len(sequences) - len(finite),
            len(sequences),
        )
    return finite, first.tap_layers


def _is_finite(sequence: TrainingSequence) -> bool:
    return not bool(np.any((sequence.features & _EXPONENT) == _EXPONENT))


def with_features_of(
    head: EagleConfig, sequences: list[TrainingSequence]
) -> list[TrainingSequence]:
    """The features that a head reads: EAGLE-1 the final hidden state alone, whatever was tapped beside it."""
    if head.kind != "eagle":
        return sequences
    return [replace(s, features=s.features[:, -head.target_hidden_size :]) for s in sequences]


def check_taps(config: EagleConfig, tap_layers: tuple[int, ...]) -> None:
    """Raises ValueError where a head reads other layers than the data have."""
    if config.kind == "eagle3" and config.tap_layers != tap_layers:
        raise ValueError(
            f"the head reads layers {list(config.tap_layers)}, the data have {list(tap_layers)}; generate data with "
            f"--drafter"
        )


def check_responses(sequences: Sequence[TrainingSequence], *, learn_prompts: bool) -> None:
    """Raises ValueError where no row counts: ``DraftObjective`` learns tokens of responses alone."""
    if not learn_prompts and all(s.prompt_len >= s.total_len for s in sequences):
        raise ValueError(
            f"none of the {len(sequences)} sequences to train on has a response, so there is nothing to learn; "
            f"generate data with longer answers, or give --learn-prompts"
        )


def data_identity(sequences: Sequence[TrainingSequence]) -> dict[str, Any]:
    """Plain values by which the same data, in the same order, are known again: counts, and a hash of keys and lengths."""
    digest = hashlib.blake2b(digest_size=16)
    for s in sequences:
        text = f"{s.key}\0{s.start}\0{s.prompt_len}\0{s.num_tokens}\n"
        digest.update(text.encode("utf-8", "surrogatepass"))
    return {
        "num_sequences": len(sequences),
        "num_tokens": sum(s.num_tokens for s in sequences),
        "keys_and_lengths": digest.hexdigest(),
    }


def coverage(sequences: Iterable[TrainingSequence], ids: Tensor, vocab_size: int) -> float:
    """The share of tokens of responses that are among ``ids``."""
    known = torch.zeros(vocab_size, dtype=torch.bool)
    known[ids] = True
    hits = total = 0
    for sequence in sequences:
        cut = max(sequence.prompt_len - sequence.start, 0)
        found = known[torch.from_numpy(sequence.token_ids[cut:].astype("int64"))]
        hits, total = hits + int(found.sum()), total + found.shape[0]
    return hits / max(total, 1)
