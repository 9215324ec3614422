"""How the rollouts and the steps of a live run take turns. Frozen, checked once.

Owns the settings. Knows nothing of engines or trainers, so that the command line is quick. Invariant: an instance that
exists is valid.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptions:
    """How rollouts and training take turns.

    Args:
        round_tokens: positions of a round's rollouts, prompts included; also of the first, which makes the head.
        round_steps: steps of training after them; None trains for a share of the time.
        rollout_share: of the time, for rollouts, where ``round_steps`` is None.
        buffer_bytes: of sequences in memory.
        spill_dir: where those beyond go; None drops the oldest.
        tuner: of the engine, "cost" or "fixed".

    Raises:
        ValueError: names the option, what came, and the fix.
    """

    round_tokens: int = 16384
    round_steps: int | None = None
    rollout_share: float = 0.5
    buffer_bytes: int = 1 << 30
    spill_dir: str | None = None
    tuner: str = "cost"

    def __post_init__(self) -> None:
        for name in ("round_tokens", "round_steps", "buffer_bytes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {value!r}")
        if not 0.0 < self.rollout_share < 1.0:
            raise ValueError(f"--rollout-share must be between 0 and 1, got {self.rollout_share!r}")
        if self.tuner not in ("cost", "fixed"):
            raise ValueError(f"--tuner must be cost or fixed, got {self.tuner!r}")
