"""Counters of one engine: plain integers, added to between steps, read at any time.

Owns no history and no export format. Invariant: a counter never falls.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class EngineCounters:
    """What has happened since the engine was made. Times are in seconds."""

    num_finished_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_target_steps: int = 0
    num_target_rows: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_sampled_positions: int = 0
    forward_time_s: float = 0.0
    sample_time_s: float = 0.0
    step_time_s: float = 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens committed by each verification of a decoding request, the bonus token included."""
        if self.num_sampled_positions == 0:
            return 0.0
        return self.num_generated_tokens / self.num_sampled_positions
