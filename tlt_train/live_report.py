"""What a round of a live run was, for the log and for people.

Owns the two records and their words. Knows nothing of how rounds come about. Invariant: every number is of one round
and of one version of the drafter's weights, so that lines can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass

from tlt_train.buffer import BufferStats
from tlt_train.objective import Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledOut:
    """A while of rollouts, by the engine's own counters.

    Attributes:
        version: of the drafter's weights, one for the whole while; 0 is the drafter that the engine was made with.
        num_positions: handed out by the tap, prompts included.
        num_steps: in which a request got tokens, one for each request.
        num_drafts: of these with a tree; num_accepted: draft tokens of trees that were committed.
        num_running: samples that go on in the next while.
        warnings: alarms of acceptance, and a drafter that was switched off or whose new weights were refused.
    """

    version: int
    seconds: float
    num_positions: int
    num_generated: int
    num_steps: int
    num_drafts: int
    num_accepted: int
    num_running: int
    warnings: tuple[str, ...]
    is_at_end: bool

    @property
    def acceptance_length(self) -> float:
        """Tokens of a step that verified a tree, the bonus token counted; 1.0 where there was none."""
        return 1.0 + self.num_accepted / max(self.num_drafts, 1)

    @property
    def tokens_per_step(self) -> float:
        """Tokens of any step of a request: what the tuner made of it."""
        return self.num_generated / max(self.num_steps, 1)

    @property
    def tokens_per_s(self) -> float:
        return self.num_generated / max(self.seconds, 1e-9)


@dataclass(frozen=True, slots=True)
class RoundReport:
    """A round's rollouts, and the training that made the weights they drafted with.

    Attributes:
        number: from 0, the round before there is a head.
        num_train_steps: so far.
        estimate: the trainer's own, over the steps since the round before; None before the first.
    """

    number: int
    num_train_steps: int
    rolled: RolledOut
    train_s: float
    estimate: Measured | None
    buffer: BufferStats

    def values(self) -> dict[str, float]:
        """For the log."""
        rolled, buffer = self.rolled, self.buffer
        values = {
            "round": float(self.number),
            "version": float(rolled.version),
            "acceptance_length": rolled.acceptance_length,
            "tokens_per_step": rolled.tokens_per_step,
            "tokens_per_s": rolled.tokens_per_s,
            "rollout_s": rolled.seconds,
            "train_s": self.train_s,
            "num_positions": float(rolled.num_positions),
            "num_drafts": float(rolled.num_drafts),
            "num_running": float(rolled.num_running),
            "num_warnings": float(len(rolled.warnings)),
            "buffer_sequences": float(buffer.num_sequences),
            "buffer_tokens": float(buffer.num_tokens),
            "buffer_bytes": float(buffer.memory_bytes),
            "buffer_spilled_bytes": float(buffer.spilled_bytes),
            "buffer_evicted": float(buffer.num_evicted),
        }
        if self.estimate is not None:
            values["estimate"] = self.estimate.acceptance_length("alpha")
            values["estimate_greedy"] = self.estimate.acceptance_length("agrees")
        return {f"live/{name}": value for name, value in values.items()}

    def line(self) -> str:
        """For people."""
        rolled, buffer = self.rolled, self.buffer
        drafted = "no drafts"
        if rolled.num_drafts:
            drafted = (
                f"acceptance length {rolled.acceptance_length:.2f} of {rolled.num_drafts} drafts, "
                f"{rolled.tokens_per_step:.2f} tokens a step in all"
            )
        if self.estimate is not None:
            drafted += (
                f" (trainer's estimate: {self.estimate.acceptance_length('alpha'):.2f} sampled, "
                f"{self.estimate.acceptance_length('agrees'):.2f} greedy)"
            )
        return (
            f"round {self.number}, head {rolled.version}: {drafted}; {rolled.tokens_per_s:.0f} tokens/s, "
            f"{rolled.num_running} running; buffer: {buffer.num_sequences} sequences of {buffer.num_tokens} tokens, "
            f"{buffer.memory_bytes / 1e6:.0f} MB and {buffer.spilled_bytes / 1e6:.0f} MB on disk, "
            f"{buffer.num_evicted} dropped"
        )
