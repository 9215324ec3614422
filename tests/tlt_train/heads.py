"""What the tests of training share: tiny targets and heads, random sequences, trainers over them.

Owns the sizes (``tests/conftest.py``'s tiny Llama) and the draws. Knows nothing of what is tested. Invariant: the same
arguments give the same bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.models.eagle_layout import EagleConfig
from tests.conftest import VOCAB_SIZE, tiny_config, tiny_weights
from tests.models.eagle_oracle import tiny_head
from tlt_train.config import TrainConfig
from tlt_train.drafter import DrafterNetwork
from tlt_train.fixed_data import FixedData
from tlt_train.packing import PackedBatch, pack
from tlt_train.sequence import TrainingSequence, TrainingWindow
from tlt_train.trainer import Trainer

HIDDEN = 64
TAPS = 3
RAW = tiny_config("llama", num_hidden_layers=7)
TARGET = ModelConfig.from_hf(RAW)


def embedding_and_head() -> tuple[Tensor, Tensor]:
    """Of the target, [V, H] each."""
    weights = tiny_weights(RAW, 0)
    return weights["model.embed_tokens.weight"], weights["lm_head.weight"]


def make_head(kind: str, **changes: Any) -> tuple[EagleConfig, dict[str, Tensor]]:
    """A random head; an eagle3 head with its own ``lm_head`` knows 200 of 320 tokens."""
    own_vocabulary = kind == "eagle3" and changes.get("own_head") is not False
    return tiny_head(
        TARGET, kind, **{"draft_vocab_size": 200 if own_vocabulary else None} | changes
    )


def make_network(kind: str = "eagle3", *, window: int = 0, **changes: Any) -> DrafterNetwork:
    config, tensors = make_head(kind, **changes)
    return DrafterNetwork(config, tensors, *embedding_and_head(), window=window)


def make_sequence(
    key: str,
    num_tokens: int,
    *,
    prompt_len: int = 3,
    start: int = 0,
    num_taps: int = TAPS,
    vocab_size: int = VOCAB_SIZE,
) -> TrainingSequence:
    """Random tokens and features of unit size."""
    rng = np.random.default_rng(zlib.crc32(key.encode()))
    features = torch.from_numpy(rng.standard_normal((num_tokens, (num_taps + 1) * HIDDEN)))
    bits = features.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    tokens = rng.integers(0, vocab_size, num_tokens).astype(np.int32)
    return TrainingSequence(key, start, prompt_len, tokens, bits, 0, group=key)


def whole(*sequences: TrainingSequence) -> list[TrainingWindow]:
    return [TrainingWindow(s, 0, s.num_tokens) for s in sequences]


def make_batch(*sequences: TrainingSequence, num_taps: int = TAPS) -> PackedBatch:
    return pack(whole(*sequences), num_taps=num_taps, hidden_size=HIDDEN)


def make_config(**changes: Any) -> TrainConfig:
    """fp32, no warm-up, steps of two micro-batches of the data of ``make_trainer``."""
    given: dict[str, Any] = {
        "dtype": "float32",
        "window": 0,
        "unroll_depth": 3,
        "warmup_steps": 0,
        "total_steps": 12,
        "learning_rate": 3e-3,
        "tokens_per_step": 48,
        "tokens_per_micro_batch": 24,
    }
    return TrainConfig(**(given | changes))


def make_data(count: int = 9) -> list[TrainingSequence]:
    return [make_sequence(f"s{i}", 7 + 3 * (i % 4), prompt_len=2 + i % 3) for i in range(count)]


def make_trainer(
    config: TrainConfig | None = None,
    *,
    sequences: Sequence[TrainingSequence] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    group: Any = None,
    **changes: Any,
) -> Trainer:
    network = make_network(**changes)
    source = FixedData(make_data() if sequences is None else sequences)
    head = embedding_and_head()[1]
    return Trainer(
        network, config or make_config(), source, head, group=group, should_stop=should_stop
    )


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    """Copies of all that an optimiser's step changes."""
    return {name: t.clone() for name, t in trainer.state()[0].items()}


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)
