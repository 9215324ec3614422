"""The trainer: one step is one big batch, whatever stops it loses nothing, what is not finite changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tlt_train.heads import (
    embedding_and_head,
    make_config,
    make_data,
    make_network,
    make_sequence,
    make_trainer,
    same_bits,
    weights_of,
    whole,
)
from tlt_train import trainer as module
from tlt_train.checkpoint import CheckpointStore
from tlt_train.config import TrainConfig
from tlt_train.packing import pack
from tlt_train.sequence import TrainingWindow
from tlt_train.trainer import Preempted, Trainer


class Fixed:
    """A source that gives the same windows for each key; ``spoil`` may change them."""

    def __init__(self, windows: list[TrainingWindow]) -> None:
        self.windows = windows
        self.keys: list[int] = []

    def draw(
        self, num_tokens: int, key: int, *, rank: int = 0, world: int = 1
    ) -> list[TrainingWindow]:
        self.keys.append(key)
        return self.windows


class Stop:
    """Says stop at one of its calls."""

    def __init__(self, at: int = -1) -> None:
        self.at = at
        self.count = 0

    def __call__(self) -> bool:
        self.count += 1
        return self.count - 1 == self.at


def make(
    windows: list[TrainingWindow],
    config: TrainConfig | None = None,
    stop: Callable[[], bool] = lambda: False,
    kind: str = "eagle3",
) -> Trainer:
    head = embedding_and_head()[1]
    return Trainer(
        make_network(kind), config or make_config(), Fixed(windows), head, should_stop=stop
    )


def test_a_step_is_adamw_on_the_gradient_of_the_whole_batch() -> None:
    """By torch's own optimiser and clipping, several steps, in one batch and in micro-batches."""
    windows = whole(*make_data(5))
    config = make_config(max_grad_norm=0.5, weight_decay=0.3, betas=(0.8, 0.9), warmup_steps=2)
    head = embedding_and_head()[1]
    network = make_network()
    matrices = [p for p in network.parameters.values() if p.dim() > 1]
    vectors = [p for p in network.parameters.values() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.8, 0.9),
    )
    objective = make(windows).objective.__class__(network, config, head)
    batch = pack(windows, num_taps=3, hidden_size=64)
    trainers = [make(windows, make_config(**(config.as_dict() | {"tokens_per_micro_batch": size})))
                for size in (1000, 16)]  # fmt: skip
    for number in range(4):
        loss, measured = objective.loss(batch, objective.num_counted(batch))
        assert loss is not None
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(network.parameters.values()), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate_at(number, 12)
        optimizer.step()
        for trainer in trainers:
            report = trainer.step()
            assert report.loss == pytest.approx(loss.item(), rel=1e-5)
            assert report.grad_norm == pytest.approx(norm.item(), rel=1e-4)
            assert report.grad_norm > 0.5  # it was clipped
            assert report.learning_rate == config.learning_rate_at(number, 12)
            assert (report.step, report.num_tokens) == (number, batch.num_tokens)
            torch.testing.assert_close(report.measured.sums, measured.sums)
            for name, parameter in network.parameters.items():
                mine = trainer.network.parameters[name]
                torch.testing.assert_close(mine, parameter, rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize(("kind", "loss"), [("eagle3", "lk"), ("eagle", "kl")])
def test_it_learns(kind: str, loss: str) -> None:
    """A handful of sequences by heart."""
    config = make_config(total_steps=40, learning_rate=1e-2, loss=loss)
    trainer = make_trainer(config, kind=kind, sequences=_with_taps(kind))
    reports = [trainer.step() for _ in range(40)]
    first, last = (sum(r.loss for r in part) for part in (reports[:5], reports[-5:]))
    assert last < 0.35 * first
    lengths = [
        sum(r.measured.acceptance_length("agrees") for r in part) / 5
        for part in (reports[:5], reports[-5:])
    ]
    assert lengths[1] > lengths[0] + 1.0


def _with_taps(kind: str) -> Any:
    num_taps = 0 if kind == "eagle" else 3
    return [make_sequence(f"s{i}", 10, prompt_len=2, num_taps=num_taps) for i in range(4)]


def test_steps_draw_their_own_number() -> None:
    trainer = make(whole(*make_data(3)))
    for _ in range(3):
        trainer.step()
    assert isinstance(trainer.source, Fixed)
    assert trainer.source.keys == [0, 1, 2]


# ---- stopping


def test_stopping_at_any_moment_loses_nothing() -> None:
    """Every call of ``should_stop`` in two steps, in turn; and many stops one after the other."""
    windows, counter, config = whole(*make_data(4)), Stop(), make_config(unroll_depth=2)
    calm = make(windows, config, counter)
    calm_losses = [calm.step().loss for _ in range(2)]
    expected = weights_of(calm)
    per_batch = 1 + 6 * calm.config.unroll_depth  # before it; three points a step, on both ways
    num_batches = len(calm._begin().batches)
    assert num_batches > 1
    assert counter.count - 1 == 2 * (1 + num_batches * per_batch)
    for at in range(counter.count - 1):
        trainer = make(windows, config, Stop(at))
        losses, num_stops = _run(trainer, 2)
        assert num_stops == 1
        assert losses == calm_losses
        assert same_bits(weights_of(trainer), expected)


def _run(trainer: Trainer, num_steps: int) -> tuple[list[float], int]:
    losses, num_stops = [], 0
    while len(losses) < num_steps:
        try:
            losses.append(trainer.step().loss)
        except Preempted:
            num_stops += 1
    return losses, num_stops


def test_a_micro_batch_that_is_done_is_not_done_again() -> None:
    windows, stop = whole(*make_data(4)), Stop()
    trainer = make(windows, stop=stop)
    per_batch = 1 + 6 * trainer.config.unroll_depth
    stop.at = 1 + per_batch + 3  # in the second micro-batch
    with pytest.raises(Preempted):
        trainer.step()
    before = stop.count
    num_batches = len(trainer._gathered.batches) if trainer._gathered else 0
    trainer.step()
    assert stop.count - before == (num_batches - 1) * per_batch
    assert isinstance(trainer.source, Fixed)
    assert trainer.source.keys == [0]


def test_a_stopped_step_changes_no_weight() -> None:
    trainer = make(whole(*make_data(4)), stop=Stop(20))
    before = weights_of(trainer)
    with pytest.raises(Preempted):
        trainer.step()
    assert same_bits(weights_of(trainer), before)
    assert trainer.num_steps == 0


# ---- what is not finite


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted() -> None:
    good, bad = make_data(4), make_sequence("nan", 9)
    bad.features[4, 5] = 0x7FC0
    trainer = make(whole(*good))
    trainer.step()
    assert isinstance(trainer.source, Fixed)
    before = weights_of(trainer)
    trainer.source.windows = whole(*good, bad)
    report = trainer.step()
    assert report.was_skipped
    assert trainer.num_skipped_steps == 1
    assert trainer.num_steps == 2
    assert same_bits(weights_of(trainer), before)
    trainer.source.windows = whole(*good)
    assert not trainer.step().was_skipped
    # the moments go on as if the step had not been, at the rate of its number
    calm = make(whole(*good))
    calm.step()
    calm.num_steps = 2
    calm.step()
    found, expected = weights_of(trainer), weights_of(calm)
    assert same_bits(found, expected)


def test_too_many_in_a_row_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SKIPPED", 3)
    good, bad = whole(make_sequence("a", 9)), make_sequence("nan", 9)
    bad.features[:] = 0x7F80
    trainer = make(whole(bad))
    assert isinstance(trainer.source, Fixed)
    before = weights_of(trainer)
    for windows in (whole(bad), whole(bad), good, whole(bad), whole(bad)):
        trainer.source.windows = windows
        assert trainer.step().was_skipped == (windows is not good)
    after = weights_of(trainer)
    with pytest.raises(FloatingPointError, match=r"3 steps in a row .* lower learning_rate"):
        trainer.step()
    assert trainer.num_skipped_steps == 5
    assert same_bits(weights_of(trainer), after)
    assert not same_bits(before, after)


def test_nothing_to_draw_is_said() -> None:
    with pytest.raises(ValueError, match="nothing to train on"):
        make([]).step()


def test_windows_without_a_row_that_counts_are_a_step_of_loss_zero() -> None:
    report = make(whole(make_sequence("p", 6, prompt_len=9))).step()
    assert report.loss == 0.0
    assert not report.was_skipped
    assert report.num_drafting == (0, 0, 0)


def test_the_rows_of_a_report_are_those_that_drafted() -> None:
    windows = whole(make_sequence("a", 12, prompt_len=5), make_sequence("b", 4, prompt_len=0))
    report = make(windows, make_config(unroll_depth=4)).step()
    assert report.num_drafting == (8 + 3, 7 + 2, 6 + 1, 5)
    assert report.num_context == 3


# ---- state


def _copied(state: tuple[dict[str, Tensor], dict[str, Any]]) -> tuple[Any, Any]:
    return {n: t.clone() for n, t in state[0].items()}, dict(state[1])


@pytest.mark.parametrize("kill_at", [1, 4])
def test_resuming_gives_the_same_bits(kill_at: int) -> None:
    """With a skipped step before the kill, and half a step thrown away."""
    bad = make_sequence("nan", 9)
    bad.features[2] = 0x7FC0
    data = [*make_data(6), bad]
    whole_run = make_trainer(sequences=data)
    losses = [whole_run.step().loss for _ in range(9)]
    first = make_trainer(sequences=data)
    for _ in range(kill_at):
        first.step()
    first._gathered = first._begin()
    first._add_up(first._gathered)
    state = _copied(first.state())
    first.step()
    second = make_trainer(sequences=data)
    for _ in range(2):  # it has moments of its own, which must go
        second.step()
    second.load_state(*state)
    assert second.num_steps == kill_at
    found = [second.step().loss for _ in range(9 - kill_at)]
    assert str(found) == str(losses[kill_at:])
    assert second.num_skipped_steps == whole_run.num_skipped_steps > 0
    assert same_bits(weights_of(second), weights_of(whole_run))


def test_a_state_of_before_the_first_step_has_no_moments() -> None:
    used, fresh = make_trainer(), make_trainer()
    state = _copied(fresh.state())
    used.step()
    used.load_state(*state)
    used.step()
    fresh.step()
    assert same_bits(weights_of(used), weights_of(fresh))


def test_a_checkpoint_gives_the_same_bits_back(tmp_path: Any) -> None:
    trainer = make_trainer()
    for _ in range(3):
        trainer.step()
    with CheckpointStore(tmp_path) as store:
        store.save(trainer.num_steps, *trainer.state())
        store.wait()
        found = store.latest()
    assert found is not None
    other = make_trainer()
    other.load_state(found.tensors, found.state)
    assert TrainConfig.from_dict(found.state["config"]) == trainer.config
    assert [other.step().loss for _ in range(3)] == [trainer.step().loss for _ in range(3)]
    assert same_bits(weights_of(other), weights_of(trainer))


def test_the_state_of_another_head_is_refused() -> None:
    state = make_trainer().state()
    with pytest.raises(ValueError, match="another head"):
        make_trainer(draft_vocab_size=100).load_state(*state)


def test_the_rate_follows_the_number_of_steps() -> None:
    trainer = make_trainer(make_config(warmup_steps=3, total_steps=6, learning_rate=0.1))
    rates = [trainer.step().learning_rate for _ in range(6)]
    low, half = 0.05, 0.95 / 2
    expected = [1 / 3, 2 / 3, 1, low + 2 * half, low + 1.5 * half, low + 0.5 * half]
    assert rates == [pytest.approx(0.1 * rate) for rate in expected]
