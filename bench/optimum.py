"""The best that speculation can do on a machine: prices of passes by rows, acceptance of a token, lengths of a rollout.

Owns the expectation of a rollout in which every request drafts chains of one depth, the best one for the number of
requests that still run. Measures nothing. Seconds come from a curve over rows; a token's acceptance is independent of
the others', as the oracle drafter's is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Price = Callable[[int], float]
"""Seconds of a step by rows."""

PhasePrice = Callable[[int, int], float]
"""Seconds of a step by requests and rows: fewer requests have longer contexts."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """A rollout at its best.

    Attributes:
        seconds: of all decoding.
        depths: the best depth by number of requests.
        rates: tokens per second there.
        tail_s: seconds of the last request alone.
    """

    seconds: float
    depths: dict[int, int]
    rates: dict[int, float]
    tail_s: float


def interpolated(points: Mapping[int, float]) -> Price:
    """A curve through seconds at some row counts: straight between them, in proportion past the last."""
    rows = sorted(points)

    def price(n: int) -> float:
        if n >= rows[-1]:
            return points[rows[-1]] * n / rows[-1]
        above = next(r for r in rows if r >= n)
        below = max((r for r in rows if r <= n), default=above)
        if below == above:
            return points[above]
        share = (n - below) / (above - below)
        return points[below] + share * (points[above] - points[below])

    return price


def best_by_phase(
    price: PhasePrice,
    lengths: Sequence[int],
    acceptance: Sequence[float],
    *,
    max_depth: int,
    draft_s: Callable[[int, int], float] = lambda num, depth: 0.0,
) -> Optimum:
    """The expected rollout where each phase, the time between two requests' ends, has its best depth.

    Args:
        price: seconds of a step by requests and rows.
        lengths: tokens of each request, the one that its prefill gives included; they start together.
        acceptance: of each request, at each token.
        max_depth: longest chain.
        draft_s: seconds of drafting by requests and depth.
    """
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    seconds, tail_s, done = 0.0, 0.0, 1
    depths: dict[int, int] = {}
    rates: dict[int, float] = {}
    for ended, number in enumerate(order):
        left, num = lengths[number] - done, len(order) - ended
        if left <= 0:
            continue
        chances = [acceptance[i] for i in order[ended:]]
        rate, depths[num] = best_depth(price, chances, max_depth=max_depth, draft_s=draft_s)
        rates[num] = rate
        tail_s = num * left / rate
        seconds += tail_s
        done = lengths[number]
    return Optimum(seconds, depths, rates, tail_s)


def best_depth(
    price: PhasePrice,
    acceptance: Sequence[float],
    *,
    max_depth: int,
    draft_s: Callable[[int, int], float] = lambda num, depth: 0.0,
) -> tuple[float, int]:
    """(expected tokens/s, depth) of the best depth that all requests share; 0 is plain decoding."""
    rate, depth = max(
        (chain_rate(price, acceptance, depth, draft_s), -depth) for depth in range(max_depth + 1)
    )
    return rate, -depth


def chain_rate(
    price: PhasePrice,
    acceptance: Sequence[float],
    depth: int,
    draft_s: Callable[[int, int], float] = lambda num, depth: 0.0,
) -> float:
    """Expected tokens per second where every request drafts ``depth`` tokens."""
    num = len(acceptance)
    tokens = sum(sum(p**j for j in range(depth + 1)) for p in acceptance)
    return tokens / (price(num, num * (1 + depth)) + (draft_s(num, depth) if depth else 0.0))
