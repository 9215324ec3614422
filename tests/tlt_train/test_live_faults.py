"""Live runs that killed processes, used up prompts, lost files and bad sizes cannot spoil."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import ModelDirFactory
from tests.tlt_train.sequences import make
from tests.tlt_train.test_live import CONFIG, LIVE, QUIET, options_of, run
from tlt_train.buffer import DataBuffer
from tlt_train.generate import DataOptions
from tlt_train.live_report import RoundReport
from tlt_train.live_state import LiveState, refill, write_data
from tlt_train.shards import ShardReader


@pytest.fixture(scope="module")
def target(make_model_dir: ModelDirFactory) -> str:
    return str(make_model_dir("llama", num_hidden_layers=4))


def few(tmp_path: Path, **more: object) -> DataOptions:
    """Twelve prompts of a file, greedy: they come once."""
    path = tmp_path / "p.txt"
    path.write_text("\n".join(f"Q{i}" for i in range(12)))
    given: dict[str, object] = {"max_tokens": 20, "batch": 4, "min_tokens": 4}
    return DataOptions(prompts=str(path), temperatures=(0.0,), **given | more)  # type: ignore[arg-type]


def test_a_run_that_was_killed_after_its_prompts_goes_on(target: str, tmp_path: Path) -> None:
    """A kill leaves no ``data``, but ``live.json`` that says that all prompts were taken."""
    out, wanted = tmp_path / "head", few(tmp_path)
    live = replace(LIVE, round_steps=2)
    out.mkdir()
    (out / "live.json").write_text(json.dumps({"round": 1, "version": 0, "num_asked": 12}))
    resumed = options_of(wanted, 4, run=replace(QUIET, resume=True))
    figures, rounds = run(target, out, resumed, live)
    assert figures["num_steps"] == 4
    assert rounds[0].number == 1
    assert rounds[0].buffer.num_sequences >= 8
    assert (out / "config.json").exists()


def test_sampled_prompts_go_on_where_they_were(target: str, tmp_path: Path) -> None:
    """They come again without end, so a kill is no reason to repeat those that weights have seen."""
    out, wanted = tmp_path / "head", replace(few(tmp_path), temperatures=(1.0,))
    out.mkdir()
    (out / "live.json").write_text(json.dumps({"round": 1, "version": 0, "num_asked": 500}))
    resumed = options_of(wanted, 2, run=replace(QUIET, resume=True))
    run(target, out, resumed, replace(LIVE, round_tokens=200))
    numbers = [int(s.key.split("/data-")[1].split("/")[0]) for s in ShardReader(out / "data")]
    assert min(numbers) >= 500


@pytest.mark.parametrize(
    ("changes", "buffer_bytes", "message"),
    [
        ({}, 300, "--buffer-bytes 300 is less than one sequence takes"),
        ({"min_tokens": 5000}, 1 << 30, r"fewer than 5000 tokens \(min_tokens\)"),
    ],
)
def test_why_there_is_nothing(
    target: str, tmp_path: Path, changes: dict[str, int], buffer_bytes: int, message: str
) -> None:
    live = replace(LIVE, buffer_bytes=buffer_bytes)
    with pytest.raises(ValueError, match=message):
        run(target, tmp_path / "head", options_of(few(tmp_path, **changes), 2), live)


def test_prompts_that_are_too_long_are_named(target: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="prompts are too long for the context of 8 tokens"):
        run(target, tmp_path / "head", options_of(few(tmp_path), 2), LIVE, max_model_len=8)


def held(buffer: DataBuffer) -> list[str]:
    return [s.key for s in buffer.sequences()]


def test_a_kill_between_two_renames_loses_no_data(tmp_path: Path) -> None:
    """``data`` is away for a moment: what was in it is there under another name, and what is to come is whole."""
    wanted = few(tmp_path)
    for name, left, expected in (
        ("both", (".data-new", ".data-former"), "new"),
        ("former", (".data-former",), "former"),
        ("new", (".data-new",), "new"),
        ("none of these", (".data-new", ".data-former", "data"), "data"),
    ):
        out = tmp_path / name
        for directory in left:
            with DataBuffer(1 << 20) as buffer:
                buffer.add(make(directory.removeprefix(".data-"), 10))
                write_data(tmp_path / "x" / "data", buffer, (0, 1), 2, "t", wanted)
            out.mkdir(exist_ok=True)
            (tmp_path / "x" / "data").rename(out / directory)
        with DataBuffer(1 << 20) as buffer:
            refill(buffer, out / "data", LiveState())
            assert held(buffer) == [expected], name
            write_data(out / "data", buffer, (0, 1), 2, "t", wanted)
        assert [p.name for p in out.iterdir()] == ["data"]


def test_data_of_other_weights_stay_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with DataBuffer(1 << 20) as buffer:
        buffer.add(make("a", 10))
        write_data(tmp_path / "data", buffer, (0, 1), 2, "t", few(tmp_path), "aa")
    for mark, expected in (("aa", ["a"]), ("bb", [])):
        with DataBuffer(1 << 20) as buffer:
            refill(buffer, tmp_path / "data", LiveState(), mark)
            assert held(buffer) == expected
    assert "hidden states of other weights" in caplog.text


def test_a_spill_directory_that_vanishes_ends_nothing(
    target: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    live = replace(LIVE, round_steps=4, buffer_bytes=20_000, spill_dir=str(tmp_path / "spill"))
    small = replace(CONFIG, tokens_per_step=32, tokens_per_micro_batch=32)  # a sample or two
    wanted = replace(few(tmp_path), temperatures=(1.0,))

    def vanish(report: RoundReport) -> None:
        if report.number != 1:  # before there is a head, all sequences are read
            return
        for directory in (tmp_path / "spill").iterdir():
            shutil.rmtree(directory)

    with caplog.at_level(logging.WARNING):
        figures, _ = run(
            target, tmp_path / "head", options_of(wanted, 8, config=small), live, on_round=vanish
        )
    assert figures["num_steps"] == 8
    assert "is lost" in caplog.text
