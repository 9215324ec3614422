"""Paged sequences for attention tests: prompts, decoding rows and token trees over a cache full of NaN.

Owns the layout: every sequence's pages lie anywhere in the cache, and whatever no row may read is NaN, in the cache
and in unused entries of the page table (negative: reading one fails the bounds check). Invariant: `rows` of a sequence
describe its logical order, so tests can move the same rows into any company.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.batch import PAGE, ForwardBatch
from tests.ops.backends import int32, nan


@dataclass(frozen=True, slots=True)
class Row:
    """A query: keys through the page table, then the tree nodes (numbers within the sequence) of its tail."""

    ctx_len: int
    path: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Sequence:
    """``length`` committed tokens, ``num_nodes`` tree nodes in scratch slots, and the rows to compute."""

    length: int
    rows: tuple[Row, ...]
    num_nodes: int = 0


def prefill(start: int, end: int) -> Sequence:
    return Sequence(end, tuple(Row(i + 1) for i in range(start, end)))


def decode(length: int) -> Sequence:
    return Sequence(length, (Row(length),))


def tree(length: int, parents: list[int]) -> Sequence:
    """Node i's parent is ``parents[i]`` < i, or -1 for a root that follows the committed tokens."""
    paths: list[tuple[int, ...]] = []
    for i, parent in enumerate(parents):
        paths.append((*(paths[parent] if parent >= 0 else ()), i))
    return Sequence(length, tuple(Row(length, path) for path in paths), len(parents))


@dataclass(slots=True)
class Shape:
    num_q_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16


@dataclass(slots=True)
class World:
    """A cache that holds sequences, and their queries. ``batch`` picks rows of them in any order of sequences."""

    shape: Shape
    sequences: list[Sequence]
    seed: int = 0
    k: Tensor = field(init=False)
    v: Tensor = field(init=False)
    q: list[Tensor] = field(init=False)  # per sequence [rows, Hq, D]
    tables: list[list[int]] = field(init=False)
    node_slots: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        s = self.shape
        pages = [-(-q.length // PAGE) for q in self.sequences]
        num_nodes = sum(q.num_nodes for q in self.sequences)
        num_pages = sum(pages) + -(-num_nodes // PAGE) + 2
        order = torch.randperm(num_pages, generator=g).tolist()
        self.k = nan(num_pages, PAGE, s.num_kv_heads, s.head_dim).to(s.dtype)
        self.v = self.k.clone()
        scratch = [page * PAGE + i for page in order[: -(-num_nodes // PAGE)] for i in range(PAGE)]
        order = order[-(-num_nodes // PAGE) :]
        mixed = torch.randperm(len(scratch), generator=g).tolist()
        scratch = [scratch[i] for i in mixed]
        self.q, self.tables, self.node_slots = [], [], []
        for sequence, count in zip(self.sequences, pages, strict=True):
            self.tables.append([order.pop() for _ in range(count)])
            self.node_slots.append([scratch.pop() for _ in range(sequence.num_nodes)])
            slots = [*self.committed_slots(len(self.tables) - 1), *self.node_slots[-1]]
            for cache in (self.k, self.v):
                new = torch.randn(len(slots), s.num_kv_heads, s.head_dim, generator=g)
                cache.flatten(0, 1)[slots] = new.to(s.dtype)
            self.q.append(
                torch.randn(len(sequence.rows), s.num_q_heads, s.head_dim, generator=g) * 2
            )

    def committed_slots(self, seq: int) -> list[int]:
        table, length = self.tables[seq], self.sequences[seq].length
        return [table[i // PAGE] * PAGE + i % PAGE for i in range(length)]

    def poison_before(self, seq: int, position: int) -> None:
        """What a window has left behind: its slots become NaN."""
        for slot in self.committed_slots(seq)[:position]:
            self.k.flatten(0, 1)[slot] = float("nan")
            self.v.flatten(0, 1)[slot] = float("nan")

    def batch(self, picked: list[tuple[int, slice]]) -> tuple[Tensor, ForwardBatch]:
        """Queries [R, Hq, D] and batch of the picked rows (sequence, rows)."""
        queries, row_start, ctx_len, tail_start, tail_slots = [], [0], [], [0], []
        width = max(1, *(len(self.tables[seq]) for seq, _ in picked)) + 1
        table = torch.full((len(picked), width), -1, dtype=torch.int32)
        for i, (seq, rows) in enumerate(picked):
            queries.append(self.q[seq][rows])
            table[i, : len(self.tables[seq])] = int32(self.tables[seq])
            for row in self.sequences[seq].rows[rows]:
                ctx_len.append(row.ctx_len)
                tail_slots += [self.node_slots[seq][node] for node in row.path]
                tail_start.append(len(tail_slots))
            row_start.append(len(ctx_len))
        zeros = torch.zeros(len(ctx_len), dtype=torch.int32)
        batch = ForwardBatch(
            token_ids=zeros,
            positions=zeros,
            slots=zeros,
            row_start=int32(row_start),
            page_table=table,
            ctx_len=int32(ctx_len),
            tail_start=int32(tail_start),
            tail_slots=int32(tail_slots),
            logit_rows=int32([]),
        )
        return torch.cat(queries), batch

    def everything(self) -> tuple[Tensor, ForwardBatch]:
        return self.batch([(i, slice(None)) for i in range(len(self.sequences))])
