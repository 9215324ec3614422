"""``rms_norm`` and ``add_rms_norm``: right against fp64, and a row's bits are its own."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.backends import agreed, best, nan, same_bits


def exact(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def case(rows: int, width: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=g) * 10.0 ** torch.randint(-3, 4, (rows, 1), generator=g)
    return x, torch.randn(rows, width, generator=g), torch.rand(width, generator=g) + 0.5


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 40),
    st.integers(1, 700),
    st.sampled_from([1e-6, 1e-5, 0.1]),
    st.integers(0, 2**32),
)
def test_matches_exact_arithmetic(rows: int, width: int, eps: float, seed: int) -> None:
    x, residual, weight = case(rows, width, seed)
    (out,) = agreed("rms_norm", lambda: (x, weight, eps, nan(rows, width)), 3)
    torch.testing.assert_close(out.double(), exact(x, weight, eps), rtol=2e-6, atol=1e-30)

    total, out = agreed(
        "add_rms_norm", lambda: (x, residual.clone(), weight, eps, nan(rows, width)), 1, 4
    )
    assert same_bits(total, x + residual)
    torch.testing.assert_close(out.double(), exact(total, weight, eps), rtol=2e-6, atol=1e-30)


@settings(deadline=None, max_examples=15)
@given(st.integers(2, 200), st.integers(1, 700), st.integers(0, 2**32))
def test_row_does_not_depend_on_its_batch(rows: int, width: int, seed: int) -> None:
    """Catches a sum whose order follows the number of rows, or a row that reads its neighbour."""
    x, residual, weight = case(rows, width, seed)
    out, alone = nan(rows, width), nan(1, width)
    best().rms_norm(x, weight, 1e-5, out)
    total, fused = residual.clone(), nan(rows, width)
    best().add_rms_norm(x, total, weight, 1e-5, fused)
    for row in {0, rows // 2, rows - 1}:
        best().rms_norm(x[row : row + 1].clone(), weight, 1e-5, alone)
        assert same_bits(alone, out[row : row + 1])
        best().rms_norm(total[row : row + 1].clone(), weight, 1e-5, alone)
        assert same_bits(alone, fused[row : row + 1])


def test_output_may_be_the_input() -> None:
    x, residual, weight = case(5, 97, 0)
    out, inplace = nan(5, 97), x.clone()
    best().rms_norm(x, weight, 1e-5, out)
    best().rms_norm(inplace, weight, 1e-5, inplace)
    assert same_bits(inplace, out)
    inplace = x.clone()
    best().add_rms_norm(x, residual.clone(), weight, 1e-5, out)
    best().add_rms_norm(inplace, residual.clone(), weight, 1e-5, inplace)
    assert same_bits(inplace, out)
