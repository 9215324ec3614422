"""A live run: the head gets better while requests go on, and no token shows it."""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM
from engine.models.eagle_checkpoint import open_drafter
from engine.models.load_threads import one_torch_thread
from tests.conftest import ModelDirFactory
from tlt_train.config import TrainConfig
from tlt_train.generate import DataOptions, requests_for, training_prompts
from tlt_train.live import train_live
from tlt_train.live_options import LiveOptions
from tlt_train.live_report import RoundReport
from tlt_train.live_rollout import LiveRollouts
from tlt_train.metrics_log import read_rows
from tlt_train.rollouts import Rollouts
from tlt_train.shards import ShardReader
from tlt_train.train import TrainOptions
from tlt_train.training_run import RunOptions

LIVE = LiveOptions(round_tokens=1200, round_steps=12, tuner="fixed")
CONFIG = TrainConfig.of(
    "eagle3",
    loss="kl",
    learning_rate=3e-3,
    warmup_steps=5,
    tokens_per_step=256,
    tokens_per_micro_batch=256,
    dtype="float32",
)
QUIET = RunOptions(checkpoint_every=0, validate_every=0, show_progress=False)


@pytest.fixture(scope="module")
def target(make_model_dir: ModelDirFactory) -> str:
    return str(make_model_dir("llama", num_hidden_layers=4))


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> DataOptions:
    path = tmp_path_factory.mktemp("prompts") / "p.txt"
    path.write_text("\n".join(f"Q{i}" for i in range(400)))
    return DataOptions(
        prompts=str(path), temperatures=(0.0,), max_tokens=60, batch=8, min_tokens=4, num_tokens=1
    )


def options_of(wanted: DataOptions, steps: int, **more: Any) -> TrainOptions:
    given: dict[str, Any] = {"draft_vocab_size": 256, "config": CONFIG, "run": QUIET}
    return TrainOptions(generate=wanted, steps=steps, **given | more)


def run(
    target: str, out: Path, options: TrainOptions, live: LiveOptions = LIVE, **more: Any
) -> tuple[dict[str, Any], list[RoundReport]]:
    rounds: list[RoundReport] = []
    with one_torch_thread():
        figures = train_live(
            target, out, options, live, **{"on_round": rounds.append, "num_threads": 1} | more
        )
    return figures, rounds


def assert_tokens_are_plain(target: str, wanted: DataOptions, data: Path) -> int:
    """Every sequence of a directory is what plain decoding of its prompt gives; how many."""
    llm = LLM(target, num_threads=1)
    asked = list(itertools.islice(requests_for(llm, target, training_prompts(wanted), wanted), 300))
    reader = ShardReader(data, verify=True)
    numbers = [int(s.key.split("/data-")[1].split("/")[0]) for s in reader]
    found = llm.generate(
        [{"prompt_token_ids": asked[n][0]} for n in numbers],  # type: ignore[index]
        [asked[n][1] for n in numbers],  # type: ignore[index]
        use_tqdm=False,
    )
    for sequence, output in zip(reader, found, strict=True):
        whole = [*(output.prompt_token_ids or ()), *output.outputs[0].token_ids]
        tokens = sequence.token_ids.tolist()
        assert tokens == whole[sequence.start : sequence.start + len(tokens)], sequence.key
    return len(numbers)


