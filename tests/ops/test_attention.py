"""``attention``: right against fp64, blind to what it may not see, and the same bits however the work is cut.

Every cache starts as NaN, so that reading a slot outside a row's logical sequence shows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.batch import PAGE, ForwardBatch
from engine.ops.native import cpu_ops, usable_isas
from tests.ops.backends import agreed, best, nan, same_bits
from tests.ops.sequences import Row, Sequence, Shape, World, decode, prefill, tree

SHAPES = [
    Shape(9, 3, 64),
    Shape(6, 2, 80),
    Shape(4, 4, 96),
    Shape(8, 1, 128),
    Shape(2, 1, 256),
    Shape(3, 1, 8),
    Shape(2, 2, 10),
    Shape(5, 1, 72, torch.float32),
    Shape(9, 3, 64, torch.float32),
]


def exact(world: World, q: Tensor, batch: ForwardBatch, scale: float, window: int) -> Tensor:
    """The reference's formula in fp64."""
    group = world.shape.num_q_heads // world.shape.num_kv_heads
    keys, values = world.k.flatten(0, 1).double(), world.v.flatten(0, 1).double()
    out = torch.empty(q.shape, dtype=torch.float64)
    for seq in range(batch.row_start.shape[0] - 1):
        for row in range(int(batch.row_start[seq]), int(batch.row_start[seq + 1])):
            logical = torch.arange(int(batch.ctx_len[row]))
            slots = batch.page_table[seq].long()[logical // PAGE] * PAGE + logical % PAGE
            tail = batch.tail_slots[int(batch.tail_start[row]) : int(batch.tail_start[row + 1])]
            slots = torch.cat((slots, tail.long()))[-window if window else None :]
            k = keys[slots].repeat_interleave(group, dim=1)
            v = values[slots].repeat_interleave(group, dim=1)
            weights = (torch.einsum("hd,khd->hk", q[row].double(), k) * scale).softmax(-1)
            out[row] = torch.einsum("hk,khd->hd", weights, v)
    return out


def attend(
    ops: Any, world: World, q: Tensor, batch: ForwardBatch, window: int = 0, scale: float = 0.125
) -> Tensor:
    out = nan(*q.shape)
    ops.attention(q, world.k, world.v, batch, scale, window, out)
    return out


def check(world: World, window: int = 0, scale: float = 0.125, tolerance: float = 2e-5) -> Tensor:
    q, batch = world.everything()
    (out,) = agreed(
        "attention", lambda: (q, world.k, world.v, batch, scale, window, nan(*q.shape)), 6
    )
    torch.testing.assert_close(
        out.double(), exact(world, q, batch, scale, window), rtol=tolerance, atol=tolerance
    )
    return out


def parents(draw: Any, size: int) -> list[int]:
    return [draw(st.integers(-1, i - 1)) for i in range(size)]


@st.composite
def sequences(draw: Any) -> Sequence:
    length = draw(st.one_of(st.integers(1, 80), st.sampled_from([127, 128, 256, 270])))
    kind = draw(st.sampled_from(["prefill", "decode", "tree"]))
    if kind == "prefill":
        return prefill(length - draw(st.integers(1, min(length, 40))), length)
    if kind == "decode":
        return decode(length)
    return tree(length, parents(draw, draw(st.integers(1, 12))))


@settings(deadline=None, max_examples=25)
@given(
    st.lists(sequences(), min_size=1, max_size=5),
    st.sampled_from(SHAPES),
    st.sampled_from([0, 0, 1, 16, 63, 64, 65, 150]),
    st.integers(0, 2**32),
)
def test_matches_exact_arithmetic(
    sequences: list[Sequence], shape: Shape, window: int, seed: int
) -> None:
    check(World(shape, sequences, seed), window)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(sequences(), min_size=2, max_size=6),
    st.sampled_from(SHAPES),
    st.sampled_from([0, 20, 64]),
    st.data(),
)
def test_row_does_not_depend_on_its_company(
    sequences: list[Sequence], shape: Shape, window: int, data: st.DataObject
) -> None:
    """Rows alone, rows with others of their sequence, sequences in another order: the same bits."""
    world = World(shape, sequences)
    q, batch = world.everything()
    together = attend(best(), world, q, batch, window)
    starts = batch.row_start.tolist()
    for seq, sequence in enumerate(sequences):
        row = data.draw(st.integers(0, len(sequence.rows) - 1))
        stop = data.draw(st.integers(row + 1, len(sequence.rows)))
        picked = [(seq, slice(row, stop))]
        before = data.draw(st.booleans())
        other = (seq + 1) % len(sequences)
        picked = [(other, slice(0, 1)), *picked] if before else picked
        out = attend(best(), world, *world.batch(picked), window)
        assert same_bits(out[int(before) :], together[starts[seq] + row : starts[seq] + stop])


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("length", [1, 50, 62, 63, 64, 126, 250, 320])
def test_a_tree_computes_what_decoding_would(length: int, window: int) -> None:
    """The foundation of lossless speculation: the node at depth d has the bits of the committed token d."""
    depth = 6
    world = World(Shape(9, 3, 64), [tree(length, list(range(-1, depth - 1)))])
    verified = attend(best(), world, *world.everything(), window)
    # the same tokens, committed: their keys and values move behind the prompt
    committed = World(Shape(9, 3, 64), [prefill(length, length + depth)])
    old, new = world.committed_slots(0) + world.node_slots[0], committed.committed_slots(0)
    committed.k.flatten(0, 1)[new] = world.k.flatten(0, 1)[old]
    committed.v.flatten(0, 1)[new] = world.v.flatten(0, 1)[old]
    committed.q = world.q
    assert same_bits(attend(best(), committed, *committed.everything(), window), verified)
    for row in range(depth):
        alone = attend(best(), committed, *committed.batch([(0, slice(row, row + 1))]), window)
        assert same_bits(alone, verified[row : row + 1])


