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
        ["drafter", "data", "--out", "/nowhere/x"],
        ["drafter", "data", "--out", "/nowhere/x", "--tasks", "gcd"],
        ["drafter", "data", "--out", "/nowhere/x", "--prompts", "/nowhere/p.txt"],
        ["drafter", "data", "--out", "x", "--prompts", "y", "--temperature", "hot"],
        ["drafter", "data", "--out", "x", "--prompts", "y", "--tap-layers", "1.5"],
        ["drafter", "eval", "--tasks", "gcd"],
        ["drafter", "eval", "--drafter", "/nowhere", "--tasks", "gcd", "--prompts", "x"],
        ["drafter", "eval", "--drafter", "/nowhere", "--prompts", "x", "--draft-sampling", "best"],
        ["drafter", "export", "--drafter", "/nowhere", "--format", "gguf", "--out", "x"],
        ["drafter", "export", "--drafter", "/nowhere", "--format", "eagle3", "--out", "/nowhere/x"],
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


def prompt_file(path: Path) -> str:
    path.write_text("\n".join(json.dumps({"prompt": f"Count from {i}."}) for i in range(40)))
    return str(path)


def test_a_drafter_from_data_to_export(
    make_model_dir: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command of ``tlt drafter`` but the training, one after the other."""
    target = str(make_model_dir("llama", num_hidden_layers=7))
    prompts = prompt_file(tmp_path / "p.jsonl")
    head, data, out = (str(tmp_path / name) for name in ("head", "data", "out"))
    shared = ["--target", target]
    timid = ["--num-threads", "1"]
    assert main(["drafter", "init", *shared, "--out", head, "--dtype", "float32"]) == 0
    arguments = ["data", *shared, "--prompts", prompts, "--max-tokens", "8", "--drafter", head]
    arguments += ["--temperature", "1,0", "-n", "2", "--batch", "6", "--out", data, "--json"]
    assert main(["drafter", *arguments, *timid]) == 0
    lines = capsys.readouterr().out.splitlines()
    figures = json.loads(lines[-1])
    assert figures["num_dropped_tokens"] == 0
    assert figures["tap_layers"] == [2, 3, 4]
    assert f"{figures['num_sequences']} sequences of {figures['num_tokens']} tokens" in "".join(
        lines
    )
    record = tmp_path / "record.jsonl"
    arguments = ["eval", *shared, "--drafter", head, "--prompts", prompts, "--temperatures", "0,1"]
    arguments += ["--max-tokens", "8", "--depth", "2", "--num-prompts", "3", "--num-timed", "1"]
    arguments += ["--rounds", "1", "--json", str(record)]
    assert main(["drafter", *arguments, *timid]) == 0
    shown = capsys.readouterr().out
    assert "acceptance on 3 held-out prompts, chains of 2, up to 8 tokens" in shown
    found = json.loads(shown.splitlines()[-1])
    assert found == json.loads(record.read_text())
    assert [(r["temperature"], r["draft_sampling"]) for r in found["results"]] == [
        (0.0, "greedy"),
        (1.0, "coupled"),
        (1.0, "mode"),
    ]
    assert found["verified"]
    arguments = ["export", *shared, "--drafter", head, "--format", "speculators", "--out", out]
    assert main(["drafter", *arguments, "--dtype", "bfloat16"]) == 0
    assert "written for the speculators library's EAGLE-3: vLLM" in capsys.readouterr().out
    config = json.loads((Path(out) / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == target


def test_an_evaluation_of_other_tokens_has_status_1(
    tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tlt_train import evaluate

    record = {"verified": False, "depth": 1, "held_out": True, "num_prompts": 1, "max_tokens": 2}
    record |= {"results": [], "rounds": 0, "failures": {}}
    monkeypatch.setattr(evaluate, "evaluate", lambda *a, **k: record)
    arguments = ["eval", "--target", str(tiny_llama_dir), "--drafter", "x", "--prompts", "y"]
    assert main(["drafter", *arguments]) == 1


def test_the_words_of_a_command_do_not_import_it() -> None:
    code = "import sys, engine.cli; engine.cli._parser(); print(*[m for m in sys.modules if 'tlt_train.' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    words = {"cli", "cli_options", "train_cli", "config", "live_options", "sft_cli", "sft_options"}
    assert set(done.stdout.split()) <= {f"tlt_train.{name}" for name in words}
