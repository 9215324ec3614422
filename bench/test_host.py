"""Times what runs between kernels for every token or request, with pytest-benchmark: ``make bench``.

Owns the loads. Knows nothing of kernels. Invariant: each result is checked before it is timed.
"""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from bench.workloads import PROMPTS
from engine import LLM
from engine.models.loader import open_checkpoint
from engine.request import Request, RequestStatus
from engine.sampling_params import SamplingParams
from engine.spec.base import DraftJob, DraftPlan
from engine.spec.suffix import SuffixDrafter
from engine.spec.tuner import OffTuner
from engine.spec.tuner_cost import CostTuner
from engine.tokenizer import Tokenizer
from tests.spec.simulation import PASS_MS, Guesser, World, interpolated


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


class Stopwatch:
    """A tuner, and the seconds spent inside it."""

    def __init__(self, tuner: CostTuner) -> None:
        self._tuner = tuner
        self.seconds, self.num_steps = 0.0, 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._tuner, name)

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            result = method(*args)
            self.seconds += time.perf_counter() - start
            self.num_steps += name == "observe"
            return result

        return timed


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("num_drafters", [1, 2])
def test_cost_tuner(benchmark, num_drafters: int, scored: bool) -> None:
    """Over the simulated long tail, 32 requests to one. ``us_per_step`` is the figure, at most 50: what the tuner takes of
    a step in plan, reconsider, trim and observe; the time of a round is the simulation's, mostly."""
    price = interpolated(PASS_MS)
    measured = {n: price(n) for n in (1, 2, 4, 8, 16, 32, 64)}
    others = [Guesser("b", lambda i: 0.7, lambda n, d: d * 1e-3)][: num_drafters - 1]
    world = World(price, lambda i: 0.8, drafter="a", scored=scored, others=others)
    names = ["a", "b"][:num_drafters]
    watches: list[Stopwatch] = []

    def run() -> float:
        tuner = CostTuner(names, max_depth=16, max_nodes=16, measured=measured)
        watches.append(Stopwatch(tuner))
        return world.run(watches[-1]).total_s  # type: ignore[arg-type]

    plain = World(price, lambda i: 0.8).run(OffTuner()).total_s
    assert run() < plain / 1.3
    benchmark.pedantic(run, rounds=5)
    per_step = [1e6 * watch.seconds / watch.num_steps for watch in watches[1:]]
    benchmark.extra_info["us_per_step"] = round(sorted(per_step)[len(per_step) // 2], 1)
