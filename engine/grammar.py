"""What a text may be (JSON schema, regex, choice, grammar) as the tokens that may follow at each position.

Owns compiled grammars and the matcher of each request; the parsing is llguidance's, an optional dependency that is
imported here and nowhere else. Knows nothing of logits or rows. Ends of a text are handled here, not there: the
library is told of an end token that no model has, whose bit says that the text is complete. So a model's end tokens,
those of a request, and end tokens that are also text are all treated alike.

Invariant: what a matcher forbids depends on the output before the position alone, not on the nodes of a token tree that
it was moved to before.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken

from engine.sampling_params import StructuredOutputsParams
from engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_END = "<|end of a grammar's text|>"
_ALL_SPELLINGS = '%llguidance {"no_forcing": true}'
"""Where a text can go on in one way only, llguidance allows no tokens but those that the tokenizer would choose, and
which these are depends on more than the text. With this, all tokens that spell it are allowed, as elsewhere."""

MAX_COMPILED = 64
"""Grammars that are kept for the next request that asks for the same."""


class GrammarError(Exception):
    """No allowed set can be had: the text has left the grammar, or the grammar takes too much work here."""


class Grammars:
    """Compiles what requests ask for; requests that ask for the same share it.

    Args:
        tokenizer: of the model; read when the first grammar is compiled.
        vocab_size: V, of the logits; it may be more or less than the tokenizer's.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compiled = functools.lru_cache(maxsize=MAX_COMPILED)(self._compile)

    @functools.cached_property
    def _library(self) -> tuple[Any, Any, int]:
        """The module, the tokenizer as it knows it, and the id of the end. Takes 0.3 s for 49 thousand tokens."""
        try:
            import llguidance
        except ImportError as error:
            raise ValueError(
                "structured_outputs needs the package llguidance, which is not installed: "
                "pip install 'tlt-engine[grammar]'"
            ) from error
        backend = self._tokenizer.backend
        try:
            backend = type(backend).from_str(backend.to_str())
            backend.add_special_tokens([AddedToken(_END, special=True, normalized=False)])
            end = int(backend.token_to_id(_END) or 0)
            size = max(self._vocab_size, end + 1)
            tokens = llguidance.LLTokenizer(backend.to_str(), n_vocab=size, eos_token=end)
        except Exception as error:  # both bindings raise bare Exception, each for its own reasons
            raise ValueError(
                f"structured_outputs: llguidance cannot read this model's tokenizer: {error}"
            ) from error
        return llguidance, tokens, end

    def matcher(
        self,
        params: StructuredOutputsParams,
        eos_token_ids: frozenset[int],
        stop_token_ids: Sequence[int],
    ) -> Matcher:
        """A matcher at the start of a text.

        Raises:
            ValueError: llguidance is absent, it refuses the schema, expression or grammar, or nothing could end the text.
        """
        if not eos_token_ids and not stop_token_ids:
            raise ValueError(
                "structured_outputs needs a token that ends the text, but the model has no end-of-sequence token; "
                "give stop_token_ids"
            )
        prototype, end = self._compiled(params), self._library[2]
        return Matcher(prototype, self._vocab_size, end, eos_token_ids, stop_token_ids)

    def _compile(self, params: StructuredOutputsParams) -> Any:
        library, tokens, _ = self._library
        name, given = next(
            (name, value)
            for name in ("json", "regex", "choice", "grammar", "json_object")
            if (value := getattr(params, name)) not in (None, False)
        )
        try:
            matcher = library.LLMatcher(tokens, _source(library, params), log_level=0)
        except Exception as error:  # the binding raises more than it says
            raise ValueError(_refusal(name, given, str(error))) from error
        if not matcher.is_error():
            empty = not np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8).any()
            if empty and not matcher.is_error():
                raise ValueError(_refusal(name, given, "no text matches it"))
        if matcher.is_error():
            raise ValueError(_refusal(name, given, matcher.get_error()))
        for warning in matcher.get_grammar_warnings():
            logger.warning("structured_outputs.%s: %s", name, warning)
        return matcher


