"""A new EAGLE head with random weights, shaped after its target: where training starts from.

Owns the choice of shape and the draws. Invariant: the same arguments give the same tensors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.models.eagle_layout import (
    D2T,
    EagleConfig,
    check_target,
    default_taps,
    expected_shapes,
)
from engine.models.load_threads import one_torch_thread


def drafter_config(
    target: ModelConfig, kind: Any = "eagle3", *, draft_vocab_size: int | None = None
) -> EagleConfig:
    """The config of a new head: a layer of the target's shape, the default taps.

    Args:
        target: the model it drafts for.
        kind: "eagle" or "eagle3".
        draft_vocab_size: rows of an eagle3 head; None is the target's vocabulary.

    Raises:
        ValueError: an unknown kind, or a vocabulary that it cannot have.
    """
    if kind not in ("eagle", "eagle3"):
        raise ValueError(f"kind must be eagle or eagle3, got {kind!r}")
    size = target.vocab_size if draft_vocab_size is None else draft_vocab_size
    if not 1 <= size <= target.vocab_size or (kind == "eagle" and size != target.vocab_size):
        allowed = f"1..{target.vocab_size}" if kind == "eagle3" else f"{target.vocab_size}"
        raise ValueError(f"draft_vocab_size must be {allowed} for kind {kind}, got {size}")
    rope = target.rope
    if rope.freq_factors:  # a GGUF's spelling of a scaling, which no config.json can hold
        rope = replace(rope, freq_factors=())
    config = EagleConfig(
        kind=kind,
        vocab_size=target.vocab_size,
        draft_vocab_size=size,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_q_heads=target.num_q_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        rope=rope,
        max_position_embeddings=target.max_position_embeddings,
        tap_layers=default_taps(target.num_layers) if kind == "eagle3" else (),
        qkv_bias=kind == "eagle" and target.qkv_bias,
        own_head=kind == "eagle3",
    )
    check_target(config, target)
    return config


def random_drafter(
    config: EagleConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Tensors of a new head, by canonical name. Norms are 1, biases 0, the draft's vocabulary the lowest ids."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    with one_torch_thread():
        for name, shape in expected_shapes(config).items():
            if name.endswith(".bias"):
                tensors[name] = torch.zeros(shape, dtype=dtype)
            elif len(shape) == 1:
                tensors[name] = torch.ones(shape, dtype=dtype)
            else:
                drawn = torch.randn(shape, generator=generator) * shape[1] ** -0.5
                tensors[name] = drawn.to(dtype)
        if config.kind == "eagle3":
            tensors[D2T] = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
    return tensors
