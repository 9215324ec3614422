"""``sample``: the reference's tokens, the softmax's distribution, and pruning that never shows.

A token may differ from the reference only where two scores are closer than the error of fp32 logarithms.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.ops.reference import NEG_INF, ReferenceOps, gumbel, kept_mask, philox4x32
from tests.ops.backends import agreed, best, nan, same_bits


@dataclass(slots=True)
class Draw:
    """Arguments of one call; scalars hold for every row."""

    logits: Tensor
    temperature: Any = 1.0
    top_k: Any = 0
    top_p: Any = 1.0
    min_p: Any = 0.0
    seeds: Any = 0
    positions: Any = None

    def arguments(self, rows: slice = slice(None)) -> tuple:
        count = self.logits.shape[0]
        positions = torch.arange(count) if self.positions is None else self.positions

        def full(value: Any, dtype: torch.dtype) -> Tensor:
            return torch.as_tensor(value).to(dtype).expand(count)[rows].contiguous()

        logits = self.logits[rows].contiguous()
        return (
            logits,
            *(full(x, torch.float32) for x in (self.temperature,)),
            full(self.top_k, torch.int32),
            full(self.top_p, torch.float32),
            full(self.min_p, torch.float32),
            full(self.seeds, torch.int64),
            full(positions, torch.int32),
            torch.full((logits.shape[0],), -7, dtype=torch.int32),
            nan(logits.shape[0]),
        )


def sampled(draw: Draw, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
    arguments = draw.arguments(rows)
    best().sample(*arguments)
    return arguments[7], arguments[8]


def scores(draw: Draw, row: int) -> tuple[Tensor, Tensor]:
    """z and z + noise of the kept tokens of a row, -inf elsewhere."""
    logits, t, k, p, m, seeds, positions = (a[row] for a in draw.arguments()[:7])
    z = logits if t == 0 else logits / t
    if t > 0:
        z = torch.where(kept_mask(z, int(k), float(p), float(m)), z, NEG_INF)
        return z, z + gumbel(int(seeds), int(positions), z.shape[0])
    return z, z


def kept(z: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """The reference's mask for parameters rounded to fp32, as the op takes them."""
    p, m = torch.tensor([top_p, min_p]).tolist()
    return kept_mask(z, top_k, p, m)


def check(draw: Draw) -> tuple[Tensor, Tensor]:
    tokens, logprobs = agreed("sample", draw.arguments, 7, 8)
    expected = draw.arguments()
    ReferenceOps().sample(*expected)
    for row, (token, reference) in enumerate(
        zip(tokens.tolist(), expected[7].tolist(), strict=True)
    ):
        if token != reference:
            _, score = scores(draw, row)
            gap = (score[reference] - score[token]).item()
            assert gap <= 4e-6 * max(1.0, abs(score[reference].item())), (
                row,
                token,
                reference,
                gap,
            )
            logprobs, expected = logprobs.clone(), (*expected[:8], expected[8].clone())
            logprobs[row] = expected[8][row] = 0.0
    torch.testing.assert_close(logprobs, expected[8], rtol=1e-5, atol=2e-5)
    return tokens, logprobs


