"""The command line: each command runs on a tiny model, bad input is one line and status 2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.cli import main


def test_generate_prints_an_answer_for_each_prompt(
    tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "--model", str(tiny_llama_dir), "--max-tokens", "4", "-n", "2"]
    assert main([*arguments, "one", "two"]) == 0
    assert capsys.readouterr().out.count("--- ") == 4


def test_generate_json_is_one_line_a_prompt(
    tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "--model", str(tiny_llama_dir), "--max-tokens", "4", "--json"]
    assert main([*arguments, "--chat", "one", "two"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["one", "two"]
    assert all(len(line["outputs"][0]["token_ids"]) <= 4 for line in lines)


def test_explain_names_the_backend_of_every_op(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--ops", "reference"]) == 0
    out = capsys.readouterr().out
    for op in ("linear", "attention", "sample"):
        line = next(line for line in out.splitlines() if line.startswith(op))
        assert "reference" in line


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "--model", "/no/such/model", "x"],
        ["generate", "--temperature", "-1", "x"],
        ["explain", "--ops", "fast"],
        ["demo", "--output", "/proc/nope/x.png"],
        ["demo", "--output", "/tmp"],
        ["generate", "--max-tokens", "many", "x"],
        ["generate", "--no-such-option", "x"],
        ["generate", "--model", "/nowhere", "x", "--two\nlines"],
        ["explain", "--num-threads"],
        ["drafter", "init"],
        ["drafter", "init", "--target", "x", "--output", "y", "--kind", "z"],
        ["check"],
        ["check", "lossless", "--seeds", "1.5"],
        ["replay", "record"],
        ["replay", "score", "x", "--tuner", "magic"],
        ["replay", "score", "x", "y", "z"],
        ["bench", "latency", "--rounds", "few"],
        ["bench", "nothing"],
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"tlt {arguments[0]}: ")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["no-such-command"], ["--no-such-option"]])
def test_no_command_is_one_line_and_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("tlt: ")
    assert captured.err.count("\n") == 1


def test_help_is_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "lossless", "--help"]) == 0
    assert "--logprob-tolerance" in capsys.readouterr().out


def test_demo_runs_its_whole_workload_and_draws_it(
    make_model_dir: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    model = make_model_dir("llama", max_position_embeddings=2048)
    picture = tmp_path / "demo.png"
    assert main(["demo", "--model", str(model), "--output", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "tokens of each rollout        3072" in out
    assert "tokens with and without speculation: identical" in out
    assert str(picture) in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_reader_that_has_seen_enough_is_no_traceback(tiny_llama_dir: Path) -> None:
    command = f"{sys.executable} -m engine.cli generate --model {tiny_llama_dir} -n 64 --max-tokens 64 x | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("--- x")
    assert "Traceback" not in done.stderr
