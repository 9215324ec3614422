"""From a scheduled step to logits: builds the ForwardBatch and runs the decoder on it.

Owns the KV cache tensor and the staging buffers. Knows nothing of sampling, stopping or scheduling decisions.
Invariant: a row is described by its own request's tokens and pages only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.batch import PAGE, ForwardBatch
from engine.models.decoder import Decoder, ForwardOutput
from engine.models.workspace import empty_in_huge_pages
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduler import ScheduledRows
from engine.spec.tree import DraftTree

_MAX_CACHED_BATCHES = 512
_MEASURED_ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 64)
_LONG_CONTEXT = 512
_SEVERAL_ROWS = (
    8  # of one sequence: what each of them takes for the context, not what the first one does
)
_ONE_TOKEN = SamplingParams(max_tokens=1)


class _Staging(NamedTuple):
    """Buffers that every step fills anew, as tensors or as numpy views of the same memory."""

    rows: Any  # [4, max rows] token id, position, slot, ctx_len
    row_start: Any  # [max sequences + 1]
    page_table: Any  # [max sequences, pages]
    logit_rows: Any  # [max rows]
    tail_start: Any  # [max rows + 1]
    tail_slots: Any  # [tail entries], grown when a step has more


class ModelRunner:
    """Runs one decoder over one KV cache.

    Args:
        decoder: the model.
        num_pages: pages of the KV cache.
        max_rows: most rows of one forward.
        max_seqs: most sequences of one forward.
        max_model_len: longest sequence in tokens.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        num_pages: int,
        max_rows: int,
        max_seqs: int,
        max_model_len: int,
    ) -> None:
        self.decoder = decoder
        self.num_pages = num_pages
        self.max_rows = max_rows
        self.max_model_len = max_model_len
        config = decoder.config
        self.kv_cache = empty_in_huge_pages(
            (config.num_layers, 2, num_pages, PAGE, config.num_kv_heads, config.head_dim),
            decoder.kv_dtype,
        )
        decoder.attach_kv_cache(self.kv_cache)
        max_pages = (max_model_len + PAGE - 1) // PAGE + 1
        self._tensors = _Staging(
            rows=torch.zeros((4, max_rows), dtype=torch.int32),
            row_start=torch.zeros(max_seqs + 1, dtype=torch.int32),
            page_table=torch.zeros((max_seqs, max_pages), dtype=torch.int32),
            logit_rows=torch.zeros(max_rows, dtype=torch.int32),
            tail_start=torch.zeros(max_rows + 1, dtype=torch.int32),
            tail_slots=torch.zeros(0, dtype=torch.int32),
        )
        self._staging = _Staging(*(tensor.numpy() for tensor in self._tensors))
        self._batches: dict[tuple[int, int, int, int], ForwardBatch] = {}

    def forward(
        self,
        rows: Sequence[ScheduledRows],
        logit_rows: Sequence[int],
        trees: Sequence[DraftTree] = (),
        *,
        tap_layers: tuple[int, ...] = (),
        want_hidden: bool = False,
    ) -> tuple[ForwardBatch, ForwardOutput]:
        """Run the target over the rows of a step, each followed by the nodes of its tree.

        Args:
            rows: what was scheduled.
            logit_rows: numbers of the rows, nodes counted, whose logits are wanted.
            trees: of the first rows, those of decoding requests; at most ``num_tree_nodes`` nodes each.
            tap_layers, want_hidden: as ``Decoder.forward``.

        Returns:
            what was run, and its results; both are valid until the next forward.
        """
        batch = self._build(rows, logit_rows, trees)
        output = self.decoder.forward(batch, tap_layers=tap_layers, want_hidden=want_hidden)
        return batch, output

    def move_kv(self, source: Tensor, target: Tensor) -> None:
        """Keys and values of slots ``source`` [n] int32 to ``target``; all are read before any is written."""
        self.decoder.ops.kv_move(self.kv_cache, source, target)

    def _build(
        self,
        rows: Sequence[ScheduledRows],
        logit_rows: Sequence[int],
        trees: Sequence[DraftTree],
    ) -> ForwardBatch:
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        staging = self._staging
        tails = _Tails()
        for s, part in enumerate(rows):
            request, start, end = part.request, part.start, part.end
            pages = request.pages
            if end - start == 1:
                token_ids.append(request.token_ids[start])
                positions.append(start)
                slots.append(pages[start // PAGE] * PAGE + start % PAGE)
            else:
                token_ids += request.token_ids[start:end]
                positions += range(start, end)
                slots += [pages[p // PAGE] * PAGE + p % PAGE for p in range(start, end)]
            if s < len(trees) and len(trees[s]):
                tree = trees[s]
                assert len(tree) <= part.num_tree_nodes, (part, tree)
                tails.add(tree, end, pages, row=len(positions))
                token_ids += tree.token_ids
                positions += [end - 1 + depth for depth in tree.depths]
                slots += [pages[p // PAGE] * PAGE + p % PAGE for p in range(end, end + len(tree))]
                end += tree.chain_len
            starts.append(len(positions))
            needed = (end + PAGE - 1) // PAGE
            staging.page_table[s, :needed] = pages[:needed]
        count, seqs, num_logits = len(positions), len(rows), len(logit_rows)
        staged = staging.rows
        staged[0, :count], staged[1, :count], staged[2, :count] = token_ids, positions, slots
        staged[3, :count] = staged[1, :count] + 1
        self._stage_tails(tails, count)
        staging.row_start[: seqs + 1] = starts
        staging.logit_rows[:num_logits] = logit_rows
        return self._batch(count, seqs, num_logits, len(tails.slots))

    def _stage_tails(self, tails: _Tails, count: int) -> None:
        staging = self._staging
        staging.tail_start[: count + 1] = 0
        if not tails.slots:
            return
        num_slots = len(tails.slots)
        if num_slots > staging.tail_slots.shape[0]:
            self._batches.clear()
            tensor = torch.zeros(2 * num_slots, dtype=torch.int32)
            self._tensors = self._tensors._replace(tail_slots=tensor)
            self._staging = staging = staging._replace(tail_slots=tensor.numpy())
        staging.tail_slots[:num_slots] = tails.slots
        for row, ctx_len, num_tail in tails.rows:
            staging.rows[3, row] = ctx_len
            staging.tail_start[row + 1] = num_tail
        np.cumsum(staging.tail_start[: count + 1], out=staging.tail_start[: count + 1])

    def _batch(self, count: int, seqs: int, num_logits: int, num_tail: int) -> ForwardBatch:
        """The batch of that shape over the staging buffers; made once, since views cost more than filling them."""
        key = (count, seqs, num_logits, num_tail)
        batch = self._batches.get(key)
        if batch is None:
            if len(self._batches) >= _MAX_CACHED_BATCHES:
                self._batches.clear()
            tensors = self._tensors
            batch = self._batches[key] = ForwardBatch(
                token_ids=tensors.rows[0, :count],
                positions=tensors.rows[1, :count],
                slots=tensors.rows[2, :count],
                row_start=tensors.row_start[: seqs + 1],
                page_table=tensors.page_table[:seqs],
                ctx_len=tensors.rows[3, :count],
                tail_start=tensors.tail_start[: count + 1],
                tail_slots=tensors.tail_slots[:num_tail],
                logit_rows=tensors.logit_rows[:num_logits],
            )
        return batch


def measure_passes(runner: ModelRunner, *, budget_s: float = 1.0) -> tuple[dict[int, float], float]:
    """What forwards take, before there is anything to run: the price of verification until steps tell.

    The engine must be idle; the first pages are written to.

    Args:
        budget_s: seconds that repetitions may take in all; every forward is run twice, whatever it takes.

    Returns:
        rows -> seconds of a forward of one sequence of that many rows, logits of all of them; and the seconds that
        a row takes for each token that it attends. The least of some repetitions.
    """
    limit = min(runner.max_model_len, runner.num_pages * PAGE) - 1
    counts = [n for n in _MEASURED_ROWS if n <= min(runner.max_rows, limit)]
    several = max(n for n in counts if n <= _SEVERAL_ROWS)
    long = min(_LONG_CONTEXT, limit - several)
    passes = [(0, n) for n in counts] + [(long, several)] * (long > 0)
    found: dict[tuple[int, int], float] = {}
    start = time.perf_counter()
    for repeat in range(5):
        for context, num_rows in passes:
            if repeat > 1 and time.perf_counter() - start > budget_s:
                break
            seconds = _pass_s(runner, context, num_rows)
            if repeat < 2:  # the first time touches memory that is new
                found[context, num_rows] = seconds
            else:
                found[context, num_rows] = min(seconds, found[context, num_rows])
    context_s = 0.0
    if long > 0:
        context_s = (found[long, several] - found[0, several]) / (long * several)
    return {n: s for (context, n), s in found.items() if not context}, max(context_s, 0.0)


def _pass_s(runner: ModelRunner, context: int, num_rows: int) -> float:
    count = context + num_rows
    request = Request("", [0] * count, _ONE_TOKEN, seed=0, max_total_len=count + 1)
    request.pages = list(range((count + PAGE - 1) // PAGE))
    start = time.perf_counter()
    runner.forward([ScheduledRows(request, context, num_rows, True)], range(num_rows))
    return time.perf_counter() - start


class _Tails:
    """Rows of a step that read ancestors by slot.

    Nodes that are a chain from the root lie where their positions are, so they are read as a prefill is, through
    the page table; the bits are the same either way.
    """

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.rows: list[tuple[int, int, int]] = []  # row, ctx_len, tail entries

    def add(self, tree: DraftTree, end: int, pages: Sequence[int], row: int) -> None:
        for node in range(tree.chain_len, len(tree)):
            line = tree.ancestors(node)
            at = [end + ancestor for ancestor in line]
            self.slots += [pages[p // PAGE] * PAGE + p % PAGE for p in at]
            self.rows.append((row + node, end, len(line)))
