"""What a user may ask of the sampler, checked once, at the boundary.

Names and meanings follow vLLM's ``SamplingParams``; a parameter that is not implemented does not exist here,
so that asking for it raises. Knows nothing of tokenizers or vocabularies: checks that need them are made by
``Engine.add_request``. Invariant: an instance that exists is valid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LogitsProcessor = Callable[..., Any]
"""``f(output_token_ids, logits)`` or ``f(prompt_token_ids, output_token_ids, logits) -> logits [vocab]``."""

MAX_LOGPROBS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of one request.

    Args:
        n: number of samples of the prompt; sample ``i`` uses ``seed + i``.
        temperature: 0 is greedy (lowest id on a tie).
        top_p, top_k, min_p: what may be sampled; ``top_k`` 0 or -1 means all. Applied after temperature in the
            order min-p, top-k, top-p, each on the renormalised rest, as vLLM does.
        max_tokens: most tokens to generate; None means up to the context length.
        min_tokens: no end-of-sequence or stop token before that many tokens.
        stop: strings that end the text; cut from it unless ``include_stop_str_in_output``.
        stop_token_ids: token ids that end it.
        seed: 0 <= seed < 2**63; None derives one from the engine's seed and the request's number.
        logprobs: k most likely tokens' log-probabilities at each output position, and the sampled one's;
            0 gives the sampled one's alone, None nothing.
        prompt_logprobs: the same for the prompt.
        presence_penalty, frequency_penalty: on output tokens, as OpenAI defines them.
        repetition_penalty: on prompt and output tokens, as in CTRL (arXiv 1909.05858): divides positive logits.
        logit_bias: token id -> what is added to its logit.
        bad_words: texts that must not appear in the output.
        allowed_token_ids: the only tokens that may appear.
        logits_processors: called in order on the logits of every sampled position.

    Raises:
        ValueError: names the argument, what came, and what is accepted.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    skip_special_tokens: bool = True
    stop_strings: tuple[str, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        stop = self.stop
        strings = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
        object.__setattr__(self, "stop_strings", strings)
        _check_int("n", self.n, 1, 4096)
        _check_float("temperature", self.temperature, 0.0, 1e4)
        _check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_int("top_k", self.top_k, -1, 2**31 - 1)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
        if self.seed is not None:
            _check_int("seed", self.seed, 0, 2**63 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, 1e4, open_low=True)
        for name, texts in (("stop", strings), ("bad_words", self.bad_words)):
            if isinstance(texts, str) or not all(isinstance(s, str) and s for s in texts):
                raise ValueError(f"{name} must be a list of non-empty strings, got {texts!r}")
        for token_id, bias in (self.logit_bias or {}).items():
            _check_int("logit_bias key", token_id, 0, 2**31 - 1)
            _check_float(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token_id in getattr(self, name) or ():
                _check_int(f"{name} entry", token_id, 0, 2**31 - 1)
        if self.allowed_token_ids is not None and len(self.allowed_token_ids) == 0:
            raise ValueError("allowed_token_ids must name at least one token, got an empty list")
        if not all(callable(p) for p in self.logits_processors):
            raise ValueError("logits_processors must be a list of callables (token_ids, logits)")

    @property
    def needs_history(self) -> bool:
        """Whether the logits of a position depend on the tokens before it beyond the model itself."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer in [{low}, {high}], got {value!r}")


def _check_float(
    name: str, value: object, low: float, high: float, *, open_low: bool = False
) -> None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or not low <= float(value) <= high or (open_low and float(value) == low):  # type: ignore[arg-type]
        raise ValueError(
            f"{name} must be a number in {'(' if open_low else '['}{low}, {high}], got {value!r}"
        )
