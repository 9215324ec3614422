"""Counters of one engine: plain integers, added to between steps, read at any time.

Owns no history and no export format. Invariant: a counter never falls.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class EngineCounters:
    """What has happened since the engine was made. Times are in seconds.

    ``num_drafts``: trees verified, ``num_draft_tokens``: their nodes. ``num_verifications``: steps in which a request
    got tokens, with or without a tree. ``num_accepted_per_position[i]``: accepted draft tokens at depth i + 1.
    """

    num_finished_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_target_steps: int = 0
    num_target_rows: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_drafts: int = 0
    num_verifications: int = 0
    num_accepted_per_position: list[int] = field(default_factory=list)
    draft_time_s: float = 0.0
    forward_time_s: float = 0.0
    sample_time_s: float = 0.0
    step_time_s: float = 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens committed by each verification of a decoding request, the bonus token included."""
        if self.num_verifications == 0:
            return 0.0
        return self.num_generated_tokens / self.num_verifications

    def count_accepted(self, num_accepted: int) -> None:
        """A verification committed so many draft tokens."""
        positions = self.num_accepted_per_position
        while len(positions) < num_accepted:
            positions.append(0)
        for i in range(num_accepted):
            positions[i] += 1
        self.num_accepted_draft_tokens += num_accepted
