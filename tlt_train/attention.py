"""Attention of packed documents: what a row of an unrolled head reads, without padding and without leaks.

Owns the layout of tiles and the pass over them. Knows nothing of networks or losses. Documents lie one behind the
other; their own rows are *tiles* of queries against the keys of the same document only, so a mask between documents
is not needed and nothing is computed that one would hide. Shapes, beside those of ``engine/batch.py``:

    N  rows of the batch: every position of every document
    A  active rows, those that draft: of each document a run that ends before its last row

Row r of step 0 reads the rows of its document up to itself. Behind it hangs a chain: at unroll step u its rotary
position is that of row r + u, and it reads what its chain's root read and the u earlier nodes of its own chain, as
the engine's drafter does (the tree mask of EAGLE-3's "training-time test", arXiv 2503.01840, section 3.2). A window
counts logical positions, the row itself included, as in ``EagleNetwork.attend``.

Invariant: no document's numbers enter another's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

TILE = 256  # query rows
# Masks that are kept, and bytes of the largest of them: 128 MiB in all. A tile of the default window fits; those of long
# documents without a window are made again, which is little beside the attention over as many keys.
NUM_KEPT, KEPT_MASK = 512, 1 << 18


class ActiveRun(NamedTuple):
    """The active rows of one document: rows ``begin : end`` of the batch; ``first`` is the document's first row."""

    first: int
    begin: int
    end: int


class _Tile(NamedTuple):
    rows: slice  # of the active rows
    keys: slice  # of the batch
    mask: Tensor  # [t, s] bool: True is hidden


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """Who reads whom in one batch.

    Attributes:
        runs: of the documents that have active rows, in order.
        window: of logical positions; 0 for all.
    """

    runs: tuple[ActiveRun, ...]
    window: int

    def tiles(self, step: int) -> list[_Tile]:
        """The tiles of an unroll step, in order of the active rows."""
        found: list[_Tile] = []
        at = 0
        for run in self.runs:
            for start in range(run.begin, run.end, TILE):
                end = min(start + TILE, run.end)
                first = run.first
                if self.window:
                    first = max(first, start + step - self.window + 1)
                # a window that ends before the chain's root leaves the row to its chain alone
                first = min(first, end - 1)
                reach = self.window - step if self.window else end - run.first + 1
                mask = _hidden(end - start, end - first, start - first, min(reach, end - first + 1))
                found.append(_Tile(slice(at, at + end - start), slice(first, end), mask))
                at += end - start
        return found


def _hidden(num_rows: int, num_keys: int, offset: int, reach: int) -> Tensor:
    """[t, s]: key j is hidden from row i unless ``i + offset - reach < j <= i + offset``."""
    make = _kept if num_rows * num_keys <= KEPT_MASK else _kept.__wrapped__
    return make(num_rows, num_keys, offset, reach)


@lru_cache(maxsize=NUM_KEPT)
def _kept(num_rows: int, num_keys: int, offset: int, reach: int) -> Tensor:
    behind = torch.arange(num_rows).unsqueeze(1) + offset - torch.arange(num_keys)
    return (behind < 0) | (behind >= reach)


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chain: Sequence[tuple[Tensor, Tensor]],
    layout: AttentionLayout,
    scale: float,
) -> Tensor:
    """Attention of the active rows at unroll step ``len(chain)``.

    Args:
        q: [A, Hq, D], rotated.
        k, v: [N, Hkv, D] of step 0, keys rotated.
        chain: (k, v), each [A, Hkv, D], of the steps 1 to this one.
        layout: of the batch.
        scale: of the scores.

    Returns:
        [A, Hq * D].
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv = k.shape[1]
    group = num_heads // num_kv
    grouped = q.view(num_rows, num_kv, group, head_dim)
    own = [(grouped * key.unsqueeze(2)).sum(-1) for key, _ in chain]  # each [A, Hkv, G]
    own_scores = torch.stack(own, dim=-1) if own else None  # [A, Hkv, G, u]
    outputs: list[Tensor] = []
    own_weights: list[Tensor] = []
    for rows, keys, mask in layout.tiles(len(chain)):
        count = rows.stop - rows.start
        queries = grouped[rows].permute(1, 2, 0, 3).reshape(num_kv, group * count, head_dim)
        scores = torch.bmm(queries, k[keys].permute(1, 2, 0)).view(num_kv, group, count, -1)
        scores = scores.masked_fill(mask, float("-inf"))
        if own_scores is not None:
            scores = torch.cat((scores, own_scores[rows].permute(1, 2, 0, 3)), dim=-1)
        weights = (scores * scale).softmax(dim=-1, dtype=torch.float32).to(q.dtype)
        if own_scores is not None:
            weights, chained = weights.split((mask.shape[1], len(chain)), dim=-1)
            own_weights.append(chained.permute(2, 0, 1, 3))
        read = torch.bmm(weights.reshape(num_kv, group * count, -1), v[keys].permute(1, 0, 2))
        outputs.append(read.view(num_kv, group, count, head_dim).permute(2, 0, 1, 3))
    out = torch.cat(outputs)
    if own_weights:
        shares = torch.cat(own_weights)
        for step, (_, value) in enumerate(chain):
            out = out + shares[..., step : step + 1] * value.unsqueeze(2)
    return out.reshape(num_rows, num_heads * head_dim)
