"""Rotary tables: cos and sin of every position, with the scaling of the checkpoint already in them.

Owns the formulas of the rope types of ``RopeConfig``; each follows transformers' ``modeling_rope_utils`` to the
rounding. Knows nothing of layers or caches. Invariant: the table of a position does not depend on what is run.

The dynamic type (NTK) makes the base a function of the sequence length in transformers, which a KV cache of
rotated keys cannot follow. Here the length is that of the longest sequence the engine takes (``num_positions``):
up to the original context that is transformers' result exactly; beyond it, every sequence gets the frequencies
that transformers uses for one of the full length.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.config import RopeConfig


def rope_tables(
    rope: RopeConfig, head_dim: int, max_position_embeddings: int, num_positions: int
) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [num_positions, D / 2] fp32, times the attention factor of the scaling.

    Args:
        rope: type and parameters.
        head_dim: D.
        max_position_embeddings: the model's original context, which ``dynamic`` compares with.
        num_positions: longest sequence that will be run.
    """
    inv_freq, attention_factor = _inverse_frequencies(
        rope, head_dim, max_position_embeddings, num_positions
    )
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inv_freq)
    return angles.cos() * attention_factor, angles.sin() * attention_factor


def _inverse_frequencies(
    rope: RopeConfig, head_dim: int, max_position_embeddings: int, num_positions: int
) -> tuple[Tensor, float]:
    theta = rope.theta
    if rope.type == "dynamic" and num_positions > max_position_embeddings:
        stretch = rope.factor * num_positions / max_position_embeddings - (rope.factor - 1)
        theta *= stretch ** (head_dim / (head_dim - 2))
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inv_freq = 1.0 / (theta**exponent)
    if rope.freq_factors:
        inv_freq = inv_freq / torch.tensor(rope.freq_factors, dtype=torch.float32)
    if rope.type == "linear":
        inv_freq = inv_freq / rope.factor
    elif rope.type == "llama3":
        inv_freq = _llama3(rope, inv_freq)
    elif rope.type == "yarn":
        return _yarn(rope, head_dim, theta**exponent), _yarn_attention_factor(rope)
    return inv_freq, 1.0


def _llama3(rope: RopeConfig, inv_freq: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths divided by the factor, short ones kept, a smooth passage between."""
    context_len = rope.original_max_position_embeddings
    low, high = rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > context_len / low, inv_freq / rope.factor, inv_freq)
    smooth = (context_len / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * scaled / rope.factor + smooth * scaled
    between = (wavelength >= context_len / high) & (wavelength <= context_len / low)
    return torch.where(between, smoothed, scaled)


def _yarn(rope: RopeConfig, head_dim: int, pos_freqs: Tensor) -> Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): interpolate low frequencies, keep high ones, ramp between."""

    def dim_of(num_rotations: float) -> float:
        context_len = rope.original_max_position_embeddings
        turns = math.log(context_len / (num_rotations * 2 * math.pi))
        return head_dim * turns / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (rope.factor * pos_freqs) * (1 - keep) + 1.0 / pos_freqs * keep


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
