"""Losses of a drafter, row by row: how far the draft distribution of a token is from the target's.

Owns the formulas and their gradients with respect to the draft logits. Knows nothing of which rows are trained, of
their weights or of unroll steps: rows come aligned, and the caller reduces. Invariant: no value or gradient of a row
depends on another row, but for the one detached mixing weight of ``lk_hybrid``.

Symbols, for one row over the draft vocabulary (V tokens): z = draft logits, target = softmax(target logits) (over the
draft vocabulary, hence renormalised where that is a part of the target's), draft = softmax(z), and
alpha = sum_v min(target_v, draft_v), the acceptance rate of ideal speculative sampling (Leviathan et al. 2023,
arXiv 2211.17192, section 3.2), so that the total variation distance is TV = 1 - alpha.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

LOSS_NAMES = ("kl", "reverse_kl", "tv", "lk", "lk_hybrid")
CHUNK_ELEMENTS = (
    1 << 17
)  # of each scratch buffer: four of fp32 are 2 MiB, which stay in the caches of two cores


@dataclass(frozen=True, slots=True)
class RowLosses:
    """Of each of N rows; fp32, or fp64 where the draft logits are."""

    loss: Tensor  # [N], nats (TV: a probability), differentiable with respect to the draft logits
    alpha: Tensor  # [N], acceptance rate of ideal speculative sampling, in [0, 1], detached
    agrees: Tensor  # [N] bool: both argmaxes are the same token (lowest id on a tie)


def row_losses(
    name: str, draft_logits: Tensor, target_logits: Tensor, *, eta: float = 3.0
) -> RowLosses:
    """The loss ``name`` of rows of logits, with the acceptance rate as a by-product.

    =============  =============================================  ==================================================
    name           loss of a row                                  d loss / d z_v
    =============  =============================================  ==================================================
    ``kl``         sum_v target_v log(target_v / draft_v)         draft_v - target_v
    ``reverse_kl`` R = sum_v draft_v log(draft_v / target_v)      draft_v (log(draft_v / target_v) - R)
    ``tv``         1 - alpha                                      draft_v (A - a_v)
    ``lk``         -log alpha                                     draft_v (A - a_v) / alpha
    ``lk_hybrid``  w KL + (1 - w) TV                              the same mixture of the gradients
    =============  =============================================  ==================================================

    with a_v = 1 where draft_v < target_v, else 0 (at the kink draft_v = target_v the subgradient of
    sum max(target - draft, 0), so that equal distributions have gradient zero), and A = sum_v a_v draft_v.
    ``kl`` is the soft cross entropy of EAGLE (arXiv 2401.15077, section 4.2) and EAGLE-3 (arXiv 2503.01840) less
    the target's entropy, hence of the same gradient; ``lk`` and ``lk_hybrid`` are the LK losses (arXiv 2602.23881,
    sections 4.2 and 4.4) with w = exp(-eta * mean alpha over the rows of the call), detached: KL leads while the
    draft is bad and its TV gradient is small, TV takes over as acceptance grows.

    Args:
        draft_logits: [N, V] floating; its gradient is computed with the loss and kept in its dtype.
        target_logits: [N, V] floating, any dtype; constants.
        eta: decay of w, at least 0; read by ``lk_hybrid`` alone.

    Logits are finite. A NaN or +inf makes that row's loss NaN, a -inf makes its KL terms infinite or NaN; other rows
    keep their values (but for w), and nothing is checked here: a check is a pass, and the trainer looks at the loss.
    Where alpha underflows (logits further apart than about 87), ``lk`` stops at -log of the smallest normal number
    with gradient zero. Backward may run more than once; it is not differentiable itself.

    Raises:
        ValueError: unknown name, shapes that are not one [N, V], dtypes that are not floating, or a bad eta.
    """
    if name not in LOSS_NAMES:
        raise ValueError(f"loss is {name!r}; choose one of {', '.join(LOSS_NAMES)}")
    if (
        draft_logits.dim() != 2
        or draft_logits.shape != target_logits.shape
        or not draft_logits.shape[1]
    ):
        raise ValueError(
            f"draft_logits is {tuple(draft_logits.shape)} and target_logits {tuple(target_logits.shape)};"
            " give both as the same [rows, draft vocabulary]"
        )
    if not (draft_logits.is_floating_point() and target_logits.is_floating_point()):
        raise ValueError(
            f"logits are {draft_logits.dtype} and {target_logits.dtype}; give floating-point logits"
        )
    if not 0.0 <= eta < float("inf"):
        raise ValueError(f"eta is {eta}; give a number of at least 0 (the paper uses 3)")
    wants_gradient = draft_logits.requires_grad and torch.is_grad_enabled()
    loss, alpha, agrees = _RowLoss.apply(
        draft_logits, target_logits.detach(), name, eta, wants_gradient
    )
    return RowLosses(loss, alpha, agrees)


def feature_regression(predicted: Tensor, target: Tensor) -> Tensor:
    """[N] smooth L1 distance (beta 1) of features [N, H], the mean over H; fp32, or fp64 where ``predicted`` is.

    EAGLE (arXiv 2401.15077, section 4.2) trains on 1.0 * this + 0.1 * soft cross entropy; the caller weighs.

    Raises:
        ValueError: the shapes are not one [N, H].
    """
    if predicted.dim() != 2 or predicted.shape != target.shape:
        raise ValueError(
            f"predicted is {tuple(predicted.shape)} and target {tuple(target.shape)};"
            " give both as the same [rows, hidden size]"
        )
    dtype = _compute_dtype(predicted)
    return functional.smooth_l1_loss(
        predicted.to(dtype), target.detach().to(dtype), reduction="none"
    ).mean(-1)


def _compute_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


class _RowLoss(torch.autograd.Function):
    """Values and the gradient in one walk over chunks of rows whose scratch stays in cache."""

    @staticmethod
    def forward(
        ctx: Any, draft: Tensor, target: Tensor, name: str, eta: float, wants_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        walk = _Walk(draft, target, name, wants_gradient)
        walk.run()
        walk.mix(eta)
        ctx.save_for_backward(walk.gradient)
        ctx.mark_non_differentiable(walk.alpha, walk.agrees)
        return walk.loss, walk.alpha, walk.agrees

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        rows = grad_loss.unsqueeze(1)
        if gradient.dtype == rows.dtype:
            return gradient * rows, None, None, None, None
        out = torch.empty_like(gradient)
        step = _chunk_rows(gradient)
        scratch = rows.new_empty(min(step, len(gradient)), gradient.shape[1])
        for begin in range(0, len(gradient), step):
            part = gradient[begin : begin + step]
            product = scratch[: len(part)].copy_(part)
            out[begin : begin + step] = product.mul_(rows[begin : begin + step])
        return out, None, None, None, None


def _chunk_rows(tensor: Tensor) -> int:
    """Rows of a chunk; an accelerator has no use for chunks that fit a CPU's cache."""
    size = CHUNK_ELEMENTS if tensor.device.type == "cpu" else CHUNK_ELEMENTS << 7
    return max(1, size // tensor.shape[1])


class _Walk:
    """One forward: outputs, scratch, and the formulas of ``row_losses`` on a chunk."""

    def __init__(self, draft: Tensor, target: Tensor, name: str, wants_gradient: bool) -> None:
        num_rows, vocab = draft.shape
        dtype = _compute_dtype(draft)
        self.inputs, self.name, self.wants_gradient = (draft, target), name, wants_gradient
        self.loss = draft.new_empty(num_rows, dtype=dtype)
        self.alpha = torch.empty_like(self.loss)
        self.agrees = torch.empty_like(self.loss, dtype=torch.bool)
        self.gradient = torch.empty_like(draft) if wants_gradient else draft.new_empty(0)
        is_mixed = name == "lk_hybrid"
        self.second_loss = torch.empty_like(self.loss) if is_mixed else self.loss
        self.second_gradient = torch.empty_like(self.gradient) if is_mixed else self.gradient
        self.step = _chunk_rows(draft)
        shape = (min(self.step, num_rows), vocab)
        self.scratch = [torch.empty(shape, dtype=dtype, device=draft.device) for _ in range(5)]

    def run(self) -> None:
        for begin in range(0, len(self.loss), self.step):
            rows = slice(begin, begin + self.step)
            draft_part, target_part = (part[rows] for part in self.inputs)
            self.agrees[rows] = draft_part.argmax(-1) == target_part.argmax(-1)
            z, t, q, p, tmp = (buffer[: len(draft_part)] for buffer in self.scratch)
            z.copy_(draft_part)
            t.copy_(target_part)
            torch.softmax(z, -1, out=q)
            torch.softmax(t, -1, out=p)
            alpha = torch.minimum(p, q, out=tmp).sum(-1).clamp_(max=1.0)
            self.alpha[rows] = alpha
            if self.name in ("kl", "lk_hybrid"):
                self.kl(rows, z, t, q, p, tmp)
            if self.name == "reverse_kl":
                self.reverse_kl(rows, z, t, q, p, tmp)
            if self.name in ("tv", "lk", "lk_hybrid"):
                self.tv(rows, alpha, q, p, tmp)

    def kl(self, rows: slice, z: Tensor, t: Tensor, q: Tensor, p: Tensor, tmp: Tensor) -> None:
        self.loss[rows] = _divergence(t, z, p, q, tmp)
        if self.wants_gradient:
            self.gradient[rows] = torch.sub(q, p, out=tmp)

    def reverse_kl(
        self, rows: slice, z: Tensor, t: Tensor, q: Tensor, p: Tensor, tmp: Tensor
    ) -> None:
        loss = _divergence(z, t, q, p, tmp)
        self.loss[rows] = loss
        if self.wants_gradient:
            # _divergence leaves log(draft / target) in its first argument
            self.gradient[rows] = z.sub_(loss.unsqueeze(1)).mul_(q)

    def tv(self, rows: slice, alpha: Tensor, q: Tensor, p: Tensor, tmp: Tensor) -> None:
        floor = torch.finfo(alpha.dtype).tiny
        is_lk = self.name == "lk"
        self.second_loss[rows] = -alpha.clamp(min=floor).log() if is_lk else 1.0 - alpha
        if not self.wants_gradient:
            return
        tmp.copy_(q).masked_fill_(q >= p, 0.0)
        inside = tmp.sum(-1, keepdim=True)
        gradient = q.mul_(inside).sub_(tmp)
        if is_lk:
            gradient.div_(alpha.clamp(min=floor).unsqueeze(1))
        self.second_gradient[rows] = gradient

    def mix(self, eta: float) -> None:
        """lk_hybrid: its weight is known only when every row's alpha is."""
        if self.name != "lk_hybrid" or not len(self.loss):
            return
        weight = torch.exp(-eta * self.alpha.mean())
        torch.lerp(self.second_loss, self.loss, weight, out=self.loss)
        if self.wants_gradient:
            weight = weight.to(self.gradient.dtype)
            torch.lerp(self.second_gradient, self.gradient, weight, out=self.gradient)


def _divergence(a: Tensor, b: Tensor, prob_a: Tensor, prob_b: Tensor, tmp: Tensor) -> Tensor:
    """[n] KL(prob_a || prob_b) of logits a, b; a becomes log(prob_a / prob_b).

    The log of a sum of exponentials is max - log(the greatest probability): no further pass with exponentials.
    """
    shift_a = a.amax(-1, keepdim=True) - prob_a.amax(-1, keepdim=True).log_()
    shift_b = b.amax(-1, keepdim=True) - prob_b.amax(-1, keepdim=True).log_()
    a.sub_(shift_a).sub_(b.sub_(shift_b))
    return torch.mul(prob_a, a, out=tmp).sum(-1)
