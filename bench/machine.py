"""What this machine can do at most: bytes read a second and FLOPs a second, measured next to every result.

Owns the measurement. The loops are native (csrc/cpu/ceiling.cpp), because a ceiling measured through a framework is
the framework's. On shared machines the ceilings move by a factor of two within minutes, so a bench samples them in
every round and compares a result with the ceilings of its own round. Invariant: a sample uses the threads and the
instruction set that the engine uses, and memory in huge pages where the system grants them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bench.harness import Samples
from engine.ops.native import ceiling_work, usable_isas

BUFFER_BYTES = 320 << 20  # more than the weights of a 150M model in bf16, far above any L3
TRIES = 3
MIN_FMA_S = 0.01


@dataclass(frozen=True, slots=True)
class Rates:
    """The ceilings at one moment; a multiply-add counts as two FLOPs."""

    read_gb_s: float
    fp32_gflop_s: float  # fp32 multiply-adds of the instruction set in use
    bf16_dot_gflop_s: float | None  # its bf16 dot product, where the kernels use one

    @property
    def gflop_s(self) -> float:
        """Of the arithmetic that linears use: nearly all of a model's."""
        return self.fp32_gflop_s if self.bf16_dot_gflop_s is None else self.bf16_dot_gflop_s


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the machine can do, medians over samples, on the threads and the instruction set that the kernels use."""

    cpu: str
    num_threads: int
    load_average: float
    isa: str
    read_gb_s: float
    read_spread: float  # (largest - smallest) / median
    arithmetic: str  # of the linears: "fp32 FMA" or "bf16 dot product"
    gflop_s: float  # of that arithmetic
    gflop_spread: float
    fp32_gflop_s: float
    best_isa: str
    best_fp32_gflop_s: float
    best_dot_gflop_s: float | None  # the machine's bf16 dot product, None where it has none

    def text(self) -> str:
        lines = [
            f"machine: {self.cpu}, {self.num_threads} threads, load average {self.load_average:.1f}",
            f"ceilings: memory read {self.read_gb_s:.1f} GB/s (spread {self.read_spread:.0%}), "
            f"{self.arithmetic} {self.gflop_s:.0f} GFLOP/s with {self.isa} (spread {self.gflop_spread:.0%})",
        ]
        others = []
        if self.arithmetic != "fp32 FMA":
            others.append(f"fp32 FMA {self.fp32_gflop_s:.0f}")
        if self.best_isa != self.isa:
            others.append(f"fp32 FMA {self.best_fp32_gflop_s:.0f} with {self.best_isa}")
        if self.best_dot_gflop_s is not None and self.arithmetic == "fp32 FMA":
            others.append(f"bf16 dot product {self.best_dot_gflop_s:.0f}")
        if others:
            lines.append(f"also here, GFLOP/s: {', '.join(others)}")
        return "\n".join(lines)


class Probe:
    """Samples the ceilings of this machine.

    Args:
        isa: the instruction set that the kernels use, as ``Ops.isa`` names it; "none" (no native kernel) measures
            the best one.
        num_threads: threads that the engine uses.
        bf16_weights: whether linears have bf16 weights: an instruction set with a bf16 dot product then uses it.
    """

    def __init__(self, isa: str, num_threads: int, *, bf16_weights: bool = True) -> None:
        isas = usable_isas()
        if not isas:
            raise ValueError("the native module is missing: build it with `pip install -e .`")
        self.isa = isas[-1] if isa == "none" else isa
        self.num_threads = num_threads
        self.load_average = os.getloadavg()[0]
        # numpy asks for huge pages for large arrays, torch does not
        self._buffer = torch.from_numpy(np.arange(BUFFER_BYTES // 4, dtype=np.int32))
        self._uses_dot = bf16_weights and "bf16" in self.isa
        self._fma_iterations = self._calibrate(self.isa, "fma")
        self._dot_iterations = self._calibrate(self.isa, "bf16_dot") if self._uses_dot else 0
        self._best_isa = isas[-1]
        self._best_fp32 = self._gflop_s(self._best_isa, "fma", self._fma_iterations)
        dot = next((name for name in isas if "bf16" in name), None)
        self._best_dot = (
            None if dot is None else self._gflop_s(dot, "bf16_dot", self._fma_iterations)
        )

    def sample(self) -> Rates:
        """The ceilings now, each the best of a few tries; takes about 0.1 s."""
        read = _best_rate(
            lambda: ceiling_work(self.isa, "read", self.num_threads, buffer=self._buffer)
        )
        dot = None
        if self._uses_dot:
            dot = self._gflop_s(self.isa, "bf16_dot", self._dot_iterations)
        return Rates(read / 1e9, self._gflop_s(self.isa, "fma", self._fma_iterations), dot)

    def ceilings(self, rates: Sequence[Rates]) -> Ceilings:
        """Medians over samples."""
        read = Samples(tuple(r.read_gb_s for r in rates))
        used = Samples(tuple(r.gflop_s for r in rates))
        return Ceilings(
            cpu=cpu_name(),
            num_threads=self.num_threads,
            load_average=self.load_average,
            isa=self.isa,
            read_gb_s=read.median,
            read_spread=read.spread,
            arithmetic="bf16 dot product" if self._uses_dot else "fp32 FMA",
            gflop_s=used.median,
            gflop_spread=used.spread,
            fp32_gflop_s=Samples(tuple(r.fp32_gflop_s for r in rates)).median,
            best_isa=self._best_isa,
            best_fp32_gflop_s=self._best_fp32,
            best_dot_gflop_s=self._best_dot,
        )

    def _calibrate(self, isa: str, kind: str) -> int:
        """Iterations that take about ``MIN_FMA_S`` at the best rate seen, so that a busy moment cannot shorten them."""
        iterations, best = 1 << 16, 0.0
        while iterations < 1 << 26:
            start = time.perf_counter()
            ceiling_work(isa, kind, self.num_threads, iterations=iterations)
            best = max(best, iterations / (time.perf_counter() - start))
            if iterations >= best * MIN_FMA_S:
                break
            iterations *= 2
        return iterations

    def _gflop_s(self, isa: str, kind: str, iterations: int) -> float:
        return 1e-9 * _best_rate(
            lambda: ceiling_work(isa, kind, self.num_threads, iterations=iterations)
        )


def measure_ceilings(
    isa: str, num_threads: int, *, bf16_weights: bool = True, num_samples: int = 3
) -> Ceilings:
    """Measure now, for one result; takes less than a second. A bench keeps a ``Probe`` and samples every round."""
    probe = Probe(isa, num_threads, bf16_weights=bf16_weights)
    return probe.ceilings([probe.sample() for _ in range(num_samples)])


def _best_rate(call: Callable[[], float]) -> float:
    """Best work per second of several calls of ``call``, which returns the work that it did."""
    best = 0.0
    for _ in range(TRIES):
        start = time.perf_counter()
        work = call()
        best = max(best, work / (time.perf_counter() - start))
    return best


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return "unknown CPU"
