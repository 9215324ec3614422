"""The offline API on tiny models: shapes of results, stops, log-probabilities, bad input, nothing left behind."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import LLM, SamplingParams
from engine.outputs import RequestOutput


@pytest.fixture(scope="module")
def llm(tiny_llama_dir: Path) -> LLM:
    return LLM(str(tiny_llama_dir), kv_cache_bytes=1 << 20, num_threads=2)


@pytest.fixture(autouse=True)
def nothing_left_behind(llm: LLM) -> Iterator[None]:
    yield
    llm.engine.scheduler.check()
    assert not llm.engine.has_unfinished
    assert llm.engine.scheduler.kv.num_used_pages == 0
    assert not llm.engine._samples
    assert not llm.engine.sampler._rules


def first(outputs: list[RequestOutput]) -> Any:
    return outputs[0].outputs[0]


def test_prompts_in_every_form_give_the_same(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, seed=3)
    ids = llm.engine.tokenizer.encode("hello")  # type: ignore[union-attr]
    forms: list[Any] = [
        "hello",
        ids,
        {"prompt": "hello"},
        {"prompt_token_ids": ids},
        [np.int64(i) for i in ids],
        np.array(ids),
        torch.tensor(ids),
    ]
    outputs = llm.generate(forms, params)
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 1
    assert all(o.prompt_token_ids == ids and o.finished for o in outputs)
    assert outputs[0].prompt == "hello"
    assert outputs[1].prompt is None
    assert first(llm.generate(ids, params)).token_ids == outputs[0].outputs[0].token_ids


def test_results_keep_the_order_and_parameters_of_their_prompts(llm: LLM) -> None:
    prompts = [f"prompt {i}" for i in range(9)]
    params = [SamplingParams(max_tokens=1 + i, seed=i, ignore_eos=True) for i in range(9)]
    outputs = llm.generate(prompts, params)
    assert [o.prompt for o in outputs] == prompts
    assert [len(o.outputs[0].token_ids) for o in outputs] == list(range(1, 10))
    assert {o.outputs[0].finish_reason for o in outputs} == {"length"}


def test_n_samples_are_those_of_consecutive_seeds_and_share_pages(llm: LLM) -> None:
    llm.reset_prefix_cache()
    prompt = "a prompt that is longer than two pages of the cache"
    before = llm.stats()["num_cached_prompt_tokens"]
    output = llm.generate(prompt, SamplingParams(n=4, seed=10, max_tokens=12))[0]
    assert llm.stats()["num_cached_prompt_tokens"] - before >= 3 * 32
    assert [c.index for c in output.outputs] == [0, 1, 2, 3]
    for i, completion in enumerate(output.outputs):
        alone = first(llm.generate(prompt, SamplingParams(seed=10 + i, max_tokens=12)))
        assert alone.token_ids == completion.token_ids


def test_same_seed_same_tokens_and_unseeded_requests_differ(tiny_llama_dir: Path, llm: LLM) -> None:
    """Catches a seed that has no effect."""
    params = SamplingParams(max_tokens=16)
    runs = [
        LLM(str(tiny_llama_dir), kv_cache_bytes=1 << 20, seed=5).generate(["x", "x"], params)
        for _ in range(2)
    ]
    tokens = [[o.outputs[0].token_ids for o in run] for run in runs]
    assert tokens[0] == tokens[1]
    assert tokens[0][0] != tokens[0][1]


def test_greedy_matches_a_plain_loop_without_cache(llm: LLM) -> None:
    ids = [5, 9, 30, 200, 7]
    outputs = llm.generate(
        {"prompt_token_ids": ids}, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    )
    for _ in range(6):
        step = llm.generate({"prompt_token_ids": ids}, SamplingParams(temperature=0, max_tokens=1))
        ids = [*ids, *first(step).token_ids]
        llm.reset_prefix_cache()
    assert first(outputs).token_ids == ids[5:]


def test_stop_token_is_kept_in_ids_and_left_out_of_the_text(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    whole = first(llm.generate("stop here", params))
    stop_id = whole.token_ids[5]
    at = whole.token_ids.index(stop_id)
    cut = first(
        llm.generate(
            "stop here",
            SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=[stop_id]),
        )
    )
    assert cut.token_ids == whole.token_ids[: at + 1]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop_id)
    assert cut.text == llm.engine.tokenizer.decode(cut.token_ids[:-1])  # type: ignore[union-attr]


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_cuts_ids_text_and_logprobs_alike(llm: LLM, include: bool) -> None:
    params: dict[str, Any] = {"max_tokens": 40, "seed": 1, "ignore_eos": True, "logprobs": 0}
    whole = first(llm.generate("stop", SamplingParams(**params)))
    stop = whole.text[10:12]
    at = whole.text.index(stop)
    cut = first(
        llm.generate(
            "stop", SamplingParams(**params, stop=[stop], include_stop_str_in_output=include)
        )
    )
    assert cut.text == whole.text[: at + (2 if include else 0)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert len(cut.logprobs) == len(cut.token_ids)
    assert cut.version_spans[-1].end == len(cut.token_ids)
    decoded = llm.engine.tokenizer.decode(cut.token_ids)  # type: ignore[union-attr]
    assert decoded.count(stop) == 1
    assert decoded.endswith(stop)


def test_stop_string_waits_for_min_tokens(llm: LLM) -> None:
    params: dict[str, Any] = {"max_tokens": 30, "seed": 2, "ignore_eos": True}
    whole = first(llm.generate("stop", SamplingParams(**params)))
    stop = whole.text[0]
    late = first(llm.generate("stop", SamplingParams(**params, stop=[stop], min_tokens=20)))
    assert len(late.token_ids) > 20
    assert late.token_ids == whole.token_ids[: len(late.token_ids)]
    assert stop in late.text


def test_logprobs_are_the_models(llm: LLM) -> None:
    output = llm.generate(
        "logprobs", SamplingParams(max_tokens=6, seed=4, logprobs=3, prompt_logprobs=2)
    )[0]
    completion = output.outputs[0]
    assert len(completion.logprobs) == len(completion.token_ids)  # type: ignore[arg-type]
    total = sum(e[t].logprob for t, e in zip(completion.token_ids, completion.logprobs or []))  # noqa: B905
    assert completion.cumulative_logprob == pytest.approx(total)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    rerun = llm.generate(
        {"prompt_token_ids": [*output.prompt_token_ids, *completion.token_ids]},
        SamplingParams(max_tokens=1, prompt_logprobs=0),
    )[0]
    for i, (token, entry) in enumerate(
        zip(completion.token_ids, completion.logprobs or [], strict=True)
    ):
        again = (rerun.prompt_logprobs or [])[len(output.prompt_token_ids) + i]
        assert again is not None
        assert again[token].logprob == entry[token].logprob  # to the bit


def test_context_length_ends_a_request(llm: LLM) -> None:
    prompt = {"prompt_token_ids": [7] * 500}
    completion = first(llm.generate(prompt, SamplingParams(max_tokens=None, ignore_eos=True)))
    assert (len(completion.token_ids), completion.finish_reason) == (12, "length")


def test_chat_renders_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    outputs = llm.chat(messages, SamplingParams(max_tokens=3, seed=1))
    assert outputs[0].prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    both = llm.chat([messages, messages], SamplingParams(max_tokens=3, seed=1))
    assert both[1].outputs[0].token_ids == outputs[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], None),
        ({"prompt_token_ids": []}, "empty"),
        ({"prompt_token_ids": [1, 320]}, "vocabulary"),
        ({"prompt_token_ids": [1, -1]}, "vocabulary"),
        ({"prompt_token_ids": [1.5]}, "token id"),
        ({"prompt_token_ids": [7] * 512}, "context"),
        ({"text": "x"}, "prompt_token_ids"),
        (["fine", ""], r"prompts\[1\]"),
        (3, "prompts"),
        ({"prompt": "a", 1: 1}, "prompt_token_ids"),
        (b"bytes", "prompts"),
        ([True, False], "token"),
    ],
)
def test_bad_prompts_are_refused_by_name(llm: LLM, prompt: Any, message: str | None) -> None:
    if message is None:
        assert llm.generate(prompt) == []
        return
    with pytest.raises(ValueError, match=message):
        llm.generate(prompt)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"allowed_token_ids": [320]}, "allowed_token_ids"),
        ({"stop_token_ids": [400]}, "stop_token_ids"),
        ({"logit_bias": {320: 1.0}}, "logit_bias"),
    ],
)
def test_parameters_outside_the_vocabulary_lose_nothing(
    llm: LLM, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(["a", "b"], [SamplingParams(), SamplingParams(**params, n=2)])


@pytest.mark.parametrize("messages", [{"role": "user"}, [], "hi", [5], [[]], (m for m in ())])
def test_messages_of_a_wrong_shape_are_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(ValueError, match=r"message"):
        llm.chat(messages)


def test_sampling_params_of_a_wrong_type_are_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="sampling_params"):
        llm.generate("a", 5)  # type: ignore[arg-type]


def test_number_of_parameters_must_match(llm: LLM) -> None:
    with pytest.raises(ValueError, match="one for each"):
        llm.generate(["a", "b"], [SamplingParams()])


def test_a_failing_processor_ends_its_request_alone(llm: LLM) -> None:
    def fail(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(ids) == 3:
            raise RuntimeError("broken")
        return logits

    good = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
    bad = SamplingParams(max_tokens=8, seed=1, ignore_eos=True, logits_processors=[fail])
    alone = first(llm.generate("x", good)).token_ids
    outputs = llm.generate(["x", "x", "x"], [good, bad, good])
    assert outputs[0].outputs[0].token_ids == outputs[2].outputs[0].token_ids == alone
    assert outputs[1].outputs[0].finish_reason == "error"
    assert "broken" in str(outputs[1].outputs[0].stop_reason)
    assert outputs[1].outputs[0].token_ids == alone[:3]


@pytest.mark.parametrize("delay_s", [0.0005, 0.001, 0.002, 0.004, 0.008])
def test_an_interrupt_at_any_moment_leaves_the_engine_usable(llm: LLM, delay_s: float) -> None:
    armed = False

    def interrupt(*args: object) -> None:
        if armed:  # an alarm that comes when the call has just ended must not hit the test itself
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    params = SamplingParams(n=2, max_tokens=60, seed=1, ignore_eos=True)
    expected = [c.token_ids for c in llm.generate("a", params)[0].outputs]
    try:
        for i in range(12):
            with contextlib.suppress(KeyboardInterrupt):
                armed = True
                signal.setitimer(signal.ITIMER_REAL, delay_s * (1 + i / 7))
                llm.generate(["a", "b", "c"], params, use_tqdm=False)
                armed = False
            armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            llm.engine.scheduler.check()
            assert [c.token_ids for c in llm.generate("a", params)[0].outputs] == expected
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_failure_while_adding_leaves_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("engine.engine.OutputText", fail)
        with pytest.raises(MemoryError):
            llm.generate(["a", "b"])
    assert first(llm.generate("a", SamplingParams(max_tokens=2, ignore_eos=True))).token_ids


def test_a_refused_call_changes_nothing_for_later_ones(tiny_llama_dir: Path) -> None:
    """Unseeded requests are numbered: a refused call must not use up numbers, nor count as work."""
    tokens = []
    for refuse in (False, True):
        llm = LLM(str(tiny_llama_dir), kv_cache_bytes=1 << 20, seed=5)
        if refuse:
            with pytest.raises(ValueError, match="stop_token_ids"):
                llm.generate(["x", "y"], [SamplingParams(), SamplingParams(stop_token_ids=[999])])
            assert llm.stats()["num_finished_requests"] == 0
        tokens.append(first(llm.generate("x", SamplingParams(max_tokens=8))).token_ids)
    assert tokens[0] == tokens[1]


def test_logprobs_name_their_tokens(llm: LLM) -> None:
    completion = first(llm.generate("x", SamplingParams(max_tokens=3, seed=1, logprobs=2)))
    for entry in completion.logprobs:
        for token_id, logprob in entry.items():
            want = llm.engine.tokenizer.decode([token_id], skip_special_tokens=False)  # type: ignore[union-attr]
            assert logprob.decoded_token == want


def test_prompt_logprobs_of_one_token(llm: LLM) -> None:
    prompt = {"prompt_token_ids": [5]}
    assert llm.generate(prompt, SamplingParams(prompt_logprobs=0))[0].prompt_logprobs == [None]


def test_two_engines_in_one_process(llm: LLM, make_model_dir: Any) -> None:
    """Catches a global context: target and drafter, or two LLMs, overwriting each other."""
    other = LLM(str(make_model_dir("qwen3", seed=1)), kv_cache_bytes=1 << 20)
    params = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
    alone = [first(engine.generate("x", params)).token_ids for engine in (llm, other)]
    mixed: dict[int, list[int]] = {}
    engines = (llm.engine, other.engine)
    reader = (llm._reader, other._reader)
    groups = [e.add("m", r.read("x"), params) for e, r in zip(engines, reader, strict=True)]
    while any(e.has_unfinished for e in engines):
        for i, engine in enumerate(engines):
            engine.step()
            mixed[i] = groups[i].output().outputs[0].token_ids
    assert [mixed[0], mixed[1]] == alone


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "/no/such/model"}, "no file or directory"),
        ({"kv_cache_bytes": 1}, "kv_cache_bytes"),
        ({"kv_cache_bytes": 1 << 60}, "kv_cache_bytes"),
        ({"max_model_len": 10**6}, "max_model_len"),
        ({"dtype": "int4"}, "dtype"),
        ({"device": "tpu"}, "device"),
        ({"num_thread": 2}, "num_threads"),
        ({"speculative_config": {"method": "eagle"}}, "speculat"),
    ],
)
def test_bad_arguments_are_refused_by_name(
    tiny_llama_dir: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(**{"model": str(tiny_llama_dir), **arguments})


def test_stats_add_up(llm: LLM) -> None:
    before = llm.stats()
    llm.generate(["a", "b", "c"], SamplingParams(max_tokens=5, ignore_eos=True))
    after = llm.stats()
    assert after["num_generated_tokens"] - before["num_generated_tokens"] == 15
    assert after["num_finished_requests"] - before["num_finished_requests"] == 3
    assert after["num_target_steps"] - before["num_target_steps"] == 5
    assert after["acceptance_length"] == pytest.approx(1.0, abs=0.05)
