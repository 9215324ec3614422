"""Numbers of a tuner's saved state: what is read back must be such as a tuner could have written.

Owns the check of one number, and where the cost tuner is in its explorations. Knows nothing of what numbers mean.
Invariant: what passes is finite and within bounds, so that sums and quotients of it stay finite: a state comes from a
file, and a tuner that believes in NaN never recovers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST = 2**53  # of anything that is counted: beyond it JSON readers disagree

# Steps of speculation between plain ones: at first, and once they bring nothing new
PLAIN_EVERY = (6, 150)

# Where the cost tuner is in its explorations: name of the attribute, least and most
TURNS: dict[str, tuple[float, float]] = {
    "steps_since_plain": (0, MOST),
    "plain_every": (1, PLAIN_EVERY[1]),
    "probe_credit_s": (-1e-6, 1e9),  # what is spent is at most what is there, but for rounding
    "probe_turn": (0, MOST),
}


def within(name: str, value: Any, low: float, high: float) -> Any:
    """The value, if it is a number from ``low`` to ``high``: an integer where the bounds are, else as a float.

    Raises:
        ValueError: it is not; says what came.
    """
    kind, types = ("an integer", int) if isinstance(low, int) else ("a number", (int, float))
    if not isinstance(value, types) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} must be {kind} from {low} to {high}, got {value!r}")
    return value if isinstance(low, int) else float(value)


def read_turns(turns: Mapping[str, Any]) -> dict[str, Any]:
    """All of ``TURNS``. Raises KeyError, TypeError or ValueError where they are malformed."""
    return {name: within(name, turns[name], low, high) for name, (low, high) in TURNS.items()}
