"""Alignment of the FeatureTap: each feature belongs to the token beside it, however the engine came to it.

Two oracles: a model that can be computed by hand, and one dense forward of the finished sequence of a random model,
bit for bit, since the engine computes each row alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine import LLM, SamplingParams
from engine.feature_tap import Features, FeatureTap
from engine.models.decoder import ForwardOutput
from engine.request import Request
from engine.request_group import RequestGroup
from tests.tapped import (
    LAYERS,
    Job,
    Seen,
    Watcher,
    by_hand,
    dense,
    make_hand_model,
    run,
    speculate_at_random,
)

PAGE = 16
SHARED = "the very same beginning of several prompts, "
JOBS: list[Job] = [
    ("a", {"max_tokens": 30}),
    (SHARED + "one", {"max_tokens": 20, "n": 3}),
    (SHARED + "two", {"max_tokens": 25, "temperature": 0.0}),
    ("0123456789" * 5, {"max_tokens": 30, "stop": ["a", "bc", "e", "0", "1"], "min_tokens": 3}),
    ("xyz xyz", {"max_tokens": 30, "stop": ["x", "y", "q", "k", "s"], "n": 2}),
    ("stop ids", {"max_tokens": 40, "stop_token_ids": list(range(60, 100))}),
    (SHARED + "three", {"max_tokens": 1}),
    ("late", {"max_tokens": 24, "temperature": 0.7, "logprobs": 1, "prompt_logprobs": 1}),
]
JOBS = [
    (prompt, {"temperature": 1.0, "ignore_eos": True, "seed": 100 * i} | given)
    for i, (prompt, given) in enumerate(JOBS)
]
SITUATIONS: dict[str, dict[str, Any]] = {
    "whole": {"enable_prefix_caching": False},
    "cached": {},
    "chunked": {"max_num_batched_tokens": 9, "max_num_seqs": 5, "enable_prefix_caching": False},
    "chunked and cached": {"max_num_batched_tokens": 12, "max_num_seqs": 6},
    "preempting": {"num_pages": 10, "max_num_seqs": 8, "enable_prefix_caching": False},
    "preempting and cached": {"num_pages": 10, "max_num_batched_tokens": 40, "max_num_seqs": 8},
}


@dataclass
class Model:
    path: str
    weights: dict[str, torch.Tensor] | None  # of the hand model
    oracle: LLM

    def engine(self, *, num_pages: int = 400, **kwargs: Any) -> LLM:
        page_bytes = PAGE * self.oracle.config.model.kv_bytes_per_token("float32")
        return LLM(self.path, kv_cache_bytes=num_pages * page_bytes, max_model_len=128, **kwargs)

    def check(self, request: Request, seen: Seen) -> None:
        """Every row that came is of the request's own token at that position."""
        token_ids = request.token_ids
        expected = (
            dense(self.oracle, token_ids)
            if self.weights is None
            else by_hand(self.weights, token_ids)
        )
        assert seen.prompt_len == request.prompt_len
        for position, token in seen.tokens.items():
            assert token == token_ids[position], (request, position)
            found = seen.features[position].astype(np.int32)
            off = np.abs(found - expected[position].astype(np.int32))
            if (
                self.weights is not None
            ):  # another order of summing the norm: the last bit may differ
                assert off[len(LAYERS) * 64 :].max() <= 1, (request, position)
                off = off[: len(LAYERS) * 64]
            assert off.max() == 0, (request, position, int(off.argmax()))


def open_model(path: str, weights: dict[str, torch.Tensor] | None = None) -> Model:
    oracle = LLM(path, kv_cache_bytes=1 << 22, max_model_len=128, enable_prefix_caching=False)
    return Model(path, weights, oracle)


@pytest.fixture(scope="module")
def hand_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = make_hand_model(tmp_path_factory.mktemp("tapped") / "hand")
    return open_model(str(path), load_file(path / "model.safetensors"))


