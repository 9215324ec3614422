"""Which rows run in the next step, and what a step's outcome does to the requests.

Owns the queue, the running requests and the token budget. Does not know tensors, sampling, drafters or text;
pages are KVCache's. Continuous batching with chunked prefill, first come first served: decoding requests first,
then prefill in chunks, then new requests while rows and pages last. Under page pressure tree nodes shrink first;
then the request that came last is preempted: it loses its pages, keeps its tokens, and waits in front.

Invariants: running requests came before waiting ones, so the oldest can take pages from all others
and always advances (no livelock); at most one step is in flight, and until it is committed or
failed no page that it uses changes hands. Every row of a step must be run, also those of requests
aborted meanwhile: others may read their pages.

    add(request)                      abort(request_id) -> bool
    schedule() -> ScheduledStep       finish(request, reason, stop_reason, num_output_tokens=...)
    fail(step)                        commit(step, {request_id: token_ids}) -> [Committed]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.kv_cache import KVCache
from engine.request import FinishReason, Request, RequestStatus


@dataclass(frozen=True, slots=True)
class ScheduledRows:
    """Rows of one request: tokens ``start : end``, and room for tree nodes behind them.

    ``samples``: the last row is the newest token, so a token is sampled behind it (the last chunk
    of a prefill, or a decode). Tree nodes may use the slots ``end : end + num_tree_nodes``.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    num_tree_nodes: int = 0

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """Rows to run in one forward: decoding requests, running prefills, newly admitted ones."""

    rows: tuple[ScheduledRows, ...]
    num_decoding: int  # the first so many of rows are of decoding requests
    num_admitted: int  # the last so many of rows are of requests admitted by this step
    version: int  # of the target weights that run it
    preempted: tuple[Request, ...]  # lost their pages in favour of this step; they wait

    @property
    def num_tokens(self) -> int:
        """Rows of the forward, tree nodes apart."""
        return sum(rows.num_tokens for rows in self.rows)


@dataclass(frozen=True, slots=True)
class Committed:
    """What a step added to a request: the tokens that were kept, after stops and limits."""

    request: Request
    token_ids: list[int]


