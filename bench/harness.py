"""How every bench times, compares and reports: interleaved rounds, medians with their spread, one JSON line.

Knows nothing of engines or models. Invariant: two variants that are compared were timed in the same rounds, in an
order that rotates, so that a slow minute of the machine hits all of them.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, TypeVar

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True, slots=True)
class Samples:
    """Repeated measurements of one thing, in the order they were taken."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def best(self) -> float:
        return min(self.values)

    @property
    def spread(self) -> float:
        """(largest - smallest) / median; differences below it are noise."""
        return (max(self.values) - min(self.values)) / self.median if self.median else 0.0


def paired_median(function: Callable[[A, B], float], xs: Sequence[A], ys: Sequence[B]) -> float:
    """Median of a figure that is taken within each round, such as a ratio or the fraction of a ceiling."""
    return Samples(tuple(function(x, y) for x, y in zip(xs, ys, strict=True))).median


def interleave(variants: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Run every variant once a round, starting one further each round; results by name, in order of rounds."""
    results: dict[str, list[T]] = {name: [] for name in variants}
    names = list(variants)
    for r in range(rounds):
        shift = r % len(names)
        for name in names[shift:] + names[:shift]:
            results[name].append(variants[name]())
    return results


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Plain text table: first column left, the others right; floats with three significant digits or so."""
    cells = [list(header)] + [[_cell(value) for value in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "  ".join(
            text.ljust(width) if i == 0 else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return (
            f"{value:.0f}"
            if abs(value) >= 100
            else f"{value:.1f}"
            if abs(value) >= 10
            else f"{value:.2f}"
        )
    return "-" if value is None else str(value)


def json_line(record: Mapping[str, Any]) -> str:
    """The last line of a bench: records as objects, floats to six significant digits, no newline inside."""
    return json.dumps(_rounded(record), ensure_ascii=False)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Samples):
        return {"median": _rounded(value.median), "values": _rounded(value.values)}
    if is_dataclass(value) and not isinstance(value, type):
        return _rounded(asdict(value))
    if isinstance(value, Mapping):
        return {str(k): _rounded(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(v) for v in value]
    return value


def agreement(expected: Sequence[Sequence[int]], got: Sequence[Sequence[int]]) -> tuple[int, int]:
    """(tokens in agreeing prefixes, tokens expected), summed over sequences."""
    same = 0
    for a, b in zip(expected, got, strict=True):
        for x, y in zip(a, b, strict=False):
            if x != y:
                break
            same += 1
    return same, sum(len(a) for a in expected)
