"""What one forward pass computes: rows, where their keys and values go, and what each row attends to.

Shape legend, used in every layer above and in the ops:

    R  rows of this pass: one token of one sequence each
    S  sequences that own rows; rows of a sequence are contiguous
    L  rows whose logits are asked for
    T  tail entries over all rows (ancestors of tree nodes, the row itself last)
    H  hidden width          V  vocabulary          I  MLP width
    Hq, Hkv  query and key/value heads              D  head size
    P  pages of the KV cache, PAGE tokens each; slot = page * PAGE + offset

A row reads its own *logical sequence*: logical positions ``[0, ctx_len)`` through the sequence's page table,
then the slots of its tail, in order. A prefill or decode row at position p has ``ctx_len = p + 1`` and no tail
(its own key is stored before attention reads it); a node of a token tree has ``ctx_len`` = committed tokens and
the slots of its ancestors and itself as tail. The batch knows nothing of requests, samplers or models.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

PAGE = 16


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The one explicit argument of a forward. All tensors int32 and contiguous, on the model's device."""

    token_ids: Tensor  # [R]
    positions: Tensor  # [R] rotary position
    slots: Tensor  # [R] where the row's key and value are stored
    row_start: Tensor  # [S + 1] rows of sequence s are row_start[s] : row_start[s + 1]
    page_table: Tensor  # [S, pages] page numbers; entries past the sequence are never read
    ctx_len: Tensor  # [R] keys read through the page table
    tail_start: Tensor  # [R + 1] tail of row r is tail_slots[tail_start[r] : tail_start[r + 1]]
    tail_slots: Tensor  # [T]
    logit_rows: Tensor  # [L] rows whose logits are asked for

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]
