"""One sample of one prompt: its tokens, how far it has come, and why it ended.

Owns the token list and every rule by which a token ends a request: end-of-sequence and stop ids,
``min_tokens``, ``max_tokens``, the context length, also in the middle of a run of tokens accepted
by speculation. Does not know text (stop strings are found by the layer that detokenises, see
``truncate_output``), tensors, or who schedules it.

Invariant: ``token_ids`` is the prompt followed by the output and never holds a token behind the one
that ended the request; while it runs, ``num_computed < len(token_ids)``, so that there is always a
row to compute.

    request.append_tokens(token_ids, version) -> how many of them were kept
    request.truncate_output(num_output_tokens); request.finish(reason, stop_reason)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from engine.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Output tokens ``start : end`` were made by target weights ``version``."""

    start: int
    end: int
    version: int


class Request:
    """State of one request, from arrival to its last token.

    Args:
        request_id: unique among live requests.
        prompt_token_ids: at least one token.
        params: what the user asked for; ``params.n`` is already unfolded (one Request per sample).
        seed: of this sample, resolved.
        max_total_len: most tokens of prompt and output together (the context length).
        eos_token_ids: end-of-sequence ids of the model; ``params.ignore_eos`` is honoured here.
        arrival: number of the request in order of arrival, for reports; scheduling follows
        ``Scheduler.add``.
        group_id, sample_index: which prompt it samples, and which sample it is.

    Raises:
        ValueError: empty prompt, or a prompt that leaves no room for one token.
    """

    __slots__ = (  # noqa: RUF023 - ordered for the reader
        "request_id",
        "prompt_token_ids",
        "params",
        "seed",
        "arrival",
        "group_id",
        "sample_index",
        "eos_token_ids",
        "max_total_len",
        "max_output_tokens",
        "token_ids",
        "prompt_len",
        "status",
        "finish_reason",
        "stop_reason",
        "num_computed",
        "num_tree_nodes",
        "num_cached_tokens",
        "num_preemptions",
        # Written by KVCache only: page table, hash chain, what the pages were computed under.
        "pages",
        "page_digests",
        "digest_version",
        "kv_epoch",
        "num_registered_pages",
        "_ending_ids",
        "_version_starts",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        max_total_len: int,
        eos_token_ids: frozenset[int] = frozenset(),
        arrival: int = 0,
        group_id: str | None = None,
        sample_index: int = 0,
    ) -> None:
        if len(prompt_token_ids) == 0:
            raise ValueError(
                f"request {request_id!r}: the prompt is empty; give at least one token"
            )
        if len(prompt_token_ids) >= max_total_len:
            raise ValueError(
                f"request {request_id!r}: the prompt has {len(prompt_token_ids)} tokens, "
                f"which leaves no room for output in a context of {max_total_len}; "
                "shorten it or raise max_model_len"
            )
        self.request_id = request_id
        self.prompt_token_ids = tuple(prompt_token_ids)
        self.prompt_len = len(self.prompt_token_ids)
        self.params = params
        self.seed = seed
        self.arrival = arrival
        self.group_id = group_id
        self.sample_index = sample_index
        self.eos_token_ids = eos_token_ids
        self.max_total_len = max_total_len
        room = max_total_len - self.prompt_len
        self.max_output_tokens = room if params.max_tokens is None else min(room, params.max_tokens)
        self._ending_ids = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            self._ending_ids |= eos_token_ids

        self.token_ids: list[int] = list(self.prompt_token_ids)
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.num_computed = 0  # tokens whose keys and values are stored
        self.num_tree_nodes = 0  # rows beyond the next token that it asks for: nodes to verify
        self.num_cached_tokens = 0  # found in the prefix cache at first admission
        self.num_preemptions = 0
        self.pages: list[int] = []
        self.page_digests: list[bytes] = []
        self.digest_version: int | None = None
        self.kv_epoch = 0
        self.num_registered_pages = 0
        self._version_starts: list[tuple[int, int]] = []  # (first output token, version), ascending

    def append_tokens(self, token_ids: Sequence[int], version: int = 0) -> int:
        """Append sampled tokens up to the one that ends the request; return how many were kept.

        Each token is judged in order, so a stop before a limit wins, and nothing behind either is
        kept. A token that both stops and reaches a limit counts as a stop.
        """
        assert self.status is not RequestStatus.FINISHED, (self.request_id, self.finish_reason)
        tokens, prompt_len = self.token_ids, self.prompt_len
        num_before = len(tokens) - prompt_len
        if token_ids and (not self._version_starts or self._version_starts[-1][1] != version):
            self._version_starts.append((num_before, version))
        num_output = num_before
        for token_id in token_ids:
            tokens.append(token_id)
            num_output += 1
            if token_id in self._ending_ids and num_output >= self.params.min_tokens:
                is_eos = token_id in self.eos_token_ids and not self.params.ignore_eos
                self.finish("stop", None if is_eos else token_id)
                break
            if num_output >= self.max_output_tokens:
                self.finish("length")
                break
        return num_output - num_before

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End the request. The first reason stays, but a stop string found later in the same tokens
        replaces the limit or stop id that stood behind it."""
        is_later_find = reason == "stop" and self.finish_reason in ("stop", "length")
        if self.status is RequestStatus.FINISHED and not is_later_find:
            return
        self.status = RequestStatus.FINISHED
        self.finish_reason = reason
        self.stop_reason = stop_reason

    def truncate_output(self, num_output_tokens: int) -> None:
        """Drop output behind the first ``num_output_tokens``; only for a request that finishes
        now."""
        assert 0 <= num_output_tokens <= self.num_output_tokens, (
            self.request_id,
            num_output_tokens,
            self.num_output_tokens,
        )
        del self.token_ids[self.prompt_len + num_output_tokens :]
        self.num_computed = min(self.num_computed, len(self.token_ids))
        while self._version_starts and self._version_starts[-1][0] >= num_output_tokens:
            self._version_starts.pop()

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def num_remaining_tokens(self) -> int:
        """Output tokens it may still make."""
        return self.max_output_tokens - self.num_output_tokens

    @property
    def max_kv_tokens(self) -> int:
        """Most tokens it can ever store keys for, tree nodes apart: the last token it makes is
        never run."""
        return self.prompt_len + self.max_output_tokens - 1

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def is_decoding(self) -> bool:
        """Runs, and only its newest output token is left to compute: neither prefill nor
        recompute."""
        num_tokens = len(self.token_ids)
        return (
            num_tokens - self.num_computed == 1
            and num_tokens > self.prompt_len
            and self.status is RequestStatus.RUNNING
        )

    @property
    def reads_prefix_cache(self) -> bool:
        """Prompt log-probabilities need the logits of every prompt row, so nothing may be
        skipped."""
        return self.params.prompt_logprobs is None

    @property
    def version_spans(self) -> list[VersionSpan]:
        """Which target weights made which output tokens; covers the output without gaps."""
        starts = self._version_starts
        ends = [start for start, _ in starts[1:]] + [self.num_output_tokens]
        return [
            VersionSpan(start, end, version)
            for (start, version), end in zip(starts, ends, strict=False)
        ]

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.value}, prompt={self.prompt_len}, "
            f"output={self.num_output_tokens}, computed={self.num_computed}, pages={self.pages})"
        )
