"""``tlt drafter train``: from prompts or recorded rollouts to a head that the engine can load.

Owns the order of things and the time: data first if none is given, then a head, then steps, then the directory. Knows
nothing of how any of these work. Invariant: the output directory becomes a drafter at the end of a run that got
there; before that it holds what a run needs to go on (``checkpoints``, ``log``, ``data``, ``start``).
"""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from engine.models.eagle_checkpoint import open_drafter, save_drafter
from engine.models.loader import Checkpoint, open_checkpoint, read_json
from tlt_train.checkpoint import CheckpointStore
from tlt_train.config import TrainConfig
from tlt_train.drafter import DTYPES, DrafterNetwork
from tlt_train.fixed_data import FixedData, split_held_out
from tlt_train.generate import DataOptions, generate_data
from tlt_train.metrics_log import MetricsLog
from tlt_train.new_head import new_head, read_target
from tlt_train.sequence import TrainingSequence
from tlt_train.train_data import (
    check_responses,
    check_taps,
    coverage,
    data_identity,
    read_sequences,
    with_features_of,
)
from tlt_train.train_process import stop_on_signal, stopped_together, trainer_group, wait_for
from tlt_train.trainer import BatchSource, Trainer
from tlt_train.training_run import RunOptions, RunOutcome, TrainingRun

logger = logging.getLogger(__name__)

