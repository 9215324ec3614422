"""One optimisation step after another: draws data, adds up gradients, updates, and can be told to stop at any moment.

Owns the optimiser's state, the gradients that a step has gathered so far, and the step's number. Knows nothing of
engines, files of data, or what the losses mean. ``step`` reads as a paragraph: draw, add up, agree, update.

Preemption: ``should_stop`` is asked before every micro-batch, and inside it between the parts of the network, on the
way there and on the way back. A micro-batch that is given up leaves no trace, since its gradients are added in one go
when all of them are there; those before it are kept, and the next call goes on behind them. Nothing is lost but the
micro-batch itself.

Several trainers (torch.distributed): each draws its part of the same global batch, and gradients, counts and
measurements are summed in one reduction a step, so they hold the same weights without ever sending them. A wrapper
(DDP, FSDP2) is not used: gradients are taken in pieces, and a head of some million weights needs no sharding. A
group stops between two steps, together.

Invariants: weights and moments change in ``_update`` only; a step with a number that is not finite changes neither.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tlt_train.config import TrainConfig
from tlt_train.drafter import DrafterNetwork
from tlt_train.objective import DraftObjective, Measured
from tlt_train.packing import PackedBatch, pack, split
from tlt_train.sequence import TrainingWindow

logger = logging.getLogger(__name__)

MAX_SKIPPED = 20  # steps in a row that were not finite


class Preempted(Exception):
    """``should_stop`` said so; the trainer goes on where it was when ``step`` is called again."""


class BatchSource(Protocol):
    """Where windows come from: ``DataBuffer`` or ``FixedData``."""

    def draw(
        self, num_tokens: int, key: int, *, rank: int = 0, world: int = 1
    ) -> list[TrainingWindow]: ...


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step did. ``measured`` is of the whole group; times are of this trainer."""

    step: int
    measured: Measured
    loss: float
    grad_norm: float
    learning_rate: float
    num_tokens: int
    num_drafting: tuple[int, ...]  # rows of this trainer that drafted, by unroll step
    num_context: int  # other rows of it, read only
    seconds: float
    was_skipped: bool


@dataclass(slots=True)
class _Gathered:
    """A step that is not finished: its micro-batches, how many are done, and their sums."""

    batches: list[PackedBatch]
    num_counted: float
    gradients: list[Tensor]
    measured: Measured
    loss: float = 0.0
    num_done: int = 0


