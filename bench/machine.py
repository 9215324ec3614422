"""What this machine can do at most: bytes read a second and FLOPs a second, measured next to every result.

Owns the measurement. The loops are native (csrc/cpu/ceiling.cpp), because a ceiling measured through a framework is
the framework's. Invariant: numbers are the best of several tries with the threads that the engine uses.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.ops.native import ceiling_work, usable_isas

BUFFER_BYTES = 320 << 20  # the size of a 150M model in bf16, far above any L3
TRIES = 5
MIN_FMA_S = 0.02


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured limits of ``num_threads`` threads; FLOPs count a multiply-add as two."""

    cpu: str
    num_threads: int
    isa: str
    read_gb_s: float
    fp32_gflop_s: float  # of ``isa``, the instruction set that the kernels use
    best_isa: str
    best_fp32_gflop_s: float
    bf16_dot_gflop_s: float | None  # of the machine's bf16 dot product instruction, None where it has none
    load_average: float

    def text(self) -> str:
        lines = [
            f"machine: {self.cpu}, {self.num_threads} threads, load average {self.load_average:.1f}",
            f"ceilings: memory read {self.read_gb_s:.1f} GB/s, fp32 FMA {self.fp32_gflop_s:.0f} GFLOP/s ({self.isa})",
        ]
        if self.best_isa != self.isa:
            lines[1] += f", {self.best_fp32_gflop_s:.0f} ({self.best_isa})"
        if self.bf16_dot_gflop_s is not None:
            lines[1] += f", bf16 dot {self.bf16_dot_gflop_s:.0f} (not used: it rounds activations)"
        return "\n".join(lines)

    def record(self) -> dict[str, object]:
        return {
            "cpu": self.cpu,
            "num_threads": self.num_threads,
            "isa": self.isa,
            "read_gb_s": self.read_gb_s,
            "fp32_gflop_s": self.fp32_gflop_s,
            "best_isa": self.best_isa,
            "best_fp32_gflop_s": self.best_fp32_gflop_s,
            "bf16_dot_gflop_s": self.bf16_dot_gflop_s,
            "load_average": self.load_average,
        }


def measure_ceilings(isa: str, num_threads: int) -> Ceilings:
    """Measure the ceilings of ``isa`` (as ``CpuOps.isa`` names it); takes about a second."""
    load = os.getloadavg()[0]
    isas = usable_isas()
    fma = {name: _flops(name, "fma", num_threads) for name in dict.fromkeys((isa, isas[-1]))}
    dot_isa = next((name for name in isas if "bf16" in name), None)
    return Ceilings(
        cpu=cpu_name(),
        num_threads=num_threads,
        isa=isa,
        read_gb_s=_read_gb_s(isa, num_threads),
        fp32_gflop_s=fma[isa],
        best_isa=isas[-1],
        best_fp32_gflop_s=fma[isas[-1]],
        bf16_dot_gflop_s=None if dot_isa is None else _flops(dot_isa, "bf16_dot", num_threads),
        load_average=load,
    )


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return "unknown CPU"


def _rate(call: Callable[[], float]) -> float:
    """Best work per second of several calls of ``call``, which returns the work it did."""
    best = 0.0
    for _ in range(TRIES):
        start = time.perf_counter()
        work = call()
        best = max(best, work / (time.perf_counter() - start))
    return best


def _read_gb_s(isa: str, num_threads: int) -> float:
    buffer = torch.arange(BUFFER_BYTES // 4, dtype=torch.int32)
    return _rate(lambda: ceiling_work(isa, "read", num_threads, buffer=buffer)) / 1e9


def _flops(isa: str, kind: str, num_threads: int) -> float:
    iterations = 1 << 16
    while True:
        start = time.perf_counter()
        ceiling_work(isa, kind, num_threads, iterations=iterations)
        if time.perf_counter() - start >= MIN_FMA_S or iterations >= 1 << 30:
            break
        iterations *= 2
    return _rate(lambda: ceiling_work(isa, kind, num_threads, iterations=iterations)) / 1e9
