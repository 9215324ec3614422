"""Faults that a hostile test found once: each was silent, and each is kept from coming back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.request import Request
from engine.spec.base import Trial
from engine.spec.price import DraftPrice
from engine.spec.suffix import SuffixDrafter
from engine.spec.tuner import FixedTuner
from engine.spec.tuner_cost import CostTuner
from engine.speculation import Speculator
from tests.spec.exact_head import make_exact

PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


class Observing(SuffixDrafter):
    """A suffix drafter whose free guesses are something else."""

    def __init__(self, give: Callable[[], Any]) -> None:
        super().__init__()
        self._give = give

    def observe(self, requests: Sequence[Request]) -> Any:
        super().observe(requests)
        return self._give()


def raising() -> Any:
    yield Trial("0", 0.5, True)
    raise ZeroDivisionError


@pytest.fixture(scope="module")
def llm(tiny_llama_dir: Path) -> LLM:
    return LLM(str(tiny_llama_dir), kv_cache_bytes=1 << 20, max_model_len=128)


def cost(*names: str) -> CostTuner:
    return CostTuner(names, max_depth=4, max_nodes=4, measured={1: 1.0, 64: 1.01})


def speculator(llm: LLM, drafter: Any, tuner: Any = None) -> Speculator:
    return Speculator([drafter], tuner or cost("suffix"), vocab_size=llm.config.model.vocab_size)


@pytest.mark.parametrize(
    "give",
    [
        lambda: [Trial("0", float("nan"), True)],
        lambda: [Trial("0", 7.0, True)],
        lambda: [1, 2],
        lambda: None,
        raising,
    ],
)
def test_guesses_that_make_no_sense_are_the_drafters_failure(
    llm: LLM, give: Callable[[], Any]
) -> None:
    """They used to reach the tuner, and generate died of them."""
    llm.engine.speculator = Speculator([], FixedTuner(None), vocab_size=320)  # type: ignore[arg-type]
    plain = llm.generate("abababab", PARAMS)[0].outputs[0].token_ids
    llm.engine.speculator = speculator(llm, Observing(give))
    assert llm.generate("abababab", PARAMS)[0].outputs[0].token_ids == plain
    assert list(llm.engine.speculator.failures) == ["suffix"]


def test_stats_that_raise_are_the_drafters_failure(llm: LLM) -> None:
    drafter = SuffixDrafter()
    drafter.stats = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    llm.engine.speculator = speculator(llm, drafter)
    assert llm.stats()["speculation"]["failures"]["suffix"].startswith("ZeroDivisionError")


def test_no_record_outlives_its_request(llm: LLM) -> None:
    """A request that ended in the step whose tree it was in used to be written down again behind its own back."""
    tuner = cost("suffix")
    llm.engine.speculator = speculator(llm, SuffixDrafter(), tuner)
    for _ in range(4):
        llm.generate(["abababab"] * 5, PARAMS, use_tqdm=False)
    assert llm.engine.counters.num_drafts > 0
    tuner.state_dict()  # all that waits is learnt
    assert not tuner._arms["suffix"].survival._requests
    group = llm.engine.add("left", llm._reader.read("abababab"), PARAMS)
    for _ in range(4):
        llm.engine.step()
    assert not group.finished
    llm.engine.recover()
    assert not tuner._arms["suffix"].survival._requests


def test_rows_asked_for_are_forgotten_with_the_last_drafter(llm: LLM) -> None:
    """The first of all cases: left-overs of the step before, granted again and again when nobody drafts any more."""
    calls: list[int] = []

    def give() -> list[Trial]:
        calls.append(1)
        if len(calls) > 3:
            raise RuntimeError("gone")
        return []

    llm.engine.speculator = speculator(
        llm, Observing(give), CostTuner(["suffix"], max_depth=4, max_nodes=4, measured={1: 1.0})
    )
    group = llm.engine.add("one", llm._reader.read("abababab"), PARAMS)
    while not group.finished:
        had_drafter = llm.engine.speculator.active
        llm.engine.step()
        if not had_drafter:
            assert group.samples[0].request.num_tree_nodes == 0
    assert llm.engine.speculator.failures


def test_nothing_is_drafted_where_no_row_is_left(tiny_llama_dir: Path) -> None:
    """As many requests as a forward has rows: a proposal could not be verified, and was paid for all the same."""
    llm = LLM(
        str(tiny_llama_dir),
        kv_cache_bytes=1 << 20,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=4,
        speculative_config={"method": "suffix", "tuner": "fixed"},
    )
    drafter = llm.engine.speculator.drafters["suffix"]
    sizes: list[int] = []
    propose = drafter.propose
    drafter.propose = lambda jobs: sizes.append(len(jobs)) or propose(jobs)  # type: ignore[method-assign]
    llm.generate(["abababab"] * 4, PARAMS, use_tqdm=False)
    assert sizes
    assert (
        max(sizes) < 4
    )  # before the last one decodes and after the first has ended there are rows


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_exact(tmp_path_factory.mktemp("exact"))


@pytest.mark.parametrize("tuner", ["fixed", "cost"])
def test_a_head_that_gives_nan_is_switched_off_loudly(exact: dict[str, Path], tuner: str) -> None:
    """Weights that are finite and overflow: no proposal came any more, no alarm, and the passes were paid for."""
    config = {"method": "eagle3", "model": str(exact["eagle3"]), "tuner": tuner}
    llm = LLM(str(exact["target"]), dtype="float32", max_model_len=256, speculative_config=config)
    prompt = {"prompt_token_ids": list(range(1, 20))}
    plain = llm.generate(prompt, PARAMS)[0].outputs[0].token_ids  # type: ignore[arg-type]
    drafter: Any = llm.engine.speculator.drafters["eagle"]
    weights = {name: torch.full(shape, 1e38) for name, shape in _shapes(drafter.network).items()}
    llm.engine.speculator.load("eagle", weights, version=1)
    assert llm.generate(prompt, PARAMS)[0].outputs[0].token_ids == plain  # type: ignore[arg-type]
    assert "not finite" in llm.stats()["speculation"]["failures"]["eagle"]


def _shapes(network: Any) -> dict[str, Any]:
    from engine.models.eagle_layout import expected_shapes

    return expected_shapes(network.config)


def test_a_cold_first_draft_does_not_price_a_drafter_out() -> None:
    price = DraftPrice()
    price.observe(1, 4, 4 * 10e-3)  # cold memory, and a long text to catch up with
    assert price.is_young
    for _ in range(3):
        price.observe(1, 4, 4 * 0.2e-3)
    assert not price.is_young
    assert price.seconds(1, 1) == pytest.approx(0.2e-3)
    price.observe(1, 4, 4 * 10e-3)  # one that comes later pulls a little
    assert price.seconds(1, 1) < 0.3e-3
