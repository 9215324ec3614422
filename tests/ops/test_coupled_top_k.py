"""``coupled_top_k``: the reference's ranking, the sampler's token first, maps of ids, and pruning that never shows.

A token may differ from the reference only where two scores are closer than the error of fp32 logarithms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.ops.reference import NEG_INF, ReferenceOps, gumbel
from tests.ops.backends import agreed, best, nan, same_bits
from tests.ops.test_sample import TEMPERATURES, VOCABS, Draw, logits_of, sampled


@dataclass(slots=True)
class Ranks:
    """Arguments of one call: those of a draw, a map of ids, and how many tokens."""

    draw: Draw
    count: int
    target_ids: Tensor | None = None

    def arguments(self) -> tuple[Any, ...]:
        rows = self.draw.logits.shape[0]
        out = torch.full((rows, self.count), -7, dtype=torch.int32)
        return (
            *self.draw.arguments()[:7],
            self.target_ids,
            out,
            nan(rows, self.count),
            nan(rows, self.count),
        )


def ranked(ranks: Ranks, **more: Any) -> list[Tensor]:
    arguments = ranks.arguments()
    best().coupled_top_k(*arguments, **more)
    return list(arguments[8:])


def check(ranks: Ranks) -> list[Tensor]:
    """Every kernel set agrees to the bit, and is the reference up to near-ties."""
    found = agreed("coupled_top_k", ranks.arguments, 8, 9, 10)
    expected = ranks.arguments()
    ReferenceOps().coupled_top_k(*expected)
    torch.testing.assert_close(found[1], expected[9], rtol=4e-6, atol=4e-6)
    near = (found[0] != expected[8]).any(dim=1)
    assert same_bits(found[0][~near], expected[8][~near])
    torch.testing.assert_close(found[2][~near], expected[10][~near], rtol=1e-5, atol=4e-5)
    for row in near.nonzero().flatten().tolist():  # neighbours whose scores are alike
        scores = expected[9][row]
        gaps = (scores[:-1] - scores[1:]).abs() / scores[:-1].abs().clamp(min=1.0)
        assert gaps.min() < 4e-6 or set(found[0][row].tolist()) != set(expected[8][row].tolist())
    return found


def a_map(vocab: int, seed: int) -> Tensor:
    """Ascending target ids with gaps, in a vocabulary three times as large."""
    g = torch.Generator().manual_seed(seed)
    return torch.randperm(3 * vocab, generator=g)[:vocab].sort().values.int()


@settings(deadline=None, max_examples=80)
@given(
    st.integers(1, 5),
    VOCABS,
    st.sampled_from([0.1, 1.0, 4.0, 40.0]),
    st.sampled_from([0, 0, 1, 3]),
    st.sampled_from([0.0, 0.3, 0.99]),
    TEMPERATURES,
    st.sampled_from([{}, {}, {"top_k": 1}, {"top_k": 7}, {"top_p": 0.9}, {"min_p": 0.05}]),
    st.sampled_from([1, 2, 4, 9, 64]),
    st.booleans(),
    st.integers(0, 2**62),
)
def test_matches_reference(
    rows: int,
    vocab: int,
    size: float,
    levels: int,
    forbidden: float,
    temperature: float,
    filters: dict[str, float],
    count: int,
    mapped: bool,
    seed: int,
) -> None:
    logits = logits_of(rows, vocab, size, levels, forbidden, seed)
    draw = Draw(logits, temperature, seeds=seed, **filters)
    check(Ranks(draw, count, a_map(vocab, seed) if mapped else None))


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 5),
    VOCABS,
    st.sampled_from([0.1, 3.0, 40.0]),
    TEMPERATURES,
    st.sampled_from([{}, {"top_k": 7}, {"top_p": 0.9}, {"min_p": 0.05}]),
    st.integers(1, 5),
    st.integers(0, 2**62),
)
def test_the_first_is_what_the_sampler_draws(
    rows: int,
    vocab: int,
    size: float,
    temperature: float,
    filters: dict[str, float],
    count: int,
    seed: int,
) -> None:
    """Bit for bit, so that a drafter with the target's logits is never refused."""
    draw = Draw(logits_of(rows, vocab, size, 0, 0.2, seed), temperature, seeds=seed, **filters)
    tokens, logprobs = sampled(draw)
    found = ranked(Ranks(draw, count))
    assert found[0][:, 0].tolist() == tokens.tolist()
    if temperature > 0:
        assert same_bits(found[2][:, 0].contiguous(), logprobs)


