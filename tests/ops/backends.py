"""Every native kernel set that runs here, and the check that they agree with each other to the bit.

Owns how ops are called in the tests of kernels. Knows no op. Invariant: ``agreed`` gives every backend fresh arguments,
with outputs that start as NaN or another value that no kernel would write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.ops.native import cpu_ops, usable_isas

Backend = tuple[str, int]  # instruction set, threads

# scalar calls a function for every fma: once is enough
NATIVE: list[Backend] = [
    (isa, threads) for isa in usable_isas() for threads in ((1, 2, 3) if isa != "scalar" else (1,))
]


def best() -> Any:
    """The kernels that a machine takes by itself, on two threads."""
    return cpu_ops("auto", 2)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal, with NaN equal to itself and -0 different from 0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def agreed(
    op: str, make: Callable[[], Sequence[Any]], *outputs: int, only: Sequence[Backend] = ()
) -> list[Tensor]:
    """The arguments at ``outputs`` after ``op(*make())`` on every native kernel set, which all agree to the bit."""
    results: list[Tensor] = []
    first: Backend | None = None
    for backend in only or NATIVE:
        arguments = make()
        getattr(cpu_ops(*backend), op)(*arguments)
        found = [arguments[i] for i in outputs]
        if first is None:
            results, first = found, backend
        for i, result, other in zip(outputs, results, found, strict=True):
            assert same_bits(result, other), f"{op}: argument {i}: {backend} differs from {first}"
    return results


def nan(*shape: int) -> Tensor:
    return torch.full(shape, float("nan"))


def int32(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32)
