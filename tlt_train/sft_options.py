"""What a supervised run is: its length, the optimiser, the sizes. Frozen, complete, checked once.

Owns the settings and the curve of the learning rate. Knows nothing of tensors. Invariant: an instance that exists is
valid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class SftOptions:
    """What a run is.

    Args:
        minutes: of training; loading and writing take some seconds more. None ends by ``steps``.
        steps: of the optimiser; None ends by ``minutes``.
        learning_rate, warmup_steps, weight_decay, max_grad_norm: of AdamW; norms do not decay.
        tokens_per_step: a step takes documents until it has so many tokens.
        num_prompts: in the file that is written beside the model, held-out ones among them.
        num_held_out: problems for validation at the end.
        dtype: of matrix multiplications, "bfloat16" or "float32".
        num_threads: of torch; None leaves them.
        seed: of the problems.

    Raises:
        ValueError: names the option, what came, and the fix.
    """

    minutes: float | None = None
    steps: int | None = None
    learning_rate: float = 3e-4
    warmup_steps: int = 10
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    tokens_per_step: int = 768
    num_prompts: int = 4000
    num_held_out: int = 24
    dtype: str = "bfloat16"
    num_threads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.steps is None):
            raise ValueError("a run ends by --minutes or by --steps: give one of them")
        for name in ("minutes", "steps", "num_threads"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise self._error(name, "above 0")
        for name in ("learning_rate", "max_grad_norm"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise self._error(name, "a number above 0")
        for name in ("tokens_per_step", "num_prompts", "num_held_out"):
            if getattr(self, name) < 1:
                raise self._error(name, "at least 1")
        for name in ("warmup_steps", "weight_decay", "seed"):
            if not 0 <= getattr(self, name) < math.inf:
                raise self._error(name, "at least 0")
        if self.dtype not in DTYPES:
            raise self._error("dtype", f"one of {', '.join(DTYPES)}")

    def _error(self, name: str, expected: str) -> ValueError:
        return ValueError(
            f"--{name.replace('_', '-')} must be {expected}, got {getattr(self, name)!r}"
        )

    def learning_rate_at(self, step: int, progress: float) -> float:
        """Of step 0, 1, ... when a share ``progress`` of the run is over: linear warm-up, half a cosine down to 0."""
        warmth = min(1.0, (step + 1) / max(self.warmup_steps, 1))
        return self.learning_rate * warmth * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
