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
    fp32_gflop_s: float


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the machine can do, and on how many threads of which instruction set it was measured."""

    cpu: str
    num_threads: int
    isa: str  # the one that the kernels use
    read_gb_s: float
    read_spread: float  # (largest - smallest) / median over the samples
    fp32_gflop_s: float
    fp32_spread: float
    best_isa: str
    best_fp32_gflop_s: float
    bf16_dot_gflop_s: float | None  # of a bf16 dot product instruction, None where there is none
    load_average: float

    def text(self) -> str:
        lines = [
            f"machine: {self.cpu}, {self.num_threads} threads, load average {self.load_average:.1f}",
            f"ceilings: memory read {self.read_gb_s:.1f} GB/s (spread {self.read_spread:.0%}), "
            f"fp32 FMA {self.fp32_gflop_s:.0f} GFLOP/s with {self.isa} (spread {self.fp32_spread:.0%})",
        ]
        others = []
        if self.best_isa != self.isa:
            others.append(f"fp32 FMA {self.best_fp32_gflop_s:.0f} with {self.best_isa}")
        if self.bf16_dot_gflop_s is not None:
            others.append(
                f"bf16 dot product {self.bf16_dot_gflop_s:.0f} (rounds activations to bf16)"
            )
        if others:
            lines.append(f"also here, GFLOP/s: {', '.join(others)}")
        return "\n".join(lines)


class Probe:
    """Samples the ceilings of this machine.

    Args:
        isa: the instruction set that the kernels use, as ``Ops.isa`` names it; "none" (no native kernel) measures
            the best one.
        num_threads: threads that the engine uses.
    """

    def __init__(self, isa: str, num_threads: int) -> None:
        isas = usable_isas()
        if not isas:
            raise ValueError("the native module is missing: build it with `pip install -e .`")
        self.isa = isas[-1] if isa == "none" else isa
        self.num_threads = num_threads
        # numpy asks for huge pages for large arrays, torch does not
        self._buffer = torch.from_numpy(np.arange(BUFFER_BYTES // 4, dtype=np.int32))
        self._iterations = self._calibrate(self.isa, "fma")
        self.best_isa = isas[-1]
        self.best_fp32_gflop_s = self._flops(self.best_isa, "fma")
        dot = next((name for name in isas if "bf16" in name), None)
        self.bf16_dot_gflop_s = None if dot is None else self._flops(dot, "bf16_dot")
        self.load_average = os.getloadavg()[0]

    def sample(self) -> Rates:
        """Both ceilings now, each the best of a few tries; takes about 0.1 s."""
        read = _best_rate(
            lambda: ceiling_work(self.isa, "read", self.num_threads, buffer=self._buffer)
        )
        return Rates(read / 1e9, self._flops(self.isa, "fma", self._iterations))

    def ceilings(self, rates: Sequence[Rates]) -> Ceilings:
        """Medians over samples."""
        read = Samples(tuple(r.read_gb_s for r in rates))
        fma = Samples(tuple(r.fp32_gflop_s for r in rates))
        return Ceilings(
            cpu=cpu_name(),
            num_threads=self.num_threads,
            isa=self.isa,
            read_gb_s=read.median,
            read_spread=read.spread,
            fp32_gflop_s=fma.median,
            fp32_spread=fma.spread,
            best_isa=self.best_isa,
            best_fp32_gflop_s=self.best_fp32_gflop_s,
            bf16_dot_gflop_s=self.bf16_dot_gflop_s,
            load_average=self.load_average,
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

    def _flops(self, isa: str, kind: str, iterations: int | None = None) -> float:
        count = self._calibrate(isa, kind) if iterations is None else iterations
        return _best_rate(lambda: ceiling_work(isa, kind, self.num_threads, iterations=count)) / 1e9


def measure_ceilings(isa: str, num_threads: int, num_samples: int = 3) -> Ceilings:
    """Measure now, for one result; takes less than a second. A bench keeps a ``Probe`` and samples every round."""
    probe = Probe(isa, num_threads)
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
