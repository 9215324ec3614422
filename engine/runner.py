"""From a scheduled step to logits: builds the ForwardBatch and runs the decoder on it.

Owns the KV cache tensor and the staging buffers. Knows nothing of sampling, stopping or scheduling decisions.
Invariant: a row is described by its own request's tokens and pages only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import PAGE, ForwardBatch
from engine.models.decoder import Decoder
from engine.scheduler import ScheduledRows


@dataclass(frozen=True, slots=True)
class RunnerOutput:
    """``logits`` [L, V] fp32, valid until the next forward; rows in the order they were asked for."""

    logits: Tensor


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
        config = decoder.config
        self.kv_cache = torch.empty(
            (config.num_layers, 2, num_pages, PAGE, config.num_kv_heads, config.head_dim),
            dtype=decoder.kv_dtype,
        )
        decoder.attach_kv_cache(self.kv_cache)
        max_pages = (max_model_len + PAGE - 1) // PAGE + 1
        self._rows = torch.zeros((4, max_rows), dtype=torch.int32)
        self._row_start = torch.zeros(max_seqs + 1, dtype=torch.int32)
        self._page_table = torch.zeros((max_seqs, max_pages), dtype=torch.int32)
        self._tail_start = torch.zeros(max_rows + 1, dtype=torch.int32)
        self._no_tail = torch.zeros(0, dtype=torch.int32)
        self._logit_rows = torch.zeros(max_rows, dtype=torch.int32)

    def forward(self, rows: Sequence[ScheduledRows], logit_rows: Sequence[int]) -> RunnerOutput:
        """Run the target over the rows of a step; logits of the rows numbered in ``logit_rows``."""
        return RunnerOutput(self.decoder.forward(self._build(rows, logit_rows)).logits)

    def _build(self, rows: Sequence[ScheduledRows], logit_rows: Sequence[int]) -> ForwardBatch:
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        num_pages = 1
        table = self._page_table.numpy()
        for s, part in enumerate(rows):
            request = part.request
            start, end = part.start, part.start + part.num_tokens
            pages = request.pages
            token_ids += request.token_ids[start:end]
            positions += range(start, end)
            slots += [pages[p // PAGE] * PAGE + p % PAGE for p in range(start, end)]
            starts.append(len(positions))
            needed = (end + PAGE - 1) // PAGE
            table[s, :needed] = pages[:needed]
            num_pages = max(num_pages, needed)
        count, seqs = len(positions), len(rows)
        staged = self._rows.numpy()
        staged[0, :count], staged[1, :count], staged[2, :count] = token_ids, positions, slots
        staged[3, :count] = staged[1, :count] + 1
        self._row_start.numpy()[: seqs + 1] = starts
        self._logit_rows.numpy()[: len(logit_rows)] = logit_rows
        return ForwardBatch(
            token_ids=self._rows[0, :count],
            positions=self._rows[1, :count],
            slots=self._rows[2, :count],
            row_start=self._row_start[: seqs + 1],
            page_table=self._page_table[:seqs],
            ctx_len=self._rows[3, :count],
            tail_start=self._tail_start[: count + 1],
            tail_slots=self._no_tail,
            logit_rows=self._logit_rows[: len(logit_rows)],
        )
