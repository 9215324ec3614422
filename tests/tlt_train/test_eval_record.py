"""Where the record of an evaluation goes is known before hours are spent on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.cli import main
from tlt_train import evaluate

RECORD = {"verified": True, "depth": 1, "held_out": True, "num_prompts": 1, "max_tokens": 2}
RECORD |= {"results": [], "rounds": 0, "failures": {}}
ARGUMENTS = ["drafter", "eval", "--drafter", "x", "--prompts", "y", "--json"]


def test_a_bad_path_is_refused_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(*_: Any, **__: Any) -> Any:
        raise AssertionError("measured first")

    monkeypatch.setattr(evaluate, "evaluate", measured)
    for path in (tmp_path / "none" / "r.jsonl", tmp_path):
        assert main([*ARGUMENTS, str(path)]) == 2
        error = capsys.readouterr().err
        assert f"--json {path} cannot be written" in error
    assert not (tmp_path / "none").exists()


def test_records_are_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "evaluate", lambda *_, **__: RECORD)
    path = tmp_path / "r.jsonl"
    for _ in range(2):
        assert main([*ARGUMENTS, str(path)]) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["eval"] for line in lines] == ["drafter", "drafter"]
