"""``embedding`` copies exactly; ``silu_mul`` is right against fp64 also where exp overflows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ops.reference import ReferenceOps
from tests.ops.backends import agreed, best, int32, nan, same_bits

REFERENCE = ReferenceOps()


@settings(deadline=None, max_examples=20)
@given(
    st.integers(1, 60),
    st.integers(1, 300),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 2**32),
)
def test_embedding_is_the_reference_to_the_bit(
    rows: int, width: int, dtype: torch.dtype, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    table = torch.randn(17, width, generator=g).to(dtype)
    ids = torch.randint(0, 17, (rows,), generator=g, dtype=torch.int32)
    (out,) = agreed("embedding", lambda: (ids, table, nan(rows, width)), 2)
    expected = nan(rows, width)
    REFERENCE.embedding(ids, table, expected)
    assert same_bits(out, expected)


@settings(deadline=None, max_examples=20)
@given(
    st.integers(1, 60),
    st.integers(1, 400),
    st.sampled_from([0.1, 3.0, 60.0]),
    st.integers(0, 2**32),
)
def test_silu_mul_matches_exact_arithmetic(rows: int, width: int, size: float, seed: int) -> None:
    gate_up = torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(seed)) * size
    (out,) = agreed("silu_mul", lambda: (gate_up, nan(rows, width)), 1)
    gate, up = gate_up.double().chunk(2, dim=-1)
    exact = torch.nn.functional.silu(gate) * up
    # fp32 ends: where exp(-gate) overflows the result, below 1e-33, is 0
    torch.testing.assert_close(out.double(), exact, rtol=2e-6, atol=1e-33)

    alone = nan(1, width)
    best().silu_mul(gate_up[rows - 1 :].clone(), alone)
    assert same_bits(alone, out[rows - 1 :])


@pytest.mark.parametrize("gate", [-1e30, -200.0, -88.9, 88.9, 200.0, 1e30, float("inf")])
def test_silu_of_extremes(gate: float) -> None:
    """Catches exp(-gate) whose overflow or clamp leaks into the result."""
    (out,) = agreed("silu_mul", lambda: (torch.tensor([[gate, 2.0]]), nan(1, 1)), 1)
    expected = 2.0 * gate if gate > 0 else 0.0
    assert out.item() == pytest.approx(expected, rel=1e-6, abs=1e-33)


def test_embedding_refuses_ids_outside_the_table() -> None:
    with pytest.raises(ValueError, match="ids"):
        best().embedding(int32([0, 3]), torch.zeros(3, 4), nan(2, 4))
