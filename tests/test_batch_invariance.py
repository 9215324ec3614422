"""Bitwise batch invariance: the foundation of exact losslessness.

A request gives the same tokens and the same log-probabilities, to the bit, alone or in company, chunked or whole,
from a cold or a cached prefix, preempted or not, for any number of threads. Log-probabilities are compared because
they see every bit of the logits; tokens alone would hide small errors.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import LLM, SamplingParams
from engine.outputs import RequestOutput

Bits = tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...]]


def bits(output: RequestOutput) -> list[Bits]:
    """Everything that a request's logits decide."""
    prompt = tuple(
        entry[token].logprob
        for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=False)
        if entry is not None
    )
    return [
        (
            tuple(c.token_ids),
            tuple(e[t].logprob for t, e in zip(c.token_ids, c.logprobs or [], strict=True)),
            prompt,
        )
        for c in output.outputs
    ]


def params_of(seed: int, **more: Any) -> SamplingParams:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 20, "presence_penalty": 0.5},
        {"temperature": 1.2, "top_p": 0.9, "min_p": 0.01},
    ]
    return SamplingParams(seed=seed, logprobs=0, ignore_eos=True, **kinds[seed % 4], **more)


class Lab:
    """Engines over one model that differ in everything that must not matter."""

    def __init__(self, model: str) -> None:
        common: dict[str, Any] = {"max_model_len": 256}
        roomy, tight = 1 << 21, 24 * 16 * 2 * 2 * 2 * 16 * 4
        self.alone = LLM(
            model, kv_cache_bytes=roomy, num_threads=1, enable_prefix_caching=False, **common
        )
        self.others = {
            "whole": LLM(model, kv_cache_bytes=roomy, num_threads=2, **common),
            "chunked": LLM(
                model, kv_cache_bytes=roomy, max_num_batched_tokens=7, max_num_seqs=7, **common
            ),
            "preempting": LLM(
                model, kv_cache_bytes=tight, max_num_batched_tokens=64, max_num_seqs=64, **common
            ),
        }


@pytest.fixture(scope="module", params=["llama", "qwen3-window"])
def lab(request: pytest.FixtureRequest, make_model_dir: Any) -> Lab:
    if request.param == "llama":
        return Lab(str(make_model_dir("llama")))
    return Lab(
        str(
            make_model_dir("qwen3", use_sliding_window=True, sliding_window=19, max_window_layers=1)
        )
    )


requests = st.lists(
    st.tuples(
        st.integers(0, 3),  # which text it begins with
        st.integers(1, 90),  # prompt tokens
        st.integers(1, 24),  # output tokens
        st.integers(0, 2**40),  # seed
    ),
    min_size=1,
    max_size=9,
)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(specs=requests)
def test_company_chunks_cache_and_preemption_change_no_bit(
    lab: Lab, specs: list[tuple[int, int, int, int]]
) -> None:
    prompts = [
        {"prompt_token_ids": [(text * 31 + i * (text + 7)) % 256 for i in range(length)]}
        for text, length, _, _ in specs
    ]
    params = [params_of(seed, max_tokens=tokens) for _, _, tokens, seed in specs]
    expected = [bits(lab.alone.generate(p, s)[0]) for p, s in zip(prompts, params, strict=True)]
    for name, llm in lab.others.items():
        got = [bits(o) for o in llm.generate(prompts, params, use_tqdm=False)]
        assert got == expected, name
        llm.engine.scheduler.check()


def check_against_alone(lab: Lab, prompts: list[Any], params: list[SamplingParams]) -> None:
    expected = [bits(lab.alone.generate(p, s)[0]) for p, s in zip(prompts, params, strict=True)]
    for name, llm in lab.others.items():
        got = [bits(o) for o in llm.generate(prompts, params, use_tqdm=False)]
        assert got == expected, name


def test_alone_or_in_a_batch_of_64(lab: Lab) -> None:
    prompts = [{"prompt_token_ids": [(i * 7 + j) % 256 for j in range(20 + i)]} for i in range(64)]
    check_against_alone(lab, prompts, [params_of(i, max_tokens=6) for i in range(64)])


def test_requests_that_preempt_each_other(lab: Lab) -> None:
    prompts = [{"prompt_token_ids": [i] * 20} for i in range(12)]
    before = lab.others["preempting"].stats()["num_preemptions"]
    check_against_alone(lab, prompts, [params_of(i, max_tokens=60) for i in range(12)])
    assert lab.others["preempting"].stats()["num_preemptions"] > before


def test_prompt_logprobs_do_not_depend_on_the_chunks(lab: Lab) -> None:
    prompt = {"prompt_token_ids": [(j * 13) % 256 for j in range(100)]}
    params = params_of(1, max_tokens=4, prompt_logprobs=0)
    expected = bits(lab.alone.generate(prompt, params)[0])
    for name, llm in lab.others.items():
        assert bits(llm.generate(prompt, params)[0]) == expected, name


@pytest.mark.smollm2
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_smollm2_alone_and_in_company(smollm2_name: str, dtype: str) -> None:
    """The same on the real model, whose widths take the wide paths of the kernels."""
    llm = LLM(smollm2_name, dtype=dtype, kv_cache_bytes=1 << 27, max_model_len=1024)
    texts = ["The capital of France is", "Once upon a time there was", "def fibonacci(n):", "1 2 3"]
    prompts = [texts[i % 4] + " and" * (i // 4) for i in range(24)]
    params = [params_of(i, max_tokens=6) for i in range(24)]
    together = [bits(o) for o in llm.generate(prompts, params, use_tqdm=False)]
    for i in (0, 1, 2, 3, 13, 22):
        llm.reset_prefix_cache()
        assert bits(llm.generate(prompts[i], params[i])[0]) == together[i]
