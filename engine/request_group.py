"""What a user sees of a request while it runs: its samples' text, tokens and log-probabilities.

Owns the visible side of each sample; the scheduler owns the running side (``Request``). Knows nothing of steps or
tensors. Invariant: the visible tokens of a sample are its request's output tokens, cut at the first stop.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.output_text import OutputText
from engine.outputs import (
    CompletionOutput,
    LogprobsAt,
    RequestMetrics,
    RequestOutput,
    SpeculationMetrics,
)
from engine.request import Request


@dataclass(slots=True)
class Sample:
    """One sample of a group. ``text`` is None where the model has no tokenizer."""

    request: Request
    group: RequestGroup
    text: OutputText | None
    logprobs: list[LogprobsAt] | None
    cumulative_logprob: float = 0.0
    first_token_time: float | None = None
    finished_time: float | None = None
    num_draft_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)

    def count_step(self, num_draft_tokens: int, num_accepted: int) -> None:
        """A step has committed tokens, ``num_accepted`` of them drafted."""
        self.num_draft_tokens += num_draft_tokens
        histogram = self.acceptance_histogram
        while len(histogram) <= num_accepted:
            histogram.append(0)
        histogram[num_accepted] += 1

    def speculation(self) -> SpeculationMetrics:
        histogram = tuple(self.acceptance_histogram)
        accepted = sum(num * count for num, count in enumerate(histogram))
        return SpeculationMetrics(sum(histogram), self.num_draft_tokens, accepted, histogram)

    def add_token(
        self, token_id: int, logprobs: LogprobsAt | None, now: float, *, may_stop: bool
    ) -> str | None:
        """Make one more token visible; the stop string that it completed, or None."""
        if self.first_token_time is None:
            self.first_token_time = now
        if self.logprobs is not None and logprobs is not None:
            self.logprobs.append(logprobs)
            self.cumulative_logprob += logprobs[token_id].logprob
        if self.text is None or self._is_end_token(token_id):
            return None
        return self.text.push(token_id, may_stop=may_stop)

    def finish(self, now: float) -> None:
        self.finished_time = now
        if self.text is not None:
            self.text.finish()

    def _is_end_token(self, token_id: int) -> bool:
        """The token that ended the request is in ``token_ids`` but not in the text, as in vLLM."""
        request = self.request
        return (
            request.finish_reason == "stop"
            and token_id == request.token_ids[-1]
            and not request.params.include_stop_str_in_output
        )

    def output(self) -> CompletionOutput:
        request = self.request
        return CompletionOutput(
            index=request.sample_index,
            text="" if self.text is None else self.text.shown,
            token_ids=request.output_token_ids,
            cumulative_logprob=None if self.logprobs is None else self.cumulative_logprob,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            version_spans=tuple(request.version_spans),
        )


@dataclass(slots=True)
class RequestGroup:
    """The n samples of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    arrival_time: float
    samples: list[Sample] = field(default_factory=list)
    prompt_logprobs: list[LogprobsAt | None] | None = None

    @property
    def finished(self) -> bool:
        return all(s.finished_time is not None for s in self.samples)

    def output(self) -> RequestOutput:
        """The state of all samples now: cumulative, as vLLM streams it."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(self.prompt_token_ids),
            outputs=[s.output() for s in self.samples],
            finished=self.finished,
            prompt_logprobs=self.prompt_logprobs,
            num_cached_tokens=self.samples[0].request.num_cached_tokens,
            metrics=[
                RequestMetrics(
                    self.arrival_time,
                    s.first_token_time,
                    s.finished_time,
                    s.request.num_preemptions,
                    s.speculation(),
                )
                for s in self.samples
            ],
        )
