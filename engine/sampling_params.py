"""What a user may ask of the sampler, checked once, at the boundary.

Names and meanings follow vLLM's ``SamplingParams``; a parameter that is not implemented does not exist here,
so that asking for it raises. Knows nothing of tokenizers or vocabularies: checks that need them are made by
``Sampler.admit``. Invariant: an instance that exists is valid.
"""

from __future__ import annotations

import difflib
import json as jsonlib
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

LogitsProcessor = Callable[..., Any]
"""``f(output_token_ids, logits)`` or ``f(prompt_token_ids, output_token_ids, logits) -> logits [vocab]``."""

MAX_LOGPROBS = 100
_INT32 = 2**31 - 1
_LEAST_TEMPERATURE = 1e-5  # below it logits / temperature overflows; it counts as 0, as in vLLM


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """What the text must be, from its first token to its last: exactly one of json, regex, choice, grammar, json_object.

    Args:
        json: a JSON schema, as a dict or as text. Held as text.
        regex: what the whole text must match, in the syntax of Rust's regex: no look-around, no back-references.
        choice: the texts, one of which it must be.
        grammar: a grammar in Lark or GBNF syntax; its start rule is ``start`` or ``root``.
        json_object: True: any JSON object.
        disable_any_whitespace: no whitespace between the parts of JSON; for ``json`` and ``json_object``.

    Raises:
        ValueError: names the argument, what came, and what is accepted. Whether a schema, an expression or a grammar
            can be compiled is seen when a request is admitted.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False

    def __new__(cls, *args: Any, **given: Any) -> StructuredOutputsParams:
        """Refuse names that do not exist, by name."""
        _refuse_unknown("structured_outputs field", [field.name for field in fields(cls)], given)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        """Check every field and put it into its plain, immutable form."""
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name) or False, bool):
                raise ValueError(
                    f"structured_outputs.{name} must be True or False, got {getattr(self, name)!r}"
                )
        kinds = ("json", "regex", "choice", "grammar", "json_object")
        given = [kind for kind in kinds if getattr(self, kind) not in (None, False)]
        if len(given) != 1:
            came = " and ".join(given) or "none of them"
            raise ValueError(
                f"structured_outputs takes exactly one of {', '.join(kinds)}, got {came}"
            )
        for name in ("regex", "grammar"):
            text = getattr(self, name)
            if text is not None and not (isinstance(text, str) and text):
                raise ValueError(f"structured_outputs.{name} must be non-empty text, got {text!r}")
        if self.choice is not None:
            texts = self.choice if isinstance(self.choice, (list, tuple)) else ()
            if not texts or not all(isinstance(text, str) and text for text in texts):
                raise ValueError(
                    "structured_outputs.choice must be a list of non-empty strings, at least one, "
                    f"got {self.choice!r}"
                )
            object.__setattr__(self, "choice", tuple(texts))
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of one request.

    Args:
        n: number of samples of the prompt; sample ``i`` uses ``seed + i``.
        temperature: 0 is greedy (lowest id on a tie), and so is anything below 1e-5.
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
        bad_words: texts whose own token sequences (at the start of a text and after a space) are not sampled; a
            text that other tokens spell is not caught.
        allowed_token_ids: the only tokens that may appear.
        logits_processors: called in order on the logits of every sampled position; with speculation also on
            positions of drafts that are then not accepted, so they must not count their calls.
        speculation: False never speculates for this request, a number allows at most that many draft tokens a
            step. The tokens are the same either way.
        structured_outputs: what the text must be, or a dict of those fields. End-of-sequence and stop tokens are then
            sampled only where the text is complete, and nothing else where it cannot go on. Behind an end that
            ``ignore_eos`` ignores, all is allowed, as in vLLM.

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
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    logits_processors: Sequence[LogitsProcessor] | None = None
    skip_special_tokens: bool = True
    speculation: bool | int = True
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None

    def __new__(cls, *args: Any, **given: Any) -> SamplingParams:
        """Refuse names that do not exist, by name: the generated ``__init__`` would raise TypeError."""
        _refuse_unknown("sampling parameter", [field.name for field in fields(cls)], given)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        """Check every field and put it into its plain, immutable form."""
        self._integer("n", 1, 4096)
        self._number("temperature", 0.0, 1e4)
        if 0.0 < self.temperature < _LEAST_TEMPERATURE:
            self._set("temperature", 0.0)
        self._number("top_p", 0.0, 1.0, open_low=True)
        self._integer("top_k", -1, _INT32)
        self._number("min_p", 0.0, 1.0)
        self._integer("max_tokens", 1, _INT32, optional=True)
        self._integer("min_tokens", 0, _INT32)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
        if not isinstance(self.speculation, bool):
            self._integer("speculation", 0, _INT32)
            self._set("speculation", self.speculation or False)
        self._integer("seed", 0, 2**63 - 1, optional=True)
        self._integer("logprobs", 0, MAX_LOGPROBS, optional=True)
        self._integer("prompt_logprobs", 0, MAX_LOGPROBS, optional=True)
        self._number("presence_penalty", -2.0, 2.0)
        self._number("frequency_penalty", -2.0, 2.0)
        self._number("repetition_penalty", 0.0, 1e4, open_low=True)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if isinstance(self.stop, str):
            self._set("stop", (self.stop,))
        self._texts("stop")
        self._texts("bad_words")
        self._token_ids("stop_token_ids")
        self._token_ids("allowed_token_ids")
        if self.allowed_token_ids == ():
            raise ValueError("allowed_token_ids must name at least one token, got an empty list")
        self._biases()
        processors = self._items("logits_processors")
        if not all(callable(p) for p in processors or ()):
            raise ValueError("logits_processors must be a list of callables (token_ids, logits)")
        self._set("logits_processors", processors or ())
        self._structure()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _integer(self, name: str, low: int, high: int, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        self._set(name, _as_int(name, value, low, high))

    def _number(self, name: str, low: float, high: float, *, open_low: bool = False) -> None:
        self._set(name, _as_float(name, getattr(self, name), low, high, open_low=open_low))

    def _items(self, name: str) -> tuple[Any, ...] | None:
        """The field as a tuple, whatever iterable came: a generator must not be used up by a check."""
        value = getattr(self, name)
        if value is None:
            return None
        if hasattr(value, "tolist"):
            value = value.tolist()
        if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
            raise ValueError(f"{name} must be a list, got {value!r}")
        return tuple(value)

    def _texts(self, name: str) -> None:
        texts = self._items(name) or ()
        if not all(isinstance(text, str) and text for text in texts):
            raise ValueError(f"{name} must be a list of non-empty strings, got {list(texts)!r}")
        self._set(name, texts)

    def _token_ids(self, name: str) -> None:
        items = self._items(name)
        if items is not None:
            items = tuple(_as_int(f"{name} entry", i, 0, _INT32) for i in items)
        self._set(name, items)

    def _biases(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")
        biases = {
            _as_int("logit_bias key", token_id, 0, _INT32): _as_float(
                f"logit_bias[{token_id}]", bias, -100.0, 100.0
            )
            for token_id, bias in self.logit_bias.items()
        }
        self._set("logit_bias", biases)

    def _structure(self) -> None:
        value = self.structured_outputs
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            self._set("structured_outputs", StructuredOutputsParams(**value))
        elif value is not None and not isinstance(value, StructuredOutputsParams):
            raise ValueError(
                "structured_outputs must be StructuredOutputsParams or a dict of its fields, "
                f"got {value!r}"
            )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` in its checked form."""
        return self.stop  # type: ignore[return-value]  # a tuple since _check

    @property
    def structure(self) -> StructuredOutputsParams | None:
        """``structured_outputs`` in its checked form."""
        return self.structured_outputs  # type: ignore[return-value]  # no mapping since _structure

    @property
    def needs_history(self) -> bool:
        """Whether the logits of a position depend on the tokens before it beyond the model itself."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


def _refuse_unknown(kind: str, known: Sequence[str], given: Mapping[str, Any]) -> None:
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
            raise ValueError(f"unknown {kind} {name}={given[name]!r}; {hint}")


def _schema_text(schema: Any) -> str:
    """A JSON schema as text, its keys in the order given: that is the order of what is generated."""
    try:
        parsed = jsonlib.loads(schema) if isinstance(schema, str) else dict(schema)
        text = jsonlib.dumps(parsed, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"structured_outputs.json is no JSON: {error}; got {schema!r}") from error
    if not isinstance(parsed, Mapping):
        raise ValueError(f"structured_outputs.json must be an object (a schema), got {schema!r}")
    return text


def _as_int(name: str, value: Any, low: int, high: int) -> int:
    """A plain int of anything that is an integer, numpy's and torch's included."""
    try:
        number = operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        number = None
    if isinstance(value, bool) or number is None or not low <= number <= high:
        raise ValueError(f"{name} must be an integer in [{low}, {high}], got {value!r}")
    return number


def _as_float(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> float:
    try:
        number = math.nan if isinstance(value, (str, bytes, bool)) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if not low <= number <= high or (open_low and number == low):
        raise ValueError(
            f"{name} must be a number in {'(' if open_low else '['}{low}, {high}], got {value!r}"
        )
    return number
