"""A run of steps with everything around them: logs, checkpoints, validation, a deadline, a way to stop and go on.

Owns the loop and what is written down of it. Knows nothing of where data and heads come from. Invariant: what a
checkpoint holds and the data's order by step number decide everything that follows, so a run of a given number of
steps that was killed and resumed has the same losses, bit by bit, as one that was not.

A run ends by steps or by time. By time, the number of steps is estimated from the steps so far, since the learning rate
must come down by the end: after the warm-up whenever the steps of this process have doubled (so a run that goes on
soon plans anew), and at each checkpoint, which the estimate is in.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from tlt_train.checkpoint import CheckpointStore
from tlt_train.config import TrainConfig
from tlt_train.metrics_log import MetricsLog
from tlt_train.objective import Measured, useful_flops
from tlt_train.packing import pack, split
from tlt_train.sequence import TrainingSequence, TrainingWindow
from tlt_train.trainer import Preempted, StepReport, Trainer

logger = logging.getLogger(__name__)

_SLACK = 0.98  # of the time left that steps are planned for
_SPEED_STEPS = 20  # whose median is the speed


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How a run is written down.

    Args:
        checkpoint_every, validate_every, log_every: steps; 0 never.
        resume: go on from the newest whole checkpoint, if there is one.
        show_progress: a bar.

    Raises:
        ValueError: names the option, what came, and the fix.
    """

    checkpoint_every: int = 200
    validate_every: int = 100
    log_every: int = 1
    resume: bool = False
    show_progress: bool = True

    def __post_init__(self) -> None:
        for name in ("checkpoint_every", "validate_every", "log_every"):
            value = getattr(self, name)
            if value < 0:
                raise ValueError(
                    f"--{name.replace('_', '-')} must be a number of steps, or 0 for never; got {value!r}"
                )


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run ended. Times and tokens are of this process, since it began or resumed."""

    num_steps: int
    num_tokens: int
    seconds: float
    useful_flops: float
    was_stopped: bool
    validation: Measured | None

    @property
    def flops_per_s(self) -> float:
        return self.useful_flops / max(self.seconds, 1e-9)


class TrainingRun:
    """Runs a trainer to its end.

    Args:
        trainer: with its data.
        options: of the run.
        store: of checkpoints; None writes none.
        log: of metrics; None writes none. Of several trainers only the first has a store and a log.
        held_out: sequences for validation; none does not validate.
        identity: mappings of plain values, by name, that a checkpoint must have in common with this run to be gone
            on from.
    """

    def __init__(
        self,
        trainer: Trainer,
        options: RunOptions,
        *,
        store: CheckpointStore | None = None,
        log: MetricsLog | None = None,
        held_out: Sequence[TrainingSequence] = (),
        identity: Mapping[str, Mapping[str, Any] | None] | None = None,
    ) -> None:
        self.trainer = trainer
        self._options = options
        self._store = store
        self._log = log
        self._held_out = list(held_out)
        self._identity = dict(identity or {})
        self._step_s: list[float] = []
        self._between_s = 0.0  # time that went elsewhere, between steps
        self._deadline_s: float | None = None
        self.validation: Measured | None = None

    def run(
        self,
        *,
        deadline_s: float | None = None,
        after_step: Callable[[StepReport], None] = lambda report: None,
    ) -> RunOutcome:
        """Steps until ``trainer.total_steps`` or the deadline, and a last checkpoint.

        Args:
            deadline_s: of ``time.perf_counter``; None ends by steps alone.
            after_step: called after each step; what it takes counts as time that steps will not have.
        """
        trainer = self.trainer
        self._deadline_s = deadline_s
        start, num_tokens, flops, was_stopped = time.perf_counter(), 0, 0.0, False
        length = trainer.total_steps
        with tqdm(
            total=length, initial=trainer.num_steps, disable=None if self._options.show_progress else True,
            unit="step", dynamic_ncols=True,
        ) as bar:  # fmt: skip
            while trainer.num_steps < trainer.total_steps:
                if deadline_s is not None and self._agreed(time.perf_counter() >= deadline_s):
                    break
                try:
                    report = trainer.step()
                except Preempted:
                    was_stopped = True
                    break
                num_tokens += report.num_tokens
                flops += self._flops(report)
                self._step_s.append(report.seconds)
                self._after(report, bar)
                after = time.perf_counter()
                after_step(report)
                self._between_s += time.perf_counter() - after
        seconds = time.perf_counter() - start
        if self._held_out and not was_stopped:
            self._validate()
        if self._store is not None:
            self._save()
            try:
                self._store.wait()
            except OSError as error:  # a full disk must not take the head
                logger.warning("%s; the run cannot be gone on with from here", error)
        return RunOutcome(
            trainer.num_steps, num_tokens, seconds, flops, was_stopped, self.validation
        )

    def resume(self) -> bool:
        """Load the newest whole checkpoint, if there is one.

        Raises:
            ValueError: it is of another head, or of a run with other settings or data.
        """
        found = None if self._store is None else self._store.latest()
        if found is None:
            return False
        self._check_same(found.state)
        self.trainer.load_state(found.tensors, found.state)
        logger.info("resumed from step %d", self.trainer.num_steps)
        return True

    def plan(self) -> None:
        """With a deadline, the number of steps that the time left allows: the learning rate comes down by then."""
        if self._deadline_s is None or not self._step_s:
            return
        step_s = statistics.median(self._step_s[-_SPEED_STEPS:])
        step_s += self._between_s / len(self._step_s)
        left = max(int((self._deadline_s - time.perf_counter()) * _SLACK / step_s), 1)
        self.trainer.total_steps = self._first(self.trainer.num_steps + left)

    def log(self, values: Mapping[str, float]) -> None:
        """Write down what is no step's own, at the number of steps so far."""
        if self._log is not None:
            self._log.log(self.trainer.num_steps, values)

    def _after(self, report: StepReport, bar: Any) -> None:
        options, trainer = self._options, self.trainer
        done = trainer.num_steps
        at_checkpoint = bool(options.checkpoint_every) and done % options.checkpoint_every == 0
        is_warm, num_here = done >= trainer.config.warmup_steps, len(self._step_s)
        if at_checkpoint or (is_warm and num_here & (num_here - 1) == 0):
            self.plan()
        bar.total = trainer.total_steps
        if options.validate_every and done % options.validate_every == 0 and self._held_out:
            self._validate()
        if self._log is not None and options.log_every and done % options.log_every == 0:
            self._log.log(done, self._values(report))
        if at_checkpoint and self._store is not None:
            self._save()  # behind the lines: what is resumed from has all that came before it
        bar.set_postfix_str(_line(report), refresh=False)
        bar.update(done - bar.n)

    def _save(self) -> None:
        assert self._store is not None
        tensors, state = self.trainer.state()
        self._store.save(self.trainer.num_steps, tensors, state | {"identity": self._identity})

    def _check_same(self, state: Mapping[str, Any]) -> None:
        """The same settings and data as the run that the checkpoint is of, but for its number of steps."""
        former = TrainConfig.from_dict(state["config"]).as_dict()
        pairs = [("", former, self.trainer.config.as_dict())]
        stored = state.get("identity", {})  # older checkpoints have none
        pairs += [(f"{name} ", stored.get(name), now) for name, now in self._identity.items()]
        found = [
            f"{label}{name} was {before[name]!r} and is {now[name]!r}"
            for label, before, now in pairs
            if before is not None and now is not None
            for name in before.keys() & now.keys()
            if name != "total_steps" and before[name] != now[name]
        ]
        if found:
            raise ValueError(
                f"what is to be resumed was another run: {', '.join(sorted(found))}; give the options and data that "
                f"it began with, or another --out"
            )

    def _validate(self) -> None:
        """On the held-out sequences, cut to steps as training is."""
        trainer = self.trainer
        config, head = trainer.config, trainer.network.config
        windows = [
            TrainingWindow(s, 0, min(s.num_tokens, config.tokens_per_step)) for s in self._held_out
        ]
        total = Measured.zero(config.unroll_depth)
        with torch.no_grad():
            for part in split(windows, config.tokens_per_micro_batch):
                batch = pack(
                    part, num_taps=len(head.tap_layers), hidden_size=head.target_hidden_size
                )
                total = total + trainer.objective.loss(batch, 1.0)[1]
        self.validation = total
        if self._log is not None:
            self._log.log(trainer.num_steps, _measured_values(total, "validation/"))

    def _values(self, report: StepReport) -> dict[str, float]:
        values = {
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "learning_rate": report.learning_rate,
            "tokens_per_s": report.num_tokens / report.seconds,
            "useful_gflops_per_s": self._flops(report) / report.seconds / 1e9,
            "num_skipped_steps": float(self.trainer.num_skipped_steps),
        }
        if self._store is not None:
            values["checkpoint_stall_s"] = self._store.stall_s
        return values | _measured_values(report.measured, "train/")

    def _flops(self, report: StepReport) -> float:
        trainer = self.trainer
        return useful_flops(
            trainer.network.config, trainer.config, report.num_drafting, report.num_context
        )

    def _agreed(self, value: bool) -> bool:
        """Whether the first of several trainers says so: they must end at the same step."""
        return bool(self._first(int(value)))

    def _first(self, value: int) -> int:
        if self.trainer.group is None:
            return value
        shared = torch.tensor([value], dtype=torch.int64)
        dist.broadcast(shared, 0, group=self.trainer.group)
        return int(shared)


def _measured_values(measured: Measured, prefix: str) -> dict[str, float]:
    """By position of the chain: acceptance expected of sampling, and of the most likely token; loss."""
    values = {
        f"{prefix}acceptance_length": measured.acceptance_length("alpha"),
        f"{prefix}acceptance_length_greedy": measured.acceptance_length("agrees"),
    }
    for name, label in (("loss", "loss"), ("alpha", "acceptance"), ("agrees", "accuracy")):
        for position, mean in enumerate(measured.means(name), 1):
            values[f"{prefix}{label}_{position}"] = mean
    return values


def _line(report: StepReport) -> str:
    measured = report.measured
    return (
        f"loss {report.loss:.3f}, acceptance length {measured.acceptance_length('alpha'):.2f} sampled "
        f"{measured.acceptance_length('agrees'):.2f} greedy, {report.num_tokens / report.seconds:.0f} tokens/s"
    )
