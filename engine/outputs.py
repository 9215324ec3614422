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
class SpeculationMetrics:
    """What speculation did for one sample, under vLLM's names and, as properties, SGLang's.

    ``acceptance_histogram[a]`` counts the steps that committed ``a`` draft tokens, so its sum is the number of steps
    and the sum of ``a`` times its bin the number of accepted draft tokens. A step is one in which the sample got
    tokens, drafted or not.
    """

    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    acceptance_histogram: tuple[int, ...]

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens of a step, the bonus token included: completion tokens / steps."""
        steps = self.num_spec_steps
        return (steps + self.num_accepted_draft_tokens) / steps if steps else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted of the draft tokens verified, the bonus token not included."""
        return self.num_accepted_draft_tokens / max(self.num_draft_tokens, 1)

    @property
    def spec_accept_length(self) -> float:
        return self.mean_acceptance_length

    @property
    def spec_accept_rate(self) -> float:
        return self.draft_acceptance_rate

    @property
    def spec_verify_ct(self) -> int:
        return self.num_spec_steps

    @property
    def spec_num_correct_drafts(self) -> int:
        return self.num_accepted_draft_tokens

    @property
    def spec_num_proposed_drafts(self) -> int:
        return self.num_draft_tokens

    @property
    def spec_correct_drafts_histogram(self) -> tuple[int, ...]:
        return self.acceptance_histogram


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of a request in seconds of ``time.monotonic``; None where it has not happened."""

    arrival_time: float
    first_token_time: float | None
    finished_time: float | None
    num_preemptions: int = 0
    speculative_decoding: SpeculationMetrics | None = None


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
