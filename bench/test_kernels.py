"""Times every op with pytest-benchmark: ``make bench``, or ``python -m pytest bench``.

Each case is compared with the torch reference before it is timed. ``extra_info`` of the JSON output
(``--benchmark-json``) has the bytes and FLOPs of a call and the machine's ceilings. TLT_BENCH_OPS names a backend.
"""

from __future__ import annotations

import os

import pytest
import torch

from bench.kernels import Case, cases
from bench.machine import Ceilings, measure_ceilings
from engine.ops import Ops, resolve_ops
from engine.ops.reference import ReferenceOps


@pytest.fixture(scope="session")
def ops() -> Ops:
    return resolve_ops(os.environ.get("TLT_BENCH_OPS", "auto"))


@pytest.fixture(scope="session")
def ceilings(ops: Ops) -> Ceilings:
    return measure_ceilings(ops.isa, ops.num_threads)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_op(benchmark, case: Case, ops: Ops, ceilings: Ceilings) -> None:
    expected_call, expected = case.make(ReferenceOps())
    expected_call()
    call, out = case.make(ops)
    call()
    if case.tolerance == 0.0:
        assert torch.equal(out, expected)
    else:
        scale = float(expected.float().abs().max())
        assert float((out - expected).abs().max()) <= case.tolerance * max(scale, 1.0)
    benchmark.extra_info |= {
        "num_bytes": case.work.num_bytes,
        "flops": case.work.flops,
        "read_gb_s_ceiling": ceilings.read_gb_s,
        "gflop_s_ceiling": ceilings.gflop_s,
        "fp32_gflop_s_ceiling": ceilings.fp32_gflop_s,
    }
    benchmark(call)
