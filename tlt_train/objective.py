"""What a head is trained for: the unrolled losses of a packed batch, and what they say about acceptance.

Owns which rows count and how their losses add up:

    loss = sum over unroll steps u of step_decay ** u * sum over rows of (loss_weight * l + regression_weight * r) / W

with l the loss of the draft's distribution (``losses.py``), r EAGLE-1's feature regression, and W the number of rows
that count at step 0 in the whole global batch, so that micro-batches and trainers simply add. A row counts if the
token that it is about is one of the response (or ``learn_prompts``) and in the draft's vocabulary. Knows nothing of
optimisers or of where batches come from. Invariant: documents contribute separately.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.eagle_layout import EagleConfig
from tlt_train.attention import ActiveRun
from tlt_train.config import TrainConfig
from tlt_train.drafter import DrafterNetwork, UnrollStep
from tlt_train.losses import feature_regression, row_losses
from tlt_train.packing import PackedBatch

_STATS = ("loss", "alpha", "agrees", "rows")


@dataclass(frozen=True, slots=True)
class Measured:
    """Sums over counted rows, by unroll step; they add over micro-batches and trainers.

    Attributes:
        sums: [4, depth] float64 of the distribution's loss, alpha, agreement, and the rows themselves.
    """

    sums: Tensor

    @classmethod
    def zero(cls, depth: int) -> Measured:
        return cls(torch.zeros((len(_STATS), depth), dtype=torch.float64))

    def __add__(self, other: Measured) -> Measured:
        return Measured(self.sums + other.sums)

    def means(self, name: str) -> list[float]:
        """Of "loss" (nats), "alpha" (expected acceptance) or "agrees" (most likely tokens equal), by unroll step."""
        rows = self.sums[-1].clamp(min=1.0)
        return (self.sums[_STATS.index(name)] / rows).tolist()

    @property
    def num_rows(self) -> int:
        return int(self.sums[-1].sum())

    def acceptance_length(self, name: str) -> float:
        """Expected tokens of a step with a chain of all unroll steps, the bonus token counted.

        From "alpha" for sampling, from "agrees" for temperature 0: 1 + a_1 + a_1 a_2 + ...
        """
        length, survival = 1.0, 1.0
        for mean in self.means(name):
            survival *= mean
            length += survival
        return length


class DraftObjective:
    """The loss of a network on packed batches.

    Args:
        network: the head.
        config: of the run.
        head: [V, H] of the target, the teacher's.

    Raises:
        ValueError: a regression for a head that has no feature to regress.
    """

    def __init__(self, network: DrafterNetwork, config: TrainConfig, head: Tensor) -> None:
        if config.regression_weight and network.config.kind != "eagle":
            raise ValueError(
                f"regression_weight must be 0 for an {network.config.kind} head, got {config.regression_weight}: "
                f"only EAGLE-1 predicts a feature of the target"
            )
        self.network = network
        self._config = config
        ids = network.target_ids
        self._teacher_head = head.float() if ids.shape[0] == head.shape[0] else head[ids].float()
        self._in_vocabulary = torch.zeros(head.shape[0], dtype=torch.bool)
        self._in_vocabulary[ids] = True

    def runs(self, batch: PackedBatch) -> tuple[ActiveRun, ...]:
        """The rows that draft: of each document those whose logits are about a token that is learnt."""
        found: list[ActiveRun] = []
        for first, end in zip(batch.doc_starts, batch.doc_starts[1:], strict=False):
            begin = first
            if not self._config.learn_prompts:
                if not bool(batch.in_response[end - 1]):
                    continue
                num_prompt = int((~batch.in_response[first:end]).sum())
                begin = max(first, first + num_prompt - 2)  # is about the response's first token
            if begin < end - 1:
                found.append(ActiveRun(first, begin, end - 1))
        return tuple(found)

    def num_counted(self, batch: PackedBatch) -> int:
        """Rows that count at step 0: the batch's part of W."""
        counted = self._counted(batch)
        return sum(int(counted[run.begin + 2 : run.end + 2].sum()) for run in self.runs(batch))

    def loss(
        self,
        batch: PackedBatch,
        num_counted: float,
        *,
        point: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> tuple[Tensor | None, Measured]:
        """The loss of one micro-batch, and what was measured; None where no row counts.

        Args:
            batch: packed documents.
            num_counted: W, of the global batch.
            point: see ``DrafterNetwork.unroll``.
        """
        config = self._config
        measured = Measured.zero(config.unroll_depth)
        runs = self.runs(batch)
        if not runs:
            return None, measured
        counted = self._counted(batch)
        teacher = self._teacher(batch, runs)
        total: Tensor | None = None
        for step in self.network.unroll(batch, runs, config.unroll_depth, point=point):
            if not step.rows.shape[0]:
                break
            weights = counted[step.teacher_rows + 1].float()
            logits = teacher[step.teacher_rows]
            losses = row_losses(config.loss, step.logits, logits, eta=config.hybrid_eta)
            rows = config.loss_weight * losses.loss
            if config.regression_weight:
                rows = rows + config.regression_weight * self._regression(step, batch)
            part = (rows * weights).sum() * (config.step_decay**step.depth / num_counted)
            total = part if total is None else total + part
            found = torch.stack(
                (losses.loss.detach(), losses.alpha, losses.agrees.to(weights.dtype))
            )
            measured.sums[:-1, step.depth] = (found * weights).double().sum(dim=1)
            measured.sums[-1, step.depth] = weights.double().sum()
        return total, measured

    def _counted(self, batch: PackedBatch) -> Tensor:
        """[N + 1] bool: whether the token of a row's position is learnt; the one behind a document, not known, is."""
        known = self._in_vocabulary[batch.token_ids]
        if not self._config.learn_prompts:
            known = known & batch.in_response
        counted = torch.cat((known, torch.ones(1, dtype=torch.bool)))
        counted[list(batch.doc_starts[1:])] = True  # behind a document's last position
        return counted

    def _teacher(self, batch: PackedBatch, runs: tuple[ActiveRun, ...]) -> Tensor:
        """[N, draft vocab] fp32 logits of the target; rows that teach nobody are not computed but there."""
        teacher = torch.empty((batch.token_ids.shape[0], self._teacher_head.shape[0]))
        for run in runs:
            rows = slice(run.begin + 1, run.end + 1)
            torch.mm(batch.hidden[rows].float(), self._teacher_head.t(), out=teacher[rows])
        return teacher

    def _regression(self, step: UnrollStep, batch: PackedBatch) -> Tensor:
        return feature_regression(step.hidden, batch.hidden[step.teacher_rows].float())


def useful_flops(
    config: EagleConfig, train_config: TrainConfig, rows: Sequence[int], context: int
) -> float:
    """Matrix multiplications that a step cannot do without, as floating point operations.

    A linear costs 2 operations a weight and row forward, as much for its weights' gradient, and as much for its
    input's unless that is data. Attention, norms and losses are not counted, nor what a pass does beyond ``rows``.

    Args:
        rows: rows that draft, by unroll step.
        context: rows whose keys are computed at step 0 and that draft nothing.
    """
    hidden, inner, width = config.hidden_size, config.intermediate_size, config.layer_width
    kv = 2 * config.num_kv_heads * config.head_dim * width
    q = config.num_q_heads * config.head_dim
    fc = config.feature_width * hidden + (hidden * hidden if config.kind == "eagle" else 0)
    layer = q * width + kv + q * hidden + 3 * inner * hidden
    head = config.draft_vocab_size * hidden
    trained = config.own_head and train_config.train_head
    total = 2.0 * 2 * fc * (rows[0] + context) + 2.0 * 3 * kv * context  # features are data
    total += 2.0 * head * rows[0]  # the teacher
    for count in rows:
        total += 2.0 * count * (3 * layer + (3 if trained else 2) * head)
    if config.kind == "eagle":  # what is fed back enters fc again, and has a gradient
        total += 2.0 * sum(rows[1:]) * (2 * fc + hidden * hidden)
    return total
