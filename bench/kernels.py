"""The per-op suite: every op at the sizes of SmolLM2-135M, by number of rows.

Owns the cases: which tensors an op gets and what work that is. ``test_kernels.py`` times them with pytest-benchmark.
Invariant: before a case is timed, its output was compared with the torch reference's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.ours import chain_batch, prefill_batch
from bench.physics import Work
from engine.batch import PAGE
from engine.ops import Ops
from engine.ops.reference import ReferenceOps

HIDDEN, MLP, VOCAB = 576, 1536, 49152
NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 9, 3, 64
NUM_PAGES = 160
ROWS = (1, 4, 8, 16, 32, 256)
CONTEXT_LEN = 512

AnyOps = Ops | ReferenceOps


@dataclass(frozen=True, slots=True)
class Case:
    """One op on one size. ``make(ops)`` gives a call and the tensor that it writes."""

    name: str
    make: Callable[[AnyOps], tuple[Callable[[], None], Tensor]]
    work: Work
    tolerance: float


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _linear(label: str, rows: int, k: int, n: int) -> Case:
    def make(ops: AnyOps) -> tuple[Callable[[], None], Tensor]:
        # values that bf16 holds: kernels that round activations to bf16 then agree with the reference too
        x, out = _randn(rows, k).bfloat16().float(), torch.empty(rows, n)
        weight: Any = ops.pack_linear((_randn(n, k, seed=1) * k**-0.5).bfloat16())
        return lambda: ops.linear(x, weight, out), out

    work = Work(num_bytes=2.0 * n * k, flops=2.0 * rows * n * k)
    return Case(f"linear {label} {rows} rows", make, work, 2e-4)


def _norm(rows: int) -> Case:
    def make(ops: AnyOps) -> tuple[Callable[[], None], Tensor]:
        x, out = _randn(rows, HIDDEN), torch.empty(rows, HIDDEN)
        residual, weight = torch.zeros(rows, HIDDEN), _randn(HIDDEN, seed=1)

        def run() -> None:
            residual.zero_()
            ops.add_rms_norm(x, residual, weight, 1e-5, out)

        return run, out

    return Case(f"add_rms_norm {rows} rows", make, Work(12.0 * rows * HIDDEN), 1e-5)


def _silu_mul(rows: int) -> Case:
    def make(ops: AnyOps) -> tuple[Callable[[], None], Tensor]:
        gate_up, out = _randn(rows, 2 * MLP), torch.empty(rows, MLP)
        return lambda: ops.silu_mul(gate_up, out), out

    return Case(f"silu_mul {rows} rows", make, Work(12.0 * rows * MLP), 1e-5)


def _embedding(rows: int) -> Case:
    def make(ops: AnyOps) -> tuple[Callable[[], None], Tensor]:
        table, out = _randn(VOCAB, HIDDEN).bfloat16(), torch.empty(rows, HIDDEN)
        ids = torch.arange(rows, dtype=torch.int32) * 17
        return lambda: ops.embedding(ids, table, out), out

    return Case(f"embedding {rows} rows", make, Work(6.0 * rows * HIDDEN), 0.0)


def _caches() -> tuple[Tensor, Tensor]:
    shape = (NUM_PAGES, PAGE, NUM_KV_HEADS, HEAD_DIM)
    return _randn(*shape, seed=2).bfloat16(), _randn(*shape, seed=3).bfloat16()


def _rope_store(rows: int) -> Case:
    def make(ops: AnyOps) -> tuple[Callable[[], None], Tensor]:
        qkv = _randn(rows, (NUM_Q_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
        angles = torch.arange(1024).unsqueeze(1) * 1e5 ** (
            -torch.arange(HEAD_DIM // 2).float() / (HEAD_DIM // 2)
        )
        cos, sin = angles.cos().contiguous(), angles.sin().contiguous()
        k_cache, v_cache = _caches()
        batch = prefill_batch(0, list(range(rows)))
        out = torch.empty(rows, NUM_Q_HEADS, HEAD_DIM)
        return (
            lambda: ops.rope_store(qkv, batch, cos, sin, None, None, 1e-5, k_cache, v_cache, out),
            out,
        )

    width = (2 * NUM_Q_HEADS + 3 * NUM_KV_HEADS) * HEAD_DIM
    return Case(f"rope_store {rows} rows", make, Work(4.0 * rows * width), 1e-4)


def _attention(rows: int) -> Case:
    """A chain of tree nodes behind a cached context, as verification runs it."""

    def make(ops: AnyOps) -> tuple[Callable[[], None], Tensor]:
        q, out = (torch.empty(rows, NUM_Q_HEADS, HEAD_DIM) for _ in range(2))
        q.copy_(_randn(rows, NUM_Q_HEADS, HEAD_DIM))
        k_cache, v_cache = _caches()
        batch = chain_batch(CONTEXT_LEN, list(range(rows)))
        scale = HEAD_DIM**-0.5
        return lambda: ops.attention(q, k_cache, v_cache, batch, scale, 0, out), out

    keys = rows * CONTEXT_LEN + rows * (rows + 1) // 2
    work = Work(
        num_bytes=4.0 * (CONTEXT_LEN + rows) * NUM_KV_HEADS * HEAD_DIM,
        flops=4.0 * keys * NUM_Q_HEADS * HEAD_DIM,
    )
    return Case(f"attention {rows} rows behind {CONTEXT_LEN}", make, work, 1e-4)


def _sample(rows: int, *, filtered: bool) -> Case:
    def make(ops: AnyOps) -> tuple[Callable[[], None], Tensor]:
        logits = _randn(rows, VOCAB) * 3
        temperature = torch.ones(rows)
        top_k = torch.full((rows,), 50 if filtered else 0, dtype=torch.int32)
        top_p = torch.full((rows,), 0.9 if filtered else 1.0)
        min_p, logprobs = torch.zeros(rows), torch.empty(rows)
        seeds = torch.arange(rows)
        positions = torch.arange(rows, dtype=torch.int32)
        out = torch.empty(rows, dtype=torch.int32)
        return (
            lambda: ops.sample(
                logits, temperature, top_k, top_p, min_p, seeds, positions, out, logprobs
            ),
            out,
        )

    name = f"sample {'top-k 50, top-p 0.9' if filtered else 'plain'} {rows} rows"
    return Case(name, make, Work(4.0 * rows * VOCAB), 0.0)


def _log_sum_exp(rows: int) -> Case:
    def make(ops: AnyOps) -> tuple[Callable[[], None], Tensor]:
        logits, out = _randn(rows, VOCAB) * 3, torch.empty(rows)
        return lambda: ops.log_sum_exp(logits, out), out

    return Case(f"log_sum_exp {rows} rows", make, Work(4.0 * rows * VOCAB), 1e-4)


def _kv_move(count: int) -> Case:
    def make(ops: AnyOps) -> tuple[Callable[[], None], Tensor]:
        cache = _randn(30, 2, 8, PAGE, NUM_KV_HEADS, HEAD_DIM).bfloat16()
        source = torch.arange(count, dtype=torch.int32) + 64
        target = torch.arange(count, dtype=torch.int32)
        return lambda: ops.kv_move(cache, source, target), cache

    moved = 2.0 * 2 * count * 30 * 2 * NUM_KV_HEADS * HEAD_DIM
    return Case(f"kv_move {count} slots", make, Work(moved), 0.0)


def cases() -> list[Case]:
    """All cases: linears by their place in the model, then the rest."""
    qkv = (NUM_Q_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    places = (("qkv", HIDDEN, qkv), ("gate_up", HIDDEN, 2 * MLP), ("down", MLP, HIDDEN))
    found = [_linear(label, rows, k, n) for label, k, n in places for rows in ROWS]
    found += [_linear("head", rows, HIDDEN, VOCAB) for rows in ROWS if rows <= 32]
    for rows in (1, 32, 256):
        found += [_norm(rows), _silu_mul(rows), _embedding(rows), _rope_store(rows)]
    found += [_attention(rows) for rows in (1, 8, 64)]
    for rows in (1, 32):
        found += [_sample(rows, filtered=False), _sample(rows, filtered=True), _log_sum_exp(rows)]
    return [*found, _kv_move(8)]
