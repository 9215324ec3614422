"""What a bench asks of whoever runs in it: this engine and its peers answer the same three questions.

Owns the records and the protocol. Invariant: everybody gets the same token ids, generates exactly the same number of
tokens, and counts time alike: ``prefill_s`` ends when the last sequence has its first token, ``decode_s`` is the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bench.workloads import Job


@dataclass(frozen=True, slots=True)
class Generation:
    """Token ids of each job, and where the time went."""

    token_ids: list[list[int]]
    prefill_s: float
    decode_s: float
    num_decode_tokens: int  # generated within decode_s
    tail_s: float | None = (
        None  # from the end of the last but one sequence, where the contestant knows it
    )

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s

    @property
    def num_tokens(self) -> int:
        return sum(len(ids) for ids in self.token_ids)

    @property
    def decode_tokens_per_s(self) -> float:
        return self.num_decode_tokens / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.total_s


class Contestant(Protocol):
    """An engine under test. ``settings`` says how it runs, for the report."""

    name: str

    @property
    def settings(self) -> str: ...

    def prepare(self, *, num_seqs: int, max_len: int) -> None:
        """Set up for so many sequences of at most so many tokens; choose the best settings for it. Not timed."""
        ...

    def generate(self, jobs: Sequence[Job], temperature: float) -> Generation:
        """Run all jobs, submitted at once, end-of-sequence ignored."""
        ...

    def prefill_s(self, prompt_ids: Sequence[int]) -> float:
        """Seconds from a prompt that was never seen to the logits behind it."""
        ...

    def pass_s(
        self, context_ids: Sequence[int], rows: Sequence[Sequence[int]], repeats: int
    ) -> list[float]:
        """Seconds of one forward over each of ``rows`` (token ids) behind a cached context, the best of ``repeats``.

        Logits of every row are computed; the context is cached once, before.
        """
        ...