def logits_of(
    rows: int, vocab: int, size: float, levels: int, forbidden: float, seed: int
) -> Tensor:
    """Normal logits; with ``levels`` > 0 rounded to that many values, so that ties abound."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=g) * size
    if levels:
        logits = (logits / size * levels).round() / levels * size
    hidden = torch.rand(rows, vocab, generator=g) < forbidden
    hidden[:, seed % vocab] = False
    return logits.masked_fill(hidden, NEG_INF)


VOCABS = st.one_of(st.integers(1, 200), st.sampled_from([1000, 4096, 4160, 9001]))
TEMPERATURES = st.sampled_from([0.0, 0.05, 0.7, 1.0, 1.7, 30.0])


@settings(deadline=None, max_examples=80)
@given(
    st.integers(1, 6),
    VOCABS,
    st.sampled_from([0.1, 1.0, 4.0, 40.0]),
    st.sampled_from([0, 0, 1, 3]),
    st.sampled_from([0.0, 0.3, 0.99]),
    TEMPERATURES,
    st.sampled_from([0, 0, 1, 2, 7, 50, 3000]),
    st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.01, 0.999999]),
    st.sampled_from([0.0, 0.0, 0.05, 0.6, 1.0]),
    st.integers(0, 2**62),
)
def test_matches_reference(
    rows: int,
    vocab: int,
    size: float,
    levels: int,
    forbidden: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
) -> None:
    logits = logits_of(rows, vocab, size, levels, forbidden, seed)
    check(Draw(logits, temperature, top_k, top_p, min_p, seed))


@settings(deadline=None, max_examples=60)
@given(
    VOCABS,
    st.sampled_from([0.1, 2.0, 10.0]),
    st.integers(0, 3),
    st.integers(0, 60),
    st.sampled_from([1.0, 0.9, 0.3]),
    st.sampled_from([0.0, 0.1]),
    st.integers(0, 2**62),
)
def test_keeps_exactly_what_the_reference_keeps(
    vocab: int, size: float, levels: int, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    """Seen through the log-probability, which is taken under the kept tokens, and through many draws."""
    logits = logits_of(1, vocab, size, levels, 0.2, seed)
    draws = 200
    draw = Draw(logits.expand(draws, -1), 1.0, top_k, top_p, min_p, seed)
    tokens, logprobs = sampled(draw)
    z = torch.where(kept(logits[0], top_k, top_p, min_p), logits[0], NEG_INF)
    expected = z.double().log_softmax(-1)[tokens.long()]
    assert expected.isfinite().all(), "a token outside the kept set was sampled"
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "kept"),
    [
        (3, 1.0, 0.0, {1, 2, 4}),  # of four equal ones the lowest ids
        (1, 1.0, 0.0, {1}),
        (0, 0.5, 0.0, {1, 2, 4}),  # 3 e of 4 e + 2 reach a half, 2 e do not
        (0, 0.4, 0.0, {1, 2}),
        (0, 1.0, 1.0, {1, 2, 4, 5}),
        (2, 0.51, 0.9, {1, 2}),
        (2, 0.49, 0.9, {1}),
    ],
)
def test_ties_are_kept_lowest_id_first(
    top_k: int, top_p: float, min_p: float, kept: set[int]
) -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0, 1.0]]).expand(300, -1)
    tokens, _ = check(Draw(logits, 1.0, top_k, top_p, min_p))
    assert set(tokens.tolist()) == kept


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 4097, 49_152])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_tie_of_everything(vocab: int, temperature: float) -> None:
    logits = torch.zeros(2, vocab)
    tokens, logprobs = check(Draw(logits, temperature))
    if temperature == 0.0:
        assert tokens.tolist() == [0, 0]
    else:
        expected = -torch.log(torch.tensor(float(vocab))).expand(2)
        torch.testing.assert_close(logprobs, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("filters", [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.02}])
@pytest.mark.parametrize("vocab", [49_152, 151_936])
def test_large_vocabulary(vocab: int, filters: dict[str, float]) -> None:
    """Few rows are cut over threads, many are dealt out: agreed() sees both."""
    for rows in (1, 7):
        check(Draw(logits_of(rows, vocab, 3.0, 0, 0.1, rows), 0.8, seeds=5, **filters))


@settings(deadline=None, max_examples=60)
@given(
    VOCABS,
    st.sampled_from([1e-3, 0.3, 3.0, 30.0, 1e5]),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([0.01, 1.0, 50.0]),
    st.sampled_from([{}, {"top_k": 5}, {"top_p": 0.7}]),
    st.integers(0, 2**62),
)
def test_pruning_changes_nothing(
    vocab: int,
    size: float,
    forbidden: float,
    temperature: float,
    filters: dict[str, float],
    seed: int,
) -> None:
    logits = logits_of(30, vocab, size, 0, forbidden, seed)
    draw = Draw(logits, temperature, seeds=seed, **filters)
    pruned, full = draw.arguments(), draw.arguments()
    best().sample(*pruned)
    best().sample(*full, prune=False)
    assert same_bits(pruned[7], full[7])
    assert same_bits(pruned[8], full[8])


def test_a_draw_below_the_pruning_threshold_is_found() -> None:
    """Token 0 alone, at positions where its noise is so small that the pruned race finds no winner."""
    positions = torch.arange(2_000_000)
    counters = torch.stack((torch.zeros_like(positions), positions), -1)
    counters = torch.nn.functional.pad(counters, (0, 2))
    x = (philox4x32(counters, (3, 0))[:, 0] >> 1).double() * 2.0**-31
    rare = positions[x > 1 - 4e-6]
    assert rare.numel() >= 3
    logits = torch.full((rare.numel(), 100), NEG_INF)
    logits[:, 0] = 2.0
    tokens, logprobs = check(Draw(logits, seeds=3, positions=rare))
    assert tokens.tolist() == [0] * rare.numel()
    assert logprobs.abs().max().item() == 0.0


@settings(deadline=None, max_examples=20)
@given(st.integers(2, 40), VOCABS, st.data())
def test_row_does_not_depend_on_its_batch(rows: int, vocab: int, data: st.DataObject) -> None:
    logits = logits_of(rows, vocab, 3.0, 0, 0.1, 1)
    g = torch.Generator().manual_seed(rows)
    draw = Draw(
        logits,
        torch.rand(rows, generator=g) * (torch.rand(rows, generator=g) > 0.2),
        torch.randint(0, 5, (rows,), generator=g) * torch.randint(0, 9, (rows,), generator=g),
        torch.rand(rows, generator=g) * 0.9 + 0.2,
        torch.rand(rows, generator=g) * 0.1,
        torch.randint(0, 2**62, (rows,), generator=g),
        torch.randint(0, 99, (rows,), generator=g),
    )
    tokens, logprobs = sampled(draw)
    start = data.draw(st.integers(0, rows - 1))
    stop = data.draw(st.integers(start + 1, rows))
    alone = sampled(draw, slice(start, stop))
    assert same_bits(alone[0], tokens[start:stop])
    assert same_bits(alone[1], logprobs[start:stop])


def test_a_forbidden_token_never_wins() -> None:
    logits = torch.full((4000, 130), NEG_INF)
    logits[:, 77] = -50.0
    logits[:, 129] = -51.0
    for temperature in (0.0, 0.3, 5.0):
        tokens, _ = sampled(Draw(logits, temperature))
        assert set(tokens.tolist()) == ({77} if temperature == 0 else {77, 129})


def test_nothing_allowed_and_nothing_finite() -> None:
    """No token can be right: the kernel stays inside its arrays and says NaN."""
    rows = torch.stack((torch.full((70,), NEG_INF), torch.full((70,), float("nan"))))
    for filters in ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}):
        tokens, logprobs = sampled(Draw(rows, 1.0, **filters))
        assert tokens.tolist() == [0, 0]
        assert logprobs.isnan().all()
    assert sampled(Draw(rows, 0.0))[0].tolist() == [0, 0]
    mixed = torch.tensor([[float("nan"), 1.0, float("nan"), 2.0]])
    assert sampled(Draw(mixed, 0.0))[0].tolist() == [3]
    assert sampled(Draw(mixed, 1e-3))[0].tolist() == [3]


@pytest.mark.parametrize(
    ("filters", "temperature"),
    [({}, 1.0), ({}, 0.6), ({"top_k": 4}, 1.0), ({"top_p": 0.8}, 1.3), ({"min_p": 0.2}, 1.0)],
)
def test_frequencies_are_those_of_the_softmax(filters: dict, temperature: float) -> None:
    """Chi-square over 40,000 positions at 1e-6: noise that favours a token, or is shared between positions, shows."""
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.1, -0.4, 0.3, -3.0, 0.9])
    draws = 40_000
    tokens, _ = sampled(Draw(logits.expand(draws, -1), temperature, seeds=12345, **filters))
    z = logits / temperature
    allowed = kept(z, **filters)
    expected = torch.where(allowed, z, NEG_INF).double().softmax(-1) * draws
    counts = torch.bincount(tokens.long(), minlength=len(logits)).double()
    assert counts[~allowed].sum() == 0
    statistic = ((counts - expected)[allowed].square() / expected[allowed]).sum().item()
    freedom = int(allowed.sum()) - 1
    # Wilson-Hilferty: the quantile of chi-square at one in a million
    limit = freedom * (1 - 2 / (9 * freedom) + 4.75 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert statistic < limit, (statistic, limit)


def test_seeds_and_positions_give_independent_draws() -> None:
    """The same pair gives the same token; another seed or position agrees as often as chance."""
    draws, vocab = 20_000, 8
    base = Draw(torch.zeros(draws, vocab), seeds=1)
    tokens, _ = sampled(base)
    assert same_bits(tokens, sampled(base)[0])
    for other in (
        replace(base, seeds=2),
        replace(base, seeds=1 + 2**32),
        replace(base, positions=torch.arange(1, draws + 1)),
    ):
        agreement = (sampled(other)[0] == tokens).float().mean().item()
        assert abs(agreement - 1 / vocab) < 0.012


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 20), VOCABS, st.sampled_from([0.1, 5.0, 80.0]), st.sampled_from([0.0, 0.9]))
def test_log_sum_exp(rows: int, vocab: int, size: float, forbidden: float) -> None:
    logits = logits_of(rows, vocab, size, 0, forbidden, 3)
    (out,) = agreed("log_sum_exp", lambda: (logits, nan(rows)), 1)
    torch.testing.assert_close(out.double(), logits.double().logsumexp(-1), rtol=1e-6, atol=1e-6)
    alone = nan(1)
    best().log_sum_exp(logits[rows - 1 :].clone(), alone)
    assert same_bits(alone, out[rows - 1 :])


def test_log_sum_exp_of_a_large_row_and_of_nothing() -> None:
    large = logits_of(1, 151_936, 3.0, 0, 0.1, 0)
    (out,) = agreed("log_sum_exp", lambda: (large, nan(1)), 1)
    torch.testing.assert_close(out.double(), large.double().logsumexp(-1), rtol=1e-6, atol=1e-6)
    (out,) = agreed("log_sum_exp", lambda: (torch.full((2, 70), NEG_INF), nan(2)), 1)
    assert out.tolist() == [NEG_INF, NEG_INF]


def test_positions_beyond_int32_are_refused_by_type() -> None:
    arguments = list(Draw(torch.zeros(2, 5)).arguments())
    arguments[6] = arguments[6].long()
    with pytest.raises(ValueError, match="positions"):
        best().sample(*arguments)
