"""The sampler's rules before the draw and its log-probabilities after it, against plain torch.

Each test names the fault it would catch. The draw itself is tested in tests/ops/test_sample.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.ops import Ops, resolve_ops
from engine.request import Request
from engine.sampler import RowError, Sampled, Sampler, SampleRow
from engine.sampling_params import SamplingParams

VOCAB = 96
PROMPT = (5, 6, 7, 5)


@pytest.fixture(scope="module", params=["reference", "auto"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return resolve_ops(request.param, num_threads=2)


def make_request(name: str = "r", output: Sequence[int] = (), **params: Any) -> Request:
    request = Request(
        name,
        PROMPT,
        SamplingParams(**{"max_tokens": 64, "seed": 1, **params}),
        seed=params.get("seed", 1),
        max_total_len=128,
        eos_token_ids=frozenset({2}),
    )
    request.token_ids += output
    return request


def make_logits(rows: int = 1, seed: int = 0) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def draw(
    ops: Ops, logits: Tensor, rows: Sequence[SampleRow], bad_words: Any = (), **options: Any
) -> list[Sampled | RowError]:
    sampler = Sampler(ops, vocab_size=VOCAB, max_rows=len(rows), **options)
    for row in rows:
        sampler.admit(row.request, bad_words)
    return sampler.sample(logits.clone(), rows)


def one(results: Sequence[Sampled | RowError]) -> Sampled:
    """The first result, which must be a token."""
    assert isinstance(results[0], Sampled), results[0]
    return results[0]


def row_of(request: Request, path: tuple[int, ...] = ()) -> SampleRow:
    return SampleRow(request, len(request.token_ids), path)


def support(ops: Ops, logits: Tensor, bad_words: Any = (), **params: Any) -> set[int]:
    """Tokens drawn over many seeds at a high temperature."""
    requests = [
        make_request(f"r{seed}", temperature=50.0, **{**params, "seed": seed})
        for seed in range(800)
    ]
    rows = [row_of(r) for r in requests]
    results = draw(ops, logits.expand(len(rows), -1), rows, bad_words=bad_words)
    return {one([result]).token_id for result in results}


def test_greedy_is_argmax_with_lowest_id_on_a_tie(ops: Ops) -> None:
    logits = make_logits()
    logits[0, 17] = logits[0, 40] = 50.0
    assert one(draw(ops, logits, [row_of(make_request(temperature=0.0))])).token_id == 17


def test_allowed_token_ids_are_the_only_ones_drawn(ops: Ops) -> None:
    assert support(ops, make_logits(), allowed_token_ids=[3, 50, 95]) == {3, 50, 95}


def test_bad_words_forbid_the_last_token_only_behind_its_beginning(ops: Ops) -> None:
    words = [
        [8, 3, 9],
        [11],
        [7, 5, 12],
    ]  # the prompt ends in 7, 5: only the output counts, as in vLLM
    drawn = support(ops, make_logits(), bad_words=words, output=(8, 3))
    assert 9 not in drawn
    assert 11 not in drawn
    assert 12 in drawn


def test_bad_words_see_the_path_of_a_tree_node(ops: Ops) -> None:
    """Catches rules that are evaluated once a step, for its first position only."""
    logits = torch.full((1, VOCAB), -5.0)
    logits[0, 12] = 5.0
    request = make_request(temperature=0.0)
    words = [[8, 12]]
    assert one(draw(ops, logits, [row_of(request)], words)).token_id == 12
    assert one(draw(ops, logits, [row_of(request, (8,))], words)).token_id != 12


def test_min_tokens_forbids_every_end_until_then(ops: Ops) -> None:
    logits = make_logits()
    logits[0, 2] = logits[0, 4] = 60.0
    params = {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": [4]}
    early, late = make_request(output=(8, 8), **params), make_request(output=(8, 8, 8), **params)
    assert one(draw(ops, logits, [row_of(early)])).token_id not in (2, 4)
    assert one(draw(ops, logits, [row_of(late)])).token_id == 2
    assert one(draw(ops, logits, [row_of(early, (8,))])).token_id == 2


def test_logit_bias_is_added(ops: Ops) -> None:
    logits = make_logits()
    request = make_request(temperature=0.0, logit_bias={33: 100.0, 34: -100.0})
    assert one(draw(ops, logits, [row_of(request)])).token_id == 33


def test_penalties_match_their_definition_at_every_position_of_a_run(ops: Ops) -> None:
    """Catches one count vector used for all positions of a step."""
    logits = make_logits(seed=3)
    params = SamplingParams(
        presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.3, logprobs=0
    )
    output, path = (8, 9, 8), (10, 8)
    for cut in range(len(path) + 1):
        history = output + path[:cut]
        expected = logits[0].clone()
        for token in set(PROMPT + history):
            value = float(expected[token])
            expected[token] = value / 1.3 if value > 0 else value * 1.3
        for token in set(history):
            expected[token] -= 0.4 * history.count(token) + 0.7
        request = make_request(
            output=output,
            temperature=1.0,
            presence_penalty=0.7,
            frequency_penalty=0.4,
            repetition_penalty=1.3,
            logprobs=0,
        )
        sampled = one(draw(ops, logits, [row_of(request, path[:cut])], processed_logprobs=True))
        assert sampled.logprobs is not None
        got = sampled.logprobs[sampled.token_id].logprob
        want = torch.log_softmax(expected, -1)[sampled.token_id]
        assert got == pytest.approx(float(want), abs=1e-5)
    assert params.needs_history


def test_raw_logprobs_stay_raw_when_rules_change_the_logits(ops: Ops) -> None:
    logits = make_logits()
    request = make_request(temperature=0.5, logit_bias={33: 100.0}, logprobs=5)
    sampled = one(draw(ops, logits, [row_of(request)]))
    raw = torch.log_softmax(logits[0], -1)
    assert sampled.token_id == 33
    assert sampled.logprobs is not None
    assert len(sampled.logprobs) in (5, 6)
    for token, entry in sampled.logprobs.items():
        assert entry.logprob == pytest.approx(float(raw[token]), abs=1e-5)
        assert entry.rank == 1 + int((raw > raw[token]).sum())


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_processed_logprobs_are_those_of_the_distribution_that_is_drawn(
    ops: Ops, temperature: float
) -> None:
    logits = make_logits(seed=4)
    request = make_request(temperature=temperature, top_k=4, logprobs=8)
    sampled = one(draw(ops, logits, [row_of(request)], processed_logprobs=True))
    assert sampled.logprobs is not None
    if temperature == 0.0:
        want = torch.log_softmax(logits[0], -1)
        assert len(sampled.logprobs) == 8
    else:
        kept = logits[0].topk(4).indices
        z = torch.full((VOCAB,), float("-inf"))
        z[kept] = logits[0, kept] / temperature
        want = torch.log_softmax(z, -1)
        assert set(sampled.logprobs) == set(kept.tolist())
    for token, entry in sampled.logprobs.items():
        assert entry.logprob == pytest.approx(float(want[token]), abs=1e-5)


def test_processor_forms_and_that_it_sees_the_text_before_its_position(ops: Ops) -> None:
    seen: list[tuple[list[int], ...]] = []

    def two(output: list[int], logits: Tensor) -> Tensor:
        seen.append((output,))
        return logits.index_fill(0, torch.tensor([20]), 90.0)

    def three(prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
        seen.append((prompt, output))
        logits[21] = 95.0
        return logits

    request = make_request(output=(8,), temperature=0.0, logits_processors=[two, three])
    sampled = draw(ops, make_logits(), [row_of(request, (9,))])
    assert one(sampled).token_id == 21
    assert seen == [([8, 9],), (list(PROMPT), [8, 9])]


@pytest.mark.parametrize(
    "params",
    [
        {"logits_processors": [lambda ids, logits: None]},
        {"logits_processors": [lambda ids, logits: logits * float("nan")]},
        {"logits_processors": [lambda ids, logits: logits + float("inf")]},
        {"logits_processors": [lambda ids, logits: 1 / 0]},
        {"allowed_token_ids": [2], "min_tokens": 5},
    ],
)
def test_a_row_that_cannot_be_sampled_fails_alone(ops: Ops, params: dict[str, Any]) -> None:
    good, bad = make_request("good"), make_request("bad", **params)
    logits = make_logits(2)
    results = draw(ops, logits, [row_of(bad), row_of(good)])
    assert isinstance(results[0], RowError)
    assert results[1] == draw(ops, logits[1:], [row_of(good)])[0]


def test_a_processor_is_called_once_for_a_position_whatever_its_neighbours_do(ops: Ops) -> None:
    calls: list[list[int]] = []

    def spy(ids: list[int], logits: Tensor) -> Tensor:
        calls.append(ids)
        return logits

    bad = make_request("bad", logits_processors=[lambda ids, logits: 1 / 0])
    good = make_request("good", logits_processors=[spy])
    draw(ops, make_logits(2), [row_of(good), row_of(bad)])
    assert calls == [[]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error_not_token_0(ops: Ops, temperature: float) -> None:
    """Catches diverged weights that poison a rollout in silence."""
    logits = make_logits(2)
    logits[0] = float("nan")
    rows = [row_of(make_request(f"r{i}", temperature=temperature)) for i in range(2)]
    results = draw(ops, logits, rows)
    assert isinstance(results[0], RowError)
    assert isinstance(results[1], Sampled)


def test_a_processors_own_parameters_stay_out_of_the_logits_buffer(ops: Ops) -> None:
    weight = torch.nn.Parameter(torch.ones(VOCAB))
    request = make_request(logits_processors=[lambda ids, logits: logits + weight])
    sampler = Sampler(ops, vocab_size=VOCAB, max_rows=1)
    sampler.admit(request)
    logits = make_logits()
    sampler.sample(logits, [row_of(request)])
    assert not logits.requires_grad


def test_a_module_with_three_arguments_gets_the_prompt(ops: Ops) -> None:
    class Force(torch.nn.Module):
        def forward(self, prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
            return logits.index_fill(0, torch.tensor(prompt[:1]), 90.0)

    request = make_request(temperature=0.0, logits_processors=[Force()])
    assert one(draw(ops, make_logits(), [row_of(request)])).token_id == PROMPT[0]


def test_more_logprobs_than_tokens_are_all_there_is(ops: Ops) -> None:
    sampled = one(draw(ops, make_logits(), [row_of(make_request(logprobs=100))]))
    assert sampled.logprobs is not None
    assert len(sampled.logprobs) == VOCAB


def test_token_ids_outside_the_vocabulary_are_refused(ops: Ops) -> None:
    sampler = Sampler(ops, vocab_size=VOCAB, max_rows=1)
    refused: list[dict[str, Any]] = [
        {"allowed_token_ids": [VOCAB]},
        {"logit_bias": {VOCAB: 1.0}},
        {"stop_token_ids": [VOCAB]},
    ]
    for params in refused:
        with pytest.raises(ValueError, match="outside the vocabulary"):
            sampler.admit(make_request(**params))


def test_a_row_does_not_depend_on_its_neighbours(ops: Ops) -> None:
    """Catches parameters or records that shift between rows when the batch is re-ordered."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 3, "logprobs": 2},
        {"temperature": 1.5, "top_p": 0.7, "presence_penalty": 1.0},
        {"temperature": 0.8, "min_p": 0.2, "logit_bias": {4: 3.0}, "logprobs": 0},
    ]
    requests = [make_request(f"r{i}", **{**kinds[i % 4], "seed": i}) for i in range(12)]
    logits = make_logits(12, seed=9)
    together = draw(ops, logits, [row_of(r) for r in requests])
    order = [7, 3, 11, 0, 5, 1, 9, 2, 10, 4, 8, 6]
    shuffled = draw(ops, logits[order], [row_of(requests[i]) for i in order])
    assert shuffled == [together[i] for i in order]
    alone = [draw(ops, logits[i : i + 1], [row_of(r)])[0] for i, r in enumerate(requests)]
    assert alone == together


def test_prompt_logprobs_are_the_models(ops: Ops) -> None:
    logits = make_logits(3, seed=5)
    sampler = Sampler(ops, vocab_size=VOCAB, max_rows=3)
    want = torch.log_softmax(logits, -1)
    for i, entry in enumerate(sampler.prompt_logprobs(logits.clone(), [1, 2, 3], 2)):
        assert list(entry)[0] == i + 1
        for token, value in entry.items():
            assert value.logprob == pytest.approx(float(want[i, token]), abs=1e-5)
