"""Times the trainer's own parts with pytest-benchmark: the row losses, and how long a checkpoint holds training up.

Each case is verified before it is timed. ``extra_info`` has the bytes that a loss must move, forward and backward
(both logits read, the gradient written, then read and written once more), and for the checkpoint what the same save
takes when one waits for it, with the share of that which the asynchronous one costs.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tlt_train.checkpoint import CheckpointStore
from tlt_train.losses import LOSS_NAMES, row_losses

NUM_ROWS, VOCAB = 1024, 4096
NUM_PARAMS = 10_000_000  # of a drafter for a model of 135M, in fp32, with two moments: 120 MB
ROUNDS = 8


def eager_losses(draft_logits: Tensor, target_logits: Tensor) -> dict[str, Tensor]:
    """Every loss [N] as plain torch writes it; the weight of the hybrid is that of row_losses' default."""
    log_target = torch.log_softmax(target_logits.float(), -1)
    log_draft = torch.log_softmax(draft_logits.float(), -1)
    target, draft = log_target.exp(), log_draft.exp()
    kl = (target * (log_target - log_draft)).sum(-1)
    alpha = torch.minimum(target, draft).sum(-1)
    weight = torch.exp(-3.0 * alpha.mean()).detach()
    return {
        "kl": kl,
        "reverse_kl": (draft * (log_draft - log_target)).sum(-1),
        "tv": 1.0 - alpha,
        "lk": -alpha.log(),
        "lk_hybrid": weight * kl + (1.0 - weight) * (1.0 - alpha),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", LOSS_NAMES)
def test_row_losses(benchmark, name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(NUM_ROWS, VOCAB, generator=generator) * 3
    draft = (target + torch.randn(NUM_ROWS, VOCAB, generator=generator)).to(dtype)
    target = target.to(dtype)
    draft.requires_grad_()
    expected = eager_losses(draft[:64], target[:64])[name]
    torch.testing.assert_close(
        row_losses(name, draft[:64], target[:64]).loss, expected, rtol=1e-4, atol=1e-5
    )

    def call() -> None:
        row_losses(name, draft, target).loss.mean().backward()
        draft.grad = None

    benchmark.extra_info["num_bytes"] = 5 * draft.numel() * draft.element_size()
    benchmark(call)


def test_checkpoint_stall(benchmark, tmp_path: Path) -> None:
    """The time of ``save`` alone; the writes between the rounds are not in it."""
    size = NUM_PARAMS // 10
    tensors = {
        f"{kind}.{index}": torch.randn(size)
        for kind in ("weight", "exp_avg", "exp_avg_sq")
        for index in range(10)
    }
    store = CheckpointStore(tmp_path, keep=2)
    store.reserve(tensors)
    waited_s, plain_s, stalls_s = [], [], []
    for step in range(ROUNDS):  # interleaved: the disk's mood is the same for all
        begin_s = time.perf_counter()
        store.save(step, tensors, {"step": step})
        store.wait()
        waited_s.append(time.perf_counter() - begin_s)
        stalls_s.append(store.stall_s)
        begin_s = time.perf_counter()
        save_file(tensors, tmp_path / "plain.safetensors")
        with open(tmp_path / "plain.safetensors", "rb") as file:
            os.fsync(file.fileno())
        plain_s.append(time.perf_counter() - begin_s)
    found = store.latest()
    assert found is not None
    assert all(torch.equal(found.tensors[name], tensors[name]) for name in tensors)
    steps = iter(range(ROUNDS, 3 * ROUNDS))
    benchmark.pedantic(
        lambda: store.save(next(steps), tensors, {}), setup=store.wait, rounds=ROUNDS, iterations=1
    )
    store.close()
    stall_s = statistics.median(stalls_s)
    benchmark.extra_info |= {
        "num_bytes": 3 * NUM_PARAMS * 4,
        "synchronous_s": statistics.median(waited_s),
        "plain_safetensors_and_fsync_s": statistics.median(plain_s),
        "stall_s": stall_s,
        "stall_share": stall_s / statistics.median(waited_s),
    }
