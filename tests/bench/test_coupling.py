"""The coupling bench runs whole on a tiny model, and its check is able to fail."""

from __future__ import annotations

import json

import pytest

from bench import coupling
from bench.main import main

ARGUMENTS = ["--num-prompts", "3", "--num-tokens", "20"]


@pytest.fixture(scope="module")
def small(make_model_dir) -> list[str]:
    path = make_model_dir("llama", max_position_embeddings=1024)
    return ["coupling", "--model", str(path), "--dtype", "float32", "--num-threads", "1"]


def test_the_whole_model_as_its_own_drafter_is_never_refused(small: list[str], capsys) -> None:
    """The exit behind the last layer gives the target's logits: coupled, the first proposal is the sample."""
    assert main([*small, *ARGUMENTS, "--exit-layer", "2"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["verified"] is True
    assert record["num_positions"] == 60
    likely, coupled = record["results"]
    assert coupled["acceptance"] == {"1": 1.0, "2": 1.0, "4": 1.0}
    assert likely["acceptance"]["1"] < 0.9


def test_noise_that_is_not_the_samplers_fails_the_bench(
    small: list[str], capsys, monkeypatch
) -> None:
    honest = coupling._rank

    def wrong(ours, logits, job, temperature, count):
        return honest(ours, logits, job, temperature, count).roll(1, 0)

    monkeypatch.setattr(coupling, "_rank", wrong)
    assert main([*small, *ARGUMENTS]) == 1
    assert "NOT every token" in capsys.readouterr().out


def test_what_cannot_be_is_refused(small: list[str], capsys) -> None:
    assert main([*small, "--exit-layer", "9"]) == 2
    assert "--exit-layer must be 0..2, got 9" in capsys.readouterr().err
