"""Faults of a run of data: prompts that cannot be answered, stops and kills, little shared memory, absurd numbers."""

from __future__ import annotations

import logging
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.cli import main
from engine.models.load_threads import one_torch_thread
from tests.conftest import ModelDirFactory
from tlt_train import generate as module
from tlt_train import rollouts as rollouts_module
from tlt_train.generate import DataOptions, generate_data, requests_of
from tlt_train.prompts import ChatPrompt
from tlt_train.rollouts import Rollouts, tap_bytes
from tlt_train.shards import ShardReader
from tlt_train.train import TrainOptions, train_drafter
from tlt_train.training_run import RunOptions


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


@pytest.fixture(scope="module")
def target(make_model_dir: ModelDirFactory) -> str:
    return str(make_model_dir("llama"))


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "p.txt"
    path.write_text("\n".join(f"What is {i} times {i + 3}?" for i in range(24)))
    return str(path)


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks whose questions have all the same length."""
    stream = (ChatPrompt.of(f"What is {i} plus {i}?", "x") for i in range(10**6, 10**7))
    monkeypatch.setattr(module, "training_prompts", lambda options: stream)


def make(target: str, out: Path, options: DataOptions, **more: Any) -> dict[str, Any]:
    return generate_data(target, out, options, show_progress=False, num_threads=1, **more)


def stop_after(num_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A SIGTERM between two steps of the rollouts."""
    step, count = Rollouts.step, 0

    def stepping(self: Rollouts) -> bool:
        nonlocal count
        count += 1
        if count == num_steps + 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self)

    monkeypatch.setattr(Rollouts, "step", stepping)


# ---- prompts that cannot be answered


@pytest.mark.usefixtures("endless")
def test_tasks_that_are_all_too_long_are_given_up(target: str, tmp_path: Path) -> None:
    options = DataOptions(tasks=("x",), num_tokens=100)
    with pytest.raises(ValueError, match="1000 questions in a row are too long") as caught:
        make(target, tmp_path / "data", options, max_model_len=8)
    assert "context of 8 tokens" in str(caught.value)
    assert "--max-model-len" in str(caught.value)
    assert not (tmp_path / "data").exists()


@pytest.mark.usefixtures("endless")
def test_a_stop_is_seen_while_prompts_are_passed_over(target: str, tmp_path: Path) -> None:
    asked = iter(range(10))
    options = DataOptions(tasks=("x",), num_tokens=100)
    figures = make(
        target, tmp_path / "data", options, max_model_len=8, should_stop=lambda: next(asked) == 2
    )
    assert figures["was_stopped"]
    assert 0 < figures["num_prompts_too_long"] < 1000
    assert list(tmp_path.iterdir()) == []


def test_tasks_that_run_dry_end_with_what_there_is(caplog: pytest.LogCaptureFixture) -> None:
    stream = (ChatPrompt.of("a" if i == 5 else "long", "x") for i in range(10**6))
    options = DataOptions(tasks=("x",), num_tokens=100)
    found = list(
        requests_of(stream, options, lambda p: [1] * (9 if p.turns[0][1] == "a" else 99), 50)
    )
    assert len(found) == 1006
    assert sum(one is not None for one in found) == 1
    assert "the run ends early: 1000 questions in a row are too long" in caplog.text


def test_a_long_file_goes_on_behind_prompts_that_are_too_long() -> None:
    stream = iter([ChatPrompt.of("long", "x")] * 3000 + [ChatPrompt.of("a", "x")])
    found = list(
        requests_of(stream, DataOptions(prompts="x"), lambda p: [1] * 30 * len(p.turns[0][1]), 50)
    )
    assert found[-1] is not None


