"""Speculation changes no bit: the promise that everything else in the product leans on.

Plain decoding, alone, is the oracle. Against it: random trees and chains, switched on and off and cut to any length at
every step for every request, in company, chunked, preempted, from a cached prefix, with neighbours aborted, under
every sampler parameter. Tokens, finish reasons, text and every log-probability must be the same to the bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import LLM, SamplingParams
from engine.outputs import CompletionOutput, RequestOutput
from engine.speculation import Speculator
from tests.spec.chaos import ChaosTuner, RandomTrees

PROMPTS = (
    "a",
    "the same words, the same words, the same",
    "xyz xyz xyz xyz xyz xyz",
    "0123456789" * 5,
)
MAX_TOKENS = 20
NUM_CASES = 500


def no_vowels(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Depends on the whole text: after an even number of tokens vowels are out."""
    if len(output_ids) % 2 == 0:
        logits[[ord(c) for c in "aeiou"]] = -float("inf")
    return logits * (1.0 + 0.01 * (sum(output_ids) % 3))


KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 12},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.9, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 0.0, "repetition_penalty": 1.4},
    {"temperature": 1.0, "logit_bias": {65: 4.0, 66: -3.0, 300: 2.0}},
    {"temperature": 0.4, "bad_words": ["the", "a"]},
    {"temperature": 1.0, "allowed_token_ids": list(range(60, 100)), "top_p": 0.95},
    {
        "temperature": 1.0,
        "min_tokens": 6,
        "stop_token_ids": list(range(100, 200)),
        "ignore_eos": False,
    },
    {"temperature": 1.0, "stop": ["a", "b", "c", "ab"], "min_tokens": 2},
    {"temperature": 0.8, "logits_processors": [no_vowels]},
    {"temperature": 1.0, "logprobs": 4, "prompt_logprobs": 2},
    {"temperature": 1.0, "speculation": False},
    {"temperature": 1.0, "speculation": 2},
)


def params_of(kind: int, seed: int) -> SamplingParams:
    given: dict[str, Any] = {"logprobs": 1, "ignore_eos": True} | KINDS[kind]
    return SamplingParams(seed=seed, max_tokens=MAX_TOKENS, **given)


def bits(completion: CompletionOutput) -> tuple[Any, ...]:
    """Everything that a user sees of a sample."""
    logprobs = tuple(
        tuple((token, entry.logprob, entry.rank) for token, entry in at.items())
        for at in completion.logprobs or ()
    )
    return (
        tuple(completion.token_ids),
        completion.text,
        completion.finish_reason,
        completion.stop_reason,
        completion.cumulative_logprob,
        logprobs,
    )


class Lab:
    """One plain engine as the oracle, and engines that speculate in every situation."""

    def __init__(self, model: str, vocab_size: int, page_bytes: int) -> None:
        common: dict[str, Any] = {"max_model_len": 128}
        roomy, tight = 1 << 22, 14 * page_bytes
        self.vocab_size = vocab_size
        self.plain = LLM(
            model, kv_cache_bytes=roomy, num_threads=1, enable_prefix_caching=False, **common
        )
        self.speculating = {
            "whole": LLM(model, kv_cache_bytes=roomy, **common),
            "chunked": LLM(
                model, kv_cache_bytes=roomy, max_num_batched_tokens=9, max_num_seqs=5, **common
            ),
            "preempting": LLM(
                model, kv_cache_bytes=tight, max_num_batched_tokens=48, max_num_seqs=8, **common
            ),
            "one thread": LLM(model, kv_cache_bytes=roomy, num_threads=1, **common),
        }
        self._known: dict[tuple[int, int, int], RequestOutput] = {}
        self.outputs: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def expected(self, prompt: int, kind: int, seed: int) -> RequestOutput:
        key = (prompt, kind, seed)
        if key not in self._known:
            output = self.plain.generate(PROMPTS[prompt], params_of(kind, seed), use_tqdm=False)[0]
            self._known[key] = output
        return self._known[key]

    def speculate(
        self, llm: LLM, cases: list[tuple[int, int, int]], truth: float, seed: int
    ) -> ChaosTuner:
        """Make an engine speculate at random, with a drafter that knows what these cases will give."""
        for prompt, kind, request_seed in cases:
            output = self.expected(prompt, kind, request_seed)
            ids = (tuple(output.prompt_token_ids), request_seed)
            self.outputs[ids] = output.outputs[0].token_ids
        drafter = RandomTrees(dict(self.outputs), truth, self.vocab_size, seed)
        tuner = ChaosTuner(["chaos"], max_depth=6, max_nodes=10, seed=seed)
        llm.engine.speculator = Speculator([drafter], tuner, vocab_size=self.vocab_size)
        return tuner


