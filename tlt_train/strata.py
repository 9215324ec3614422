"""Strata of length, and how a draw is shared among them.

Owns the log2 scale and the arithmetic of shares. Knows nothing of sequences: arrays of numbers in, arrays out.
Invariant: a share never exceeds what is there, and the shares sum up to what is asked for or to all there is.
"""

from __future__ import annotations

import numpy as np

NUM_STRATA = 40  # up to 2**40 tokens


def stratum_of(lengths: np.ndarray) -> np.ndarray:
    """Stratum of each length >= 1: floor(log2(length)), exactly."""
    return np.frexp(np.asarray(lengths, np.float64))[1].astype(np.int64) - 1


def fill(weights: np.ndarray, capacities: np.ndarray, total: float) -> np.ndarray:
    """Share ``total`` in proportion to ``weights``, none above its capacity; what is over goes to the others.

    A cell of weight 0 gets something only once all others are full.
    """
    taken = np.zeros_like(capacities, dtype=np.float64)
    for open_weights in (np.asarray(weights, np.float64), np.ones_like(taken)):
        while (rest := total - taken.sum()) > 1e-9 * max(total, 1.0):
            is_open = (taken < capacities) & (open_weights > 0)
            if not is_open.any():
                break
            parts = np.where(is_open, open_weights, 0.0)
            wanted = taken + rest * parts / parts.sum()
            is_over = wanted >= capacities
            if not (is_over & is_open).any():
                return wanted
            # Fill those that would overflow, then share the rest anew among the others.
            taken = np.where(is_over & is_open, capacities, taken)
    return taken


def wanted_tokens(
    current: np.ndarray,
    earlier: np.ndarray,
    current_room: np.ndarray,
    earlier_room: np.ndarray,
    *,
    num_tokens: int,
    power: float,
    max_earlier_share: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens to draw of each stratum (from the current step, from earlier ones).

    The rule: let c and p be the shares of tokens by stratum in the current step and in earlier ones. A step that has
    just begun has finished its short samples only, so the lengths that it will have are guessed as m = max(c, p). A
    stratum gets tokens in proportion to m ** ``power``: at 1 the mix is that of the samples, at 0 all strata are equal.
    Of it the part c / m comes from the current step, and what is missing there, 1 - c / m, from earlier ones (TLT's
    one-step-off sampling, arXiv 2511.16665). Earlier steps give at most ``max_earlier_share`` of the draw, unless
    the current one has too little to fill the rest. What a stratum cannot give, others do.

    Args:
        current, earlier: [strata] tokens that are there, weighted.
        current_room, earlier_room: [strata] tokens that a draw can take at most.
    """
    c = current / max(current.sum(), 1e-30)
    p = earlier / max(earlier.sum(), 1e-30)
    expected = np.maximum(c, p)
    is_there = (current_room > 0) | (earlier_room > 0)
    weights = np.where(is_there, np.where(is_there, expected, 1.0) ** power, 0.0)
    if not weights.any():
        return np.zeros_like(c), np.zeros_like(p)
    share = weights / weights.sum()
    of_current = np.divide(c, expected, out=np.zeros_like(c), where=expected > 0)
    limit = max(max_earlier_share * num_tokens, num_tokens - current_room.sum())
    from_earlier = np.minimum(share * (1 - of_current) * num_tokens, earlier_room)
    if from_earlier.sum() > limit:
        from_earlier *= limit / from_earlier.sum()
    rest = min(num_tokens - from_earlier.sum(), current_room.sum())
    first = np.minimum(share * of_current * num_tokens, current_room)
    from_current = first + fill(share, current_room - first, rest - first.sum())
    rest = num_tokens - from_current.sum() - from_earlier.sum()
    from_earlier = from_earlier + fill(share, earlier_room - from_earlier, rest)
    return from_current, from_earlier
