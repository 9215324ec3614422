"""``tlt check lossless`` says yes to this engine, and no, with where and why, to engines that were broken for it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine import step_plan
from engine.check_lossless import _first_difference
from engine.cli import main
from engine.outputs import CompletionOutput, Logprob
from engine.spec.oracle import OracleDrafter
from engine.spec.tree import DraftTree


def check(
    model: Path, capsys: pytest.CaptureFixture[str], *more: str
) -> tuple[int, str, dict[str, Any]]:
    """(status, what was printed, its last line as JSON)."""
    arguments = ["check", "lossless", "--model", str(model), "--kv-cache-bytes", "1000000"]
    arguments += ["--tuners", "fixed", "--batch-sizes", "1,4", "--seeds", "1", "--max-tokens", "16"]
    arguments += ["--drafters", "oracle:0.7", "--num-threads", "1"]
    status = main([*arguments, *more])
    out = capsys.readouterr().out
    return status, out, json.loads(out.splitlines()[-1])


def test_this_engine_is_lossless(tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, result = check(tiny_llama_dir, capsys, "--temperatures", "0,0.7,1")
    assert status == 0
    assert out.count("oracle:0.7") == 2
    assert result["lossless"]
    assert result["num_samples"] == 2 * 6 * 3
    assert result["num_accepted_draft_tokens"] > 50
    assert result["max_logprob_difference"] == 0.0
    assert result["first_difference"] is None


def test_a_walk_that_accepts_too_much_is_found(
    tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def trusting(tree: DraftTree, drawn: Sequence[int | None]) -> list[int]:
        return list(range(len(tree)))

    monkeypatch.setattr(step_plan, "walk", trusting)
    status, out, result = check(tiny_llama_dir, capsys)
    assert status == 1
    assert not result["lossless"]
    first = result["first_difference"]
    assert first["setting"] == {"drafter": "oracle:0.7", "tuner": "fixed", "batch_size": 1}
    assert f"first difference: {first['what']} at output position {first['position']}" in out
    assert repr(first["case"]["prompt"]) in out
    assert ">>>" in first["plain"]
    assert ">>>" in first["speculated"]


def test_a_drafter_that_fails_is_no_proof(
    tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: OracleDrafter, jobs: object) -> list[DraftTree]:
        raise RuntimeError("broken")

    monkeypatch.setattr(OracleDrafter, "propose", fail)
    status, out, result = check(tiny_llama_dir, capsys)
    assert status == 1
    assert result["num_different"] == 0
    assert "FAILED oracle: RuntimeError('broken')" in out
    assert "no draft token was accepted" in out


def completion(tokens: Sequence[int], shift: float = 0.0, **more: Any) -> CompletionOutput:
    logprobs = [
        {token: Logprob(-1.0 + (shift if i == 2 else 0.0), 1, None)}
        for i, token in enumerate(tokens)
    ]
    return CompletionOutput(0, "", list(tokens), logprobs=logprobs, **more)


@pytest.mark.parametrize(
    ("got", "at", "what"),
    [
        (completion([1, 2, 3]), 3, None),
        (completion([1, 9, 3]), 1, "token"),
        (completion([1, 2]), 2, "number of tokens"),
        (completion([1, 2, 3], shift=1e-3), 2, "log-probability, by 0.001"),
        (completion([1, 2, 3], shift=1e-7), 3, None),
        (completion([1, 2, 3], shift=math.nan), 2, "log-probability, by nan"),
        (completion([1, 2, 3], finish_reason="length"), 3, "finish_reason or text"),
    ],
)
def test_every_kind_of_difference_is_seen(got: CompletionOutput, at: int, what: str | None) -> None:
    assert _first_difference(got, completion([1, 2, 3]), 1e-6)[:2] == (at, what)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--batch-sizes", "0"),
        ("--batch-sizes", ","),
        ("--batch-sizes", "99999999999999999999"),
        ("--drafters", "sufix"),
        ("--drafters", "oracle:often"),
        ("--drafters", "eagle3"),
        ("--tuners", "magic"),
        ("--temperatures", "warm"),
        ("--seeds", "0"),
        ("--seeds", "99999999999999999999"),
        ("--seeds", "two"),
        ("--logprob-tolerance", "nan"),
        ("--logprob-tolerance", "-1"),
        ("--logprob-tolerance", "inf"),
    ],
)
def test_bad_options_are_one_line_and_status_2(
    tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    assert main(["check", "lossless", "--model", str(tiny_llama_dir), option, value]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("tlt check: ")
    assert captured.err.count("\n") == 1
