"""EAGLE heads in plain torch, row by row and in fp32, and random heads of every shape to compare with.

Owns the oracle of the network's tests: written from the papers and the public checkpoints' layout, with no op and no
cache of the engine. A row names the earlier rows that it reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.batch import PAGE, ForwardBatch
from engine.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.eagle_init import drafter_config, random_drafter
from engine.models.eagle_layout import EagleConfig, expected_shapes
from engine.ops import resolve_ops
from tests.conftest import tiny_config, tiny_weights

L = "midlayer."
A = L + "self_attn."
# name -> kind, changes of its config: heads of every shape
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle": ("eagle", {}),
    "eagle-biases": ("eagle", {"fc_bias": True, "qkv_bias": True, "o_bias": True}),
    "eagle-mha": ("eagle", {"num_kv_heads": 4}),
    "eagle3": ("eagle3", {}),
    "eagle3-mqa": ("eagle3", {"num_kv_heads": 1, "head_dim": 24}),
    "eagle3-biases": (
        "eagle3",
        {"fc_bias": True, "qkv_bias": True, "o_bias": True, "mlp_bias": True},
    ),
    "eagle3-head-norms": ("eagle3", {"qk_norm": True}),
    "eagle3-norm-before-residual": ("eagle3", {"norm_before_residual": True}),
    "eagle3-norm-output": ("eagle3", {"norm_output": True}),
    "eagle3-fc-norm": ("eagle3", {"fc_norm": True}),
    "eagle3-norm-before-fc": ("eagle3", {"norm_before_fc": True, "norm_before_residual": True}),
    "eagle3-small": ("eagle3", {"hidden_size": 32, "intermediate_size": 40}),
    "eagle3-target-head": ("eagle3", {"own_head": False}),
}


def tiny_target(kind: str = "llama", seed: int = 0, **overrides: Any) -> Decoder:
    """A tiny fp32 decoder with random weights."""
    raw = tiny_config(kind, **overrides)
    return Decoder(
        ModelConfig.from_hf(raw),
        tiny_weights(raw, seed),
        resolve_ops(num_threads=1),
        max_rows=128,
        max_positions=4096,
    )


def tiny_head(
    target: ModelConfig, kind: str, *, draft_vocab_size: int | None = None, **changes: Any
) -> tuple[EagleConfig, dict[str, Tensor]]:
    """A random head whose every tensor matters; ``changes`` of its config."""
    config = drafter_config(target, kind, draft_vocab_size=draft_vocab_size)
    config = replace(config, **changes)
    tensors = random_drafter(config, seed=5)
    generator = torch.Generator().manual_seed(6)
    for name, shape in expected_shapes(config).items():
        if len(shape) == 1:
            drawn = torch.randn(shape, generator=generator) * 0.3
            tensors[name] = drawn if name.endswith("bias") else 1.0 + drawn
    if config.draft_vocab_size < config.vocab_size:
        ids = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size]
        tensors["d2t"] = ids.sort().values - torch.arange(config.draft_vocab_size)
    if config.hidden_size != config.target_hidden_size:
        shape = (config.vocab_size, config.hidden_size)
        tensors["embed_tokens.weight"] = torch.randn(shape, generator=generator)
    return config, tensors


class Oracle:
    """One head over one growing list of rows."""

    def __init__(
        self, config: EagleConfig, tensors: Mapping[str, Tensor], embedding: Tensor, head: Tensor
    ) -> None:
        self.config = config
        self.w = dict(tensors)
        self.embedding = self.w.get("embed_tokens.weight", embedding)
        self.head = self.w.get("lm_head.weight", head)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def row(
        self,
        feature: Tensor,
        token: int,
        position: int,
        visible: Sequence[int],
        *,
        fed_back: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """(logits, what the next depth reads) of a new row that reads the rows ``visible`` and itself."""
        c, w = self.config, self.w
        embedded = self.embedding[token].float()
        if c.kind == "eagle":
            residual = self._linear("fc", torch.cat((embedded, feature)))
            entering = residual
        else:
            residual = feature if fed_back else self._fuse(feature)
            normed = self._norm(residual, w[L + "hidden_norm.weight"])
            entering = torch.cat((self._norm(embedded, w[L + "input_layernorm.weight"]), normed))
            residual = normed if c.norm_before_residual else residual
        x = residual + self._linear(A + "o_proj", self._attention(entering, position, visible))
        h = self._norm(x, w[L + "post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(self._linear(L + "mlp.gate_proj", h))
        x = x + self._linear(L + "mlp.down_proj", gate * self._linear(L + "mlp.up_proj", h))
        final = x if c.kind == "eagle" else self._norm(x, w["norm.weight"])
        return self.head.float() @ final, final if c.norm_output else x

    def _fuse(self, taps: Tensor) -> Tensor:
        c = self.config
        if c.norm_before_fc:
            taps = self._norm(taps, self.w["input_norm.weight"])
        if c.fc_norm:
            parts = taps.view(-1, c.target_hidden_size)
            normed = [
                self._norm(part, self.w[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)
            ]
            taps = torch.cat(normed)
        return self._linear("fc", taps)

    def _attention(self, x: Tensor, position: int, visible: Sequence[int]) -> Tensor:
        c = self.config
        q = self._linear(A + "q_proj", x).view(c.num_q_heads, c.head_dim)
        k = self._linear(A + "k_proj", x).view(c.num_kv_heads, c.head_dim)
        v = self._linear(A + "v_proj", x).view(c.num_kv_heads, c.head_dim)
        if c.qk_norm:
            q = self._norm(q, self.w[A + "q_norm.weight"])
            k = self._norm(k, self.w[A + "k_norm.weight"])
        self.keys.append(self._rotate(k, position))
        self.values.append(v)
        q = self._rotate(q, position)
        rows = [*visible, len(self.keys) - 1]
        group = c.num_q_heads // c.num_kv_heads
        keys = torch.stack([self.keys[r] for r in rows]).repeat_interleave(group, dim=1)
        values = torch.stack([self.values[r] for r in rows]).repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,khd->hk", q, keys) / c.head_dim**0.5
        return torch.einsum("hk,khd->hd", scores.softmax(-1), values).flatten()

    def _rotate(self, heads: Tensor, position: int) -> Tensor:
        half = self.config.head_dim // 2
        theta = self.config.rope.theta
        angles = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
        cos, sin = angles.cos().float(), angles.sin().float()
        a, b = heads[:, :half], heads[:, half:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt()
        return x * scale * weight

    def _linear(self, name: str, x: Tensor) -> Tensor:
        out = self.w[name + ".weight"] @ x
        return out + self.w[name + ".bias"] if name + ".bias" in self.w else out


def ints(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def one_sequence(
    tokens: Sequence[int], start: int, tails: Sequence[Sequence[int]] = ()
) -> ForwardBatch:
    """Rows from position ``start`` on in pages 0, 1, ...; with ``tails``, nodes at slots of their own, one deeper each."""
    rows = range(start, start + len(tokens))
    num_pages = (start + len(tokens)) // PAGE + 1
    counts = torch.tensor([0, *(len(tail) for tail in tails)])
    return ForwardBatch(
        token_ids=ints(list(tokens)),
        positions=ints(list(rows)),
        slots=ints([tail[-1] for tail in tails] or list(rows)),
        row_start=ints([0, len(tokens)]),
        page_table=torch.arange(num_pages, dtype=torch.int32).unsqueeze(0),
        ctx_len=ints([start] * len(tokens) if tails else [p + 1 for p in rows]),
        tail_start=counts.cumsum(0).int() if tails else ints([0] * (len(tokens) + 1)),
        tail_slots=ints([slot for tail in tails for slot in tail]),
        logit_rows=ints([]),
    )