@pytest.fixture(scope="module", params=["llama", "qwen3-window"])
def lab(request: pytest.FixtureRequest, make_model_dir: Any) -> Lab:
    overrides: dict[str, Any] = {}
    kind = request.param
    if kind == "qwen3-window":
        kind = "qwen3"
        overrides = {"sliding_window": 11, "use_sliding_window": True, "max_window_layers": 0}
    model = str(make_model_dir(kind, **overrides))
    llm = LLM(model, kv_cache_bytes=1 << 20, max_model_len=64)
    config = llm.config.model
    return Lab(model, config.vocab_size, 16 * config.kv_bytes_per_token("float32"))


# Few distinct requests, so that the oracle's answers are computed once and used again and again; seeds of one
# prompt differ by kind, because the drafter finds a request by prompt and seed.
Case = tuple[int, int, int]
cases = st.lists(
    st.tuples(st.integers(0, len(PROMPTS) - 1), st.integers(0, len(KINDS) - 1)),
    min_size=1,
    max_size=4,
).map(lambda pairs: [(prompt, kind, 100 * kind + prompt) for prompt, kind in dict.fromkeys(pairs)])


@settings(
    max_examples=NUM_CASES // 2,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    chosen=cases,
    engine=st.sampled_from(["whole", "chunked", "preempting", "one thread"]),
    truth=st.sampled_from([0.0, 0.6, 0.9, 1.0]),
    seed=st.integers(0, 2**16),
)
def test_every_bit_is_that_of_plain_decoding(
    lab: Lab, chosen: list[Case], engine: str, truth: float, seed: int
) -> None:
    expected = [lab.expected(*case) for case in chosen]
    llm = lab.speculating[engine]
    lab.speculate(llm, chosen, truth, seed)
    prompts = [PROMPTS[prompt] for prompt, _, _ in chosen]
    params = [params_of(kind, request_seed) for _, kind, request_seed in chosen]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.engine.scheduler.check()
    for case, output, plain in zip(chosen, outputs, expected, strict=True):
        assert bits(output.outputs[0]) == bits(plain.outputs[0]), (case, engine)
        assert output.prompt_logprobs == plain.prompt_logprobs, (case, engine)
        spec = output.metrics[0].speculative_decoding
        num_tokens = len(output.outputs[0].token_ids)
        assert spec is not None
        assert spec.num_spec_steps + spec.num_accepted_draft_tokens == num_tokens
        assert sum(spec.acceptance_histogram) == spec.num_spec_steps


def test_true_drafts_are_accepted(lab: Lab) -> None:
    """What makes the test above bite: trees are really verified and accepted, not ignored."""
    chosen = [(1, 1, 101), (2, 1, 102), (3, 0, 3)]
    tuner = lab.speculate(lab.speculating["whole"], chosen, truth=1.0, seed=1)
    params = [params_of(kind, seed) for _, kind, seed in chosen]
    lab.speculating["whole"].generate([PROMPTS[p] for p, _, _ in chosen], params, use_tqdm=False)
    verified = [entry for record in tuner.records for entry in record.verified]
    assert sum(len(entry.accepted) for entry in verified) > 10
    assert any(entry.accepted != list(range(len(entry.accepted))) for entry in verified)


def test_neighbours_that_are_aborted_change_nothing(lab: Lab) -> None:
    chosen = [(p, k, 100 * k + p) for p in range(4) for k in (0, 1, 5)]
    llm = lab.speculating["preempting"]
    for seed in range(8):
        lab.speculate(llm, chosen, truth=0.9, seed=seed)
        groups = []
        for i, (prompt, kind, request_seed) in enumerate(chosen):
            tokens = llm._reader.read(PROMPTS[prompt])
            groups.append(llm.engine.add(f"{seed}-{i}", tokens, params_of(kind, request_seed)))
        num_steps = 0
        while llm.engine.has_unfinished:
            llm.engine.step()
            num_steps += 1
            if num_steps % 3 == 0:
                victim = groups[(seed + 5 * num_steps) % len(groups)]
                if (seed + num_steps) % 2:
                    llm.engine.abort(victim)
                llm.engine.scheduler.check()
        for case, group in zip(chosen, groups, strict=True):
            output, plain = group.output().outputs[0], lab.expected(*case).outputs[0]
            if output.finish_reason == "abort":
                count = len(output.token_ids)
                assert output.token_ids == plain.token_ids[:count]
            else:
                assert bits(output) == bits(plain), case
        assert llm.engine.scheduler.kv.num_used_pages == 0
