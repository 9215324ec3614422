"""The ``native`` backend: C++ kernels for the CPU, one set per instruction set, chosen when they are resolved.

Owns the import of the native module and the reason when it cannot be imported. Knows nothing of other backends.
Invariant: what this returns runs the instruction set that was asked for, or a ValueError says why it cannot. The
methods of ``CpuOps`` check every argument and raise ValueError naming the op, the argument, what was expected and
what came; a call costs well under a microsecond on top of its kernel. Calls may come from any thread; while one of
them has the worker threads, another does its work alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from engine.ops._native import CpuOps

# csrc/common/tensor.h, enum Element
_ELEMENTS = {torch.float32: 1, torch.bfloat16: 2, torch.int32: 4, torch.int64: 8}

try:
    from engine.ops import _native
except ImportError as error:
    _native = None
    _IMPORT_ERROR = (
        f"the native module cannot be imported ({error}); install with `pip install -e .`"
    )
else:
    _IMPORT_ERROR = ""
    _native.init_tensors(Tensor, _ELEMENTS, True)


def native_unavailable() -> str | None:
    """Why no native kernel can run here, or None when they can."""
    return _IMPORT_ERROR or None


def usable_isas() -> list[str]:
    """Instruction sets that were compiled in and that this machine has, best last."""
    return _native.usable_isas() if _native is not None else []


def use_exchange_api(wanted: bool) -> bool:
    """Read tensors through torch's DLPack exchange API (the default, where torch has it) or through ``data_ptr()``.

    Returns whether it is in use. For tests: both ways check the same, the second takes microseconds a tensor.
    """
    return _native is not None and _native.init_tensors(Tensor, _ELEMENTS, wanted)


def cpu_ops(isa: str, num_threads: int) -> CpuOps:
    """The kernels of ``isa`` ("auto": the default of csrc/cpu/dispatch.cpp) on ``num_threads`` threads.

    Raises:
        ValueError: the module is missing, or ``isa`` is unknown or not supported by this machine.
    """
    if _native is None:
        raise ValueError(f"native ops: {_IMPORT_ERROR}")
    return _native.CpuOps(isa, num_threads)


def ceiling_work(
    isa: str,
    kind: str,
    num_threads: int,
    *,
    iterations: int = 0,
    buffer: Tensor | None = None,
) -> float:
    """Run one measuring loop of csrc/cpu/ceiling.cpp and return the bytes or FLOPs that it did; the caller takes the time.

    ``kind`` is "read" (over ``buffer``), "fma" or "bf16_dot" (``iterations`` of every thread).
    """
    if _native is None:
        raise ValueError(f"ceiling_work: {_IMPORT_ERROR}")
    return _native.ceiling_work(isa, kind, num_threads, iterations, buffer)
