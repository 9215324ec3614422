"""A FeatureTap beside a drafter that reads the target's hidden states as well: each gets its own columns."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import LLM, SamplingParams
from engine.config import ModelConfig
from engine.feature_tap import FeatureTap
from engine.models.eagle_checkpoint import save_drafter
from engine.models.eagle_init import drafter_config, random_drafter
from engine.spec.eagle import EagleDrafter
from tests.spec.exact_head import make_exact
from tests.tapped import HIDDEN, Watcher, dense


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory, make_model_dir: Any) -> dict[str, Path]:
    """Targets and heads: exact ones of one layer, whose acceptance is high, and a random one of three layers."""
    path = tmp_path_factory.mktemp("heads")
    found = make_exact(path)
    target = make_model_dir("llama", num_hidden_layers=3)
    config = drafter_config(ModelConfig.from_hf(json.loads((target / "config.json").read_text())))
    config = replace(config, tap_layers=(2, 0, 1))
    save_drafter(path / "random", config, random_drafter(config, seed=1))
    return found | {"random": path / "random", "target of random": target}


@pytest.mark.parametrize("layers", [(), (1, 0), (0, 0, 1), (0, 0), "other"])
@pytest.mark.parametrize("kind", ["eagle3", "eagle", "random"])
def test_the_drafter_reads_its_own_columns(
    heads: dict[str, Path], kind: str, layers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same proposals, same acceptance, with any tap beside it; and the tap gets its own columns."""
    target = heads["target of random" if kind == "random" else "target"]
    if layers == "other":
        layers = (3, 0) if kind == "random" else (1, 1)
    propose, trees = EagleDrafter.propose, []

    def recorded(self: EagleDrafter, jobs: Any) -> Any:
        trees.append(propose(self, jobs))
        return trees[-1]

    monkeypatch.setattr(EagleDrafter, "propose", recorded)
    method = "eagle" if kind == "eagle" else "eagle3"
    config = {"method": method, "model": str(heads[kind]), "tuner": "fixed"}
    found = []
    for has_tap in (False, True):
        llm = LLM(str(target), kv_cache_bytes=1 << 22, max_model_len=128, speculative_config=config)
        trees.clear()
        tap = FeatureTap(layers, capacity_bytes=1 << 20)
        watcher = Watcher(tap.name)
        if has_tap:
            llm.attach_tap(tap)
        prompts = [{"prompt_token_ids": [1, 5, 9, 2]}, {"prompt_token_ids": list(range(20))}]
        params = SamplingParams(max_tokens=24, temperature=1.0, seed=2, ignore_eos=True)
        done = llm.generate(prompts, params)  # type: ignore[arg-type]
        watcher.poll()
        metrics = [(o.outputs[0].token_ids, o.metrics[0].speculative_decoding) for o in done]
        found.append((metrics, list(trees)))
        assert not llm.engine.speculator.failures
        if has_tap:
            assert llm.engine.counters.num_accepted_draft_tokens > 8 or kind == "random"
            for output, seen in zip(done, watcher.seen.values(), strict=True):
                ids = output.prompt_token_ids + output.outputs[0].token_ids
                expected = dense(llm, ids, layers) if layers else dense(llm, ids, (0,))[:, HIDDEN:]
                assert all(np.array_equal(expected[p], row) for p, row in seen.features.items())
        tap.close()
    assert found[0] == found[1]
