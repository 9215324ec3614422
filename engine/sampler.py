"""The one sampler: from logits rows to tokens, for plain decoding and for every node of a token tree alike.

The draw itself is ``ops.sample`` (Gumbel-max with counter-based noise, defined in ``ops/reference.py``): a pure
function of the seed, the position and the text before it. This file owns what comes before the draw (grammar, allowed
and bad words, bias, min_tokens, the user's processors, penalties: all recomputed from the text before each
position, so that a position inside a speculated run is treated as any other; what a grammar allows, it asks of
``grammar.py``) and the log-probabilities after it.
It does not know why a row is asked for. Invariant: what a row gets depends on its own logits, its request's
parameters and the text before it, and on nothing else in the batch.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.grammar import GrammarError, Grammars, Matcher
from engine.ops import Ops
from engine.ops.reference import kept_mask
from engine.outputs import Logprob, LogprobsAt
from engine.request import Request
from engine.sampling_params import SamplingParams

NEG_INF = float("-inf")


class RowError(Exception):
    """Why no token can be drawn for a row: its processor raised, nothing is allowed, the logits are not finite."""


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One position to draw: the token after ``request.token_ids[:length] + path``."""

    request: Request
    length: int
    path: tuple[int, ...] = ()

    @property
    def position(self) -> int:
        return self.length + len(self.path)

    def output_token_ids(self) -> list[int]:
        request = self.request
        return [*request.token_ids[len(request.prompt_token_ids) : self.length], *self.path]


@dataclass(frozen=True, slots=True)
class Sampled:
    """A drawn token and, where asked for, log-probabilities at its position."""

    token_id: int
    logprobs: LogprobsAt | None = None


@dataclass(frozen=True, slots=True)
class _Rules:
    """A request's parameters made ready for its logits; None or empty where it asks for nothing."""

    forbidden: Tensor | None  # bool [V], from allowed_token_ids
    bad_words: tuple[tuple[int, ...], ...]
    bias_ids: Tensor | None
    bias: Tensor | None
    end_ids: Tensor | None  # forbidden before min_tokens
    processors: tuple[tuple[object, bool], ...]  # callable, whether it takes the prompt too
    penalised: bool
    matcher: Matcher | None  # of structured_outputs

    @property
    def any(self) -> bool:
        return (
            self.forbidden is not None
            or self.bias_ids is not None
            or self.end_ids is not None
            or bool(self.bad_words)
            or bool(self.processors)
            or self.penalised
            or self.matcher is not None
        )