@pytest.fixture(scope="module", params=["by hand", "random", "random qwen3"])
def model(request: pytest.FixtureRequest, hand_model: Model, make_model_dir: Any) -> Model:
    if request.param == "by hand":
        return hand_model
    return open_model(str(make_model_dir("qwen3" if "qwen3" in request.param else "llama")))


def samples(groups: list[RequestGroup]) -> list[Request]:
    return [sample.request for group in groups for sample in group.samples]


def tokens_of(groups: list[RequestGroup]) -> list[tuple[list[int], str | None]]:
    return [(request.token_ids, request.finish_reason) for request in samples(groups)]


def check_all(
    model: Model, watcher: Watcher, requests: list[Request], *, is_cached: bool, is_plain: bool
) -> None:
    """All accepted positions of every request, each once, each with its own features; and its end."""
    assert set(watcher.seen) == {request.request_id for request in requests}
    for request in requests:
        seen = watcher.seen[request.request_id]
        assert (seen.group_id, seen.sample_index) == (request.group_id, request.sample_index)
        assert seen.end == request.finish_reason
        length = len(request.token_ids)
        # The last token was sampled and never run, but where a stop made an accepted draft token the last one.
        ends = (
            {length - 1} if is_plain or request.finish_reason == "length" else {length - 1, length}
        )
        assert max(seen.tokens) + 1 in ends, request
        if is_cached:
            assert all(start % PAGE == 0 for start in seen.starts), seen.starts
            if not request.num_preemptions:
                assert seen.starts == [request.num_cached_tokens]
        else:
            assert seen.starts == [0]
        model.check(request, seen)


@pytest.mark.parametrize("is_speculating", [False, True], ids=["plain", "trees"])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_features_are_those_of_their_tokens(
    model: Model, situation: str, is_speculating: bool
) -> None:
    plain = run(model.oracle, JOBS)
    for seed in range(3 if is_speculating else 1):
        llm = model.engine(**SITUATIONS[situation])
        if is_speculating:
            speculate_at_random(llm, plain, truth=(1.0, 0.9, 0.5)[seed], seed=seed)
        with FeatureTap(LAYERS, capacity_bytes=1 << 23) as tap:
            llm.engine.attach_tap(tap)
            watcher = Watcher(tap.name)
            groups = run(llm, JOBS, watcher)
            stats = tap.stats()
        assert tokens_of(groups) == tokens_of(plain)
        assert llm.engine.taps.num_failures == 0
        is_cached = SITUATIONS[situation].get("enable_prefix_caching", True)
        check_all(model, watcher, samples(groups), is_cached=is_cached, is_plain=not is_speculating)
        num_rows = sum(len(seen.tokens) for seen in watcher.seen.values())
        assert (stats["num_tokens"], stats["num_dropped_tokens"]) == (num_rows, 0)
        assert stats["num_records"] == watcher.num_records
        if "preempting" in situation:
            assert llm.engine.scheduler.num_preemptions > 0
        if is_speculating:
            assert llm.engine.counters.num_accepted_draft_tokens > 5
        if is_cached:
            assert any(seen.starts[0] >= 2 * PAGE for seen in watcher.seen.values())


def test_requests_that_are_aborted_end_with_what_was_accepted(model: Model) -> None:
    plain = run(model.oracle, JOBS)
    for seed in range(3):
        llm = model.engine(num_pages=24, max_num_batched_tokens=24, max_num_seqs=6)
        speculate_at_random(llm, plain, truth=0.9, seed=seed)
        tap = FeatureTap(LAYERS, capacity_bytes=1 << 22)
        llm.attach_tap(tap)
        watcher = Watcher(tap.name)
        groups = run(llm, JOBS, watcher, abort_after={0: 1 + seed, 1: 4, 3: 2, 7: 3, 5: 9})
        watcher.poll()
        aborted = 0
        for request in samples(groups):
            seen = watcher.seen.get(request.request_id)
            if seen is None:  # it had not run
                assert request.finish_reason == "abort"
                continue
            assert seen.end == request.finish_reason
            aborted += seen.end == "abort"
            model.check(request, seen)
        assert aborted >= 2
        assert not tap._requests
        assert tap._ends_bytes == 0
        tap.close()


