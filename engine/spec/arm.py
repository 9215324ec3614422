"""A drafter as the cost tuner sees it: what its proposals are worth and what they cost.

Owns nothing that its parts do not: acceptance (``survival.py``) and the price of drafting (``price.py``), and how the
drafter is to be asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.spec.price import DraftPrice
from engine.spec.saved import within
from engine.spec.survival import Survival

_MOST_TRIALS = 1e6  # that a saved state may claim; discounted as they are, there are never more than some hundred


@dataclass(slots=True)
class Arm:
    """A drafter and what is known of it."""

    name: str
    survival: Survival = field(default_factory=Survival)
    price: DraftPrice = field(default_factory=DraftPrice)
    has_scores: bool = False  # its trees bring scores, so it is asked first and trimmed afterwards
    has_trials: bool = False  # it is scored for free, so it needs no probes

    def explain(self) -> dict[str, Any]:
        price_ms = round(1e3 * self.price.seconds(1, 1), 4)
        return self.survival.explain() | {"draft_ms_per_depth": price_ms}

    def state_dict(self) -> dict[str, Any]:
        return {
            "survival": self.survival.state_dict(),
            "price": self.price.state_dict(),
            "has_scores": self.has_scores,
            "has_trials": self.has_trials,
        }

    @classmethod
    def from_state(cls, name: str, state: Mapping[str, Any]) -> Arm:
        """As saved. Raises KeyError, TypeError or ValueError where the state is malformed."""
        for key in ("has_scores", "has_trials"):
            if not isinstance(state[key], bool):
                raise ValueError(f"{key} must be true or false, got {state[key]!r}")
        for key, counts in state["survival"].items():
            for count in counts:
                within(key, count, 0.0, _MOST_TRIALS)
        for bucket, seconds in state["price"].items():
            within("requests of a price", int(bucket), 0, 64)
            within("seconds of drafting", seconds, 0.0, 1e9)
        arm = cls(name, has_scores=state["has_scores"], has_trials=state["has_trials"])
        arm.survival.load_state_dict(state["survival"])
        arm.price.load_state_dict(state["price"])
        return arm