class Sampler:
    """Draws tokens for rows of logits.

    Args:
        ops: the op table; ``sample`` and ``log_sum_exp`` are used.
        vocab_size: V.
        max_rows: most rows of one call.
        decode: text of a token id, for ``Logprob.decoded_token``; None where there is no tokenizer.
        processed_logprobs: report log-probabilities after bias, penalties, temperature and top-k/p instead of
            those of the model itself.
        grammars: for ``structured_outputs``; None where there is no tokenizer.
    """

    def __init__(
        self,
        ops: Ops,
        *,
        vocab_size: int,
        max_rows: int,
        decode: Callable[[int], str] | None = None,
        processed_logprobs: bool = False,
        grammars: Grammars | None = None,
    ) -> None:
        self._ops = ops
        self._decode = (lambda token_id: None) if decode is None else functools.cache(decode)
        self._vocab_size = vocab_size
        self._processed = processed_logprobs
        self._grammars = grammars
        self._rules: dict[str, _Rules] = {}
        self._floats = torch.empty((3, max_rows), dtype=torch.float32)  # temperature, top_p, min_p
        self._ints = torch.empty((3, max_rows), dtype=torch.int32)  # top_k, position, token
        self._seeds = torch.empty(max_rows, dtype=torch.int64)
        self._draw_logprobs = torch.empty(max_rows, dtype=torch.float32)
        self._lse = torch.empty(max_rows, dtype=torch.float32)
        self._views: dict[int, tuple[Tensor, ...]] = {}  # arguments of ops.sample by rows
        self._np = (self._floats.numpy(), self._ints.numpy(), self._seeds.numpy())

    def admit(self, request: Request, bad_words: Sequence[Sequence[int]] = ()) -> None:
        """Make ready the rules of a request. ``bad_words``: token id sequences that must not appear.

        Raises ValueError for token ids outside the vocabulary and for a grammar that cannot be used.
        """
        self._rules[request.request_id] = self._compile(request, bad_words)

    def forget(self, request_id: str) -> None:
        self._rules.pop(request_id, None)

    def forget_all(self) -> None:
        self._rules.clear()

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled | RowError]:
        """Draw one token for each row, or say why there is none. ``logits`` [L, V] fp32 is overwritten.

        A row that fails changes nothing for the others, and no processor is called twice for a position.
        """
        wants = [r.request.params.logprobs is not None for r in rows]
        raw = self._raw_logprob_sources(logits, rows, wants)
        errors: dict[int, RowError] = {}
        for i, row in enumerate(rows):
            rules = self._rules[row.request.request_id]
            if rules.any:
                try:
                    self._apply_rules(logits[i], row, rules)
                except RowError as error:
                    errors[i] = error
        token_ids = self._draw(logits, rows)
        for i in np.flatnonzero(np.isnan(self._draw_logprobs.numpy()[: len(rows)])).tolist():
            errors.setdefault(i, RowError("the model's logits are not finite; check its weights"))
        if not errors and not any(wants):
            return [Sampled(token_id) for token_id in token_ids]
        return [
            errors.get(i) or Sampled(t, self._logprobs(logits, raw, i, t, row) if want else None)
            for i, (t, row, want) in enumerate(zip(token_ids, rows, wants, strict=True))
        ]

    def prompt_logprobs(self, logits: Tensor, token_ids: Sequence[int], k: int) -> list[LogprobsAt]:
        """Log-probabilities of the prompt tokens that follow each row of raw ``logits`` [L, V]."""
        lse = self._lse[: logits.shape[0]]
        self._ops.log_sum_exp(logits, lse)
        return [
            self._top_logprobs(logits[i], float(lse[i]), token, k)
            for i, token in enumerate(token_ids)
        ]

    def _draw(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
        count = len(rows)
        floats, ints, seeds = self._np
        for i, row in enumerate(rows):
            request = row.request
            params = request.params
            floats[:, i] = params.temperature, params.top_p, params.min_p
            ints[0, i], ints[1, i] = max(params.top_k, 0), row.position
            seeds[i] = request.seed
        views = self._views.get(count)
        if views is None:
            temperature, top_p, min_p = (self._floats[j, :count] for j in range(3))
            top_k, positions, out = (self._ints[j, :count] for j in range(3))
            seeds, logprobs = self._seeds[:count], self._draw_logprobs[:count]
            views = (temperature, top_k, top_p, min_p, seeds, positions, out, logprobs)
            self._views[count] = views
        self._ops.sample(logits, *views)
        return ints[2, :count].tolist()

    def _compile(self, request: Request, bad_words: Sequence[Sequence[int]]) -> _Rules:
        params = request.params
        forbidden = None
        if params.allowed_token_ids is not None:
            forbidden = torch.ones(self._vocab_size, dtype=torch.bool)
            forbidden[self._ids("allowed_token_ids", params.allowed_token_ids)] = False
        bias_ids = bias = end_ids = None
        if params.logit_bias:
            bias_ids = self._ids("logit_bias", list(params.logit_bias))
            bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
        stop_ids = self._ids("stop_token_ids", params.stop_token_ids or ())
        if params.min_tokens > 0:
            ends = {*stop_ids.tolist(), *request.eos_token_ids}
            end_ids = torch.tensor(sorted(ends), dtype=torch.int64) if ends else None
        processors = tuple((p, _takes_prompt(p)) for p in params.logits_processors or ())
        words = tuple(tuple(w) for w in bad_words)
        matcher = self._matcher(request)
        return _Rules(
            forbidden, words, bias_ids, bias, end_ids, processors, params.needs_history, matcher
        )

    def _matcher(self, request: Request) -> Matcher | None:
        structure = request.params.structure
        if structure is None:
            return None
        if self._grammars is None:
            raise ValueError("structured_outputs is about text, but the model has no tokenizer")
        return self._grammars.matcher(
            structure, request.eos_token_ids, request.params.stop_token_ids or ()
        )

    def _ids(self, name: str, token_ids: Sequence[int]) -> Tensor:
        for token_id in token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise ValueError(
                    f"{name}: token id {token_id} is outside the vocabulary of {self._vocab_size}"
                )
        return torch.tensor(token_ids, dtype=torch.int64)

    def _apply_rules(self, logits: Tensor, row: SampleRow, rules: _Rules) -> None:
        """In vLLM's order: grammar, allowed, bad words, min_tokens, bias, processors, penalties.

        The grammar's word is repeated behind the processors: what they write over the logits cannot break a text.
        """
        params = row.request.params
        output = row.output_token_ids()
        outside = _outside_grammar(rules.matcher, output, len(row.path))
        if outside is not None:
            logits.masked_fill_(outside, NEG_INF)
        if rules.forbidden is not None:
            logits.masked_fill_(rules.forbidden, NEG_INF)
        if rules.bad_words:
            for word in rules.bad_words:
                head = list(word[:-1])
                if not head or output[-len(head) :] == head:
                    logits[word[-1]] = NEG_INF
        if rules.end_ids is not None and len(output) < params.min_tokens:
            logits[rules.end_ids] = NEG_INF
        if rules.bias_ids is not None and rules.bias is not None:
            logits.index_add_(0, rules.bias_ids, rules.bias)
        for processor, takes_prompt in rules.processors:
            _run_processor(processor, takes_prompt, row, output, logits)
        if rules.processors and outside is not None:
            logits.masked_fill_(outside, NEG_INF)
        if rules.penalised:
            _penalise(logits, row.request.prompt_token_ids, output, params)
        if bool((logits == NEG_INF).all()):
            raise RowError(
                "no token may follow: structured_outputs, allowed_token_ids, bad_words, min_tokens, "
                "logit_bias and logits_processors together forbid the whole vocabulary; relax one of them",
            )

    def _raw_logprob_sources(
        self, logits: Tensor, rows: Sequence[SampleRow], wants: Sequence[bool]
    ) -> dict[int, Tensor]:
        """Copies of the raw rows that rules will change, so that raw log-probabilities stay raw."""
        if self._processed or not any(wants):
            return {}
        self._ops.log_sum_exp(logits, self._lse[: len(rows)])
        return {
            i: logits[i].clone()
            for i, row in enumerate(rows)
            if wants[i] and self._rules[row.request.request_id].any
        }

    def _logprobs(
        self, logits: Tensor, raw: dict[int, Tensor], i: int, token_id: int, row: SampleRow
    ) -> LogprobsAt:
        params = row.request.params
        k = params.logprobs or 0
        if not self._processed:
            return self._top_logprobs(raw.get(i, logits[i]), float(self._lse[i]), token_id, k)
        z = logits[i]
        if params.temperature > 0.0:
            z = z / params.temperature
            keep = kept_mask(z, params.top_k, params.top_p, params.min_p)
            z = torch.where(keep, z, NEG_INF)
        lse = torch.empty(1)
        self._ops.log_sum_exp(z.unsqueeze(0), lse)
        return self._top_logprobs(z, float(lse), token_id, k)

    def _top_logprobs(
        self, logits: Tensor, log_sum_exp: float, token_id: int, k: int
    ) -> LogprobsAt:
        value = logits[token_id]
        rank = 1 + int((logits > value).sum())
        result = {token_id: Logprob(float(value) - log_sum_exp, rank, self._decode(token_id))}
        if k > 0:
            values, ids = torch.topk(logits, min(k, self._vocab_size))
            for place, (v, token) in enumerate(zip(values.tolist(), ids.tolist(), strict=True)):
                if v > NEG_INF:
                    entry = Logprob(v - log_sum_exp, place + 1, self._decode(token))
                    result.setdefault(token, entry)
        return result


def _outside_grammar(
    matcher: Matcher | None, output: Sequence[int], path_len: int
) -> Tensor | None:
    """bool [V], or None where everything may follow."""
    if matcher is None:
        return None
    try:
        forbidden = matcher.forbidden(output, len(output) - path_len)
    except GrammarError as error:
        raise RowError(str(error)) from error
    return None if forbidden is None else torch.from_numpy(forbidden)


def _penalise(
    logits: Tensor, prompt: Sequence[int], output: Sequence[int], params: SamplingParams
) -> None:
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(np.asarray([*prompt, *output], dtype=np.int64)))
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if output and (params.frequency_penalty != 0.0 or params.presence_penalty != 0.0):
        ids, counts = np.unique(np.asarray(output, dtype=np.int64), return_counts=True)
        fall = params.frequency_penalty * counts + params.presence_penalty
        logits.index_add_(0, torch.from_numpy(ids), torch.from_numpy(-fall.astype(np.float32)))


def _takes_prompt(processor: object) -> bool:
    """Whether a processor has vLLM's three-argument form (prompt ids, output ids, logits)."""
    function = getattr(
        processor, "forward", processor
    )  # an nn.Module is called through its forward
    try:
        signature = inspect.signature(function)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    required = [
        p
        for p in signature.parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return len(required) == 3


def _run_processor(
    processor: object, takes_prompt: bool, row: SampleRow, output: list[int], logits: Tensor
) -> None:
    prompt = list(row.request.prompt_token_ids)
    arguments = (prompt, list(output), logits) if takes_prompt else (list(output), logits)
    try:
        with torch.no_grad():  # a trained processor must not draw the logits into its graph
            result = processor(*arguments)  # type: ignore[operator]
        if not isinstance(result, Tensor) or result.shape != logits.shape:
            raise TypeError(f"it must return logits of shape {tuple(logits.shape)}, got {result!r}")
        if result is not logits:
            logits.copy_(result)
        if not bool((logits < float("inf")).all()):
            raise ValueError("it left NaN or +inf in the logits; forbid the other tokens instead")
    except (
        Exception
    ) as error:  # the user's code: whatever it raises is this request's failure alone
        raise RowError(f"logits processor failed: {error!r}") from error
