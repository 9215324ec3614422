"""One trainer of a group, in a process of its own: what ``test_trainer_group.py`` spawns.

Owns the jobs and the file in which a process leaves what it found. Invariant: all processes do the same jobs in the
same order.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.tlt_train.heads import make_config, make_data, make_sequence, make_trainer, weights_of
from tlt_train.trainer import Preempted, Trainer
from tlt_train.training_run import RunOptions, TrainingRun

NUM_STEPS = 5
STOP_AFTER = 2


def losses(group: Any) -> dict[str, Any]:
    """Some steps of several windows each."""
    trainer = make_trainer(group=group)
    return _run(trainer, NUM_STEPS)


def few_windows(group: Any) -> dict[str, Any]:
    """Steps of one window: one trainer of two has none."""
    config = make_config(tokens_per_step=16)
    trainer = make_trainer(config, group=group, sequences=make_data(3))
    return _run(trainer, 3)


def not_finite(group: Any) -> dict[str, Any]:
    """One trainer's share of one step is NaN."""
    bad = make_sequence("nan", 16)
    bad.features[3] = 0x7FC0
    trainer = make_trainer(group=group, sequences=[*make_data(8), bad])
    return _run(trainer, 5)


def stopped(group: Any) -> dict[str, Any]:
    """The last trainer is told to stop, the others are not."""
    is_last = group is None or dist.get_rank(group) == dist.get_world_size(group) - 1
    trainer = make_trainer(group=group)
    trainer._should_stop = lambda: is_last and trainer.num_steps == STOP_AFTER
    num_stops = 0
    while trainer.num_steps < NUM_STEPS and not num_stops:
        try:
            trainer.step()
        except Preempted:
            num_stops += 1
    return {"num_steps": trainer.num_steps, "num_stops": num_stops}


def by_time(group: Any) -> dict[str, Any]:
    """The first trainer's time ends, the others' does not; the number of steps is the first one's estimate."""
    is_first = group is None or dist.get_rank(group) == 0
    trainer = make_trainer(group=group)
    options = RunOptions(checkpoint_every=0, validate_every=0, show_progress=False)
    deadline_s = time.perf_counter() + (0.3 if is_first else 1000.0)
    outcome = TrainingRun(trainer, options).run(deadline_s=deadline_s)
    return {"num_steps": outcome.num_steps, "weights": weights_of(trainer)}


JOBS = {
    "losses": losses,
    "few_windows": few_windows,
    "not_finite": not_finite,
    "stopped": stopped,
    "by_time": by_time,
}


def _run(trainer: Trainer, num_steps: int) -> dict[str, Any]:
    reports = [trainer.step() for _ in range(num_steps)]
    return {
        "losses": [r.loss for r in reports],
        "norms": [r.grad_norm for r in reports],
        "sums": torch.stack([r.measured.sums for r in reports]),
        "num_tokens": [r.num_tokens for r in reports],
        "skipped": [r.was_skipped for r in reports],
        "weights": weights_of(trainer),
    }


def work(rank: int, world: int, directory: str) -> None:
    """All jobs; the results are left in ``directory``."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world
    )
    found = {name: job(dist.group.WORLD) for name, job in JOBS.items()}
    torch.save(found, Path(directory) / f"{rank}.pt")
    dist.destroy_process_group()
