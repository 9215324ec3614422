"""What a run of ``tlt drafter data`` was: its figures, and why one has nothing.

Owns the names of the figures. Knows nothing of engines, taps or prompts. Invariant: figures are plain values, which JSON
holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tlt_train.rollouts import RolloutFigures


def report(figures: RolloutFigures, written: Any) -> dict[str, Any]:
    """Figures of a run as plain values."""
    lengths = sorted(figures.lengths)

    def percentile(share: float) -> int:
        return lengths[min(int(share * len(lengths)), len(lengths) - 1)] if lengths else 0

    return {
        "num_sequences": written.num_sequences,
        "num_tokens": written.num_tokens,
        "num_generated_tokens": figures.num_generated,
        "seconds": figures.seconds,
        "tokens_per_s": written.num_tokens / max(figures.seconds, 1e-9),
        "generated_tokens_per_s": figures.num_generated / max(figures.seconds, 1e-9),
        "mean_len": sum(lengths) / max(len(lengths), 1),
        "len_percentiles": {str(p): percentile(p / 100) for p in (10, 50, 90, 99, 100)},
        "num_unfinished": figures.num_unfinished,
        "num_prompts_too_long": figures.num_too_long,
        "num_prompts_refused": figures.num_refused,
        "refusal": figures.refusal,
        "was_stopped": figures.was_stopped,
    }


def why_nothing(figures: Mapping[str, Any], *, min_tokens: int, max_model_len: int) -> str:
    """What a run without a sequence says."""
    long, refused = figures["num_prompts_too_long"], figures["num_prompts_refused"]
    if figures["num_too_short_tokens"]:
        why = (
            f"all pieces are shorter than --min-tokens {min_tokens}; lower it, or raise --max-tokens, "
            f"--seconds or --num-tokens"
        )
    elif figures["num_dropped_tokens"]:
        why = (
            f"the tap had no room for any of {figures['num_dropped_tokens']} tokens; make /dev/shm larger "
            f"(docker run --shm-size=1g)"
        )
    elif long and not figures["num_generated_tokens"]:
        why = (
            f"{long} prompts are too long for the context of {max_model_len} tokens, which must hold two more; raise "
            f"--max-model-len or give shorter prompts"
        )
    elif refused and not figures["num_generated_tokens"]:
        why = f"{refused} prompts are refused, the first because {figures['refusal']}; give others"
    else:
        why = (
            f"the run ended after {figures['seconds']:.1f} s, before any prompt was read; raise --seconds or "
            f"--num-tokens"
        )
    return f"there is nothing to write: {why}"
