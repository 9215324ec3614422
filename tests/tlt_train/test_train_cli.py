"""``tlt drafter train`` as it is typed: recorded data, live rollouts, two processes, what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine import LLM
from engine.cli import main
from engine.models.eagle_checkpoint import open_drafter
from engine.models.load_threads import one_torch_thread
from tests.conftest import ModelDirFactory
from tlt_train.metrics_log import read_rows

SMALL = (
    *("--num-threads", "1", "--draft-vocab-size", "256", "--tokens-per-step", "256"),
    *("--tokens-per-micro-batch", "256", "--warmup-steps", "2", "--train-dtype", "float32"),
)


@pytest.fixture(scope="module")
def target(make_model_dir: ModelDirFactory) -> str:
    return str(make_model_dir("llama", num_hidden_layers=4))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("prompts") / "p.txt"
    path.write_text("\n".join(f"Q{i}" for i in range(100)))
    return str(path)


@pytest.fixture(scope="module")
def data(target: str, prompts: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("data") / "rollouts"
    asked = ("--prompts", prompts, "--num-tokens", "1500", "--max-tokens", "40")
    with one_torch_thread():
        assert tlt("data", "--target", target, *asked, "--num-threads", "1", "--out", out) == 0
    return str(out)


def tlt(*arguments: Any) -> int:
    return main(["drafter", *(str(a) for a in arguments)])


def train(target: str, *arguments: Any) -> int:
    with one_torch_thread():
        return tlt("train", "--target", target, *SMALL, *arguments)


def test_live_rollouts(
    target: str, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--prompts", prompts, "--max-tokens", "30", "--batch", "4", "--tuner", "fixed")
    rounds = ("--live", "--round-tokens", "300", "--round-steps", "2", "--steps", "6")
    out = tmp_path / "head"
    assert train(target, *asked, *rounds, "--out", out, "--json") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == [f"round {i}, head {i}" for i in range(3)]
    assert "no drafts" in lines[0]
    assert "acceptance length" in lines[1]
    assert "trainer's estimate" in lines[1]
    assert f"written: {out}" in lines
    figures = json.loads(lines[-1])
    assert (figures["num_steps"], figures["num_rounds"], figures["draft_version"]) == (6, 3, 2)
    left = {path.name for path in out.iterdir()} - {"config.json", "model.safetensors"}
    assert left == {"checkpoints", "data", "live.json", "log", "start"}


def test_an_eagle_head_from_data_with_taps_that_it_does_not_read(
    target: str, data: str, tmp_path: Path
) -> None:
    out = tmp_path / "head"
    asked = ("--data", data, "--objective", "eagle1", "--steps", "3", "--out", out)
    assert train(target, *asked) == 0
    assert open_drafter(out, LLM(target, num_threads=1).config.model).config.kind == "eagle"


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(
    target: str, data: str, tmp_path: Path
) -> None:
    out = tmp_path / "head"
    (out / "log").mkdir(parents=True)
    (out / "log" / "metrics.jsonl").write_text('{"step": 1, "unix_s": 1.0, "loss": 99.0}\n')
    assert train(target, "--data", data, "--steps", "3", "--out", out, "--resume") == 0
    rows = read_rows(out / "log" / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3]
    assert all(row["loss"] < 99.0 for row in rows if "loss" in row)


def test_two_processes_learn_what_one_does(
    target: str, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # not the LK hybrid: its mixing weight is of the rows of one pass, which differ
    asked = ("--data", data, "--steps", "4", "--loss", "kl")
    assert train(target, *asked, "--out", tmp_path / "one") == 0
    command = (
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("-m", "engine.cli", "drafter", "train", "--target", target, *SMALL, *asked),
    )
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "two")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("4 steps in") == 1  # one of them speaks
    losses = [
        [
            row["loss"]
            for row in read_rows(tmp_path / name / "log" / "metrics.jsonl")
            if "loss" in row
        ]
        for name in ("one", "two")
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--live", "--data", "x", "--steps", "1"), "--live rolls prompts out"),
        (("--prompts", "x", "--steps", "1"), "with --steps give --data or --live"),
        (("--live", "--steps", "1"), "give one of these"),
        (("--live", "--prompts", "x", "--steps", "1", "--rollout-share", "1"), "--rollout-share"),
        (("--live", "--prompts", "x", "--steps", "1", "--minutes", "1"), "--minutes or by --steps"),
    ],
)
def test_what_is_refused(
    arguments: tuple[str, ...],
    message: str,
    target: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train(target, *arguments, "--out", tmp_path / "head") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "head").exists()
