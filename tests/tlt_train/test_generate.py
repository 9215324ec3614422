"""Data of a drafter: whole samples with the features of a forward of their own, in an order that nothing disturbs."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.ours import prefill_batch
from engine import LLM
from engine.models.load_threads import one_torch_thread
from tests.conftest import ModelDirFactory
from tlt_train.generate import DataOptions, generate_data, requests_of
from tlt_train.prompts import ChatPrompt
from tlt_train.sequence import TrainingSequence
from tlt_train.shards import ShardReader

LAYERS = (0, 2, 3)


@pytest.fixture(scope="module")
def target(make_model_dir: ModelDirFactory) -> str:
    return str(make_model_dir("llama", num_hidden_layers=4))


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("prompts") / "p.txt"
    path.write_text("\n".join(f"What is {i} times {i + 3}?" for i in range(12)))
    return str(path)


def make(target: str, out: Path, options: DataOptions, **more: Any) -> dict[str, Any]:
    with one_torch_thread():
        return generate_data(
            target,
            out,
            options,
            **{"tap_layers": LAYERS, "show_progress": False, "num_threads": 1} | more,
        )


def training(options: DataOptions) -> int:
    """Prompts of the file on the training side."""
    from tlt_train.prompts import prompts_of

    return len(list(prompts_of(file=options.prompts, held_out=False)))


def features_of(target: str, sequence: TrainingSequence) -> np.ndarray:
    """The bits that a forward over all positions gives."""
    llm = LLM(target, num_threads=1)
    decoder = llm.engine.runner.decoder
    found = decoder.forward(prefill_batch(0, sequence.token_ids.tolist()), tap_layers=LAYERS)
    assert found.taps is not None
    assert found.hidden is not None
    rows = torch.cat((found.taps, found.hidden.unsqueeze(1)), dim=1).flatten(1)
    return rows.bfloat16().view(torch.int16).numpy().view(np.uint16)


def test_every_sample_is_whole_and_has_its_own_features(
    target: str, prompt_file: str, tmp_path: Path
) -> None:
    """With the prefix cache, samples of one prompt but the first would begin with a gap."""
    options = DataOptions(
        prompts=prompt_file, samples=3, max_tokens=40, batch=5, min_tokens=1, seed=4
    )
    figures = make(target, tmp_path / "data", options)
    reader = ShardReader(tmp_path / "data", verify=True)
    assert reader.meta.tap_layers == LAYERS
    assert reader.meta.hidden_size == 64
    assert reader.meta.target == target
    assert reader.meta.sampling["samples"] == 3
    assert len(reader) == 3 * training(options) == figures["num_sequences"]
    assert figures["num_tokens"] == sum(s.num_tokens for s in reader)
    assert figures["num_dropped_tokens"] == 0
    prompts = {bytes(s.token_ids[: s.prompt_len].tolist()[4:8]) for s in reader}
    assert len({s.group for s in reader}) == training(options)
    assert prompts
    for sequence in reader:
        assert sequence.start == 0
        assert sequence.is_finished
        assert sequence.num_tokens > sequence.prompt_len
        assert np.array_equal(sequence.features, features_of(target, sequence))
    groups: dict[str, set[bytes]] = {}
    for sequence in reader:
        groups.setdefault(sequence.group, set()).add(sequence.token_ids.tobytes())
    assert all(len(samples) == 3 for samples in groups.values())  # different seeds


def test_the_batch_changes_nothing_but_the_order(
    target: str, prompt_file: str, tmp_path: Path
) -> None:
    options = DataOptions(prompts=prompt_file, max_tokens=20, temperatures=(1.0, 0.0))
    found = []
    for batch in (1, 7):
        make(target, tmp_path / str(batch), replace(options, batch=batch))
        found.append({s.token_ids.tobytes() for s in ShardReader(tmp_path / str(batch))})
    assert found[0] == found[1]
    assert len(found[0]) == training(options)


def test_tokens_end_a_run_and_what_is_running_is_kept(
    target: str, prompt_file: str, tmp_path: Path
) -> None:
    options = DataOptions(
        prompts=prompt_file, num_tokens=400, max_tokens=200, batch=4, min_tokens=1
    )
    figures = make(target, tmp_path / "data", options)
    assert 400 <= figures["num_tokens"] < 700
    reader = ShardReader(tmp_path / "data")
    unfinished = [s for s in reader if not s.is_finished]
    assert figures["num_unfinished"] == len(unfinished) > 0
    assert all(s.num_tokens >= s.prompt_len for s in unfinished)
    for sequence in unfinished[:2]:
        assert np.array_equal(sequence.features, features_of(target, sequence))


def test_seconds_end_a_run_and_passes_go_on_until_then(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tlt_train import generate as module

    clock = iter(range(10**6))
    monkeypatch.setattr(module.time, "perf_counter", lambda: float(next(clock)))
    path = tmp_path / "p.txt"
    text = next(f"Q{i}" for i in range(99) if not ChatPrompt.of(f"Q{i}", "p.txt").is_held_out())
    path.write_text(text)
    options = DataOptions(prompts=str(path), seconds=200, max_tokens=6, batch=2, min_tokens=1)
    figures = make(target, tmp_path / "data", options)
    found = [s.token_ids.tobytes() for s in ShardReader(tmp_path / "data")]
    assert figures["num_sequences"] == len(found) > 5
    assert len(set(found)) > 0.8 * len(found)  # other seeds in every pass


def asked(options: DataOptions, count: int, prompts: list[str] | None = None) -> list[Any]:
    names = prompts or [f"p{i}" for i in range(6)]
    stream = (ChatPrompt.of(name, "x") for name in names)

    def encode(prompt: ChatPrompt) -> list[int]:
        return [1] * (99 if prompt.turns[0][1] == "long" else 3) + list(prompt.turns[0][1].encode())

    return list(islice(requests_of(stream, options, encode, 50), count))


def test_no_temperature_is_bound_to_a_task() -> None:
    options = DataOptions(tasks=("a", "b"), num_tokens=9, temperatures=(1.0, 0.0))
    found = [params.temperature for _, params in asked(options, 4)]
    assert found[0::2] == [1.0, 0.0]  # of task a
    assert found[1::2] == [0.0, 1.0]


def test_greedy_samples_are_not_repeated() -> None:
    options = DataOptions(prompts="x", num_tokens=9, temperatures=(1.0, 0.0), samples=4)
    found = asked(options, 24)
    greedy = [tuple(ids) for ids, params in found if params.temperature == 0.0]
    assert len(greedy) == len(set(greedy)) == 6
    assert {params.n for _, params in found if params.temperature == 0.0} == {1}
    assert {params.n for _, params in found if params.temperature} == {4}
    seeds = [params.seed + k for _, params in found for k in range(params.n)]
    assert len(set(seeds)) == len(seeds)
    only = DataOptions(prompts="x", num_tokens=9, temperatures=(0.0,))
    assert len(asked(only, 100)) == 6


def test_one_pass_where_nothing_else_ends_the_run() -> None:
    assert len(asked(DataOptions(prompts="x"), 100)) == 6


def test_prompts_that_are_too_long_are_counted_and_do_not_go_round_for_ever() -> None:
    options = DataOptions(prompts="x", num_tokens=9)
    found = asked(options, 5, ["a", "long", "b"])
    assert [one is None for one in found] == [False, True, False, False, True]
    assert asked(options, 50, ["long"]) == [None]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_tokens": 0}, "--num-tokens must be above 0"),
        ({"seconds": -1.0}, "--seconds must be above 0"),
        ({"batch": 0}, "--batch must be above 0"),
        ({"temperatures": ()}, "--temperature must be one or more"),
        ({"temperatures": (1.0, -0.5)}, "--temperature must be one or more"),
        ({"tasks": ("a",), "prompts": None}, "give --num-tokens or --seconds"),
    ],
)
def test_bad_options_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataOptions(**dict[str, Any]({"prompts": "x"}, **given))


def test_what_fails_leaves_nothing(target: str, prompt_file: str, tmp_path: Path) -> None:
    options = DataOptions(prompts=prompt_file, max_tokens=8)
    with pytest.raises(ValueError, match=r"tap_layers \[9\] do not exist"):
        make(target, tmp_path / "data", options, tap_layers=(9,))
    with pytest.raises(ValueError, match="--drafter or from --tap-layers"):
        make(target, tmp_path / "data", options, drafter="/x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    with pytest.raises(ValueError, match="exists already"):
        make(target, tmp_path / "full", options)
    assert [p.name for p in tmp_path.iterdir()] == ["full"]
