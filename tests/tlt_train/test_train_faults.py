"""What goes wrong around a run: full disks, kills, two runs at once, other options, data that are worth nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.cli import main
from engine.models.eagle_checkpoint import open_drafter
from engine.models.load_threads import one_torch_thread
from engine.models.loader import open_checkpoint
from tests.conftest import ModelDirFactory
from tests.tlt_train.heads import make_config, make_sequence, make_trainer
from tlt_train import checkpoint as checkpoint_module
from tlt_train import train_process
from tlt_train.checkpoint import CheckpointStore
from tlt_train.config import TrainConfig
from tlt_train.metrics_log import MetricsLog, read_rows
from tlt_train.shards import ShardWriter
from tlt_train.train import TrainOptions, train_drafter
from tlt_train.train_cli import _plain
from tlt_train.training_run import RunOptions, TrainingRun

NAN = 0x7FC0


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


@pytest.fixture(scope="module")
def target(make_model_dir: ModelDirFactory) -> str:
    return str(make_model_dir("llama"))


def write_data(
    path: Path, target: str, *, bad: int = 0, prompt_len: int = 3, count: int = 8
) -> str:
    """``bad`` of the sequences have one row that is not finite."""
    with ShardWriter(path, tap_layers=(0, 1, 2), hidden_size=64, target=target) as writer:
        for i in range(count):
            sequence = make_sequence(f"s{i}", 12 + i, prompt_len=prompt_len)
            if i < bad:
                sequence.features[7] = NAN
            writer.add(sequence)
    return str(path)


@pytest.fixture(scope="module")
def data(target: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_data(tmp_path_factory.mktemp("data") / "d", target)


def options_of(source: str, **changes: Any) -> TrainOptions:
    run = {"checkpoint_every": 2, "validate_every": 0, "show_progress": False}
    sizes: dict[str, Any] = {
        "dtype": "float32", "tokens_per_step": 64, "tokens_per_micro_batch": 64, "unroll_depth": 2,
    }  # fmt: skip
    given: dict[str, Any] = {
        "data": (source,), "steps": 8, "held_out_share": 0.0, "draft_vocab_size": 100,
        "config": TrainConfig.of("eagle3", **(sizes | changes.pop("config", {}))),
        "run": RunOptions(**(run | changes.pop("run", {}))),
    }  # fmt: skip
    return TrainOptions(**(given | changes))


def is_head(path: Path, target: str) -> bool:
    return open_drafter(path, open_checkpoint(target).config).path == path


def fail_saves(monkeypatch: pytest.MonkeyPatch, steps: tuple[int, ...]) -> None:
    plain = checkpoint_module.write_checkpoint

    def write(path: Path, step: int, *rest: Any) -> None:
        if step in steps:
            raise OSError(28, "No space left on device")
        plain(path, step, *rest)

    monkeypatch.setattr(checkpoint_module, "write_checkpoint", write)


# ---- full disks


@pytest.mark.parametrize("steps", [(2,), (8,), (2, 4, 6, 8)])
def test_a_checkpoint_that_was_not_written_costs_no_head(
    target: str, data: str, steps: tuple[int, ...], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    fail_saves(monkeypatch, steps)
    figures = train_drafter(target, tmp_path / "out", options_of(data))
    assert not figures["was_stopped"]
    assert is_head(tmp_path / "out", target)
    assert ("cannot be gone on with" in caplog.text) == (8 in steps)


def test_a_newer_save_makes_good_for_one_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_saves(monkeypatch, (2,))
    with CheckpointStore(tmp_path) as store:
        store.save(2, {}, {})
        store.save(3, {}, {})
        store.wait()
        assert (store.num_failed, store.steps()) == (1, [3])


# ---- kills and two at once


def test_a_second_run_in_the_directory_is_refused_and_the_log_of_the_first_stays(
    target: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_module, "LOCK_WAIT_S", 0.01)
    out, refused = tmp_path / "out", []
    plain = TrainingRun._after

    def after(self: TrainingRun, *given: Any) -> None:
        plain(self, *given)
        if self.trainer.num_steps == 1 and not refused:  # before the first save
            refused.append(True)
            with pytest.raises(ValueError, match="another process saves checkpoints"):
                train_drafter(target, out, options_of(data, run={"resume": True}))

    monkeypatch.setattr(TrainingRun, "_after", after)
    train_drafter(target, out, options_of(data))
    rows = read_rows(out / "log" / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 9))
    assert refused


def test_a_start_that_is_not_whole_is_made_anew(target: str, data: str, tmp_path: Path) -> None:
    train_drafter(target, tmp_path / "one", options_of(data, steps=2))
    whole = (tmp_path / "one" / "start" / "model.safetensors").read_bytes()
    for name, text in (("none", None), ("empty", ""), ("cut", '{"model_type"')):
        start = tmp_path / name / "start"
        start.mkdir(parents=True)
        (start / "model.safetensors").write_bytes(whole[:1000])
        if text is not None:
            (start / "config.json").write_text(text)
        train_drafter(target, start.parent, options_of(data, steps=2, run={"resume": True}))
        assert (start / "model.safetensors").read_bytes() == whole


def test_a_start_that_checkpoints_need_is_not_made_anew(
    target: str, data: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    train_drafter(target, out, options_of(data, steps=2))
    for path in (out / "config.json", out / "start" / "config.json"):
        path.unlink()
    with pytest.raises(ValueError, match="checkpoints beside it"):
        train_drafter(target, out, options_of(data, steps=4, run={"resume": True}))


@pytest.mark.parametrize("text", ["", '{"model_type": "lla'])
def test_a_config_that_was_cut_off_is_no_finished_head(
    text: str, target: str, data: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    train_drafter(target, out, options_of(data, steps=2))
    (out / "config.json").write_text(text)
    train_drafter(target, out, options_of(data, steps=4, run={"resume": True}))
    assert is_head(out, target)


def test_the_line_of_a_step_is_there_before_its_checkpoint(tmp_path: Path) -> None:
    """Whatever a kill leaves: what is resumed from has the lines of all its steps."""
    trainer = make_trainer(make_config(total_steps=3))
    options = RunOptions(checkpoint_every=1, validate_every=1, show_progress=False)
    found: list[tuple[int, set[int], set[int]]] = []
    with CheckpointStore(tmp_path / "c") as store, MetricsLog(tmp_path / "l") as log:
        plain = store.save

        def save(step: int, *rest: Any) -> None:
            rows = read_rows(tmp_path / "l" / "metrics.jsonl")
            lines = {r["step"] for r in rows if "loss" in r}
            found.append((step, lines, {r["step"] for r in rows if "validation/loss_1" in r}))
            plain(step, *rest)

        store.save = save  # type: ignore[method-assign]
        held_out = [make_sequence("h", 20)]
        TrainingRun(trainer, options, store=store, log=log, held_out=held_out).run()
    for step, steps, validated in found:
        assert steps == validated == set(range(1, step + 1))


# ---- going on with something else


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": {"loss": "tv"}}, "loss was 'lk_hybrid' and is 'tv'"),
        ({"config": {"unroll_depth": 3}}, "unroll_depth was 2 and is 3"),
        ({"config": {"learning_rate": 0.5}}, "learning_rate was 0.002 and is 0.5"),
        ({"config": {"seed": 3, "window": 64}}, "seed was 0 and is 3, window was 512 and is 64"),
        ({"held_out_share": 0.3}, "options held_out_share was 0.0 and is 0.3"),
        ({"draft_vocab_size": 90}, "options draft_vocab_size was 100 and is 90"),
        ({"data": ("others", {"count": 7})}, "data num_sequences was 8 and is 7"),
        ({"data": ("lengths", {"prompt_len": 4})}, "data keys_and_lengths was"),
    ],
)
def test_a_run_is_gone_on_with_as_it_was(
    changes: dict[str, Any], message: str, target: str, data: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    train_drafter(target, out, options_of(data, steps=2))
    (out / "config.json").unlink()
    log = (out / "log" / "metrics.jsonl").read_bytes()
    if "data" in changes:
        name, given = changes["data"]
        changes = {"data": (write_data(tmp_path / name, target, **given),)}
    with pytest.raises(ValueError, match=message):
        train_drafter(
            target, out, options_of(data, **{"steps": 4, "run": {"resume": True}} | changes)
        )
    assert (out / "log" / "metrics.jsonl").read_bytes() == log
    assert not (out / "config.json").exists()


def test_the_number_of_steps_may_differ(target: str, data: str, tmp_path: Path) -> None:
    """And so may where the same data lie."""
    train_drafter(target, tmp_path / "out", options_of(data, steps=2))
    (tmp_path / "out" / "config.json").unlink()
    moved = write_data(tmp_path / "moved", target)
    figures = train_drafter(
        target, tmp_path / "out", options_of(moved, steps=3, run={"resume": True})
    )
    assert figures["num_steps"] == 3


# ---- what is not finite, and nothing to learn


def command(target: str, source: str, out: Path, *more: str) -> int:
    sizes = ("--draft-vocab-size", "100", "--tokens-per-step", "64", "--num-threads", "1")
    given = ("--target", target, "--data", source, "--out", str(out), *sizes, *more)
    return main(["drafter", "train", *given])


@pytest.mark.parametrize("steps", ["60", "5"])
def test_a_rate_that_is_too_high_is_one_line_and_no_head(
    steps: str, target: str, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rate = ("--steps", steps, "--learning-rate", "1e30", "--warmup-steps", "0")
    assert command(target, data, tmp_path / "out", *rate) == 2
    captured = capsys.readouterr()
    assert "no head is written" in captured.err
    assert "Traceback" not in captured.err
    assert "written:" not in captured.out
    assert not (tmp_path / "out" / "config.json").exists()


def test_sequences_that_are_not_finite_are_left_out(
    target: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mixed = write_data(tmp_path / "mixed", target, bad=1)
    figures = train_drafter(target, tmp_path / "out", options_of(mixed, held_out_share=0.4))
    assert figures["held_out_acceptance_length"] >= 1.0  # not NaN
    assert "1 of 8 sequences have features that are not finite" in caplog.text
    losses = [
        r["loss"] for r in read_rows(tmp_path / "out" / "log" / "metrics.jsonl") if "loss" in r
    ]
    assert all(loss == loss for loss in losses)
    bad = write_data(tmp_path / "bad", target, bad=8)
    with pytest.raises(ValueError, match="all 8 sequences of the data have features that are not"):
        train_drafter(target, tmp_path / "other", options_of(bad))


def test_data_without_a_response_are_refused(target: str, tmp_path: Path) -> None:
    prompts = write_data(tmp_path / "prompts", target, prompt_len=40)
    with pytest.raises(ValueError, match="none of the 8 sequences to train on has a response"):
        train_drafter(target, tmp_path / "out", options_of(prompts))
    options = options_of(prompts, steps=1, config={"learn_prompts": True})
    assert train_drafter(target, tmp_path / "other", options)["num_steps"] == 1


def test_no_step_is_no_head(target: str, data: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no time for a step; give more --minutes"):
        train_drafter(target, tmp_path / "out", options_of(data, steps=None, minutes=1e-9))
    assert not (tmp_path / "out" / "config.json").exists()


def test_json_has_no_nan() -> None:
    figures = {"a": float("nan"), "b": [1.0, float("inf")], "c": 2, "d": "x", "e": True}
    text = json.dumps(_plain(figures), allow_nan=False)
    assert json.loads(text) == {"a": None, "b": [1.0, None], "c": 2, "d": "x", "e": True}


# ---- options


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--steps", "2", "--checkpoint-every", "-1"), "--checkpoint-every must be a number"),
        (("--steps", "2", "--validate-every", "-1"), "--validate-every must be a number"),
        (("--steps", "2", "--keep", "0"), "--keep must be above 0"),
        (("--minutes", "inf"), "--minutes must be finite"),
    ],
)
def test_options_out_of_range_are_refused_by_name(
    given: tuple[str, ...], message: str, target: str, data: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert command(target, data, tmp_path / "out", *given) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_group_reduces_on_the_cpu_whatever_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(train_process.dist, "init_process_group", asked.append)
    monkeypatch.setattr(train_process.dist, "destroy_process_group", lambda: None)
    with train_process.trainer_group():
        pass
    assert asked == ["gloo"]
