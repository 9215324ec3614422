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
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from tlt_train.config import LOSSES as LOSS_NAMES

# Of each scratch buffer, 2 MiB of fp32: all six stay in a last cache of 16 MiB. Smaller chunks are no faster on an idle
# machine and slower on a busy one, where each parallel op may wait for a core.
CHUNK_ELEMENTS = 1 << 19
BLOCK = 64  # tokens that share a maximum on the way to an argmax


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
        loss, weights = walk.mix(eta)
        ctx.save_for_backward(*walk.gradients.values(), *weights)
        ctx.mark_non_differentiable(walk.alpha, agrees := walk.agrees())
        return loss, walk.alpha, agrees

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None, None]:
        first, *rest = ctx.saved_tensors
        scales = [grad_loss.unsqueeze(1)]
        if rest:  # the gradients of two losses, then the weights of both
            second, *weights = rest
            scales = [scales[0] * weight for weight in weights]
            rest = [second]
        out = torch.empty_like(first)
        step = _chunk_rows(first)
        for begin in range(0, len(out), step):
            rows = slice(begin, begin + step)
            # products in the dtype of the loss: rounding a scale to bf16 would shift a whole row
            total = first[rows].to(grad_loss.dtype) * scales[0][rows]
            for gradient, scale in zip(rest, scales[1:], strict=True):
                total.addcmul_(gradient[rows].to(grad_loss.dtype), scale[rows])
            out[rows] = total
        return out, None, None, None, None


def _chunk_rows(tensor: Tensor) -> int:
    """Rows of a chunk; an accelerator has no use for chunks that fit a CPU's cache."""
    size = CHUNK_ELEMENTS if tensor.device.type == "cpu" else CHUNK_ELEMENTS << 7
    return max(1, size // tensor.shape[1])


class _Walk:
    """One forward: outputs, scratch, and the formulas of ``row_losses`` on a chunk of rows.

    In the methods z, t are logits of draft and target, q, p their distributions, [n, V] each; u, v are scratch.
    """

    def __init__(self, draft: Tensor, target: Tensor, name: str, wants_gradient: bool) -> None:
        self.draft, self.target, self.wants_gradient = draft, target, wants_gradient
        self.names = ("kl", "tv") if name == "lk_hybrid" else (name,)
        self.dtype = _compute_dtype(draft)
        num_rows, vocab = draft.shape
        self.alpha = draft.new_empty(num_rows, dtype=self.dtype)
        self.losses = {part: torch.empty_like(self.alpha) for part in self.names}
        self.gradients = {part: torch.empty_like(draft) for part in self.names if wants_gradient}
        self.width = gcd(vocab, BLOCK)
        blocks = (num_rows, vocab // self.width)
        self.blocks = [draft.new_empty(blocks, dtype=self.dtype) for _ in (draft, target)]

    def run(self) -> None:
        step = _chunk_rows(self.draft)
        shape = (min(step, len(self.alpha)), self.draft.shape[1])
        scratch = [self.draft.new_empty(shape, dtype=self.dtype) for _ in range(6)]
        for begin in range(0, len(self.alpha), step):
            rows = slice(begin, begin + step)
            q, p, u, v, *copies = (buffer[: len(self.alpha[rows])] for buffer in scratch)
            z = _as_dtype(self.draft[rows], copies[0])
            t = _as_dtype(self.target[rows], copies[1])
            for logits, blocks in zip((z, t), self.blocks, strict=True):
                torch.amax(logits.view(len(z), -1, self.width), -1, out=blocks[rows])
            torch.softmax(z, -1, out=q)
            torch.softmax(t, -1, out=p)
            alpha = torch.minimum(p, q, out=u).sum(-1).clamp_(max=1.0)
            self.alpha[rows] = alpha
            for name in self.names:
                if name in ("kl", "reverse_kl"):
                    self.divergence(name, rows, torch.sub(t, z, out=u), q, p, v)
                else:
                    self.overlap(name, rows, alpha, q, p, u, v)

    def divergence(
        self, name: str, rows: slice, gap: Tensor, q: Tensor, p: Tensor, v: Tensor
    ) -> None:
        """kl and reverse_kl; gap = t - z.

        The log of a sum of exponentials is max - log(the greatest probability): no further exponentials.
        """
        log_sums = [
            blocks[rows].amax(-1) - probs.amax(-1).log_()
            for blocks, probs in zip(self.blocks, (q, p), strict=True)
        ]
        shift = log_sums[1] - log_sums[0]  # log(target / draft) = gap - shift
        if name == "kl":
            self.losses[name][rows] = torch.mul(p, gap, out=v).sum(-1).sub_(shift)
            if self.wants_gradient:
                self.gradients[name][rows] = torch.sub(q, p, out=v)
            return
        loss = shift.sub_(torch.mul(q, gap, out=v).sum(-1))
        self.losses[name][rows] = loss
        if self.wants_gradient:  # q (shift - gap - loss) = q (sum_v q gap - gap)
            mean_gap = v.sum(-1, keepdim=True)
            self.gradients[name][rows] = torch.sub(mean_gap, gap, out=gap).mul_(q)

    def overlap(
        self, name: str, rows: slice, alpha: Tensor, q: Tensor, p: Tensor, u: Tensor, v: Tensor
    ) -> None:
        """tv and lk."""
        floored = alpha.clamp(min=torch.finfo(alpha.dtype).tiny)
        self.losses[name][rows] = floored.log().neg_() if name == "lk" else 1.0 - alpha
        if not self.wants_gradient:
            return
        _where_positive(q, torch.sub(p, q, out=u), out=v)
        gradient = torch.mul(q, v.sum(-1, keepdim=True), out=u).sub_(v)
        if name == "lk":
            gradient.div_(floored.unsqueeze(1))
        self.gradients[name][rows] = gradient

    def mix(self, eta: float) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Loss of each row, and the weights of two losses where it mixes them: every row's alpha is known now."""
        if len(self.names) == 1:
            return self.losses[self.names[0]], ()
        weight = torch.exp(-eta * self.alpha.mean())
        return torch.lerp(self.losses["tv"], self.losses["kl"], weight), (weight, 1.0 - weight)

    def agrees(self) -> Tensor:
        """[N] whether both argmaxes are the same token.

        An argmax over V costs as much as three softmaxes, and a maximum next to nothing: the first block of the
        vocabulary that holds the row's maximum, then the first token within it.
        """
        tokens = []
        for logits, blocks in zip((self.draft, self.target), self.blocks, strict=True):
            block = blocks.argmax(-1, keepdim=True)
            cells = block * self.width + torch.arange(self.width, device=logits.device)
            cell = logits.gather(1, cells).argmax(-1, keepdim=True)
            tokens.append(cells.gather(1, cell).squeeze(1))
        return tokens[0] == tokens[1]


def _as_dtype(logits: Tensor, buffer: Tensor) -> Tensor:
    """The logits themselves where they have the buffer's dtype, else a copy in the buffer."""
    is_plain = logits.dtype == buffer.dtype and logits.is_contiguous()
    return logits if is_plain else buffer.copy_(logits)


def _where_positive(values: Tensor, gate: Tensor, *, out: Tensor) -> None:
    """out = values where gate > 0, else 0: relu's backward, six times as fast as a comparison and a masked fill."""
    torch.ops.aten.threshold_backward.grad_input(values, gate, 0, grad_input=out)
