"""``kv_move``: all sources are read before any target is written, in every layer, keys and values."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ops.reference import ReferenceOps
from tests.ops.backends import agreed, best, int32, same_bits

SLOTS = 4 * 16


def cache(dtype: torch.dtype = torch.bfloat16, head_dim: int = 6) -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    return torch.randn(3, 2, SLOTS // 16, 16, 2, head_dim, generator=g).to(dtype)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.integers(0, SLOTS - 1), unique=True, max_size=40),
    st.data(),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_is_the_reference_to_the_bit(
    targets: list[int], data: st.DataObject, dtype: torch.dtype
) -> None:
    """Sources and targets overlap at will: chains, cycles, one source for many targets."""
    sources = data.draw(
        st.lists(st.integers(0, SLOTS - 1), min_size=len(targets), max_size=len(targets))
    )
    source, target = int32(sources), int32(targets)
    (moved,) = agreed("kv_move", lambda: (cache(dtype), source, target), 0)
    expected = cache(dtype)
    ReferenceOps().kv_move(expected, source, target)
    assert same_bits(moved, expected)


def test_a_chain_moves_every_slot_once() -> None:
    """Catches copying in place, which would smear slot 5 over the whole path."""
    before, after = cache(), cache()
    best().kv_move(after, int32([5, 6, 7, 8]), int32([6, 7, 8, 9]))
    old, new = before.flatten(2, 3), after.flatten(2, 3)
    assert same_bits(new[:, :, 6:10], old[:, :, 5:9])
    assert same_bits(new[:, :, :6], old[:, :, :6])
    assert same_bits(new[:, :, 10:], old[:, :, 10:])
