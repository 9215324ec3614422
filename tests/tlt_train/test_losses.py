"""The losses of a drafter against the eager version, autograd's own check, and what must hold of distances.

Each test names the bug that it would catch.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import tlt_train.losses as losses
from tests.tlt_train.loss_reference import acceptance, reference_loss
from tlt_train.losses import LOSS_NAMES, feature_regression, row_losses

# rows and vocabulary: one block of 64, several chunks (see `small_chunks`), a vocabulary that blocks do not divide
SHAPES = ((1, 1), (3, 7), (5, 64), (9, 320), (33, 130))
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-6}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few rows, the last one not full: else no test would see more than one."""
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", 1200)


def logits(
    shape: tuple[int, int], dtype: torch.dtype, *, seed: int = 0, scale: float = 2.0
) -> tuple[Tensor, Tensor]:
    """(draft, target); related, as those of a half-trained drafter are."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    draft = target + torch.randn(shape, generator=generator, dtype=torch.float64)
    return draft.to(dtype).requires_grad_(), target.to(dtype)


def gradient(loss: Tensor, draft: Tensor) -> Tensor:
    """Of a weighted sum, so that a gradient that ignores its row's weight is seen."""
    weights = torch.linspace(-1.0, 2.0, len(loss), dtype=loss.dtype)
    (grad,) = torch.autograd.grad((loss * weights).sum(), draft)
    return grad


