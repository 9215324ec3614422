"""Bytes and FLOPs, counted by hand for a model small enough to do so, and for the real one."""

from __future__ import annotations

import pytest

from bench.physics import ModelShape, Work, decode_passes, floor_s, pass_work, total

TINY = ModelShape(
    num_layers=2,
    hidden=4,
    mlp=6,
    num_q_heads=2,
    num_kv_heads=1,
    head_dim=2,
    vocab=10,
    weight_itemsize=2,
    kv_itemsize=4,
)
SMOLLM2 = ModelShape(
    num_layers=30,
    hidden=576,
    mlp=1536,
    num_q_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab=49152,
    weight_itemsize=2,
    kv_itemsize=2,
)


def test_one_row_by_hand() -> None:
    # a layer: q 4x4, k and v 2x4 each, o 4x4, three MLP matrices of 6x4
    layer = 16 + 8 + 8 + 16 + 3 * 24
    assert TINY.linear_params == 2 * layer
    work = pass_work(TINY, [(3, 1)], 1)
    assert (
        work.flops == 2 * (2 * layer) + 2 * 40 + 4 * 4 * 2 * 2 * 2
    )  # 4 keys, 2 layers, 2 heads of 2
    assert work.num_bytes == 2 * (2 * layer + 40) + 4 * (2 * 2 * 1 * 2 * 4)


def test_rows_without_logits_skip_the_head_and_the_last_layers_rest() -> None:
    with_logits, without = pass_work(TINY, [(0, 2)], 2), pass_work(TINY, [(0, 2)], 0)
    rest = 16 + 3 * 24
    assert with_logits.flops - without.flops == 2 * 2 * (40 + rest)
    assert with_logits.num_bytes - without.num_bytes == 2 * 40


def test_smollm2_is_the_size_that_its_name_says() -> None:
    assert SMOLLM2.linear_params + SMOLLM2.head_params == pytest.approx(134.5e6, rel=1e-3)
    assert pass_work(SMOLLM2, [(0, 1)], 1).num_bytes == pytest.approx(269e6, rel=1e-3)


def test_decode_passes_shrink_as_sequences_end() -> None:
    passes = decode_passes(TINY, [5, 7], [1, 3])
    assert passes == [
        pass_work(TINY, [(5, 1), (7, 1)], 2),
        pass_work(TINY, [(8, 1)], 1),
        pass_work(TINY, [(9, 1)], 1),
    ]
    assert total(passes).flops == sum(work.flops for work in passes)


def test_floor_takes_the_binding_ceiling_of_each_pass() -> None:
    passes = [Work(num_bytes=10e9, flops=1e9), Work(num_bytes=1e9, flops=40e9)]
    assert floor_s(passes, 10.0, 10.0) == pytest.approx(1.0 + 4.0)