@settings(deadline=None, max_examples=60)
@given(
    VOCABS,
    st.sampled_from([1e-3, 0.3, 3.0, 30.0, 1e5]),
    st.sampled_from([0.0, 0.5, 0.999]),
    st.sampled_from([0.0, 0.01, 1.0, 50.0]),
    st.sampled_from([{}, {"top_k": 5}, {"top_p": 0.7}]),
    st.sampled_from([1, 4, 33]),
    st.booleans(),
    st.integers(0, 2**62),
)
def test_pruning_changes_nothing(
    vocab: int,
    size: float,
    forbidden: float,
    temperature: float,
    filters: dict[str, float],
    count: int,
    mapped: bool,
    seed: int,
) -> None:
    draw = Draw(logits_of(20, vocab, size, 0, forbidden, seed), temperature, seeds=seed, **filters)
    ranks = Ranks(draw, count, a_map(vocab, seed) if mapped else None)
    for pruned, full in zip(ranked(ranks), ranked(ranks, prune=False), strict=True):
        assert same_bits(pruned, full)


def test_noise_is_that_of_the_target_ids() -> None:
    """A map that is left out would couple with the noise of other tokens, and the drafter would miss in silence."""
    ids = a_map(500, 1)
    logits = torch.zeros(3, 500)
    tokens, scores, logprobs = ranked(Ranks(Draw(logits, 1.0, seeds=9), 3, ids))
    for row in range(3):
        noise = gumbel(9, row, 1500)[ids.long()]
        top = noise.topk(3)
        assert tokens[row].tolist() == ids[top.indices].tolist()
        torch.testing.assert_close(scores[row], top.values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logprobs, torch.full((3, 3), -float(torch.tensor(500.0).log())))


def test_an_identity_map_changes_nothing() -> None:
    draw = Draw(logits_of(4, 9001, 3.0, 0, 0.1, 3), 0.9, seeds=4)
    plain = ranked(Ranks(draw, 5))
    mapped = ranked(Ranks(draw, 5, torch.arange(9001, dtype=torch.int32)))
    assert all(same_bits(a, b) for a, b in zip(plain, mapped, strict=True))


@pytest.mark.parametrize("vocab", [49_152, 151_936])
def test_large_vocabulary(vocab: int) -> None:
    """Few rows are cut over threads, many are dealt out: agreed() sees both."""
    for rows in (1, 7):
        check(Ranks(Draw(logits_of(rows, vocab, 3.0, 0, 0.1, rows), 0.8, seeds=5), 4))


def test_greedy_takes_the_lowest_of_equals_and_places_without_a_token_are_empty() -> None:
    logits = torch.tensor([[1.0, 3.0, NEG_INF, 3.0, 2.0], [NEG_INF] * 5, [float("nan")] * 5])
    tokens, scores, logprobs = ranked(Ranks(Draw(logits, 0.0), 6))
    assert tokens.tolist() == [[1, 3, 4, 0, -1, -1], [-1] * 6, [-1] * 6]
    assert scores[0].tolist() == [3.0, 3.0, 2.0, 1.0, NEG_INF, NEG_INF]
    expected = logits[0].log_softmax(-1)[[1, 3, 4, 0]]
    torch.testing.assert_close(logprobs[0, :4], expected)
    for temperature in (0.0, 1.0):
        assert set(ranked(Ranks(Draw(logits[1:], temperature), 2))[0].flatten().tolist()) == {-1}


def test_filters_leave_places_empty() -> None:
    logits = torch.tensor([[0.0, 5.0, 4.9, -1.0]])
    tokens, _, logprobs = ranked(Ranks(Draw(logits, 1.0, top_k=2), 4))
    assert sorted(tokens[0, :2].tolist()) == [1, 2]
    assert tokens[0, 2:].tolist() == [-1, -1]
    assert float(logprobs[0, :2].exp().sum()) == pytest.approx(1.0, abs=1e-5)


def test_row_does_not_depend_on_its_batch() -> None:
    draw = Draw(logits_of(9, 5000, 3.0, 0, 0.1, 2), 1.0, seeds=torch.arange(9))
    whole = ranked(Ranks(draw, 4))
    alone = ranked(
        Ranks(Draw(draw.logits[5:6].clone(), 1.0, seeds=5, positions=torch.tensor([5])), 4)
    )
    assert all(same_bits(a, b[5:6]) for a, b in zip(alone, whole, strict=True))


def test_what_does_not_fit_is_refused_by_name() -> None:
    arguments = list(Ranks(Draw(torch.zeros(2, 5)), 65).arguments())
    with pytest.raises(ValueError, match=r"coupled_top_k: argument token_ids: expected 1\.\.64"):
        best().coupled_top_k(*arguments)
    arguments = list(Ranks(Draw(torch.zeros(2, 5)), 2, torch.zeros(4).int()).arguments())
    with pytest.raises(
        ValueError, match=r"coupled_top_k: argument target_ids: expected shape \[5\]"
    ):
        best().coupled_top_k(*arguments)
