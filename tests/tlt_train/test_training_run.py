"""The loop around the trainer: what is written when, validation, and a run that ends by time, by a clock of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tlt_train.heads import (
    HIDDEN,
    TAPS,
    make_config,
    make_sequence,
    make_trainer,
    same_bits,
    weights_of,
)
from tlt_train import trainer as trainer_module
from tlt_train import training_run as module
from tlt_train.checkpoint import CheckpointStore
from tlt_train.metrics_log import MetricsLog, read_rows
from tlt_train.objective import useful_flops
from tlt_train.packing import pack
from tlt_train.sequence import TrainingWindow
from tlt_train.trainer import StepReport, Trainer
from tlt_train.training_run import RunOptions, RunOutcome, TrainingRun

QUIET: dict[str, Any] = {"show_progress": False}


class Clock:
    """Seconds that pass only where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module.time, "perf_counter", clock)
    assert trainer_module.time.perf_counter is clock  # one module
    return clock


def timed(
    trainer: Trainer, clock: Clock, step_s: Callable[[int], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step takes what ``step_s`` says, by the clock."""
    plain = trainer._update

    def update(gathered: Any) -> tuple[float, bool]:
        clock.now += step_s(trainer.num_steps)
        return plain(gathered)

    monkeypatch.setattr(trainer, "_update", update)


def run_for(
    trainer: Trainer, seconds: float, clock: Clock, **options: Any
) -> tuple[RunOutcome, list[StepReport]]:
    reports: list[StepReport] = []
    plain: dict[str, Any] = {"checkpoint_every": 0, "validate_every": 0}
    run = TrainingRun(trainer, RunOptions(**(QUIET | plain | options)))
    return run.run(deadline_s=clock.now + seconds, after_step=reports.append), reports


@pytest.mark.parametrize("warmup", [0, 1, 5, 8])
def test_a_run_by_time_uses_its_time_and_ends_with_a_low_rate(
    warmup: int, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ``total_steps`` was said to be; its first step is slow, as first steps are."""
    for total in (3 + warmup, 1000):
        trainer = make_trainer(make_config(warmup_steps=warmup, total_steps=total))
        timed(trainer, clock, lambda step: 1.0 if step else 6.0, monkeypatch)
        start = clock.now
        outcome, reports = run_for(trainer, 40.0, clock)
        assert 36.0 <= clock.now - start <= 40.0
        assert outcome.num_steps == len(reports) == trainer.total_steps
        rates = [report.learning_rate for report in reports]
        assert rates[-1] < 0.1 * max(rates)
        assert outcome.seconds == clock.now - start


def test_a_run_that_turns_slow_still_ends_on_time(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer()
    timed(trainer, clock, lambda step: 1.0 if step < 20 else 4.0, monkeypatch)
    outcome, _ = run_for(trainer, 40.0, clock)
    assert clock.now <= 44.0  # a step is not cut short
    assert not outcome.was_stopped


def test_what_comes_between_steps_is_planned_for(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer()
    timed(trainer, clock, lambda step: 1.0, monkeypatch)

    def rest(report: StepReport) -> None:
        clock.now += 1.0

    options = RunOptions(checkpoint_every=0, validate_every=0, show_progress=False)
    TrainingRun(trainer, options).run(deadline_s=40.0, after_step=rest)
    assert 18 <= trainer.num_steps == trainer.total_steps <= 20


def test_a_run_that_goes_on_plans_anew(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of steps in the checkpoint was that of another deadline."""
    first = make_trainer()
    timed(first, clock, lambda step: 1.0, monkeypatch)
    run_for(first, 10.0, clock)
    tensors, values = first.state()
    second = make_trainer()
    second.load_state(tensors, values | {"total_steps": 14})
    timed(second, clock, lambda step: 1.0, monkeypatch)
    outcome, _ = run_for(second, 30.0, clock)
    assert outcome.num_steps >= first.num_steps + 28


def test_no_time_is_no_step(clock: Clock) -> None:
    trainer = make_trainer()
    before = weights_of(trainer)
    outcome, reports = run_for(trainer, 0.0, clock)
    assert (outcome.num_steps, reports) == (0, [])
    assert same_bits(weights_of(trainer), before)


def test_checkpoints_and_lines_come_when_they_should(tmp_path: Path) -> None:
    trainer = make_trainer(make_config(total_steps=7))
    held_out = [make_sequence("h", 20), make_sequence("i", 90)]
    options = RunOptions(checkpoint_every=3, validate_every=2, log_every=2, show_progress=False)
    saved: list[int] = []
    with CheckpointStore(tmp_path / "c", keep=9) as store, MetricsLog(tmp_path / "l") as log:
        plain = store.save
        store.save = lambda step, *rest: (saved.append(step), plain(step, *rest))[1]  # type: ignore[method-assign]
        run = TrainingRun(trainer, options, store=store, log=log, held_out=held_out)
        outcome = run.run()
        assert store.steps() == [3, 6, 7]
        found = store.load(7)
    assert saved == [3, 6, 7]
    assert found.state["num_steps"] == 7
    assert same_bits(dict(found.tensors), weights_of(trainer))
    rows = read_rows(tmp_path / "l" / "metrics.jsonl")
    assert [r["step"] for r in rows if "loss" in r] == [2, 4, 6]
    assert [r["step"] for r in rows if "validation/loss_1" in r] == [2, 4, 6, 7]
    assert outcome.num_steps == 7
    last = next(r for r in rows if r["step"] == 6 and "loss" in r)
    for name in ("grad_norm", "learning_rate", "tokens_per_s", "useful_gflops_per_s"):
        assert last[name] > 0
    assert {"train/acceptance_length", "train/acceptance_3", "train/accuracy_1"} <= last.keys()
    assert {"checkpoint_stall_s", "train/acceptance_length_greedy"} <= last.keys()


def test_validation_is_over_what_is_held_out_cut_to_a_step(tmp_path: Path) -> None:
    trainer = make_trainer(make_config(total_steps=1))
    held_out = [make_sequence("h", 20), make_sequence("i", 90), make_sequence("j", 5)]
    with MetricsLog(tmp_path) as log:
        options = RunOptions(validate_every=0, show_progress=False)
        outcome = TrainingRun(trainer, options, log=log, held_out=held_out).run()
    windows = [TrainingWindow(s, 0, min(s.num_tokens, 48)) for s in held_out]
    batch = pack(windows, num_taps=TAPS, hidden_size=HIDDEN)
    expected = trainer.objective.loss(batch, 1.0)[1]
    assert outcome.validation is not None
    assert expected.num_rows > 0
    torch.testing.assert_close(outcome.validation.sums, expected.sums, rtol=1e-5, atol=1e-5)
    row = read_rows(tmp_path / "metrics.jsonl")[-1]
    assert row["validation/loss_2"] == pytest.approx(expected.means("loss")[1], rel=1e-5)
    assert row["validation/acceptance_1"] == pytest.approx(expected.means("alpha")[0], rel=1e-5)
    length = expected.acceptance_length("agrees")
    assert row["validation/acceptance_length_greedy"] == pytest.approx(length, rel=1e-5)


def test_validation_changes_nothing(tmp_path: Path) -> None:
    found = []
    for held_out in ([], [make_sequence("h", 20)]):
        trainer = make_trainer(make_config(total_steps=4))
        options = RunOptions(validate_every=1, show_progress=False)
        TrainingRun(trainer, options, held_out=held_out).run()
        found.append(weights_of(trainer))
    assert same_bits(*found)


def test_a_stopped_run_saves_and_goes_on(tmp_path: Path) -> None:
    """In the middle of a step: it is done again, and all ends as if nothing had been."""
    calm = make_trainer(make_config(total_steps=5))
    TrainingRun(calm, RunOptions(**QUIET)).run()
    count = 0

    def stop() -> bool:
        nonlocal count
        count += 1
        return count == 70

    trainer = make_trainer(make_config(total_steps=5), should_stop=stop)
    with CheckpointStore(tmp_path) as store:
        outcome = TrainingRun(trainer, RunOptions(**QUIET), store=store).run()
        assert outcome.was_stopped
        assert 0 < outcome.num_steps < 5
        assert store.steps() == [outcome.num_steps]
        assert outcome.validation is None
        second = make_trainer(make_config(total_steps=5))
        run = TrainingRun(second, RunOptions(**QUIET), store=store)
        assert run.resume()
        assert not run.run().was_stopped
    assert same_bits(weights_of(second), weights_of(calm))


def test_nothing_to_resume_from_is_said(tmp_path: Path) -> None:
    trainer = make_trainer()
    assert not TrainingRun(trainer, RunOptions(**QUIET)).resume()
    with CheckpointStore(tmp_path) as store:
        assert not TrainingRun(trainer, RunOptions(**QUIET), store=store).resume()


def test_the_outcome_counts_this_runs_own_work() -> None:
    trainer = make_trainer(make_config(total_steps=4))
    trainer.step()
    reports: list[StepReport] = []
    outcome = TrainingRun(trainer, RunOptions(**QUIET)).run(after_step=reports.append)
    assert [r.step for r in reports] == [1, 2, 3]
    assert outcome.num_tokens == sum(r.num_tokens for r in reports)
    head, config = trainer.network.config, trainer.config
    flops = sum(useful_flops(head, config, r.num_drafting, r.num_context) for r in reports)
    assert outcome.useful_flops == pytest.approx(flops)
    assert math.isfinite(outcome.flops_per_s)
