"""Times what runs between kernels for every token or request, with pytest-benchmark: ``make bench``.

Owns the loads. Knows nothing of kernels. Invariant: each result is checked before it is timed.
"""

from __future__ import annotations

import random

import pytest

from bench.workloads import PROMPTS
from engine import LLM
from engine.models.loader import open_checkpoint
from engine.request import Request, RequestStatus
from engine.sampling_params import SamplingParams
from engine.spec.base import DraftJob, DraftPlan
from engine.spec.suffix import SuffixDrafter
from engine.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = open_checkpoint("smollm2").tokenizer
    assert found is not None
    return found


def test_detokenize_one_token_at_a_time(benchmark, tokenizer: Tokenizer) -> None:
    text = " ".join(PROMPTS)
    ids = tokenizer.encode(text)

    def run() -> str:
        detokenizer = tokenizer.detokenizer()
        return "".join([*map(detokenizer.push, ids), detokenizer.finish()])

    assert run() == text
    benchmark.extra_info["num_tokens"] = len(ids)
    benchmark(run)


def test_load(benchmark) -> None:
    """``LLM("smollm2")`` once it has been converted."""
    assert LLM("smollm2").config.model.num_layers == 30
    benchmark.pedantic(lambda: LLM("smollm2"), rounds=3)


def test_suffix_proposals_for_32_requests(benchmark) -> None:
    """4 prompts x 8 samples of 2000 tokens made of 400 phrases: a tree of 16 nodes for each sample."""
    rng = random.Random(0)
    phrases = [rng.choices(range(2000), k=rng.randint(3, 12)) for _ in range(400)]
    requests = []
    for number in range(32):
        params = SamplingParams(max_tokens=4000)
        request = Request(str(number), (number // 8,), params, seed=0, max_total_len=8000)
        request.status = RequestStatus.RUNNING
        while request.num_output_tokens < 2000:
            request.append_tokens(phrases[min(int(rng.expovariate(1 / 60)), 399)])
        requests.append(request)
    drafter = SuffixDrafter()
    jobs = [DraftJob(request, DraftPlan("suffix", 8, 16, width=2)) for request in requests]
    assert sum(len(tree) for tree in drafter.propose(jobs)) > 32 * 8
    benchmark(drafter.propose, jobs)