def test_a_stop_cuts_rows_of_tokens_behind_it(model: Model) -> None:
    """Accepted nodes behind the token that completes a stop string were computed, but are not part of the request."""
    job: Job = ("cut me", {"max_tokens": 40, "seed": 5, "ignore_eos": True})
    full = run(model.oracle, [job])
    text = full[0].samples[0].request.output_token_ids
    stop = next(t for t in text[3:] if 32 < t < 127 and t not in text[:3])
    job[1]["stop"] = [model.oracle.engine.tokenizer.decode([stop])]  # type: ignore[union-attr]
    num_cut = 0
    for seed in range(12):
        llm = model.engine()
        speculate_at_random(
            llm, full, truth=1.0, seed=seed
        )  # it drafts what comes behind the stop, too
        tap = FeatureTap(LAYERS, capacity_bytes=1 << 22)
        llm.attach_tap(tap)
        watcher = Watcher(tap.name)
        (request,) = samples(run(llm, [job], watcher))
        seen = watcher.seen[request.request_id]
        assert (seen.end, request.token_ids[-1]) == ("stop", stop)
        assert max(seen.tokens) in (len(request.token_ids) - 2, len(request.token_ids) - 1)
        num_cut += max(seen.tokens) == len(request.token_ids) - 1
        model.check(request, seen)
        tap.close()
    assert num_cut  # at least once a whole accepted run went over the stop


def test_records_of_two_versions_never_mix(hand_model: Model) -> None:
    """New weights in the middle: rows before are the old model's, rows behind the new one's, and say so."""
    weights = hand_model.weights
    assert weights is not None
    llm = hand_model.engine(enable_prefix_caching=False)
    tap = FeatureTap(LAYERS, capacity_bytes=1 << 22)
    llm.attach_tap(tap)
    watcher = Watcher(tap.name)
    engine = llm.engine
    tables = [weights, {n: w * (2 if "embed" in n else 1) for n, w in weights.items()}]
    tokens = llm._reader.read("some prompt")
    params = SamplingParams(max_tokens=20, ignore_eos=True, seed=1, n=2)
    group = engine.add("r", tokens, params)
    for step in range(1000):
        if not engine.has_unfinished:
            break
        if step == 7:
            engine.runner.decoder.load_weights(tables[1])
            engine.scheduler.kv.set_version(4)
            engine.speculator.set_target_version(4)
        engine.step()
    watcher.poll()
    for request in samples([group]):
        seen = watcher.seen[request.request_id]
        assert set(seen.versions.values()) == {0, 4}
        for span in request.version_spans:
            for index in range(span.start, span.end):  # row p draws the token at p + 1
                assert seen.versions[request.prompt_len + index - 1] == span.version
        for position, token in seen.tokens.items():
            expected = by_hand(tables[seen.versions[position] // 4], [token])[0]
            assert np.array_equal(seen.features[position][:64], expected[:64])
    tap.close()


@pytest.mark.parametrize("serial", [1, 700, 1 << 20])
def test_rows_and_columns_are_copied_in_any_stretches(
    serial: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits as indexing, whatever is contiguous and however much is copied at once."""
    monkeypatch.setattr("engine.feature_tap._SERIAL", serial)
    taps, hidden = torch.randn(40, 4, 24), torch.randn(40, 24)
    for columns in (range(3), [0, 1, 2], [3, 0, 1], [2, 2], range(0), [1]):
        features = Features(ForwardOutput(torch.empty(0), hidden, taps), columns, 0)
        for rows in (range(40), [3, 4, 5, 9, 8, 20], [7], range(11, 12)):
            found = torch.zeros(len(rows), len(columns) + 1, 24, dtype=torch.bfloat16)
            features.copy(rows, found)
            at = torch.tensor(list(rows))
            expected = torch.cat([taps[at][:, list(columns)], hidden[at].unsqueeze(1)], 1)
            assert torch.equal(found, expected.bfloat16())
