"""What comes back to the user: plain records, in the shapes that vLLM users know.

Knows nothing of engines or tensors. Invariant: ``token_ids``, ``logprobs`` and the usage counts of one
completion always have the same length, and nothing after a stop is in any of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.request import VersionSpan


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token at one position; rank 1 is the most likely."""

    logprob: float
    rank: int
    decoded_token: str | None = None


LogprobsAt = dict[int, Logprob]
"""Token id -> its log-probability at one position: the sampled (or prompt) token first, then the most likely."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample of a request. ``cumulative_logprob`` is None unless logprobs were asked for.

    ``finish_reason``: "stop" (end token, stop token or stop string; ``stop_reason`` says which, None for the model's
    own end token), "length", "abort", "error" (``stop_reason`` is the message), or None while unfinished.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[LogprobsAt] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    version_spans: tuple[VersionSpan, ...] = ()

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of a request in seconds of ``time.monotonic``; None where it has not happened."""

    arrival_time: float
    first_token_time: float | None
    finished_time: float | None
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its samples. ``num_cached_tokens``: prompt tokens read from the prefix cache, by sample 0."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[LogprobsAt | None] | None = None
    num_cached_tokens: int = 0
    metrics: list[RequestMetrics] = field(default_factory=list)