@pytest.mark.parametrize("name", LOSS_NAMES)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_eager_version(name: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Wrong formula, rows of the wrong chunk, computation in bf16."""
    draft, target = logits(shape, dtype)
    out = row_losses(name, draft, target, eta=2.0)
    expected = reference_loss(name, draft, target, eta=2.0)
    assert out.loss.dtype == expected.dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.loss, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        out.alpha, acceptance(draft, target).detach(), rtol=tolerance, atol=tolerance
    )
    found, wanted = gradient(out.loss, draft), gradient(expected, draft)
    assert found.dtype == dtype
    if (
        dtype == torch.bfloat16
    ):  # rounded to bf16 once when kept, once when multiplied by the row's weight
        torch.testing.assert_close(found, wanted, rtol=2**-7, atol=1e-7)
    else:
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize("name", [name for name in LOSS_NAMES if name != "lk_hybrid"])
def test_gradcheck(name: str) -> None:
    """The analytic gradient against finite differences: no formula of ours on the other side."""
    draft, target = logits((4, 11), torch.float64, seed=1)
    assert torch.autograd.gradcheck(lambda z: row_losses(name, z, target).loss, (draft,))


def test_gradcheck_of_the_hybrid_holds_its_weight_still() -> None:
    """A weight that is differentiated rewards a worse draft for a greater alpha."""
    draft, target = logits((4, 11), torch.float64, seed=1)
    weight = float(torch.exp(-3.0 * row_losses("kl", draft, target).alpha.mean()))

    def mixture(z: Tensor) -> Tensor:
        kl, tv = (row_losses(name, z, target).loss for name in ("kl", "tv"))
        return weight * kl + (1.0 - weight) * tv

    assert torch.autograd.gradcheck(mixture, (draft,))
    found = gradient(row_losses("lk_hybrid", draft, target).loss, draft)
    torch.testing.assert_close(found, gradient(mixture(draft), draft))


def test_eta_leads_from_kl_to_tv() -> None:
    draft, target = logits((5, 64), torch.float64)
    for eta, name in ((0.0, "kl"), (1e6, "tv")):
        mixed = row_losses("lk_hybrid", draft, target, eta=eta).loss
        torch.testing.assert_close(mixed, row_losses(name, draft, target).loss)


@pytest.mark.parametrize("name", ["kl", "lk_hybrid"])
def test_the_weight_of_a_row_is_not_rounded_to_bf16(name: str) -> None:
    """1 + 2^-8 lies between two bf16 numbers: rounded, it would be 0.4% off for each element of a row alike."""
    draft, target = logits((33, 130), torch.bfloat16)
    exact = draft.detach().double().requires_grad_()
    weight = 1.0 + 2**-8
    (found,) = torch.autograd.grad((row_losses(name, draft, target).loss * weight).sum(), draft)
    (wanted,) = torch.autograd.grad((row_losses(name, exact, target).loss * weight).sum(), exact)
    assert (
        abs(float((found.double() / wanted).median()) - 1.0) < 2e-3
    )  # both roundings of bf16 allow 1e-3


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_a_shift_of_logits_changes_nothing(name: str) -> None:
    draft, target = logits((5, 64), torch.float64)
    out = row_losses(name, draft, target)
    moved = (draft.detach() + 300.0).requires_grad_()
    other = row_losses(name, moved, target - 1000.0)
    torch.testing.assert_close(other.loss, out.loss, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradient(other.loss, moved), gradient(out.loss, draft))


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_tokens_may_be_renamed_and_gradients_sum_to_zero(name: str) -> None:
    """The sum of logits is free: a gradient along it would push all of them for nothing."""
    draft, target = logits((5, 64), torch.float64)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(2))
    shuffled = draft.detach()[:, order].requires_grad_()
    out, other = row_losses(name, draft, target), row_losses(name, shuffled, target[:, order])
    torch.testing.assert_close(other.loss, out.loss)
    grad = gradient(out.loss, draft)
    torch.testing.assert_close(gradient(other.loss, shuffled), grad[:, order])
    assert float(grad.sum(-1).abs().max()) < 1e-12


def test_identities_of_distances() -> None:
    """TV = 1 - alpha, KL >= 0 both ways, Pinsker's TV <= sqrt(KL / 2), LK = -log alpha with TV's gradient / alpha."""
    draft, target = logits((200, 64), torch.float64, scale=4.0)
    out = {name: row_losses(name, draft, target) for name in LOSS_NAMES}
    alpha = out["tv"].alpha
    assert float(alpha.min()) > 0.0
    assert float(alpha.max()) <= 1.0
    torch.testing.assert_close(out["tv"].loss, 1.0 - alpha)
    half_l1 = 0.5 * (draft.softmax(-1) - target.softmax(-1)).abs().sum(-1)
    torch.testing.assert_close(out["tv"].loss, half_l1)
    for name in ("kl", "reverse_kl"):
        assert not bool((out[name].loss < 0.0).any())
        assert bool((out["tv"].loss <= (out[name].loss / 2).sqrt() + 1e-12).all())
    torch.testing.assert_close(out["lk"].loss, -alpha.log())
    (lk,) = torch.autograd.grad(out["lk"].loss.sum(), draft)
    (tv,) = torch.autograd.grad(out["tv"].loss.sum(), draft)
    torch.testing.assert_close(lk, tv / alpha.unsqueeze(1))


@pytest.mark.parametrize("name", LOSS_NAMES)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_equal_distributions_are_a_fixed_point(name: str, dtype: torch.dtype) -> None:
    """All tokens stand at the kink of TV then: a mask that differs between them would push a perfect draft away."""
    draft, target = logits((5, 64), dtype)
    same = target.clone().requires_grad_()
    out = row_losses(name, same, target)
    assert float(out.loss.detach().abs().max()) < 1e-6
    assert float(out.alpha.min()) > 1.0 - 1e-6
    assert bool(out.agrees.all())
    assert float(gradient(out.loss, same).abs().max()) < 1e-7
    assert float(row_losses(name, draft, target).loss.detach().min()) > 1e-3


def test_a_tie_counts_as_covered() -> None:
    """Token 2 has 1/2 in both distributions, the draft lacks token 0: nothing that it has can be moved there."""
    target = torch.tensor([[0.0, -1e4, 0.0]])
    draft = torch.tensor([[-1e4, 0.0, 0.0]], requires_grad=True)
    out = row_losses("tv", draft, target)
    assert out.alpha.tolist() == [0.5]
    assert not gradient(out.loss, draft).any()


@pytest.mark.parametrize("name", LOSS_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_extremes_stay_finite(name: str, dtype: torch.dtype) -> None:
    """Logits of +-1e4: exp overflows without the max taken off, and 0 * log 0 is NaN."""
    vocab = 64
    draft, target = torch.full((4, vocab), -1e4), torch.full((4, vocab), -1e4)
    target[:, 3] = (
        1e4  # the target is certain of token 3; the draft of it, of another, of none, half
    )
    draft[0, 3], draft[1, 5] = 1e4, 1e4
    draft[3, 3] = draft[3, 4] = 1e4
    draft = draft.to(dtype).requires_grad_()
    out = row_losses(name, draft, target.to(dtype))
    assert bool(torch.isfinite(out.loss).all())
    assert bool(torch.isfinite(gradient(out.loss, draft)).all())
    torch.testing.assert_close(out.alpha, torch.tensor([1.0, 0.0, 1.0 / vocab, 0.5]))
    assert out.agrees.tolist() == [True, False, False, True]
    if (
        name == "lk"
    ):  # at a one-hot target it is the cross entropy of that token, where fp32 can say it
        expected = [0.0, -math.log(torch.finfo(torch.float32).tiny), math.log(vocab), math.log(2.0)]
        torch.testing.assert_close(out.loss, torch.tensor(expected))


@pytest.mark.parametrize("name", LOSS_NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_logit_shows_in_its_row_only(name: str, bad: float) -> None:
    """A NaN that is swallowed trains on rubbish; one that spreads hides which row it was."""
    draft, target = logits((9, 320), torch.float32)
    spoilt = draft.detach().clone()
    spoilt[4, 17] = bad
    out = row_losses(name, spoilt.requires_grad_(), target)
    assert math.isnan(out.loss[4].item())
    if name != "lk_hybrid":  # its weight is a mean over rows
        kept = [row for row in range(9) if row != 4]
        assert torch.equal(out.loss[kept], row_losses(name, draft, target).loss[kept])


def test_agreement_is_that_of_argmax_with_ties() -> None:
    """bf16 logits tie at the top often; the engine takes the lowest id, and so must this."""
    generator = torch.Generator().manual_seed(3)
    for vocab in (320, 7, 130):
        draft, target = (
            torch.randint(0, 4, (300, vocab), generator=generator).bfloat16() for _ in range(2)
        )
        target[:150] = draft[:150]
        first = draft.float().numpy().argmax(-1) == target.float().numpy().argmax(-1)
        assert row_losses("kl", draft, target).agrees.tolist() == first.tolist()
        assert 150 <= first.sum() < 300


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_inputs_are_left_alone_and_backward_may_run_twice(name: str) -> None:
    """Scratch that aliases an fp32 input, or a gradient that is multiplied in place."""
    draft, target = logits((9, 320), torch.float32)
    before = draft.detach().clone(), target.clone()
    loss = row_losses(name, draft, target).loss
    first, second = (torch.autograd.grad(loss.sum(), draft, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(draft, before[0])
    assert torch.equal(target, before[1])


def test_views_mixed_dtypes_and_no_rows() -> None:
    draft, target = logits((8, 64), torch.float32)
    strided = draft.t().contiguous().t()
    out = row_losses("lk", strided, target.bfloat16())
    expected = reference_loss("lk", draft, target.bfloat16())
    torch.testing.assert_close(out.loss, expected)
    torch.testing.assert_close(gradient(out.loss, draft), gradient(expected, draft))
    for name in LOSS_NAMES:
        empty = row_losses(name, draft[:0], target[:0])
        assert empty.loss.shape == empty.alpha.shape == empty.agrees.shape == (0,)
        (grad,) = torch.autograd.grad(empty.loss.sum(), draft)
        assert not grad.any()


def test_only_the_loss_carries_a_gradient() -> None:
    draft, target = logits((3, 7), torch.float32)
    target.requires_grad_()
    out = row_losses("lk", draft, target)
    assert out.loss.requires_grad
    assert not out.alpha.requires_grad
    assert not out.agrees.requires_grad
    out.loss.sum().backward()
    assert target.grad is None
    assert not row_losses("lk", draft.detach(), target).loss.requires_grad
    with torch.no_grad():
        assert torch.equal(row_losses("lk", draft, target).loss, out.loss)


def test_bad_input_is_refused() -> None:
    draft, target = logits((3, 7), torch.float32)
    with pytest.raises(ValueError, match=r"'ce'.*lk_hybrid"):
        row_losses("ce", draft, target)
    for other in (target[:2], target[:, :6], target[0], target[:, :0]):
        with pytest.raises(ValueError, match="draft vocabulary"):
            row_losses("kl", draft, other)
    with pytest.raises(ValueError, match="floating"):
        row_losses("kl", draft, target.int())
    for eta in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="eta"):
            row_losses("lk_hybrid", draft, target, eta=eta)
    with pytest.raises(ValueError, match="hidden size"):
        feature_regression(draft, target[:2])


def test_feature_regression_by_hand() -> None:
    """Quadratic below a distance of 1, linear above; the mean is over features, not over rows."""
    predicted = torch.tensor([[0.5, 3.0], [0.0, 0.0]], requires_grad=True)
    loss = feature_regression(predicted, torch.zeros(2, 2))
    torch.testing.assert_close(loss, torch.tensor([(0.125 + 2.5) / 2, 0.0]))
    loss.sum().backward()
    torch.testing.assert_close(predicted.grad, torch.tensor([[0.25, 0.5], [0.0, 0.0]]))
    assert feature_regression(predicted.bfloat16(), torch.zeros(2, 2)).dtype == torch.float32
