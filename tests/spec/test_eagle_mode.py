"""Mode proposals: a head that proposes its likeliest tokens, whatever the temperature, and says what they are worth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.models.eagle import EagleNetwork
from engine.models.load_threads import one_torch_thread
from engine.request import Request
from engine.spec.base import DraftJob, DraftPlan
from engine.spec.eagle import EagleDrafter
from engine.spec.tuner import FixedTuner, StepRecord, Verified
from tests.models.eagle_oracle import tiny_head, tiny_target
from tests.spec.exact_head import VOCAB, WINDOW, make_exact

PROMPT = [(7 * i + i // 5) % VOCAB for i in range(1, 41)]


def a_request(length: int, temperature: float, **options: Any) -> Request:
    params = SamplingParams(max_tokens=64, temperature=temperature, **options)
    request = Request(
        "r", [1 + i % 7 for i in range(length - 1)], params, seed=3, max_total_len=400
    )
    request.append_tokens([2])
    request.pages = [0, 1]
    return request


def proposal(mode: bool, temperature: float, **options: Any) -> tuple[Any, list[torch.Tensor]]:
    """The tree of a random head for a request, and the logits that it was drawn from, level by level."""
    target = tiny_target(num_hidden_layers=7)
    config, tensors = tiny_head(target.config, "eagle3", draft_vocab_size=100)
    network = EagleNetwork(config, tensors, target, max_rows=32)
    drafter = EagleDrafter(network, num_pages=4, max_seqs=4, window=16, mode=mode)
    taps = torch.randn(19, 3, 64, generator=torch.Generator().manual_seed(4))
    drafter.store_features(torch.arange(19).int(), taps, None)
    seen: list[torch.Tensor] = []
    attend = network.attend

    def watched(*arguments: Any) -> Any:
        found = attend(*arguments)
        seen.append(found[0].clone())
        return found

    network.attend = watched  # type: ignore[method-assign]
    job = DraftJob(a_request(20, temperature, **options), DraftPlan("eagle", 3, 3))
    return drafter.propose([job])[0], seen


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.5])
def test_the_likeliest_tokens_with_their_probability_at_the_requests_temperature(
    temperature: float,
) -> None:
    """A score that is not the chance of acceptance would let the tuner draft too much or too little."""
    greedy, _ = proposal(False, 0.0)
    tree, seen = proposal(True, temperature)
    assert tree.token_ids == greedy.token_ids
    for score, logits in zip(tree.scores, seen, strict=True):
        chances = (logits[0] / (temperature or 1.0)).softmax(-1)
        assert score == pytest.approx(float(chances.max()), rel=1e-4)


def test_a_temperature_next_to_nothing_loses_no_proposal() -> None:
    """The smallest temperature that a request can have: logits over 1e-5 must not become infinite: what is not finite is not proposed."""
    tree, _ = proposal(True, 1e-5)
    assert len(tree) == 3
    assert min(tree.scores) > 0.99


def test_filters_leave_the_proposals_alone() -> None:
    tree, _ = proposal(True, 1.0)
    assert proposal(True, 1.0, top_k=1)[0] == proposal(True, 0.0)[0]
    assert proposal(True, 1.0, top_p=0.5, min_p=0.2, top_k=3)[0] == tree


class Watching(FixedTuner):
    """Keeps the verified trees."""

    def __init__(self, plan: DraftPlan) -> None:
        super().__init__(plan)
        self.verified: list[Verified] = []

    def observe(self, record: StepRecord) -> None:
        self.verified += record.verified


def test_lossless_and_its_scores_come_true(tmp_path: Path) -> None:
    """With a head that knows the target exactly: tokens unchanged, accepted as often as the scores promise."""
    exact = make_exact(tmp_path)
    options: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_model_len": 512}

    def run(config: dict[str, Any] | None, temperature: float) -> tuple[LLM, list[list[int]]]:
        llm = LLM(str(exact["target"]), speculative_config=config, **options)
        tuner = Watching(DraftPlan("eagle", 2, 2))
        if config:
            llm.engine.speculator.tuner = tuner
        sampling = SamplingParams(
            n=4, temperature=temperature, max_tokens=100, ignore_eos=True, seed=5
        )
        (result,) = llm.generate([{"prompt_token_ids": PROMPT}], sampling)
        return llm, [list(o.token_ids) for o in result.outputs]

    def config(kind: str) -> dict[str, Any]:
        shared = {"method": "eagle3", "model": str(exact["eagle3"]), "window": WINDOW}
        return shared | {"tuner": "fixed", "draft_sampling": kind}

    with one_torch_thread():
        for temperature in (0.0, 4.0):
            _, plain = run(None, temperature)
            llm, mode = run(config("mode"), temperature)
            _, coupled = run(config("coupled"), temperature)
            assert plain == mode == coupled
            assert not llm.engine.speculator.failures
            tuner: Any = llm.engine.speculator.tuner
            promised, variance, kept, trials = 0.0, 0.0, 0, 0
            for entry in tuner.verified:
                for node, score in enumerate(entry.tree.scores[: len(entry.accepted) + 1]):
                    promised, variance = promised + score, variance + score * (1 - score)
                    kept, trials = kept + (node < len(entry.accepted)), trials + 1
            if temperature == 0.0:
                assert kept == trials
            else:
                assert trials > 150
                assert 0.2 * trials < kept < 0.8 * trials
                assert abs(kept - promised) < 4 * variance**0.5
