"""``linear``: right against fp64, and the same bits whatever the rows around it, the threads or the instruction set."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.ops import Ops, resolve_ops
from engine.ops.native import usable_isas
from engine.ops.reference import ReferenceOps

ISAS = usable_isas()
EXACT_ISAS = [
    isa for isa in ISAS if isa != "avx512bf16"
]  # fp32 activations: the same bits everywhere
BEST = EXACT_ISAS[-1]
DTYPES = [torch.bfloat16, torch.float32]
SHAPES = [(1, 1), (3, 5), (16, 2), (15, 64), (33, 31), (48, 65), (130, 97), (576, 576), (77, 1536)]
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 31, 64]


def native(isa: str, num_threads: int = 1) -> Ops:
    return resolve_ops("native", isa=isa, num_threads=num_threads)


def case(rows: int, n: int, k: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, ...]:
    """x [rows, k], weight [n, k], bias [n]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator)
    weight = torch.randn(n, k, generator=generator).to(dtype)
    return x, weight, torch.randn(n, generator=generator)


def run(ops: Ops, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = torch.full((x.shape[0], weight.shape[0]), float("nan"))
    ops.linear(x, ops.pack_linear(weight, bias), out)
    return out


def assert_close_to_exact(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Within the error of K roundings of fp32, of the fp64 result."""
    exact = x.double() @ weight.double().t()
    size = x.double().abs() @ weight.double().abs().t() + 1.0
    if bias is not None:
        exact += bias
        size += bias.abs()
    error = ((out.double() - exact).abs() / size).max().item()
    assert error < 2.0**-24 * (x.shape[1] + 2), f"relative error {error:.3g}"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_matches_fp64(isa: str, dtype: torch.dtype, n: int, k: int) -> None:
    """Odd N and K, with and without bias, for every size of a row group. Catches: padding that leaks, lost tails."""
    ops = native(isa)
    for rows in ROWS if isa != "scalar" or n * k < 20000 else [5]:
        x, weight, bias = case(rows, n, k, dtype)
        if isa == "avx512bf16" and dtype == torch.bfloat16:
            x = (
                x.bfloat16().float()
            )  # this variant rounds activations: give it some that are rounded
        assert_close_to_exact(run(ops, x, weight), x, weight, None)
        assert_close_to_exact(run(ops, x, weight, bias), x, weight, bias)


def test_agrees_with_the_reference_op() -> None:
    x, weight, bias = case(9, 70, 131, torch.bfloat16)
    reference, out = ReferenceOps(), torch.empty(9, 70)
    reference.linear(x, reference.pack_linear(weight, bias), out)
    torch.testing.assert_close(run(native(BEST), x, weight, bias), out, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(33, 31), (176, 96)])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    isa: str, dtype: torch.dtype, n: int, k: int
) -> None:
    """Exact losslessness rests on this. Catches: an order of accumulation that depends on the number of rows."""
    sizes = [*range(2, 35), 64, 100, 256, 1024] if isa != "scalar" else [2, 3, 4, 5, 9, 17]
    x, weight, bias = case(max(sizes), n, k, dtype)
    ops = native(isa)
    handle = ops.pack_linear(weight, bias)
    alone = torch.empty(max(sizes), n)
    for row in range(max(sizes)):
        ops.linear(x[row : row + 1], handle, alone[row : row + 1])
    for rows in sizes:
        out = torch.full((rows, n), float("nan"))
        ops.linear(x[-rows:], handle, out)
        assert torch.equal(out, alone[-rows:]), f"{rows} rows"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 7, 19])
def test_instruction_sets_agree_bit_for_bit(dtype: torch.dtype, rows: int) -> None:
    x, weight, bias = case(rows, 70, 131, dtype)
    first = run(native(EXACT_ISAS[0]), x, weight, bias)
    for isa in EXACT_ISAS[1:]:
        assert torch.equal(run(native(isa), x, weight, bias), first), isa


@pytest.mark.skipif("avx512bf16" not in ISAS, reason="this machine has no avx512bf16")
def test_avx512bf16_rounds_activations_and_says_so() -> None:
    """The variant is not a silent twin: other bits than fp32 activations, those of rounded activations nearly."""
    x, weight, _ = case(4, 64, 128, torch.bfloat16)
    out, exact = run(native("avx512bf16"), x, weight), run(native("avx512"), x, weight)
    assert not torch.equal(out, exact)
    assert_close_to_exact(out, x.bfloat16().float(), weight, None)


@pytest.mark.parametrize("num_threads", [2, 3, 4, 7])
@pytest.mark.parametrize("rows", [1, 8, 40])
def test_threads_do_not_change_bits(num_threads: int, rows: int) -> None:
    """Also more threads than panels. Catches: units that overlap or leave gaps, and a thread that packs one group of
    rows into the beginning of the next one's (K = 577 ends so that a whole vector does not fit)."""
    for n, k in ((16, 577), (40, 577), (250, 576)):
        x, weight, bias = case(rows, n, k, torch.bfloat16)
        for isa in ISAS:
            alone = run(native(isa), x, weight, bias)
            for _ in range(3):
                assert torch.equal(run(native(isa, num_threads), x, weight, bias), alone), (isa, n)


def test_nothing_past_the_output_is_written() -> None:
    """N that is no multiple of 16 ends in a partial store."""
    x, weight, _ = case(3, 21, 10, torch.bfloat16)
    for isa in ISAS:
        ops = native(isa)
        guarded = torch.full((5, 21), 7.0)
        ops.linear(x, ops.pack_linear(weight), guarded[1:4])
        assert torch.all(guarded[0] == 7.0), isa
        assert torch.all(guarded[4] == 7.0), isa


def test_special_values_stay_in_their_row_and_column() -> None:
    """inf and nan in one row or one column of weights; K odd, so a padded pair must not turn inf * 0 into nan."""
    x, weight, _ = case(6, 20, 5, torch.bfloat16)
    x[2, 4] = float("inf")
    weight[3, 4] = 0.0
    weight[11, 0] = float("nan")
    for isa in ISAS:
        out = run(native(isa), x, weight)
        exact = x @ weight.float().t()
        assert torch.equal(out.isnan(), exact.isnan()), isa
        assert torch.equal(out.isinf(), exact.isinf()), isa


def test_no_rows_and_no_inputs() -> None:
    ops = native("auto")
    assert run(ops, torch.empty(0, 8), torch.ones(4, 8)).shape == (0, 4)
    assert torch.equal(run(ops, torch.empty(2, 0), torch.ones(4, 0)), torch.zeros(2, 4))


def test_packed_weight_is_a_copy_with_its_shape() -> None:
    x, weight, _ = case(2, 33, 31, torch.bfloat16)
    ops = native("auto")
    before = run(ops, x, weight)
    handle = ops.pack_linear(weight)
    assert handle.shape == (33, 31)
    assert handle.num_bytes == 3 * 16 * 64  # 3 panels of 16 pairs of 64 bytes
    weight.zero_()
    out = torch.empty(2, 33)
    ops.linear(x, handle, out)
    assert torch.equal(out, before)


def test_bad_arguments_name_the_argument() -> None:
    ops = native("auto")
    x, weight, bias = case(4, 8, 6, torch.bfloat16)
    handle, out = ops.pack_linear(weight), torch.empty(4, 8)
    ops.linear(x, handle, out)
    bad: list[tuple[tuple, str]] = [
        (
            (x.double(), handle, out),
            r"linear: argument x: expected torch.float32, got torch.float64",
        ),
        ((x[:, :5].contiguous(), handle, out), r"argument x: expected shape \[any, 6\], got .*5\]"),
        ((x[0], handle, out), r"argument x: expected shape \[any, 6\], got shape \[6\]"),
        ((torch.randn(4, 7)[:, 1:], handle, out), r"argument x: expected a contiguous tensor"),
        ((x.t().contiguous().t(), handle, out), r"argument x: expected a contiguous tensor"),
        ((x.to("meta"), handle, out), r"argument x: expected a dense CPU tensor, got meta"),
        ((x.numpy(), handle, out), r"argument x: expected a torch.Tensor, got .*ndarray"),
        ((x, handle, out[:3]), r"argument out: expected shape \[4, 8\], got shape \[3, 8\]"),
        ((x, handle, out.bfloat16()), r"argument out: expected torch.float32, got torch.bfloat16"),
    ]
    for arguments, message in bad:
        with pytest.raises(ValueError, match=message):
            ops.linear(*arguments)
    with pytest.raises(
        ValueError, match=r"pack_linear: argument weight: expected .* got torch.float16"
    ):
        ops.pack_linear(weight.half())
    with pytest.raises(
        ValueError, match=r"pack_linear: argument weight: expected a contiguous tensor"
    ):
        ops.pack_linear(weight.t())
    with pytest.raises(ValueError, match=r"pack_linear: argument bias: expected shape \[8\]"):
        ops.pack_linear(weight, bias[:7])
    with pytest.raises(TypeError):
        ops.linear(x, weight, out)  # not packed
