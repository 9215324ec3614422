"""Attention over packed documents against one dense masked softmax, written from the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tlt_train import attention
from tlt_train.attention import ActiveRun, AttentionLayout, packed_attention

# (rows, of which active): the last row is never active; one document is not, and one has one active row
DOCUMENTS = ((5, (1, 4)), (3, None), (17, (0, 16)), (2, (0, 1)), (9, (6, 8)))
SCALE = 0.37


def runs() -> tuple[ActiveRun, ...]:
    found, first = [], 0
    for length, active in DOCUMENTS:
        if active is not None:
            found.append(ActiveRun(first, first + active[0], first + active[1]))
        first += length
    return tuple(found)


def naive(
    q: Tensor, k: Tensor, v: Tensor, chain: list[tuple[Tensor, Tensor]], window: int
) -> Tensor:
    """[A, Hq, D]: every row over every row and every node of every chain, all but its own hidden."""
    step = len(chain)
    documents = [d for d, (length, _) in enumerate(DOCUMENTS) for _ in range(length)]
    active = [r for run in runs() for r in range(run.begin, run.end)]
    keys = torch.cat([k, *[own for own, _ in chain]])
    values = torch.cat([v, *[own for _, own in chain]])
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("ahd,khd->ahk", q, keys.repeat_interleave(group, 1)) * SCALE
    hidden = torch.ones(len(active), keys.shape[0], dtype=torch.bool)
    for i, row in enumerate(active):
        here = row + step  # logical positions, from the batch's start
        for other in range(k.shape[0]):
            if documents[other] == documents[row] and other <= row:
                hidden[i, other] = bool(window) and here - other >= window
        for depth in range(1, step + 1):
            is_far = bool(window) and here - (row + depth) >= window
            hidden[i, k.shape[0] + (depth - 1) * len(active) + i] = is_far
    scores = scores.masked_fill(hidden.unsqueeze(1), float("-inf"))
    return torch.einsum("ahk,khd->ahd", scores.softmax(-1), values.repeat_interleave(group, 1))


@pytest.mark.parametrize("heads", [(4, 2), (2, 2), (3, 1)])
@pytest.mark.parametrize("tile", [256, 5, 1])
@pytest.mark.parametrize("window", [0, 4, 5, 9, 40])
def test_values_and_gradients_are_those_of_a_dense_softmax(
    heads: tuple[int, int], tile: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "TILE", tile)
    num_heads, num_kv = heads
    num_rows = sum(length for length, _ in DOCUMENTS)
    num_active = sum(run.end - run.begin for run in runs())
    generator = torch.Generator().manual_seed(num_heads)

    def drawn(rows: int, heads: int) -> Tensor:
        return torch.randn(rows, heads, 8, generator=generator).requires_grad_()

    k, v = drawn(num_rows, num_kv), drawn(num_rows, num_kv)
    chain: list[tuple[Tensor, Tensor]] = []
    for step in range(5):
        q = drawn(num_active, num_heads)
        if step:
            chain.append((drawn(num_active, num_kv), drawn(num_active, num_kv)))
        found = packed_attention(q, k, v, chain, AttentionLayout(runs(), window), SCALE)
        expected = naive(q, k, v, chain, window).flatten(1)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        inputs = [q, k, v, *[t for pair in chain for t in pair]]
        weight = torch.randn(found.shape, generator=generator)
        for mine, its in zip(
            torch.autograd.grad((found * weight).sum(), inputs),
            torch.autograd.grad((expected * weight).sum(), inputs),
            strict=True,
        ):
            torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


def test_what_no_row_reads_may_be_anything() -> None:
    """NaN in a document without active rows, in the rows behind a run, and in those before every window."""
    num_rows = sum(length for length, _ in DOCUMENTS)
    generator = torch.Generator().manual_seed(3)
    num_active = sum(run.end - run.begin for run in runs())
    q = torch.randn(num_active, 2, 8, generator=generator)
    k, v = torch.randn(2, num_rows, 2, 8, generator=generator).unbind()
    layout = AttentionLayout(runs(), 2)
    expected = packed_attention(q, k, v, [], layout, SCALE)
    for row in (4, 5, 6, 7, 24, 26, 35, 27 + 3):
        k[row], v[row] = float("nan"), float("nan")
    assert torch.equal(packed_attention(q, k, v, [], layout, SCALE), expected)


def test_masks_of_long_documents_are_not_kept() -> None:
    """One of 300 000 rows without a window would be 1200 masks of up to 77 MB each."""
    attention._kept.cache_clear()
    long = AttentionLayout((ActiveRun(0, 0, 1024), ActiveRun(1025, 4000, 5000)), 0)
    tiles = long.tiles(0)
    assert [tuple(tile.mask.shape) for tile in tiles[:4]] == [(256, 256 * n) for n in (1, 2, 3, 4)]
    assert all(tile.mask.numel() > attention.KEPT_MASK for tile in tiles[4:])
    assert attention._kept.cache_info().currsize == 4
    row = tiles[-1].mask[-1]  # of the last active row, 4999 of a document from 1025 on: it sees all
    assert not row.any()
    assert tiles[-1].mask[0].sum() == tiles[-1].mask.shape[0] - 1
    AttentionLayout((ActiveRun(0, 2048, 2304),), 512).tiles(0)  # the default window's widest
    assert attention._kept.cache_info().currsize == 5
