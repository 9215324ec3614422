"""The losses of a drafter as one writes them on a board: eager, differentiated by autograd, whole [N, V] tensors.

Owns the definitions that tlt_train.losses is compared with. Knows nothing of speed. Invariant: no line here is shared
with what it checks; logits are used in the dtype of the computation (float32, or float64 where the draft's are).
"""

from __future__ import annotations

import torch
from torch import Tensor


def log_probs(logits: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.log_softmax(logits.to(dtype), dim=-1)


def acceptance(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """[N] sum of min(target, draft)."""
    dtype = torch.float64 if draft_logits.dtype == torch.float64 else torch.float32
    target = log_probs(target_logits, dtype).exp()
    draft = log_probs(draft_logits, dtype).exp()
    return torch.minimum(target, draft).sum(-1)


def reference_loss(
    name: str, draft_logits: Tensor, target_logits: Tensor, eta: float = 3.0
) -> Tensor:
    """[N] of the loss ``name``; differentiable with respect to the draft logits."""
    dtype = torch.float64 if draft_logits.dtype == torch.float64 else torch.float32
    log_target = log_probs(target_logits, dtype)
    log_draft = log_probs(draft_logits, dtype)
    target, draft = log_target.exp(), log_draft.exp()
    kl = (target * (log_target - log_draft)).sum(-1)
    if name == "kl":
        return kl
    if name == "reverse_kl":
        return (draft * (log_draft - log_target)).sum(-1)
    # relu's derivative at 0 is 0: the same choice at the kink target = draft as in tlt_train.losses
    total_variation = torch.relu(target - draft).sum(-1)
    if name == "tv":
        return total_variation
    if name == "lk":
        return -torch.log(1.0 - total_variation)
    if name == "lk_hybrid":
        weight = torch.exp(-eta * torch.minimum(target, draft).sum(-1).mean()).detach()
        return weight * kl + (1.0 - weight) * total_variation
    raise ValueError(f"there is no reference for the loss {name!r}")
