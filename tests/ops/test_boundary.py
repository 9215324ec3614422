"""Reading tensors at the native boundary: both ways of reading accept and refuse the same tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.ops.native import cpu_ops, use_exchange_api


@pytest.fixture(params=[True, False], ids=["exchange api", "data_ptr"])
def exchange(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Skips what this torch lacks; the other tests of the process keep the default."""
    in_use = use_exchange_api(request.param)
    try:
        if in_use != request.param:
            pytest.skip("this torch has no DLPack exchange API")
        yield request.param
    finally:
        use_exchange_api(True)


def test_views_that_are_contiguous_are_read_in_place(exchange: bool) -> None:
    """Offsets into a storage, sizes of one with any stride, and empty tensors."""
    ops = cpu_ops("auto", 1)
    storage = torch.arange(60.0).view(10, 6)
    weight, out = torch.ones(6), torch.full((10, 6), -1.0)
    ops.rms_norm(storage[3:5], weight, 0.0, out[7:9])
    assert torch.allclose(out[7:9].square().mean(-1), torch.ones(2))
    assert torch.all(out[:7] == -1.0)
    assert torch.all(out[9:] == -1.0)
    one_row = torch.arange(12.0).view(6, 2).t()[:1].as_strided((1, 6), (999, 1))
    ops.rms_norm(one_row, weight, 0.0, out[:1])
    assert not torch.any(out[0] == -1.0)
    ops.rms_norm(torch.empty(0, 6), weight, 0.0, torch.empty(0, 6))


def test_what_does_not_fit_is_refused_by_name(exchange: bool) -> None:
    ops = cpu_ops("auto", 1)
    x, weight, out = torch.randn(4, 6), torch.ones(6), torch.empty(4, 6)
    bad = [
        ((x.half(), weight, 0.0, out), "rms_norm: argument x: expected torch.float32, got torch.float16"),
        ((x[:, ::2], weight[:3], 0.0, out[:, :3]), "argument x: expected a contiguous tensor, got strides"),
        ((x.to("meta"), weight, 0.0, out), "argument x: expected a dense CPU tensor, got meta"),
        ((x, weight[:5], 0.0, out), r"argument weight: expected shape \[6\], got shape \[5\]"),
        ((x, weight, 0.0, out.view(2, 12)), r"argument out: expected shape \[4, 6\], got shape \[2, 12\]"),
        ((x, weight, 0.0, out.view(4, 6, 1)), r"expected shape \[4, 6\], got shape \[4, 6, 1\]"),
        (([1.0], weight, 0.0, out), "argument x: expected a torch.Tensor, got <class 'list'>"),
    ]  # fmt: skip
    for arguments, message in bad:
        with pytest.raises(ValueError, match=message):
            ops.rms_norm(*arguments)


def test_indices_that_lead_outside_are_refused(exchange: bool) -> None:
    """An index out of range would read or overwrite memory of others."""
    ops = cpu_ops("auto", 1)
    table, out = torch.randn(5, 4), torch.empty(2, 4)
    for ids in ([0, 5], [-1, 0]):
        with pytest.raises(
            ValueError, match=r"embedding: argument ids: expected values in 0\.\.4, got"
        ):
            ops.embedding(torch.tensor(ids, dtype=torch.int32), table, out)
    cache = torch.zeros(1, 2, 2, 16, 1, 4)
    good, bad = torch.tensor([0], dtype=torch.int32), torch.tensor([32], dtype=torch.int32)
    for arguments, name in (((good, bad), "target"), ((bad, good), "source")):
        with pytest.raises(
            ValueError, match=rf"kv_move: argument {name}: expected values in 0\.\.31"
        ):
            ops.kv_move(cache, *arguments)