START = "start"  # the head that training began with, which a resumed run begins with too
DATA = "data"
STEPS_END_S = 59.5  # of a minute: what is left is for validating and writing


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """What to train, on what, and for how long.

    Args:
        data: directories that ``tlt drafter data`` wrote.
        generate: prompts to roll out first, where there is no ``data``.
        minutes: of the whole command, data included; None ends by ``steps``.
        steps: of the optimiser; None ends by ``minutes``.
        kind: "eagle3" or "eagle", of a new head.
        drafter: a head to go on from; None makes a new one.
        draft_vocab_size: of a new EAGLE-3 head.
        held_out_share: of the prompts, for validation; 0 does not validate.
        config: of the steps; its ``total_steps`` is not read.
        run: how the run is written down.
        keep: checkpoints to leave.
        out_dtype: of the written head.

    Raises:
        ValueError: names the option, what came, and the fix.
    """

    data: tuple[str, ...] = ()
    generate: DataOptions | None = None
    minutes: float | None = None
    steps: int | None = None
    kind: str = "eagle3"
    drafter: str | None = None
    draft_vocab_size: int = 4096
    held_out_share: float = 0.03
    config: TrainConfig = field(default_factory=lambda: TrainConfig.of("eagle3"))
    run: RunOptions = field(default_factory=RunOptions)
    keep: int = 3
    out_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.steps is None):
            raise ValueError("a run ends by --minutes or by --steps: give one of them")
        for name in ("minutes", "steps", "keep", "draft_vocab_size"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {value!r}")
        if self.minutes is not None and not math.isfinite(self.minutes):
            raise ValueError(f"--minutes must be finite, got {self.minutes!r}; or give --steps")
        if not 0.0 <= self.held_out_share < 1.0:
            raise ValueError(
                f"--held-out-share must be from 0 to below 1, got {self.held_out_share!r}"
            )
        if bool(self.data) == (self.generate is not None):
            raise ValueError(
                "training data come from --data, or are made from --tasks or --prompts: give one of these"
            )


def train_drafter(
    target: str, out: str | Path, options: TrainOptions, **engine_options: Any
) -> dict[str, Any]:
    """Train a head and write it to ``out``.

    Args:
        target: "smollm2", an HF directory or a GGUF file.
        out: directory; what a stopped run left there is gone on from with ``options.run.resume``.
        engine_options: of the ``LLM`` that generates data.

    Returns:
        Figures of the run, plain values; ``was_stopped`` says that there is no head yet.

    Raises:
        ValueError: an option, a directory or the data are bad.
    """
    start = time.perf_counter()
    out = Path(out)
    check_out(out, options.run.resume)
    with trainer_group() as group, stop_on_signal() as stop:
        is_first = group is None or dist.get_rank(group) == 0
        sources = list(options.data)
        if options.generate is not None:
            sources = [str(out / DATA)]
            if is_first and not (out / DATA).exists():
                generate_data(
                    target,
                    out / DATA,
                    options.generate,
                    drafter=options.drafter,
                    show_progress=options.run.show_progress,
                    should_stop=stop.is_set,
                    **engine_options,
                )
            if stopped_together(stop, group):
                seconds = time.perf_counter() - start
                return {"was_stopped": True, "num_steps": 0, "seconds": seconds, "out": str(out)}
        sequences, tap_layers = read_sequences(sources, target)
        opened = open_checkpoint(target)
        identity = data_identity(sequences)
        if is_first and not has_start(out, opened):
            training = split_held_out(sequences, options.held_out_share)[0]
            begin_head(opened, out / START, options, training, tap_layers)
        wait_for(group)
        head = open_drafter(out / START, opened.config).config
        check_taps(head, tap_layers)
        sequences = with_features_of(head, sequences)
        training, held_out = split_held_out(sequences, options.held_out_share)
        config = options.config
        check_responses(training, learn_prompts=config.learn_prompts)
        source = FixedData(training, seed=config.seed, max_window=config.tokens_per_step)
        longest = max(s.start + s.num_tokens for s in sequences)
        trainer = open_trainer(opened, out / START, options, source, longest, stop, group=group)
        deadline = None if options.minutes is None else start + options.minutes * STEPS_END_S
        with open_run(
            trainer, out, options, is_first=is_first, held_out=held_out, data=identity
        ) as run:
            outcome = run.run(deadline_s=deadline)
        if is_first and not outcome.was_stopped:
            write_head(trainer, out, options, opened)
    seconds = time.perf_counter() - start
    return figures_of(outcome, training, trainer, seconds) | {"out": str(out)}


def begin_head(
    opened: Checkpoint,
    directory: Path,
    options: TrainOptions,
    sequences: Sequence[TrainingSequence],
    tap_layers: tuple[int, ...],
) -> None:
    """Write the head that training begins with: ``options.drafter``, or a new one for ``sequences``.

    Raises:
        ValueError: the drafter does not fit the target, or the sizes do not.
    """
    if options.drafter is not None:
        found = open_drafter(options.drafter, opened.config)
        config, tensors = found.config, found.tensors
    else:
        config, tensors = new_head(
            opened.config,
            opened.weights,
            sequences,
            kind=options.kind,
            tap_layers=tap_layers,
            draft_vocab_size=options.draft_vocab_size,
            seed=options.config.seed,
        )
    save_drafter(directory, config, tensors, target=opened.config)


def open_trainer(
    opened: Checkpoint,
    start: Path,
    options: TrainOptions,
    source: BatchSource,
    longest: int,
    stop: threading.Event,
    *,
    group: Any = None,
) -> Trainer:
    """The trainer of the head in ``start``.

    Args:
        source: of windows with the features that the head reads.
        longest: sequence of the source, in positions.
        stop: makes ``step`` raise ``Preempted``.
    """
    head = open_drafter(start, opened.config)
    config = replace(options.config, total_steps=options.steps or options.config.total_steps)
    embedding, target_head = read_target(opened.weights, opened.config, DTYPES[config.dtype])
    network = DrafterNetwork(
        head.config,
        head.tensors,
        embedding,
        target_head,
        dtype=config.dtype,
        window=config.window,
        max_positions=longest + config.unroll_depth,
        train_head=config.train_head,
    )
    return Trainer(network, config, source, target_head, group=group, should_stop=stop.is_set)


def write_head(trainer: Trainer, out: Path, options: TrainOptions, opened: Checkpoint) -> None:
    """Make ``out`` a drafter.

    Raises:
        ValueError: the run has not learnt anything that is worth a head.
    """
    _check_learnt(trainer)
    network = trainer.network
    tensors = {
        name: t.to(DTYPES[options.out_dtype]) if t.is_floating_point() else t
        for name, t in network.tensors().items()
    }
    save_drafter(out, network.config, tensors, target=opened.config)


def _check_learnt(trainer: Trainer) -> None:
    num_steps, num_skipped = trainer.num_steps, trainer.num_skipped_steps
    if not num_steps:
        raise ValueError("no head is written: there was no time for a step; give more --minutes")
    if 2 * num_skipped > num_steps:
        raise ValueError(
            f"no head is written: {num_skipped} of {num_steps} steps had a loss or gradient that is not finite and "
            f"changed nothing; lower --learning-rate or look at the data, and give another --out"
        )
    for name, tensor in trainer.network.tensors().items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError(
                f"no head is written: {name} is not finite any more; lower --learning-rate"
            )


def has_start(out: Path, opened: Checkpoint) -> bool:
    """Whether the head that training begins with is there. One that is not whole goes, so that it is made anew.

    Raises:
        ValueError: it is damaged, and there are checkpoints, which are worth nothing without it.
    """
    start = out / START
    if not start.exists():
        return False
    try:
        open_drafter(start, opened.config)
        return True
    except ValueError as error:
        if any((out / "checkpoints").glob("step-*")):
            raise ValueError(
                f"{error}; the checkpoints beside it go on from that head: give another --out"
            ) from error
        logger.warning("%s is not whole and is made anew: %s", start, error)
        shutil.rmtree(start)
        return False


@contextlib.contextmanager
def open_run(
    trainer: Trainer,
    out: Path,
    options: TrainOptions,
    *,
    is_first: bool = True,
    held_out: Sequence[TrainingSequence] = (),
    data: Mapping[str, Any] | None = None,
) -> Iterator[TrainingRun]:
    """The run of a trainer, gone on with if it is to be resumed, with checkpoints and log below ``out``.

    Args:
        is_first: of several trainers, the one that writes.
        held_out: for validation.
        data: by which recorded data are known again; None for what changes.

    Raises:
        ValueError: another run writes here, or what is to be resumed was another run.
    """
    made_of = {
        "kind": options.kind,
        "draft_vocab_size": options.draft_vocab_size,
        "held_out_share": options.held_out_share,
    }
    identity = {"options": made_of, "data": None if data is None else dict(data)}
    with contextlib.ExitStack() as stack:
        store = log = None
        if is_first or options.run.resume:
            store = stack.enter_context(CheckpointStore(out / "checkpoints", keep=options.keep))
            if is_first:
                store.own()  # before the log is touched, which may be that of a run that goes on
        if options.run.resume:
            TrainingRun(trainer, options.run, store=store, identity=identity).resume()
            if options.steps is not None:  # which need not be those of the run that was stopped
                trainer.total_steps = options.steps
        if is_first:
            assert store is not None
            store.reserve(trainer.state()[0])
            # without a checkpoint it begins again, and so does its log
            resume_step = trainer.num_steps if options.run.resume else None
            log = stack.enter_context(MetricsLog(out / "log", resume_step=resume_step))
        yield TrainingRun(
            trainer,
            options.run,
            store=store if is_first else None,
            log=log,
            held_out=held_out if is_first else (),
            identity=identity,
        )


def figures_of(
    outcome: RunOutcome, sequences: Sequence[TrainingSequence], trainer: Trainer, seconds: float
) -> dict[str, Any]:
    """What a run was, as plain values; ``sequences`` are what it was trained on."""
    network = trainer.network
    vocab_size = network.config.vocab_size
    covered = coverage(sequences, network.target_ids, vocab_size)
    figures: dict[str, Any] = {
        "num_steps": outcome.num_steps,
        "was_stopped": outcome.was_stopped,
        "num_sequences": len(sequences),
        "num_data_tokens": sum(s.num_tokens for s in sequences),
        "vocabulary_coverage": covered,
        "seconds": seconds,
        "training_s": outcome.seconds,
        "tokens_per_s": outcome.num_tokens / max(outcome.seconds, 1e-9),
        "useful_gflops_per_s": outcome.flops_per_s / 1e9,
    }
    if outcome.validation is not None:
        for name, label in (("alpha", "acceptance"), ("agrees", "accuracy")):
            figures[f"held_out_{label}"] = outcome.validation.means(name)
            figures[f"held_out_{label}_length"] = outcome.validation.acceptance_length(name)
    return figures


def check_out(out: Path, resume: bool) -> None:
    if _is_finished(out):
        raise ValueError(f"--out {out} holds a finished head; give another directory")
    if not resume and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(
            f"--out {out} exists and is not an empty directory; give another, or --resume to go on with it"
        )
    out.mkdir(parents=True, exist_ok=True)


def _is_finished(out: Path) -> bool:
    """A config that is empty or cut off is what a kill left of a head, not a head."""
    try:
        return (out / "config.json").exists() and bool(read_json(out / "config.json"))
    except ValueError:
        return False