def refusing(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    whole = ChatPrompt.token_ids

    def token_ids(self: ChatPrompt, tokenizer: Any) -> list[int]:
        if word in self.turns[0][1]:
            raise ValueError("the chat template refuses the messages: no")
        return whole(self, tokenizer)

    monkeypatch.setattr(ChatPrompt, "token_ids", token_ids)


def test_a_prompt_that_the_template_refuses_is_passed_over_and_counted(
    target: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing(monkeypatch, "What is 1")  # 1 and 10 to 19
    options = DataOptions(prompts=prompts, max_tokens=4, min_tokens=1)
    figures = make(target, tmp_path / "data", options)
    assert figures["num_prompts_refused"] > 2
    assert figures["num_sequences"] > 2
    assert figures["refusal"] == "the chat template refuses the messages: no"


# ---- nothing to write


@pytest.mark.parametrize(
    ("given", "more", "message"),
    [
        ({}, {"max_model_len": 8}, "prompts are too long for the context of 8 .*--max-model-len"),
        ({"min_tokens": 200}, {}, "all pieces are shorter than --min-tokens 200; lower it"),
        ({}, {"word": "What"}, "prompts are refused, the first because the chat template refuses"),
        ({}, {"ends": True}, "the run ended after .* before any prompt was read"),
    ],
)
def test_a_run_without_a_sequence_says_why(
    target: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    given: dict[str, Any], more: dict[str, Any], message: str,
) -> None:  # fmt: skip
    if word := more.pop("word", None):
        refusing(monkeypatch, word)
    if more.pop("ends", None):
        monkeypatch.setattr(Rollouts, "step", lambda self: False)
    options = DataOptions(prompts=prompts, max_tokens=4, **given)
    with pytest.raises(ValueError, match=f"there is nothing to write: .*{message}"):
        make(target, tmp_path / "data", options, **more)
    assert [p.name for p in tmp_path.iterdir()] == ["p.txt"]


# ---- stops and kills


def command(target: str, prompts: str, out: Path) -> list[str]:
    return [
        *("drafter", "data", "--target", target, "--prompts", prompts, "--out", str(out)),
        *("--seconds", "500", "--max-tokens", "30", "--batch", "4", "--min-tokens", "1"),
        *("--num-threads", "1"),
    ]


def test_a_signal_ends_data_with_what_there_is(
    target: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    former = signal.getsignal(signal.SIGTERM)
    stop_after(12, monkeypatch)
    assert main(command(target, prompts, tmp_path / "data")) == 1
    assert signal.getsignal(signal.SIGTERM) is former
    assert "stopped; what there was by then is whole" in capsys.readouterr().out
    reader = ShardReader(tmp_path / "data", verify=True)
    assert len(reader) >= 4
    assert any(s.num_tokens > s.prompt_len for s in reader)


def test_a_signal_before_the_first_token_leaves_nothing(
    target: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    whole = module.requests_for

    def requests(*given: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return whole(*given)

    monkeypatch.setattr(module, "requests_for", requests)
    assert main(command(target, prompts, tmp_path / "data")) == 1
    assert "nothing is written" in capsys.readouterr().out
    assert [p.name for p in tmp_path.iterdir()] == ["p.txt"]


def test_training_that_is_stopped_while_it_makes_data_goes_on_with_them(
    target: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = DataOptions(prompts=prompts, seconds=500, max_tokens=30, batch=4, min_tokens=1)

    def run(*, resume: bool) -> dict[str, Any]:
        options = TrainOptions(
            generate=generate,
            steps=2,
            draft_vocab_size=100,
            held_out_share=0.0,
            run=RunOptions(resume=resume, show_progress=False),
        )
        return train_drafter(target, tmp_path / "head", options, num_threads=1)

    with monkeypatch.context() as patch:
        stop_after(20, patch)
        figures = run(resume=False)
    assert figures["was_stopped"]
    assert figures["num_steps"] == 0
    held = len(ShardReader(tmp_path / "head" / "data", verify=True))
    assert held >= 4
    assert not (tmp_path / "head" / "start").exists()
    figures = run(resume=True)
    assert not figures["was_stopped"]
    assert figures["num_sequences"] == held
    assert (tmp_path / "head" / "config.json").exists()


def test_what_a_kill_left_is_named(
    target: str, prompts: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".data.part-abcd").mkdir()
    (tmp_path / ".data2.part-abcd").mkdir()
    with caplog.at_level(logging.WARNING):
        make(target, tmp_path / "data", DataOptions(prompts=prompts, max_tokens=2, min_tokens=1))
    assert ".data.part-abcd" in caplog.text
    assert ".data2" not in caplog.text


# ---- shared memory


def shared_memory(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(
        rollouts_module.os, "statvfs", lambda path: SimpleNamespace(f_bavail=free, f_frsize=1)
    )


@pytest.mark.parametrize(
    ("free", "at_most", "least"),
    [(1 << 40, 256 << 20, 30 << 20), (64 << 20, 32 << 20, 6 << 20), (7 << 20, 7 << 20, 5 << 20)],
)
def test_a_ring_leaves_room_in_a_small_shared_memory(
    monkeypatch: pytest.MonkeyPatch, free: int, at_most: int, least: int
) -> None:
    shared_memory(monkeypatch, free)
    step = 512 * 2 * 4608
    assert least <= tap_bytes(512, 32, 4608) <= at_most
    assert tap_bytes(512, 32, 4608) > step


def test_too_little_shared_memory_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared_memory(monkeypatch, 4 << 20)
    with pytest.raises(ValueError, match=r"4\.2 MB free: make it larger \(docker run --shm-size"):
        tap_bytes(512, 32, 4608)


def test_the_least_ring_has_room_for_a_whole_step(
    target: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    least: list[int] = []
    whole = tap_bytes

    def smallest(*given: int) -> int:
        free = next(n for n in range(1 << 18, 1 << 26, 1 << 16) if fits(n, given))
        least.append(free)
        return whole(*given)

    def fits(free: int, given: tuple[int, ...]) -> bool:
        shared_memory(monkeypatch, free)
        try:
            whole(*given)
        except ValueError:
            return False
        return True

    monkeypatch.setattr(module, "tap_bytes", smallest)
    options = DataOptions(prompts=prompts, max_tokens=8, min_tokens=1, batch=21)
    with monkeypatch.context():
        figures = make(target, tmp_path / "data", options)
    assert least
    assert figures["num_dropped_tokens"] == 0


# ---- numbers


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seconds": math.nan}, "--seconds must be above 0, got nan"),
        ({"num_tokens": math.inf}, "--num-tokens must be an integer, got inf"),
        ({"max_tokens": math.nan}, "--max-tokens must be above 0"),
        ({"max_tokens": math.inf}, "--max-tokens must be an integer"),
        ({"temperatures": (1.0, math.nan)}, "--temperature must be one or more finite"),
        ({"temperatures": (math.inf,)}, "--temperature must be one or more finite"),
    ],
)
def test_numbers_that_are_none_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataOptions(prompts="x", **given)


def test_seconds_without_end_are_refused(target: str, prompts: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--seconds must be finite, got inf"):
        make(target, tmp_path / "data", DataOptions(prompts=prompts, seconds=math.inf))