class Scheduler:
    """Decides each step. One thread; a step in flight allows add, abort and finish only.

    Args:
        kv: the cache whose pages are given out.
        max_num_seqs: most running requests.
        max_num_batched_tokens: most rows of a step, tree nodes included; at least max_num_seqs.
        max_model_len: most tokens of a request, prompt and output.
    """

    def __init__(
        self, kv: KVCache, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
    ) -> None:
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, got {max_num_seqs}")
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens must be at least max_num_seqs ({max_num_seqs}), so that all "
                f"running requests can decode in one step; got {max_num_batched_tokens}"
            )
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.num_preemptions = 0
        self._live: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._in_flight: ScheduledStep | None = None

    # ---- requests come and go

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: the id is taken, the request is too long for the model, or it can never fit
            the cache.
        """
        request_id, kv = request.request_id, self.kv
        if request_id in self._live:
            raise ValueError(f"request id {request_id!r} is in use; choose another, or abort it")
        if request.status is not RequestStatus.WAITING:
            raise ValueError(f"request {request_id!r} has run already; make a new Request")
        if request.max_total_len > self.max_model_len:
            raise ValueError(
                f"request {request_id!r}: max_total_len must be at most max_model_len "
                f"({self.max_model_len}), got {request.max_total_len}"
            )
        num_pages = kv.num_pages_for(request.max_kv_tokens)
        if num_pages > kv.num_pages:
            raise ValueError(
                f"request {request_id!r}: a prompt of {request.prompt_len} and up to "
                f"{request.max_output_tokens} output tokens need {num_pages} pages of "
                f"{kv.page_size} tokens, the KV cache has {kv.num_pages}; raise kv_cache_bytes by "
                f"a factor of {num_pages / kv.num_pages:.2f}, or lower max_tokens or max_model_len"
            )
        self._live[request_id] = request
        self._waiting.append(request)

    def abort(self, request_id: str) -> bool:
        """End a request at any moment; False if no such request lives. Its id is free at once."""
        request = self._live.get(request_id)
        if request is None:
            return False
        self.finish(request, "abort")
        return True

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        *,
        num_output_tokens: int | None = None,
    ) -> None:
        """End a request from above: a stop string in what ``commit`` returned, an error.

        Keeps its first ``num_output_tokens``. A stop counts also where a limit behind it has ended the
        request already. Pages in use by a step in flight are kept until that has ended."""
        if num_output_tokens is not None:
            request.truncate_output(num_output_tokens)
        was_waiting = request.status is RequestStatus.WAITING
        request.finish(reason, stop_reason)
        if self._live.get(request.request_id) is not request:
            return
        del self._live[request.request_id]
        if was_waiting:
            self._waiting.remove(request)
        elif self._in_flight is None:
            self._drop_finished()

    def get(self, request_id: str) -> Request | None:
        return self._live.get(request_id)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._waiting) or any(not r.is_finished for r in self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_prefill(self) -> bool:
        """Whether others than decoding requests want rows of the next step."""
        return bool(self._waiting) or not all(request.is_decoding for request in self._running)

    @property
    def decoding(self) -> list[Request]:
        """Running requests past their prefill: they alone count when speculation is decided."""
        return [request for request in self._running if request.is_decoding]

    # ---- a step

    def schedule(self) -> ScheduledStep:
        """Choose the rows of the next step; without rows there is nothing to do or to commit."""
        assert self._in_flight is None, "schedule() before the last step was committed or failed"
        self._drop_finished()
        decoding = self.decoding
        num_rows = self.max_num_batched_tokens - len(decoding)
        num_nodes = self._num_nodes(decoding, num_rows)
        num_rows -= num_nodes

        decodes, prefills, preempted = self._run(num_rows)
        num_rows -= sum(rows.num_tokens for rows in prefills)
        admitted = [] if preempted else self._admit(num_rows)
        num_rows -= sum(rows.num_tokens for rows in admitted)
        rows = self._decode_rows(decodes, num_nodes + num_rows) + prefills + admitted
        step = ScheduledStep(
            rows=tuple(rows),
            num_decoding=len(decodes),
            num_admitted=len(admitted),
            version=self.kv.version,
            preempted=tuple(preempted),
        )
        assert rows or not self._running, ("nobody can run", self._running)
        self._in_flight = step if rows else None
        return step

    def commit(self, step: ScheduledStep, sampled: Mapping[str, Sequence[int]]) -> list[Committed]:
        """The step has run, and accepted tree nodes have been moved into place.

        Args:
            sampled: for every request whose rows sample, its accepted draft tokens and the token
                sampled behind them: one token, or up to ``1 + num_tree_nodes``.

        Returns:
            what each live request gained, in order of the rows; finished ones have no pages.
        """
        if not step.rows:
            return []
        assert step is self._in_flight, "commit() of a step that is not in flight"
        for rows in step.rows:
            if rows.samples and not rows.request.is_finished:
                token_ids = sampled[rows.request.request_id]
                assert 1 <= len(token_ids) <= 1 + rows.num_tree_nodes, (rows, token_ids)
        self._in_flight = None
        self.kv.commit_step()
        outcome: list[Committed] = []
        for rows in step.rows:
            request = rows.request
            if request.status is RequestStatus.FINISHED:  # aborted meanwhile
                continue
            request.num_computed = rows.start + rows.num_tokens
            if not rows.samples:
                continue
            token_ids = sampled[request.request_id]
            num_kept = request.append_tokens(token_ids, step.version)
            request.num_computed += num_kept - 1
            if rows.num_tree_nodes:
                self.kv.trim(request, request.num_computed)
            outcome.append(Committed(request, list(token_ids[:num_kept])))
        self._drop_finished()
        return outcome

    def fail(self, step: ScheduledStep) -> None:
        """The forward raised: put everything back as it was before ``schedule``, nothing is lost.

        Requests it admitted wait again, in front; who was preempted for it stays preempted.
        """
        if not step.rows:
            return
        assert step is self._in_flight, "fail() of a step that is not in flight"
        self._in_flight = None
        self.kv.unregister_step()
        for _ in range(step.num_admitted):
            self._to_waiting(self._running.pop())
        for rows in step.rows:
            self.kv.trim(rows.request, rows.request.num_computed)
        self._drop_finished()

    def check(self) -> None:
        """Raise AssertionError, with values, if an invariant here or of the cache is broken."""
        self.kv.check(self._running)
        assert len(self._running) <= self.max_num_seqs, len(self._running)
        for request in self._running:
            assert request.status is not RequestStatus.WAITING, request
            if not request.is_finished:
                assert request.num_computed < len(request.token_ids), request
        for request in self._waiting:
            assert request.status is RequestStatus.WAITING, request
            assert not request.pages, request
            assert request.num_computed == 0, request
        everyone = [r for r in (*self._running, *self._waiting) if not r.is_finished]
        ids = [request.request_id for request in everyone]
        assert len(set(ids)) == len(ids), ids
        live = {i: r for i, r in self._live.items() if not r.is_finished}
        assert live == dict(zip(ids, everyone, strict=True)), (live, everyone)

    # ---- inside

    def _num_nodes(self, decoding: list[Request], num_rows: int) -> int:
        """Rows set aside for tree nodes: as asked for, half at most while prefill has work."""
        num_asked = sum(request.num_tree_nodes for request in decoding)
        if num_asked and (self._waiting or len(decoding) < len(self._running)):
            num_rows //= 2
        return min(num_asked, num_rows)

    def _run(self, num_rows: int) -> tuple[list[Request], list[ScheduledRows], list[Request]]:
        """Give rows to running requests, oldest first; return (decodes, prefills, preempted).

        ``num_rows`` bounds the prefill; decode rows are set aside. Who is preempted is the last,
        never older than the request in hand, so it has no rows in this step yet.
        """
        decodes: list[Request] = []
        prefills: list[ScheduledRows] = []
        preempted: list[Request] = []
        index = 0
        while index < len(self._running):
            request = self._running[index]
            index += 1
            start = request.num_computed
            is_decoding = request.is_decoding
            num_tokens = 1 if is_decoding else min(len(request.token_ids) - start, num_rows)
            if not num_tokens:
                continue
            num_tokens = self._make_room(request, num_tokens, preempted)
            if not num_tokens:
                break  # it was the last one itself
            self.kv.grow(request, start + num_tokens)
            self.kv.register(request, start + num_tokens)
            if is_decoding:
                decodes.append(request)
            else:
                prefills.append(_rows(request, num_tokens))
                num_rows -= num_tokens
        return decodes, prefills, preempted

    def _make_room(self, request: Request, num_tokens: int, preempted: list[Request]) -> int:
        """Tokens of those asked for that fit, at least one; 0 if the request itself had to go."""
        while True:
            room = self.kv.capacity(request) - request.num_computed
            if room > 0:
                return min(num_tokens, room)
            victim = self._running.pop()
            victim.num_preemptions += 1
            self.num_preemptions += 1
            preempted.append(victim)
            self._to_waiting(victim)
            if victim is request:
                assert self._running, ("the cache is too small for one request", request)
                return 0

    def _admit(self, num_rows: int) -> list[ScheduledRows]:
        """Let waiting requests in, in order, while there are rows, places and pages."""
        admitted: list[ScheduledRows] = []
        if not self._waiting:
            return admitted
        reserve = sum(self._num_reserved(request) for request in self._running)
        while self._waiting and num_rows and len(self._running) < self.max_num_seqs:
            request = self._waiting[0]
            num_tokens = self.kv.allocate(request, num_rows, reserve)
            if not num_tokens:
                break
            self._running.append(self._waiting.popleft())
            request.status = RequestStatus.RUNNING
            if not request.num_preemptions:
                request.num_cached_tokens = request.num_computed
            self.kv.register(request, request.num_computed + num_tokens)
            admitted.append(_rows(request, num_tokens))
            num_rows -= num_tokens
            reserve += self._num_reserved(request)
        return admitted

    def _num_reserved(self, request: Request) -> int:
        """Pages a running request will want soon: newcomers who took them would be preempted."""
        return max(0, self.kv.pages_wanted(request) - len(request.pages))

    def _decode_rows(self, decodes: list[Request], num_nodes: int) -> list[ScheduledRows]:
        """Rows of decoding requests, with the tree nodes that rows and pages left over allow."""
        rows: list[ScheduledRows] = []
        for request in decodes:
            granted = 0
            if request.num_tree_nodes and request.num_remaining_tokens > 1:
                end = request.num_computed + 1
                room = self.kv.capacity(request) - end
                granted = min(request.num_tree_nodes, num_nodes, room)
                self.kv.grow(request, end + granted)
                num_nodes -= granted
            rows.append(ScheduledRows(request, request.num_computed, 1, True, granted))
        return rows

    def _to_waiting(self, request: Request) -> None:
        """Take its pages and put it in front of the queue; just drop it if it was aborted."""
        self.kv.free(request)
        request.num_computed = 0
        if request.status is not RequestStatus.FINISHED:
            request.status = RequestStatus.WAITING
            self._waiting.appendleft(request)

    def _drop_finished(self) -> None:
        """Take pages and place from requests that have finished, by whatever way."""
        finished = [r for r in self._running if r.status is RequestStatus.FINISHED]
        if not finished:
            return
        self._running = [r for r in self._running if r.status is not RequestStatus.FINISHED]
        for request in finished:
            self.kv.free(request)
            if self._live.get(request.request_id) is request:
                del self._live[request.request_id]


def _rows(request: Request, num_tokens: int) -> ScheduledRows:
    start = request.num_computed
    return ScheduledRows(request, start, num_tokens, start + num_tokens == len(request.token_ids))
