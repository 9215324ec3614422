"""The passes of an EAGLE drafter as ForwardBatches, over buffers that every pass fills anew.

Owns the staging buffers. Knows nothing of requests or trees. Invariant: a batch is valid until the next one is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.batch import ForwardBatch

_MAX_CACHED = 256


class _Ints:
    """An int32 buffer as a tensor and as numpy, with cached views of its first entries."""

    def __init__(self, size: int) -> None:
        self._tensor = torch.zeros(size, dtype=torch.int32)
        self._array = self._tensor.numpy()
        self._views: dict[int, Tensor] = {}

    def fill(self, values: Any, count: int) -> Tensor:
        """The first ``count`` entries, set to ``values``."""
        if count > self._array.shape[0]:
            self.__init__(2 * count)
        self._array[:count] = values
        view = self._views.get(count)
        if view is None:
            if len(self._views) >= _MAX_CACHED:
                self._views.clear()
            view = self._views[count] = self._tensor[:count]
        return view


class EagleBatches:
    """Staging for passes of at most ``max_rows`` rows of ``max_seqs`` sequences with ``ring_pages`` pages each."""

    def __init__(self, max_rows: int, max_seqs: int, ring_pages: int) -> None:
        self._token_ids, self._positions, self._slots = (_Ints(max_rows) for _ in range(3))
        self._ctx_len, self._row_start = _Ints(max_rows), _Ints(max_seqs + 1)
        self._tail_start, self._tail_slots = _Ints(max_rows + 1), _Ints(max_rows)
        self._sources, self._features = _Ints(max_rows), _Ints(max_rows)
        self._tables = torch.zeros((max_seqs, ring_pages), dtype=torch.int32)
        self._table_array = self._tables.numpy()
        self._none = torch.zeros(0, dtype=torch.int32)

    def set_pages(self, tables: Sequence[np.ndarray]) -> None:
        """Page tables of the sequences, for all passes until the next call."""
        for s, pages in enumerate(tables):
            self._table_array[s, : pages.shape[0]] = pages

    def stored(self, token_ids: Any, positions: Any, slots: Any) -> ForwardBatch:
        """Rows whose keys are stored, and no more."""
        count, none = len(token_ids), self._none
        return ForwardBatch(
            token_ids=self._token_ids.fill(token_ids, count),
            positions=self._positions.fill(positions, count),
            slots=self._slots.fill(slots, count),
            row_start=none,
            page_table=none,
            ctx_len=none,
            tail_start=none,
            tail_slots=none,
            logit_rows=none,
        )

    def reading(
        self,
        stored: ForwardBatch | None,
        row_start: Sequence[int],
        ctx_len: Any,
        tails: Sequence[Sequence[int]] = (),
    ) -> ForwardBatch:
        """Rows that read their sequences: what ``stored`` gave, or others (None) of as many as ``ctx_len``."""
        count, seqs = len(ctx_len), len(row_start) - 1
        slots = [slot for tail in tails for slot in tail]
        starts = [0, *accumulate(map(len, tails))] if tails else 0
        none = self._none
        return ForwardBatch(
            token_ids=none if stored is None else stored.token_ids,
            positions=none if stored is None else stored.positions,
            slots=none if stored is None else stored.slots,
            row_start=self._row_start.fill(row_start, seqs + 1),
            page_table=self._tables[:seqs],
            ctx_len=self._ctx_len.fill(ctx_len, count),
            tail_start=self._tail_start.fill(starts, count + 1),
            tail_slots=self._tail_slots.fill(slots, len(slots)),
            logit_rows=none,
        )

    def rows(self, numbers: Sequence[int]) -> Tensor:
        """Row numbers, to pick from the pass before."""
        return self._sources.fill(numbers, len(numbers))

    def feature_slots(self, slots: Any) -> Tensor:
        """Slots of the target's features."""
        return self._features.fill(slots, len(slots))
