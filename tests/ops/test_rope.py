"""``rope_store``: rotation, optional head norms, and what lands in the cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.batch import ForwardBatch
from engine.ops.reference import ReferenceOps
from tests.ops.backends import agreed, best, int32, nan, same_bits

POSITIONS, SLOTS = 50, 96
DTYPES = [torch.float32, torch.bfloat16]


def batch_of(positions: Tensor, slots: Tensor) -> ForwardBatch:
    rows = positions.shape[0]
    return ForwardBatch(
        token_ids=torch.zeros(rows, dtype=torch.int32),
        positions=positions,
        slots=slots,
        row_start=int32([0, rows]),
        page_table=int32([[0]]),
        ctx_len=torch.ones(rows, dtype=torch.int32),
        tail_start=torch.zeros(rows + 1, dtype=torch.int32),
        tail_slots=int32([]),
        logit_rows=int32([]),
    )


class Case:
    """Arguments of one call; ``caches`` start as a pattern that the op must leave alone elsewhere."""

    def __init__(
        self,
        rows: int,
        heads: tuple[int, int],
        dim: int,
        dtype: torch.dtype,
        norms: bool,
        seed: int,
    ) -> None:
        g = torch.Generator().manual_seed(seed)
        self.num_q_heads, self.num_kv_heads = heads
        self.dim, self.dtype = dim, dtype
        self.qkv = torch.randn(rows, (heads[0] + 2 * heads[1]) * dim, generator=g)
        angles = torch.rand(POSITIONS, dim // 2, generator=g) * 6
        self.cos, self.sin = angles.cos(), angles.sin()
        self.q_norm = torch.rand(dim, generator=g) + 0.5 if norms else None
        self.k_norm = torch.rand(dim, generator=g) + 0.5 if norms else None
        positions = torch.randint(0, POSITIONS, (rows,), generator=g, dtype=torch.int32)
        self.batch = batch_of(positions, torch.randperm(SLOTS, generator=g)[:rows].int())

    def arguments(self, rows: slice = slice(None)) -> tuple:
        qkv = self.qkv[rows].clone()
        batch = replace(
            batch_of(self.batch.positions[rows].clone(), self.batch.slots[rows].clone())
        )
        caches = [
            torch.full((SLOTS // 16, 16, self.num_kv_heads, self.dim), 7.0, dtype=self.dtype)
            for _ in range(2)
        ]
        q_out = nan(qkv.shape[0], self.num_q_heads, self.dim)
        norms = (self.q_norm, self.k_norm)
        return (qkv, batch, self.cos, self.sin, *norms, 1e-6, *caches, q_out)


HEADS = st.sampled_from([(1, 1), (4, 2), (9, 3)])
DIMS = st.sampled_from([2, 8, 10, 32, 64, 80, 128])


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 60), HEADS, DIMS, st.sampled_from(DTYPES), st.booleans(), st.integers(0, 2**32)
)
def test_matches_reference(
    rows: int, heads: tuple[int, int], dim: int, dtype: torch.dtype, norms: bool, seed: int
) -> None:
    case = Case(rows, heads, dim, dtype, norms, seed)
    k_cache, v_cache, q_out = agreed("rope_store", case.arguments, 7, 8, 9)
    expected = case.arguments()
    ReferenceOps().rope_store(*expected)
    torch.testing.assert_close(q_out, expected[9], rtol=1e-5, atol=1e-5)
    # one unit in the last place of bf16 where fp32 results straddle the middle
    tolerance = 1e-5 if dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(k_cache, expected[7], rtol=tolerance, atol=1e-5)
    assert same_bits(v_cache, expected[8])
    untouched = torch.ones(SLOTS, dtype=torch.bool)
    untouched[case.batch.slots.long()] = False
    assert (k_cache.flatten(0, 1)[untouched] == 7.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_are_rounded_to_nearest_even(dtype: torch.dtype) -> None:
    """Where the rotation is the identity, the cache holds what torch's own conversion gives."""
    case = Case(40, (2, 2), 64, dtype, False, 0)
    case.cos, case.sin = torch.ones(POSITIONS, 32), torch.zeros(POSITIONS, 32)
    arguments = case.arguments()
    best().rope_store(*arguments)
    keys = case.qkv.view(40, 6, 64)[:, 2:4].to(dtype)
    assert same_bits(arguments[7].flatten(0, 1)[case.batch.slots.long()], keys)


@settings(deadline=None, max_examples=10)
@given(st.integers(2, 80), DIMS, st.booleans(), st.integers(0, 2**32))
def test_row_does_not_depend_on_its_batch(rows: int, dim: int, norms: bool, seed: int) -> None:
    case = Case(rows, (4, 2), dim, torch.float32, norms, seed)
    together = case.arguments()
    best().rope_store(*together)
    for row in {0, rows // 2, rows - 1}:
        alone = case.arguments(slice(row, row + 1))
        best().rope_store(*alone)
        assert same_bits(alone[9], together[9][row : row + 1])
        slot = case.batch.slots[row]
        for cache in (7, 8):
            assert same_bits(alone[cache].flatten(0, 1)[slot], together[cache].flatten(0, 1)[slot])
