"""The work of a forward pass in bytes and FLOPs, and the least time that a machine's ceilings allow for it.

Owns the counting rules, stated at ``pass_work``. Knows nothing of how the work is done. Invariant: counts are of the
work that the mathematics needs, never of what an implementation happens to do, so that a fraction of a ceiling can
be compared between engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a dense decoder; item sizes in bytes."""

    num_layers: int
    hidden: int
    mlp: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    weight_itemsize: int
    kv_itemsize: int

    @property
    def linear_params(self) -> int:
        """Weights of the linears of all layers."""
        attention = self.hidden * self.head_dim * (2 * self.num_q_heads + 2 * self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden * self.mlp)

    @property
    def last_params(self) -> int:
        """Weights of one layer behind its attention."""
        return self.hidden * (self.num_q_heads * self.head_dim + 3 * self.mlp)

    @property
    def head_params(self) -> int:
        return self.vocab * self.hidden

    @property
    def kv_bytes_per_token(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.kv_itemsize


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes to move and FLOPs to do."""

    num_bytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.num_bytes + other.num_bytes, self.flops + other.flops)

    def memory_s(self, read_gb_s: float) -> float:
        return self.num_bytes / (read_gb_s * 1e9)

    def compute_s(self, gflop_s: float) -> float:
        return self.flops / (gflop_s * 1e9)


def total(passes: Sequence[Work]) -> Work:
    return sum(passes, Work())


def floor_s(passes: Sequence[Work], read_gb_s: float, gflop_s: float) -> float:
    """The roofline of passes that follow each other: each takes at least as long as either ceiling allows."""
    return sum(max(work.memory_s(read_gb_s), work.compute_s(gflop_s)) for work in passes)


def pass_work(shape: ModelShape, spans: Sequence[tuple[int, int]], num_logit_rows: int) -> Work:
    """Work of one forward over sequences given as (tokens already cached, new rows).

    Every weight is read once; the head only where logits are asked for; each sequence's cached keys and values are
    read once and its new ones written once; row r of a span attends to cached + r + 1 keys. Rows without logits need
    nothing of the last layer behind its attention. A multiply-add is 2 FLOPs. Norms, rope and activations are left
    out: below 1% of either count.
    """
    rows = sum(new for _, new in spans)
    keys = sum(new * cached + new * (new + 1) // 2 for cached, new in spans)
    kv_tokens = sum(cached + new for cached, new in spans)
    weights = shape.linear_params + (shape.head_params if num_logit_rows else 0)
    return Work(
        num_bytes=float(weights * shape.weight_itemsize + kv_tokens * shape.kv_bytes_per_token),
        flops=float(
            2 * rows * shape.linear_params
            - 2 * (rows - num_logit_rows) * shape.last_params
            + 2 * num_logit_rows * shape.head_params
            + 4 * keys * shape.num_layers * shape.num_q_heads * shape.head_dim
        ),
    )


def decode_passes(
    shape: ModelShape, context_lens: Sequence[int], num_steps: Sequence[int]
) -> list[Work]:
    """Decoding sequences together from the given context lengths, sequence i for num_steps[i] steps."""
    passes = []
    for step in range(max(num_steps, default=0)):
        spans = [
            (context + step, 1)
            for context, steps in zip(context_lens, num_steps, strict=True)
            if step < steps
        ]
        passes.append(pass_work(shape, spans, len(spans)))
    return passes