def test_acceptance_rises_and_no_token_changes(
    target: str, wanted: DataOptions, tmp_path: Path
) -> None:
    out = tmp_path / "head"
    figures, rounds = run(target, out, options_of(wanted, 60))
    assert figures["num_steps"] == 60
    assert [r.number for r in rounds] == [0, 1, 2, 3, 4]
    assert [r.rolled.version for r in rounds] == [0, 1, 2, 3, 4]
    assert [r.num_train_steps for r in rounds] == [0, 12, 24, 36, 48]
    assert rounds[0].rolled.num_drafts == 0
    assert rounds[0].rolled.tokens_per_step == 1.0
    lengths = [r.rolled.acceptance_length for r in rounds[1:]]
    assert all(r.rolled.num_drafts > 300 for r in rounds[1:])
    assert lengths[-1] > lengths[0] + 0.08
    assert lengths[-1] > 1.15
    for report in rounds[
        1:
    ]:  # text of new prompts, judged by the engine and, before, by the trainer on others
        assert report.estimate is not None
        estimate = report.estimate.acceptance_length("agrees")
        assert abs(estimate - report.rolled.acceptance_length) < 0.12
    # they go on, nothing is given up; the last step of a round may have ended some
    assert all(r.rolled.num_running >= wanted.batch // 2 for r in rounds)
    rows = [row for row in read_rows(out / "log" / "metrics.jsonl") if "live/version" in row]
    assert [row["live/version"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["live/acceptance_length"] for row in rows][1:] == pytest.approx(lengths)
    assert assert_tokens_are_plain(target, wanted, out / "data") > 60
    started = {s.rl_step for s in ShardReader(out / "data")}
    assert started == {0, 1, 2, 3, 4}
    head = LLM(target, num_threads=1, speculative_config={"method": "eagle3", "model": str(out)})
    assert head.engine.speculator.active


def test_a_request_that_was_running_goes_on_with_the_new_head(
    target: str, wanted: DataOptions, tmp_path: Path
) -> None:
    """Whole samples across rounds: no abort, no gap, and one entry for each in the buffer."""
    long = replace(wanted, max_tokens=300, batch=4)
    live = replace(LIVE, round_tokens=400, round_steps=4)
    _, rounds = run(target, tmp_path / "head", options_of(long, 24), live)
    assert len(rounds) == 6
    assert all(r.rolled.num_drafts > 20 for r in rounds[1:])
    sequences = list(ShardReader(tmp_path / "head" / "data"))
    names = [s.key.split("/")[2] for s in sequences]
    assert len(set(names)) == len(names)
    assert {s.start for s in sequences} == {0}
    assert all(r.rolled.num_running == 4 for r in rounds)
    longest = max(s.num_tokens for s in sequences if s.is_finished)
    assert longest > 250  # of rounds of about 100 each
    assert_tokens_are_plain(target, long, tmp_path / "head" / "data")


def test_a_stopped_run_goes_on(
    target: str, wanted: DataOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "head"
    options = options_of(wanted, 48)

    def stop(report: RoundReport) -> None:
        if report.number == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    figures, _ = run(target, out, options, on_round=stop)
    assert figures["was_stopped"]
    assert figures["num_steps"] == 24
    assert not (out / "config.json").exists()
    state = json.loads((out / "live.json").read_text())
    assert (state["round"], state["version"]) == (3, 2)
    kept = {s.key: s.token_ids.tobytes() for s in ShardReader(out / "data", verify=True)}
    assert len(kept) > 20

    published: list[tuple[int, float]] = []
    publish = LiveRollouts.publish

    def watched(self: LiveRollouts, tensors: Any) -> bool:
        done = publish(self, tensors)
        published.append((self.version, float(tensors["lm_head.weight"].abs().sum())))
        return done

    monkeypatch.setattr(LiveRollouts, "publish", watched)
    with pytest.raises(ValueError, match="give another, or --resume"):
        run(target, out, options)
    resumed = replace(options, run=replace(QUIET, resume=True))
    figures, rounds = run(target, out, resumed)
    assert figures["num_steps"] == 48
    assert [r.rolled.version for r in rounds] == [3]
    assert [r.number for r in rounds] == [3]
    assert rounds[0].num_train_steps == 36
    assert rounds[0].rolled.acceptance_length > 1.08  # what it had learnt is still there
    now = {s.key: s.token_ids.tobytes() for s in ShardReader(out / "data", verify=True)}
    assert {key: now[key] for key in kept} == kept
    numbers = [int(key.split("/data-")[1].split("/")[0]) for key in set(now) - set(kept)]
    assert min(numbers) >= state["num_asked"]  # other prompts
    steps = [r["step"] for r in read_rows(out / "log" / "metrics.jsonl") if "loss" in r]
    assert steps == list(range(1, 49))
    assert open_drafter(out, LLM(target, num_threads=1).config.model)


def test_a_stop_before_there_is_a_head(target: str, wanted: DataOptions, tmp_path: Path) -> None:
    out = tmp_path / "head"
    options = options_of(wanted, 2)
    figures, rounds = run(
        target, out, options, on_round=lambda report: os.kill(os.getpid(), signal.SIGTERM)
    )
    assert figures["was_stopped"]
    assert not (out / "start").exists()
    assert len(ShardReader(out / "data")) > 5
    figures, rounds = run(target, out, replace(options, run=replace(QUIET, resume=True)))
    assert figures["num_steps"] == 2
    assert rounds == []  # what was rolled out before is enough


def test_a_stop_in_the_middle_of_a_round(
    target: str, wanted: DataOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, calls = Rollouts.step, itertools.count(1)

    def counted(self: Rollouts) -> bool:
        if next(calls) == 140:  # of the second round
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self)

    monkeypatch.setattr(Rollouts, "step", counted)
    live = replace(LIVE, round_tokens=900)
    figures, rounds = run(target, tmp_path / "head", options_of(wanted, 48), live)
    assert figures["was_stopped"]
    assert next(calls) == 141  # not one more
    assert figures["num_steps"] == 12
    assert rounds[0].rolled.num_positions >= 900 > rounds[1].rolled.num_positions > 0
    assert not all(s.is_finished for s in ShardReader(tmp_path / "head" / "data"))


def test_a_dead_head_is_heard(
    target: str,
    wanted: DataOptions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    publish = LiveRollouts.publish

    def killed(self: LiveRollouts, tensors: Any) -> bool:
        if self.version >= 3:
            tensors = tensors | {"lm_head.weight": -tensors["lm_head.weight"]}
        return publish(self, tensors)

    monkeypatch.setattr(LiveRollouts, "publish", killed)
    with caplog.at_level(logging.WARNING):
        figures, rounds = run(target, tmp_path / "head", options_of(wanted, 60))
    assert figures["num_steps"] == 60
    assert rounds[3].rolled.warnings == ()
    assert rounds[4].rolled.acceptance_length < 1.02
    (message,) = rounds[4].rolled.warnings
    assert "version" in message
    assert any(f"round 4: {message}" in record.message for record in caplog.records)
    assert_tokens_are_plain(target, wanted, tmp_path / "head" / "data")


def test_weights_that_the_engine_refuses_end_nothing(
    target: str,
    wanted: DataOptions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publish = LiveRollouts.publish

    def spoilt(self: LiveRollouts, tensors: Any) -> bool:
        if self.version == 1:
            tensors = tensors | {"fc.weight": tensors["fc.weight"] * torch.nan}
        return publish(self, tensors)

    monkeypatch.setattr(LiveRollouts, "publish", spoilt)
    figures, rounds = run(
        target, tmp_path / "head", options_of(wanted, 6), replace(LIVE, round_steps=2)
    )
    assert figures["num_steps"] == 6
    assert [r.rolled.version for r in rounds] == [0, 1, 1]
    assert rounds[2].rolled.num_drafts > 0
    (message,) = rounds[2].rolled.warnings
    assert "version 2 of the head is refused, 1 stays" in message


def test_the_buffer_is_bounded(target: str, wanted: DataOptions, tmp_path: Path) -> None:
    most = 600_000
    live = replace(LIVE, round_steps=2, buffer_bytes=most)
    for name, spill in (("dropped", None), ("spilled", str(tmp_path / "spill"))):
        out = tmp_path / name
        _, rounds = run(target, out, options_of(wanted, 8), replace(live, spill_dir=spill))
        assert all(r.buffer.memory_bytes <= most for r in rounds)
        assert rounds[-1].buffer.memory_bytes > most / 2
        assert (rounds[-1].buffer.num_evicted > 0) == (spill is None)
        assert (rounds[-1].buffer.spilled_bytes > 0) == (spill is not None)
        kept = sum(s.num_bytes for s in ShardReader(out / "data"))
        assert (kept > most) == (spill is not None)
    assert not list((tmp_path / "spill").iterdir())


def test_shares_of_time_decide_where_no_number_of_steps_is_given(
    target: str, wanted: DataOptions, tmp_path: Path
) -> None:
    live = replace(LIVE, round_tokens=300, round_steps=None, rollout_share=0.5)
    options = replace(options_of(wanted, 10), steps=None, minutes=30)

    seen: list[RoundReport] = []

    def stop(report: RoundReport) -> None:
        seen.append(report)
        if report.number == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    run(target, tmp_path / "head", options, live, on_round=stop)
    assert len(seen) == 4
    for before, after in zip(seen, seen[1:], strict=False):
        assert after.train_s >= before.rolled.seconds


def test_an_eagle_head_and_a_head_to_go_on_from(
    target: str, wanted: DataOptions, tmp_path: Path
) -> None:
    config = TrainConfig.of(
        "eagle1",
        warmup_steps=2,
        tokens_per_step=256,
        tokens_per_micro_batch=256,
        dtype="float32",
    )
    first = options_of(wanted, 4, kind="eagle", config=config)
    live = replace(LIVE, round_steps=2)
    _, rounds = run(target, tmp_path / "first", first, live)
    assert [r.rolled.version for r in rounds] == [0, 1]
    again = replace(first, drafter=str(tmp_path / "first"))
    _, rounds = run(target, tmp_path / "again", again, live)
    assert rounds[0].rolled.num_drafts > 0  # there is a head from the beginning
    assert open_drafter(tmp_path / "again", LLM(target, num_threads=1).config.model)


def test_prompts_that_end_do_not_end_the_run(target: str, tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("\n".join(f"Q{i}" for i in range(12)))
    wanted = DataOptions(
        prompts=str(path), temperatures=(0.0,), max_tokens=20, batch=4, min_tokens=4
    )
    figures, rounds = run(
        target, tmp_path / "head", options_of(wanted, 6), replace(LIVE, round_steps=2)
    )
    assert figures["num_steps"] == 6
    assert len(rounds) == 1
    assert rounds[0].rolled.is_at_end


def test_bad_options_are_refused(
    target: str, wanted: DataOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"round_tokens": 0}, "--round-tokens must be above 0"),
        ({"round_steps": 0}, "--round-steps must be above 0"),
        ({"rollout_share": 1.0}, "--rollout-share must be between 0 and 1"),
        ({"buffer_bytes": -1}, "--buffer-bytes must be above 0"),
        ({"tuner": "beg"}, "--tuner must be cost or fixed"),
    ]
    for given, message in bad:
        with pytest.raises(ValueError, match=message):
            LiveOptions(**given)
    recorded = TrainOptions(data=("x",), steps=1)
    with pytest.raises(ValueError, match="give --tasks or --prompts, and no --data"):
        run(target, tmp_path / "a", recorded)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="one process"):
        run(target, tmp_path / "a", options_of(wanted, 1))
    assert not (tmp_path / "a").exists()
