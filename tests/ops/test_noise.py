"""The noise of sampling: Philox4x32-10 against Random123's known answers, and uniforms that agree to the bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ops.native import cpu_ops
from engine.ops.reference import philox4x32, uniform
from tests.ops.backends import NATIVE, Backend, int32, nan, same_bits

# Random123, tests/kat_vectors, philox4x32 with 10 rounds: counter, key, words
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def signed(values: list[int]) -> list[int]:
    return [value - (1 << 32) if value >= 1 << 31 else value for value in values]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_reference_philox_has_the_known_answers(counter: str, key: str, expected: str) -> None:
    key0, key1 = words(key)
    assert philox4x32(torch.tensor(words(counter)), (key0, key1)).tolist() == words(expected)


@pytest.mark.parametrize("backend", NATIVE)
def test_native_philox_has_the_known_answers(backend: Backend) -> None:
    counters = int32([signed(words(counter)) for counter, _, _ in KNOWN])
    keys = int32([signed(words(key)) for _, key, _ in KNOWN])
    out = torch.zeros(3, 4, dtype=torch.int32)
    cpu_ops(*backend).philox_words(counters, keys, out)
    assert out.tolist() == [signed(words(expected)) for _, _, expected in KNOWN]


@settings(deadline=None, max_examples=40)
@given(
    st.one_of(st.integers(0, 2**63 - 1), st.sampled_from([0, 2**32 - 1, 2**32, 2**63 - 1])),
    st.integers(0, 2**31 - 1),
    st.one_of(st.integers(1, 300), st.just(50_257)),
)
def test_uniforms_agree_to_the_bit(seed: int, position: int, vocab_size: int) -> None:
    """Catches words given to the wrong token, a seed cut to 32 bits, another rounding of the word."""
    expected = uniform(seed, position, vocab_size)
    for backend in NATIVE:
        out = nan(vocab_size)
        cpu_ops(*backend).philox_uniform(seed, position, out)
        assert same_bits(out, expected), backend


def test_uniforms_are_uniform() -> None:
    """Kolmogorov-Smirnov: over 200,000 draws the distribution is off by less than its 1e-6 quantile."""
    x = nan(200_000)
    cpu_ops("auto", 1).philox_uniform(7, 11, x)
    steps = torch.arange(1, x.numel() + 1) / x.numel()
    assert (x.sort().values - steps).abs().max().item() < 2.7 / x.numel() ** 0.5
    assert x.min().item() > 0.0
    assert x.max().item() < 1.0
