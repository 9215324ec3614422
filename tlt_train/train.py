"""``tlt drafter train``: from prompts or recorded rollouts to a head that the engine can load.

Owns the order of things and the time: data first if none is given, then a head, then steps, then the directory. Knows
nothing of how any of these work. Invariant: the output directory becomes a drafter at the end of a run that got
there; before that it holds what a run needs to go on (``checkpoints``, ``log``, ``data``, ``start``).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.models.eagle_checkpoint import open_drafter, save_drafter
from engine.models.eagle_layout import EagleConfig
from engine.models.loader import Checkpoint, open_checkpoint
from tlt_train.checkpoint import CheckpointStore
from tlt_train.config import TrainConfig
from tlt_train.drafter import DTYPES, DrafterNetwork
from tlt_train.fixed_data import FixedData, split_held_out
from tlt_train.generate import DataOptions, generate_data
from tlt_train.metrics_log import MetricsLog
from tlt_train.new_head import new_head, read_target
from tlt_train.sequence import TrainingSequence
from tlt_train.shards import ShardReader
from tlt_train.trainer import BatchSource, Trainer
from tlt_train.training_run import RunOptions, RunOutcome, TrainingRun

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
    with _group() as group, stop_on_signal() as stop:
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
                    **engine_options,
                )
            _wait(group)
        sequences, tap_layers = _read(sources, target)
        opened = open_checkpoint(target)
        if is_first and not (out / START).exists():
            training = split_held_out(sequences, options.held_out_share)[0]
            begin_head(opened, out / START, options, training, tap_layers)
        _wait(group)
        head = open_drafter(out / START, opened.config).config
        _check_taps(head, tap_layers)
        sequences = _with_features_of(head, sequences)
        training, held_out = split_held_out(sequences, options.held_out_share)
        config = options.config
        source = FixedData(training, seed=config.seed, max_window=config.tokens_per_step)
        longest = max(s.start + s.num_tokens for s in sequences)
        trainer = open_trainer(opened, out / START, options, source, longest, stop, group=group)
        deadline = None if options.minutes is None else start + options.minutes * STEPS_END_S
        with open_run(trainer, out, options, is_first=is_first, held_out=held_out) as run:
            outcome = run.run(deadline_s=deadline)
        if is_first and not outcome.was_stopped:
            write_head(trainer, out, options, opened)
    seconds = time.perf_counter() - start
    return figures_of(outcome, training, trainer, seconds) | {"out": str(out)}


def _read(
    directories: Sequence[str], target: str
) -> tuple[list[TrainingSequence], tuple[int, ...]]:
    """The sequences of all directories, which must be of one kind."""
    sequences: list[TrainingSequence] = []
    first = None
    for directory in directories:
        reader = ShardReader(directory)
        first = first or reader.meta
        if (reader.meta.tap_layers, reader.meta.hidden_size) != (
            first.tap_layers,
            first.hidden_size,
        ):
            raise ValueError(
                f"--data {directory} taps layers {list(reader.meta.tap_layers)} of hidden size "
                f"{reader.meta.hidden_size}, {directories[0]} layers {list(first.tap_layers)} of "
                f"{first.hidden_size}; train on data of one kind"
            )
        if reader.meta.target != target:
            raise ValueError(
                f"--data {directory} is of the target {reader.meta.target!r}, not of {target!r}; give that --target, "
                f"or generate data with this one"
            )
        sequences += [s for s in reader if s.num_tokens > 2]
    assert first is not None
    if not sequences:
        raise ValueError("the data have no sequence of more than two positions; generate more")
    return sequences, first.tap_layers


def _with_features_of(
    head: EagleConfig, sequences: list[TrainingSequence]
) -> list[TrainingSequence]:
    """The features that a head reads: EAGLE-1 the final hidden state alone, whatever was tapped beside it."""
    if head.kind != "eagle":
        return sequences
    return [replace(s, features=s.features[:, -head.target_hidden_size :]) for s in sequences]


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
    """Make ``out`` a drafter."""
    network = trainer.network
    tensors = {
        name: t.to(DTYPES[options.out_dtype]) if t.is_floating_point() else t
        for name, t in network.tensors().items()
    }
    save_drafter(out, network.config, tensors, target=opened.config)


def _check_taps(config: EagleConfig, tap_layers: tuple[int, ...]) -> None:
    if config.kind == "eagle3" and config.tap_layers != tap_layers:
        raise ValueError(
            f"the head reads layers {list(config.tap_layers)}, the data have {list(tap_layers)}; generate data with "
            f"--drafter"
        )


def _coverage(sequences: Iterable[TrainingSequence], ids: Tensor, vocab_size: int) -> float:
    known = torch.zeros(vocab_size, dtype=torch.bool)
    known[ids] = True
    hits = total = 0
    for sequence in sequences:
        cut = max(sequence.prompt_len - sequence.start, 0)
        found = known[torch.from_numpy(sequence.token_ids[cut:].astype("int64"))]
        hits, total = hits + int(found.sum()), total + found.shape[0]
    return hits / max(total, 1)


@contextlib.contextmanager
def open_run(
    trainer: Trainer,
    out: Path,
    options: TrainOptions,
    *,
    is_first: bool = True,
    held_out: Sequence[TrainingSequence] = (),
) -> Iterator[TrainingRun]:
    """The run of a trainer, gone on with if it is to be resumed, with checkpoints and log below ``out``."""
    with contextlib.ExitStack() as stack:
        store = log = None
        if is_first or options.run.resume:
            store = stack.enter_context(CheckpointStore(out / "checkpoints", keep=options.keep))
        if options.run.resume:
            TrainingRun(trainer, options.run, store=store).resume()
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
        )


def figures_of(
    outcome: RunOutcome, sequences: Sequence[TrainingSequence], trainer: Trainer, seconds: float
) -> dict[str, Any]:
    """What a run was, as plain values; ``sequences`` are what it was trained on."""
    network = trainer.network
    vocab_size = network.config.vocab_size
    covered = _coverage(sequences, network.target_ids, vocab_size)
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
    if (out / "config.json").exists():
        raise ValueError(f"--out {out} holds a finished head; give another directory")
    if not resume and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(
            f"--out {out} exists and is not an empty directory; give another, or --resume to go on with it"
        )
    out.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def _group() -> Iterator[Any]:
    """The trainers that torchrun started, or None for one."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        yield None
        return
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def _wait(group: Any) -> None:
    if group is not None:
        dist.barrier(group)


@contextlib.contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """An event that Ctrl-C or SIGTERM sets; a second one acts as it always does."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    former = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

    def handle(number: int, frame: Any) -> None:
        stop.set()
        signal.signal(number, former[signal.Signals(number)])

    for number in former:
        signal.signal(number, handle)
    try:
        yield stop
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