@pytest.mark.parametrize("window", [0, 90])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_few_queries_compute_what_many_do(shape: Shape, window: int) -> None:
    """Up to 8 queries of a kv head meet the cache's own rows (attention_few.h), more meet a converted chunk: the same
    bits for the row inside a prefill, alone, beside one other row, and in a batch of decoding rows."""
    group = shape.num_q_heads // shape.num_kv_heads
    ends = [1, 16, 17, 63, 64, 65, 110, 128, 200, 256, 257, 300, 330]
    world = World(shape, [prefill(0, ends[-1])])
    many = attend(cpu_ops("auto", 1), world, *world.everything(), window)
    for backend in [(isa, threads) for isa in usable_isas()[1:] for threads in (1, 2, 3)]:
        ops = cpu_ops(*backend)
        for end in ends:
            for start in {end - 1, max(0, end - max(1, 8 // group))}:
                few = attend(ops, world, *world.batch([(0, slice(start, end))]), window)
                assert same_bits(few, many[start:end]), (backend, start, end)
        decoding = attend(ops, world, *world.batch([(0, slice(e - 1, e)) for e in ends]), window)
        assert same_bits(decoding, many[[e - 1 for e in ends]]), backend


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("length", [0, 40, 63, 120, 250])
@pytest.mark.parametrize("shape", SHAPES[:3] + SHAPES[-2:], ids=str)
def test_few_queries_with_tails_compute_what_many_do(
    shape: Shape, length: int, window: int
) -> None:
    """As above for nodes of a tree: a tail is read where it lies, and chunks are shared or not."""
    world = World(shape, [tree(length, [*range(-1, 30), *range(3, 12)])])
    many = attend(cpu_ops("auto", 1), world, *world.everything(), window)
    for backend in [(isa, threads) for isa in usable_isas()[1:] for threads in (1, 2)]:
        for start, end in [(0, 1), (1, 3), (13, 14), (30, 32), (37, 38)]:
            rows = world.batch([(0, slice(start, end))])
            few = attend(cpu_ops(*backend), world, *rows, window)
            assert same_bits(few, many[start:end]), (backend, start, end)


@pytest.mark.parametrize("rows", [[(0, 300, 1)], [(0, 900, 3)], [(0, 600, 34)], [(0, 260, 1)] * 3])
def test_cutting_the_keys_over_threads_changes_no_bit(rows: list[tuple[int, int, int]]) -> None:
    """One long sequence on many threads is cut into segments of keys; on one thread it is not."""
    shape = Shape(4, 2, 64)
    world = World(shape, [prefill(length - count, length) for _, length, count in rows])
    q, batch = world.everything()
    many = [(isa, threads) for isa in usable_isas()[1:] for threads in (1, 2, 5, 16)]
    for window in (0, 100):
        (out,) = agreed(
            "attention",
            lambda window=window: (q, world.k, world.v, batch, 0.125, window, nan(*q.shape)),
            6,
            only=[*many, ("scalar", 2)],
        )
        torch.testing.assert_close(
            out.double(), exact(world, q, batch, 0.125, window), rtol=2e-5, atol=2e-5
        )


def test_prefill_in_pieces_gives_the_bits_of_prefill_at_once() -> None:
    world = World(Shape(9, 3, 64), [prefill(0, 200)])
    whole = attend(best(), world, *world.everything())
    for piece in (1, 7, 64, 100):
        for start in range(0, 200, piece):
            rows = slice(start, start + piece)
            out = attend(best(), world, *world.batch([(0, rows)]))
            assert same_bits(out, whole[rows])


def test_branches_do_not_see_each_other() -> None:
    """A node's result does not change when the nodes that are not its ancestors do (bug: a mask by position only)."""
    world = World(Shape(6, 2, 64), [tree(61, [-1, 0, 0, 1, 2, 2, 4])])
    q, batch = world.everything()
    before = attend(best(), world, q, batch)
    path = world.sequences[0].rows[3].path
    for node, slot in enumerate(world.node_slots[0]):
        if node not in path:
            world.k.flatten(0, 1)[slot] = torch.randn(2, 64).to(torch.bfloat16) * 50
            world.v.flatten(0, 1)[slot] = torch.randn(2, 64).to(torch.bfloat16) * 50
    after = attend(best(), world, q, batch)
    assert same_bits(before[3], after[3])
    assert not same_bits(before[6], after[6])


@pytest.mark.parametrize("length", [70, 128, 200, 257])
def test_window_leaves_the_past_unread(length: int) -> None:
    """Pages behind the window may be gone: here they are NaN."""
    window = 30
    world = World(Shape(9, 3, 64), [decode(length), tree(length, [-1, 0, 1])])
    world.poison_before(0, length - window)
    world.poison_before(1, length + 1 - window)
    out = check(world, window)
    assert out.isfinite().all()


def test_a_broken_sequence_stays_alone() -> None:
    """NaN in one sequence's keys and values reaches no other: what a chunk leaves in scratch memory is not read."""
    sequences = [prefill(60, 100), tree(70, [-1, 0, 0, 1]), decode(33), prefill(5, 20)]
    world = World(Shape(9, 3, 64), sequences)
    expected = attend(best(), world, *world.everything())
    world.poison_before(0, 100)
    broken = attend(cpu_ops("auto", 1), world, *world.everything())
    assert broken[:40].isnan().all()
    assert same_bits(broken[40:], expected[40:])


def test_rows_of_a_sequence_may_differ_in_context() -> None:
    """Tails over keys that another row of the block reads through the page table: the chunk is loaded again."""
    rows = (
        Row(20, (0, 1)),
        Row(40, (2,)),
        Row(30),
        Row(70, (0, 3)),
        Row(64, (1,)),
        Row(10, (2, 3)),
    )
    check(World(Shape(6, 2, 64), [Sequence(75, rows, num_nodes=4)]))


def test_long_tail_crosses_chunks() -> None:
    rows = tree(50, list(range(-1, 89))).rows
    world = World(
        Shape(6, 2, 64), [Sequence(50, (*rows[:3], *rows[12:16], *rows[77:80], rows[89]), 90)]
    )
    check(world)
    check(world, window=33)


def test_large_scores_do_not_overflow() -> None:
    world = World(Shape(4, 2, 64), [prefill(60, 90), decode(130)])
    # a score of 500 has an error of 3e-5, and so has the logarithm of its weight
    assert check(world, scale=30.0, tolerance=1e-3).isfinite().all()


def test_a_row_without_keys_is_zero() -> None:
    world = World(Shape(4, 2, 64), [Sequence(16, (Row(0), Row(1)))])
    out = attend(best(), world, *world.everything())
    assert (out[0] == 0).all()
    assert out[1].isfinite().all()