class Matcher:
    """Follows the output of one request, and any continuation of it that a token tree proposes."""

    def __init__(
        self,
        prototype: Any,
        vocab_size: int,
        end: int,
        eos_token_ids: frozenset[int],
        stop_token_ids: Sequence[int],
    ) -> None:
        self._prototype = prototype
        self._parser = prototype.deep_copy()
        self._vocab_size = vocab_size
        self._end = end  # the tokens of the tokenizer are below it
        self._eos_ids = eos_token_ids
        self._ends = eos_token_ids.union(stop_token_ids)
        self._eos_at = _places(eos_token_ids, vocab_size)
        self._ends_at = _places(self._ends, vocab_size)
        self._followed: list[int] = []  # tokens that the parser stands behind
        self._num_committed = 0  # of them, those that the request has for good

    def forbidden(self, output: Sequence[int], num_committed: int) -> NDArray[np.bool_] | None:
        """What may not follow ``output``, of which the first ``num_committed`` tokens never change: bool [V], yours.

        None where everything may follow: behind an end of the text that does not end the request, and behind
        proposed tokens that are not allowed, which nothing can reach.

        Raises:
            GrammarError: the committed output is no beginning of a text of the grammar, or parsing took too much.
        """
        mask = self._mask_behind(output, num_committed)
        if mask is None and self._parser.is_error():
            # Work limits count what was parsed since the start. Without the nodes that other steps tried, the
            # text alone may be within them; where it is not, plain decoding would have ended the same way.
            self._restart()
            mask = self._mask_behind(output, num_committed)
            if self._parser.is_error():
                error = self._parser.get_error()
                self._restart()
                raise GrammarError(f"structured_outputs: {error}")
        return mask

    def _mask_behind(self, output: Sequence[int], num_committed: int) -> NDArray[np.bool_] | None:
        self._move(output, num_committed)
        reached = len(self._followed)
        if reached < len(output):
            left = output[reached] not in self._ends and reached < num_committed
            if left and not self._parser.is_error():
                raise GrammarError(
                    f"structured_outputs: output token {reached} ({output[reached]}) is not allowed"
                )
            return None
        bits = np.frombuffer(self._parser.compute_bitmask(), dtype=np.uint8)
        if self._parser.is_error():
            return None
        is_complete = bool(bits[self._end // 8] >> (self._end % 8) & 1)
        mask = np.unpackbits(~bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        mask[self._end :] = True
        if is_complete:
            mask[self._ends_at] = False
        else:
            mask[self._eos_at] = True
        return mask

    def _move(self, output: Sequence[int], num_committed: int) -> None:
        """Take the parser back to where ``output`` goes another way, and from there along it as far as it goes."""
        followed = self._followed
        same = min(self._num_committed, num_committed, len(followed), len(output))
        limit = min(len(followed), len(output))
        while same < limit and followed[same] == output[same]:
            same += 1
        if same < len(followed):
            self._parser.rollback(len(followed) - same)
            del followed[same:]
        rest = list(output[same:])
        text_len = next((i for i, token in enumerate(rest) if not self._is_text(token)), len(rest))
        followed += rest[: self._parser.try_consume_tokens(rest[:text_len])]
        self._num_committed = num_committed

    def _is_text(self, token_id: int) -> bool:
        return token_id < self._end and token_id not in self._eos_ids

    def _restart(self) -> None:
        self._parser = self._prototype.deep_copy()
        self._followed.clear()
        self._num_committed = 0


def _source(library: Any, params: StructuredOutputsParams) -> str:
    """In Lark, llguidance's own language. Raises what its readers raise."""
    if params.json is not None or params.json_object:
        schema = json.loads(str(params.json or '{"type": "object"}'))
        if params.disable_any_whitespace:
            options = schema.get("x-guidance") or {}
            schema["x-guidance"] = {**options, "whitespace_flexible": False}
        lark = f"start: %json {json.dumps(schema)}"
    elif params.regex is not None:
        lark = f"start: /{library.regex_to_lark(params.regex, use_ascii='')}/"
    elif params.choice is not None:
        lark = "start: " + " | ".join(json.dumps(text) for text in params.choice)
    else:
        lark = library.grammar_from("grammar", params.grammar)
    return f"{lark}\n{_ALL_SPELLINGS}"


def _refusal(name: str, given: object, reason: str) -> str:
    return f"structured_outputs.{name} cannot be used: {' '.join(reason.split())}; got {given!r}"


def _places(token_ids: frozenset[int], vocab_size: int) -> NDArray[np.int64]:
    return np.array(sorted(i for i in token_ids if 0 <= i < vocab_size), dtype=np.int64)
