"""``train_drafter`` from prompts to an engine that drafts: what the trainer promises is what the engine accepts."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import LLM, SamplingParams
from engine.config import ModelConfig
from engine.models.eagle_checkpoint import open_drafter
from engine.models.load_threads import one_torch_thread
from engine.models.loader import open_checkpoint
from tests.conftest import ModelDirFactory, tiny_config
from tests.tlt_train.heads import make_sequence
from tlt_train import train_data
from tlt_train.attention import ActiveRun
from tlt_train.config import TrainConfig
from tlt_train.drafter import DrafterNetwork
from tlt_train.fixed_data import split_held_out
from tlt_train.generate import DataOptions
from tlt_train.metrics_log import read_rows
from tlt_train.new_head import read_target
from tlt_train.objective import DraftObjective, Measured
from tlt_train.packing import pack
from tlt_train.sequence import TrainingSequence, TrainingWindow
from tlt_train.shards import ShardReader, ShardWriter
from tlt_train.train import TrainOptions, train_drafter
from tlt_train.training_run import RunOptions, TrainingRun

DEPTH = 5
MAX_TOKENS = 80
KINDS = ("eagle3", "eagle")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


@pytest.fixture(scope="module")
def target(make_model_dir: ModelDirFactory) -> str:
    return str(make_model_dir("llama"))


def settings(kind: str, **changes: Any) -> TrainConfig:
    given: dict[str, Any] = {
        "dtype": "float32", "unroll_depth": DEPTH, "learning_rate": 5e-3, "warmup_steps": 5,
        "tokens_per_step": 512, "tokens_per_micro_batch": 512,
    }  # fmt: skip
    return TrainConfig.of("eagle3" if kind == "eagle3" else "hass", **(given | changes))


# ---- what the engine accepts


@pytest.fixture(scope="module", params=KINDS)
def trained(
    request: pytest.FixtureRequest, target: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """(kind, directory of a head trained on greedy rollouts of the tiny target; its data lie in ``data``)."""
    path = tmp_path_factory.mktemp("trained")
    (path / "p.txt").write_text("\n".join(f"What is {i} times {i + 3}?" for i in range(24)))
    generate = DataOptions(
        prompts=str(path / "p.txt"), temperatures=(0.0,), max_tokens=MAX_TOKENS, min_tokens=1
    )
    options = TrainOptions(
        generate=generate,
        steps=50,
        kind=request.param,
        draft_vocab_size=200,
        held_out_share=0.0,
        config=settings(request.param),
        run=RunOptions(checkpoint_every=0, show_progress=False),
        out_dtype="float32",
    )
    with one_torch_thread():
        figures = train_drafter(target, path / "out", options, num_threads=1)
    assert figures["num_steps"] == 50
    assert not figures["was_stopped"]
    return request.param, path / "out"


def network_of(head: Path, target: str) -> tuple[DrafterNetwork, torch.Tensor]:
    opened = open_checkpoint(target)
    found = open_drafter(head, opened.config)
    embedding, target_head = read_target(opened.weights, opened.config)
    return DrafterNetwork(found.config, found.tensors, embedding, target_head), target_head


def packed(sequence: TrainingSequence, kind: str) -> Any:
    if kind == "eagle":
        sequence = replace(sequence, features=sequence.features[:, -64:])
    windows = [TrainingWindow(sequence, 0, sequence.num_tokens)]
    return pack(windows, num_taps=3 if kind == "eagle3" else 0, hidden_size=64)


def decode(
    target: str, head: Path, kind: str, sequences: list[TrainingSequence]
) -> tuple[list[list[int]], Any]:
    """(prompt and answer of each prompt at temperature 0, the engine's counters)."""
    llm = LLM(
        target,
        num_threads=1,
        speculative_config={
            "method": kind, "model": str(head), "tuner": "fixed", "num_speculative_tokens": DEPTH,
            "on_acceptance_drop": "ignore",
        },
    )  # fmt: skip
    prompts = [{"prompt_token_ids": s.token_ids[: s.prompt_len].tolist()} for s in sequences]
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    found = llm.generate(prompts, params)
    texts = [list(o.prompt_token_ids) + list(o.outputs[0].token_ids) for o in found]
    return texts, llm.engine.counters


def promised(
    network: DrafterNetwork, kind: str, sequence: TrainingSequence, text: list[int]
) -> tuple[int, list[int]]:
    """(drafts, accepted by position) of decoding ``text`` with chains, from the rows of the unrolled head alone."""
    batch = packed(sequence, kind)
    count = sequence.num_tokens
    assert batch.token_ids.tolist() == text[:-1]
    guesses: dict[tuple[int, int], int] = {}
    with torch.no_grad():
        for step in network.unroll(batch, (ActiveRun(0, 0, count - 1),), DEPTH):
            ids = network.target_ids[step.logits.argmax(-1)].tolist()
            for row, token in zip(step.rows.tolist(), ids, strict=True):
                guesses[row, step.depth] = token
    known, end = sequence.prompt_len + 1, sequence.prompt_len + MAX_TOKENS
    num_drafts, accepted = 0, [0] * DEPTH
    while known < len(text):
        length = min(DEPTH, end - known - 1)
        depth = 0
        num_drafts += length > 0
        while depth < length and known + depth < len(text):
            if guesses[known - 2, depth] != text[known + depth]:
                break
            accepted[depth] += 1
            depth += 1
        known += depth + 1
    return num_drafts, accepted


def test_the_engine_accepts_what_the_trainer_says(trained: tuple[str, Path], target: str) -> None:
    """Draft by draft: one function, one alignment, one window in both. A shift by one shows at once."""
    kind, out = trained
    sequences = [s for s in ShardReader(out / "data") if s.is_finished]
    texts, counters = decode(target, out, kind, sequences)
    network, head = network_of(out, target)
    num_drafts, accepted = 0, [0] * DEPTH
    for sequence, text in zip(sequences, texts, strict=True):
        drafts, found = promised(network, kind, sequence, text)
        num_drafts += drafts
        accepted = [a + b for a, b in zip(accepted, found, strict=True)]
    # features are bf16 in the data: a guess may turn over
    assert counters.num_drafts == pytest.approx(num_drafts, rel=0.02)
    assert counters.num_accepted_per_position == pytest.approx(accepted, rel=0.03, abs=2)

    measured = Measured.zero(DEPTH)
    objective = DraftObjective(network, settings(kind, regression_weight=0.0), head)
    for sequence in sequences:
        measured = measured + objective.loss(packed(sequence, kind), 1.0)[1]
    length = 1 + counters.num_accepted_draft_tokens / counters.num_drafts
    assert length == pytest.approx(measured.acceptance_length("agrees"), rel=0.2)
    assert length > 2.0

    fresh = decode(target, out / "start", kind, sequences)
    assert fresh[0] == texts  # lossless
    untrained = 1 + fresh[1].num_accepted_draft_tokens / fresh[1].num_drafts
    assert length - 1 > 3 * (untrained - 1)


# ---- runs that stop and go on


@pytest.fixture(scope="module")
def data(target: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Random tokens and features, one sequence far longer than all others."""
    out = tmp_path_factory.mktemp("data") / "d"
    with ShardWriter(out, tap_layers=(0, 1, 2), hidden_size=64, target=target) as writer:
        for i in range(12):
            writer.add(make_sequence(f"s{i}", 8 + i, prompt_len=3))
        writer.add(make_sequence("long", 60, prompt_len=3))
    return str(out)


def options_of(source: str, **changes: Any) -> TrainOptions:
    run = {"checkpoint_every": 3, "validate_every": 4, "show_progress": False}
    run |= changes.pop("run", {})
    kind = changes.get("kind", "eagle3")
    sizes = {"tokens_per_step": 64, "tokens_per_micro_batch": 32, "unroll_depth": 2}
    given: dict[str, Any] = {
        "data": (source,), "steps": 8, "held_out_share": 0.2, "draft_vocab_size": 100,
        "config": settings(kind, **(sizes | changes.pop("config", {}))),
        "run": RunOptions(**run), "out_dtype": "float32",
    }  # fmt: skip
    return TrainOptions(**(given | changes))


def stop_after(num_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A SIGTERM between two steps, as Ctrl-C or a cluster sends it."""
    plain = TrainingRun._after

    def after(self: TrainingRun, *given: Any) -> None:
        plain(self, *given)
        if self.trainer.num_steps == num_steps:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(TrainingRun, "_after", after)


def losses_of(out: Path, name: str = "loss") -> list[tuple[int, float]]:
    return [(r["step"], r[name]) for r in read_rows(out / "log" / "metrics.jsonl") if name in r]


def same_head(one: Path, other: Path, target: str) -> bool:
    model = open_checkpoint(target).config
    heads = [open_drafter(path, model).tensors for path in (one, other)]
    return all(torch.equal(heads[0][n], heads[1][n]) for n in heads[0])


@pytest.fixture(scope="module")
def unbroken(target: str, data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unbroken") / "out"
    with one_torch_thread():
        figures = train_drafter(target, out, options_of(data))
    assert not figures["was_stopped"]
    assert [step for step, _ in losses_of(out)] == list(range(1, 9))
    return out


@pytest.mark.parametrize("stop", [1, 3, 7])
def test_a_run_that_was_stopped_goes_on_with_the_same_bits(
    target: str, data: str, unbroken: Path, stop: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    out = tmp_path / "out"
    former = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        stop_after(stop, patch)
        figures = train_drafter(target, out, options_of(data))
    assert signal.getsignal(signal.SIGTERM) is former
    assert figures["was_stopped"]
    assert figures["num_steps"] == stop
    assert not (out / "config.json").exists()
    with pytest.raises(ValueError, match="--resume to go on with it"):
        train_drafter(target, out, options_of(data))
    figures = train_drafter(target, out, options_of(data, run={"resume": True}))
    assert not figures["was_stopped"]
    assert losses_of(out) == losses_of(unbroken)
    for name in ("validation/loss_1", "train/acceptance_1", "grad_norm", "learning_rate"):
        assert losses_of(out, name) == losses_of(unbroken, name)
    assert same_head(out, unbroken, target)


class Killed(Exception):
    pass


@pytest.mark.parametrize("kill", [2, 5])
def test_a_run_that_was_killed_goes_on_from_its_checkpoint_with_the_same_bits(
    target: str, data: str, unbroken: Path, kill: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Before the first checkpoint too: it begins again, and its log with it."""
    out = tmp_path / "out"

    def die(self: TrainingRun, *given: Any) -> None:
        plain(self, *given)
        if self.trainer.num_steps == kill:
            raise Killed

    plain = TrainingRun._after
    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "_after", die)
        with pytest.raises(Killed):
            train_drafter(target, out, options_of(data))
    assert len(losses_of(out)) == kill
    train_drafter(target, out, options_of(data, run={"resume": True}))
    assert losses_of(out) == losses_of(unbroken)
    assert same_head(out, unbroken, target)


def test_steps_that_are_asked_for_when_going_on_are_those_that_are_run(
    target: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_after(2, patch)
        train_drafter(target, tmp_path / "out", options_of(data, steps=4))
    options = options_of(data, steps=6, run={"resume": True})
    assert train_drafter(target, tmp_path / "out", options)["num_steps"] == 6


def test_a_finished_head_is_left_alone(target: str, data: str, unbroken: Path) -> None:
    for resume in (False, True):
        with pytest.raises(ValueError, match="holds a finished head"):
            train_drafter(target, unbroken, options_of(data, run={"resume": resume}))


def test_a_head_is_gone_on_with(target: str, data: str, unbroken: Path, tmp_path: Path) -> None:
    """Its first loss is that of the head, not of a new one."""
    options = options_of(data, drafter=str(unbroken), steps=1, draft_vocab_size=7)
    train_drafter(target, tmp_path / "out", options)
    assert same_head(tmp_path / "out" / "start", unbroken, target)
    first, again = losses_of(unbroken)[0][1], losses_of(tmp_path / "out")[0][1]
    assert again < 0.9 * first


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_held_out_may_be_longer_than_what_is_trained_on(
    target: str, tmp_path: Path, kind: str
) -> None:
    """The rotary table must reach both; EAGLE-1 reads the final state of data with taps."""
    names = [f"s{i}" for i in range(12)]
    held_out = split_held_out([make_sequence(name, 8) for name in names], 0.3)[1]
    longer = {sequence.key for sequence in held_out}
    with ShardWriter(tmp_path / "d", tap_layers=(0, 1, 2), hidden_size=64, target=target) as writer:
        for name in names:
            writer.add(make_sequence(name, 50 if name in longer else 8))
    options = options_of(str(tmp_path / "d"), kind=kind, held_out_share=0.3, steps=2)
    figures = train_drafter(target, tmp_path / "out", options)
    assert figures["num_sequences"] == 12 - len(longer) < 12
    assert len(figures["held_out_acceptance"]) == 2
    assert figures["held_out_accuracy_length"] >= 1.0
    model = ModelConfig.from_hf(tiny_config("llama"))
    assert open_drafter(tmp_path / "out", model).config.kind == kind


def test_a_step_that_is_not_finite_is_written_down(
    target: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(train_data, "_is_finite", lambda sequence: True)  # as live data may be
    with ShardWriter(tmp_path / "d", tap_layers=(0, 1, 2), hidden_size=64, target=target) as writer:
        for i in range(6):
            sequence = make_sequence(f"s{i}", 20, prompt_len=3)
            if i == 2:
                sequence.features[7] = 0x7FC0
            writer.add(sequence)
    caplog.set_level(logging.WARNING)
    out = tmp_path / "out"
    options = options_of(str(tmp_path / "d"), held_out_share=0.0, config={"tokens_per_step": 40})
    train_drafter(target, out, options)
    skipped = [step for step, loss in losses_of(out) if np.isnan(loss)]
    assert 0 < len(skipped) < 8
    assert losses_of(out, "num_skipped_steps")[-1] == (8, float(len(skipped)))
    assert "is skipped" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"minutes": 1.0}, "--minutes or by --steps"),
        ({"steps": None}, "--minutes or by --steps"),
        ({"steps": 0}, "--steps must be above 0, got 0"),
        ({"steps": None, "minutes": float("nan")}, "--minutes must be above 0, got nan"),
        ({"keep": 0}, "--keep must be above 0"),
        ({"draft_vocab_size": 0}, "--draft-vocab-size must be above 0"),
        ({"held_out_share": 1.0}, "--held-out-share must be from 0 to below 1"),
        ({"data": ()}, "--data, or are made from"),
        ({"generate": DataOptions(prompts="x")}, "--data, or are made from"),
    ],
)
def test_bad_options_are_refused(data: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options_of(data, **changes)


def test_data_that_do_not_fit_are_refused(
    target: str, data: str, unbroken: Path, tmp_path: Path
) -> None:
    other, short = tmp_path / "other", tmp_path / "short"
    with ShardWriter(other, tap_layers=(0, 1), hidden_size=64, target=target) as writer:
        writer.add(make_sequence("a", 9, num_taps=2))
    with ShardWriter(short, tap_layers=(0, 1, 2), hidden_size=64, target=target) as writer:
        writer.add(make_sequence("a", 2))

    def refused(message: str, given: TrainOptions, model: str = target) -> None:
        with pytest.raises(ValueError, match=message):
            train_drafter(model, tmp_path / "out", given)
        assert not list((tmp_path / "out").iterdir())

    refused(r"taps layers \[0, 1\] .* one kind", options_of(data, data=(data, str(other))))
    refused("no sequence of more than two positions", options_of(str(short)))
    refused(f"is of the target '{target}', not of 'smollm2'", options_of(data), "smollm2")
    out = tmp_path / "taps"
    with pytest.raises(ValueError, match=r"reads layers \[0, 1, 2\], the data have \[0, 1\]"):
        train_drafter(target, out, options_of(str(other), drafter=str(unbroken)))