class Trainer:
    """Trains one head.

    Args:
        network: the head; its parameters are updated in place.
        config: of the run.
        source: of the data.
        target_head: [V, H] of the target, the teacher's.
        group: of torch.distributed; None trains alone.
        should_stop: asked often; True makes ``step`` raise ``Preempted`` soon.
    """

    def __init__(
        self,
        network: DrafterNetwork,
        config: TrainConfig,
        source: BatchSource,
        target_head: Tensor,
        *,
        group: Any = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.network = network
        self.config = config
        self.source = source
        self.objective = DraftObjective(network, config, target_head)
        self.total_steps = config.total_steps
        self.num_steps = 0
        self.num_skipped_steps = 0
        self._skipped_in_a_row = 0
        self.group = group
        self._should_stop = should_stop
        self._names = sorted(network.parameters)
        self._parameters = [network.parameters[name] for name in self._names]
        self._optimizer = self._make_optimizer()
        self._gathered: _Gathered | None = None

    def _make_optimizer(self) -> torch.optim.AdamW:
        matrices = [p for p in self._parameters if p.dim() > 1]
        vectors = [p for p in self._parameters if p.dim() == 1]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": self.config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            groups, lr=self.config.learning_rate, betas=self.config.betas, fused=True
        )

    # ---- a step

    def step(self) -> StepReport:
        """Draw a global batch and learn from it.

        Raises:
            Preempted: stopped; call again to go on.
            ValueError: the source has nothing to draw.
            FloatingPointError: too many steps in a row were not finite.
        """
        start = time.perf_counter()
        gathered = self._gathered or self._begin()
        self._gathered = gathered
        while gathered.num_done < len(gathered.batches):
            self._add_up(gathered)
        self._gathered = None  # from here on it is done or failed as a whole
        self._reduce(gathered)
        grad_norm, was_skipped = self._update(gathered)
        report = StepReport(
            self.num_steps,
            gathered.measured,
            gathered.loss,
            grad_norm,
            self.learning_rate,
            sum(batch.num_tokens for batch in gathered.batches),
            *self._row_counts(gathered.batches),
            time.perf_counter() - start,
            was_skipped,
        )
        self.num_steps += 1
        return report

    def _row_counts(self, batches: list[PackedBatch]) -> tuple[tuple[int, ...], int]:
        runs = [run for batch in batches for run in self.objective.runs(batch)]
        drafting = tuple(
            sum(max(run.end - run.begin - step, 0) for run in runs)
            for step in range(self.config.unroll_depth)
        )
        return drafting, sum(run.begin - run.first for run in runs)

    @property
    def learning_rate(self) -> float:
        """Of the step that comes."""
        return self.config.learning_rate_at(self.num_steps, self.total_steps)

    def _begin(self) -> _Gathered:
        self._check_stop()
        self._check_stop_together()
        config, network = self.config, self.network
        rank, world = 0, 1
        if self.group is not None:
            rank, world = dist.get_rank(self.group), dist.get_world_size(self.group)
        windows = self.source.draw(config.tokens_per_step, self.num_steps, rank=rank, world=world)
        num_taps = len(network.config.tap_layers)
        batches = [
            pack(part, num_taps=num_taps, hidden_size=network.config.target_hidden_size)
            for part in split(windows, config.tokens_per_micro_batch)
        ]
        if not batches and world == 1:
            raise ValueError("there is nothing to train on: the source of data gave no window")
        counted = torch.tensor(
            [sum(self.objective.num_counted(batch) for batch in batches)], dtype=torch.float64
        )
        if self.group is not None:
            dist.all_reduce(counted, group=self.group)
        return _Gathered(
            batches,
            max(float(counted), 1.0),
            [torch.zeros_like(p) for p in self._parameters],
            Measured.zero(config.unroll_depth),
        )

    def _add_up(self, gathered: _Gathered) -> None:
        """The next micro-batch, whole or not at all."""
        self._check_stop()
        loss, measured = self.objective.loss(
            gathered.batches[gathered.num_done], gathered.num_counted, point=self._point
        )
        if loss is not None:
            found = torch.autograd.grad(loss, self._parameters, allow_unused=True)
            pairs = [
                (own, new)
                for own, new in zip(gathered.gradients, found, strict=True)
                if new is not None
            ]
            mine = [own for own, _ in pairs]
            torch._foreach_add_(mine, [new for _, new in pairs])  # pyright: ignore[reportPrivateImportUsage]
            gathered.loss += float(loss.detach())
        gathered.measured = gathered.measured + measured
        gathered.num_done += 1

    def _reduce(self, gathered: _Gathered) -> None:
        """Sums over the group, in one message."""
        if self.group is None:
            return
        sums = gathered.measured.sums
        parts = [g.flatten() for g in gathered.gradients]
        flat = torch.cat([*parts, sums.flatten().float(), torch.tensor([gathered.loss])])
        dist.all_reduce(flat, group=self.group)
        sizes = [part.shape[0] for part in parts]
        *gradients, stats, loss = flat.split([*sizes, sums.numel(), 1])
        for mine, new in zip(gathered.gradients, gradients, strict=True):
            mine.copy_(new.view_as(mine))
        gathered.measured = Measured(stats.double().view_as(sums))
        gathered.loss = float(loss)

    def _update(self, gathered: _Gathered) -> tuple[float, bool]:
        """(norm of the gradient, whether it was not finite and the step left everything as it was)."""
        norms = torch._foreach_norm(gathered.gradients)  # pyright: ignore[reportPrivateImportUsage]
        norm = float(torch.linalg.vector_norm(torch.stack(norms)))
        if not (math.isfinite(norm) and math.isfinite(gathered.loss)):
            self.num_skipped_steps += 1
            self._skipped_in_a_row += 1
            logger.warning(
                "step %d is skipped: loss %g, gradient norm %g", self.num_steps, gathered.loss, norm
            )
            if self._skipped_in_a_row >= MAX_SKIPPED:
                raise FloatingPointError(
                    f"{MAX_SKIPPED} steps in a row had a loss or gradient that is not finite; lower learning_rate or "
                    f"look at the data"
                )
            return norm, True
        self._skipped_in_a_row = 0
        limit = self.config.max_grad_norm
        if limit and norm > limit:
            scale = limit / norm
            torch._foreach_mul_(gathered.gradients, scale)  # pyright: ignore[reportPrivateImportUsage]
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate
        for parameter, gradient in zip(self._parameters, gathered.gradients, strict=True):
            parameter.grad = gradient
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm, False

    # ---- stopping

    def _check_stop(self) -> None:
        if self.group is None and self._should_stop():
            raise Preempted

    def _check_stop_together(self) -> None:
        """One trainer of a group that is to stop stops all of them, between the same two steps."""
        if self.group is None:
            return
        wanted = torch.tensor([int(self._should_stop())])
        dist.all_reduce(wanted, group=self.group)
        if bool(wanted):
            raise Preempted

    def _point(self, x: Tensor) -> Tensor:
        return _Point.apply(x, self._check_stop)  # type: ignore[no-any-return]

    # ---- state

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors, plain values) from which ``load_state`` goes on with the same bits.

        A step that is not finished is not in it: it is done again from its number.
        """
        tensors: dict[str, Tensor] = {}
        for name, parameter in zip(self._names, self._parameters, strict=True):
            tensors[f"parameter/{name}"] = parameter.detach()
            moments = self._optimizer.state.get(parameter)
            if moments:
                tensors[f"exp_avg/{name}"] = moments["exp_avg"]
                tensors[f"exp_avg_sq/{name}"] = moments["exp_avg_sq"]
        values = {
            "num_steps": self.num_steps,
            "num_updates": self.num_steps - self.num_skipped_steps,
            "num_skipped_steps": self.num_skipped_steps,
            "total_steps": self.total_steps,
            "config": self.config.as_dict(),
        }
        return tensors, values

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Go on from what ``state`` gave.

        Raises:
            ValueError: it is of another head.
        """
        shapes = {f"parameter/{n}": tuple(p.shape) for n, p in self.network.parameters.items()}
        found = {n: tuple(t.shape) for n, t in tensors.items() if n.startswith("parameter/")}
        if found != shapes:
            raise ValueError(
                f"the checkpoint is of another head: it has {len(found)} tensors that train, this one {len(shapes)}, "
                f"or their shapes differ"
            )
        self._optimizer.state.clear()
        with torch.no_grad():
            for name, parameter in zip(self._names, self._parameters, strict=True):
                parameter.copy_(tensors[f"parameter/{name}"])
                if f"exp_avg/{name}" in tensors:
                    self._optimizer.state[parameter] = {
                        "step": torch.tensor(float(values["num_updates"])),
                        "exp_avg": tensors[f"exp_avg/{name}"].clone(),
                        "exp_avg_sq": tensors[f"exp_avg_sq/{name}"].clone(),
                    }
        self.num_steps = int(values["num_steps"])
        self.num_skipped_steps = int(values["num_skipped_steps"])
        self._skipped_in_a_row = 0
        self.total_steps = int(values["total_steps"])
        self._gathered = None


class _Point(torch.autograd.Function):
    """The identity, which asks whether to stop on both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, check: Callable[[], None]) -> Tensor:
        check()
        ctx.check = check
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.check()
        return grads[0], None
