"""What counts, and for how much: by hand on a head of two numbers, and by sums over the unrolled rows of random ones."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from engine.models.eagle_layout import EagleConfig
from engine.models.rope import RopeConfig
from tests.tlt_train.heads import (
    HIDDEN,
    embedding_and_head,
    make_batch,
    make_config,
    make_network,
    make_sequence,
    whole,
)
from tests.tlt_train.loss_reference import reference_loss
from tlt_train.attention import ActiveRun
from tlt_train.config import TrainConfig
from tlt_train.drafter import DrafterNetwork
from tlt_train.objective import DraftObjective, Measured, useful_flops
from tlt_train.packing import PackedBatch, pack
from tlt_train.sequence import TrainingSequence, TrainingWindow

# ---- by hand
#
# A head of kind "eagle" with two channels: x = (the token's number, the feature's second channel). Its queries and keys
# are constant, so that the score of a row at distance d is cos(d) / sqrt(2) by the rotary embedding; values are x;
# o_proj is the identity and the MLP nothing. So what goes through the head is x + the mean of all x that the row reads,
# weighted by exp(cos(d) / sqrt(2)).

HEAD = [[0.3, -0.1], [-0.2, 0.05], [0.1, 0.1], [-0.4, 0.2]]  # [V, H] of the target
TOKENS = [1, 3, 2, 0, 3, 1]
FEATURES = [[0.5, 1.0], [-1.0, 2.0], [2.0, -1.5], [1.5, 0.25], [-0.5, 3.0], [1.0, -2.0]]


def hand_network() -> DrafterNetwork:
    config = EagleConfig(
        kind="eagle", vocab_size=4, draft_vocab_size=4, hidden_size=2, target_hidden_size=2,
        intermediate_size=2, num_q_heads=1, num_kv_heads=1, head_dim=2, rms_norm_eps=1e-6,
        rope=RopeConfig(), max_position_embeddings=64, qkv_bias=True,
    )  # fmt: skip
    attention, mlp = "midlayer.self_attn.", "midlayer.mlp."
    none, constant = torch.zeros(2, 2), torch.tensor([1.0, 0.0])
    tensors = {
        "fc.weight": torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]),
        attention + "q_proj.weight": none,
        attention + "q_proj.bias": constant,
        attention + "k_proj.weight": none,
        attention + "k_proj.bias": constant,
        attention + "v_proj.weight": torch.eye(2),
        attention + "v_proj.bias": torch.zeros(2),
        attention + "o_proj.weight": torch.eye(2),
        "midlayer.post_attention_layernorm.weight": torch.ones(2),
        mlp + "gate_proj.weight": none,
        mlp + "up_proj.weight": none,
        mlp + "down_proj.weight": none,
    }
    embedding = torch.stack((torch.arange(4.0), torch.full((4,), 9.0)), dim=1)
    return DrafterNetwork(config, tensors, embedding, torch.tensor(HEAD), window=0)


def hand_sequence(num_tokens: int, start: int, prompt_len: int, shift: int = 0) -> TrainingSequence:
    """Rows of TOKENS and FEATURES from ``shift`` on, said to be at ``start``."""
    rows = slice(shift, shift + num_tokens)
    features = torch.tensor(FEATURES[rows]).bfloat16().view(torch.int16).numpy().view(np.uint16)
    return TrainingSequence("h", start, prompt_len, np.array(TOKENS[rows], np.int32), features, 0)


def by_hand(tokens: list[int], features: list[list[float]], row: int, depth: int) -> list[float]:
    """What goes through the head at a row of a document and a depth, from the definition alone."""
    inputs = [(float(tokens[p + 1]), features[p][1]) for p in range(row + 1)]
    at, out = list(range(row + 1)), [0.0, 0.0]
    for step in range(depth + 1):
        if step:
            inputs.append((float(tokens[row + 1 + step]), out[1]))
            at.append(row + step)
        scores = [math.exp(math.cos(at[-1] - a) / math.sqrt(2)) for a in at]
        mean = [
            sum(s * x[c] for s, x in zip(scores, inputs, strict=True)) / sum(scores) for c in (0, 1)
        ]
        out = [inputs[-1][c] + mean[c] for c in (0, 1)]
    return out


def kl(teacher: list[float], draft: list[float]) -> float:
    def log_probs(hidden: list[float]) -> list[float]:
        logits = [sum(a * b for a, b in zip(row, hidden, strict=True)) for row in HEAD]
        total = math.log(sum(map(math.exp, logits)))
        return [logit - total for logit in logits]

    target, own = log_probs(teacher), log_probs(draft)
    return sum(math.exp(t) * (t - o) for t, o in zip(target, own, strict=True))


# (rows, start, prompt_len) -> by depth, the rows that count. The token that row p is about at depth u is p + 2 + u; the one
# behind the last row is not known but taught.
COUNTED: dict[str, tuple[int, int, int, list[list[int]]]] = {
    "whole": (6, 0, 3, [[1, 2, 3, 4], [1, 2, 3], [1, 2], [1]]),
    "no-prompt": (5, 0, 0, [[0, 1, 2, 3], [0, 1, 2], [0, 1], [0]]),
    "one-token-prompt": (4, 0, 1, [[0, 1, 2], [0, 1], [0], []]),
    "prompt-of-two": (4, 0, 2, [[0, 1, 2], [0, 1], [0], []]),
    "begins-in-the-response": (4, 40, 3, [[0, 1, 2], [0, 1], [0], []]),
    "begins-at-the-response": (4, 3, 3, [[0, 1, 2], [0, 1], [0], []]),
    "begins-in-the-prompt": (6, 10, 14, [[2, 3, 4], [2, 3], [2], []]),
    "one-response-token": (5, 0, 4, [[2, 3], [2], [], []]),
    "prompt-alone": (4, 0, 4, [[], [], [], []]),
    "inside-the-prompt": (4, 2, 9, [[], [], [], []]),
    "two-rows": (2, 5, 1, [[0], [], [], []]),
    "one-row": (1, 5, 1, [[], [], [], []]),
}


def hand_loss(network: DrafterNetwork, windows: list[TrainingWindow]) -> tuple[Tensor, Measured]:
    config = make_config(unroll_depth=4)
    objective = DraftObjective(network, config, torch.tensor(HEAD))
    batch = pack(windows, num_taps=0, hidden_size=2)
    loss, measured = objective.loss(batch, max(objective.num_counted(batch), 1))
    return torch.zeros(()) if loss is None else loss, measured


@pytest.mark.parametrize("case", COUNTED)
@torch.no_grad()
def test_the_loss_is_that_of_a_calculation_by_hand(case: str) -> None:
    num_tokens, start, prompt_len, rows = COUNTED[case]
    sequence = hand_sequence(num_tokens, start, prompt_len)
    found, measured = hand_loss(hand_network(), whole(sequence))
    tokens, features = TOKENS[:num_tokens], FEATURES[:num_tokens]
    expected = 0.0
    for depth, at_depth in enumerate(rows):
        losses = [
            kl(features[p + 1 + depth], by_hand(tokens, features, p, depth)) for p in at_depth
        ]
        expected += 0.8**depth * sum(losses) / max(len(rows[0]), 1)
        assert measured.sums[0, depth].item() == pytest.approx(sum(losses), rel=1e-4, abs=1e-7)
        assert measured.sums[3, depth].item() == len(at_depth)
    assert found.item() == pytest.approx(expected, rel=1e-4, abs=1e-7)


@torch.no_grad()
def test_documents_side_by_side_count_as_each_alone() -> None:
    """Every case at once, in both orders, and a window of the middle of a sequence."""
    network = hand_network()
    windows = [w for n, s, p, _ in COUNTED.values() for w in whole(hand_sequence(n, s, p))]
    middle = TrainingWindow(hand_sequence(6, 20, 24), 2, 6)
    alone = hand_loss(network, whole(hand_sequence(4, 22, 24, shift=2)))[1]
    torch.testing.assert_close(hand_loss(network, [middle])[1].sums, alone.sums)
    windows.append(middle)
    total = sum((hand_loss(network, [w])[1].sums for w in windows), Measured.zero(4).sums)
    for order in (windows, windows[::-1]):
        torch.testing.assert_close(hand_loss(network, order)[1].sums, total)


# ---- random heads


def objective_of(
    kind: str = "eagle3", config: TrainConfig | None = None, **changes: Any
) -> DraftObjective:
    network = make_network(kind, **changes)
    return DraftObjective(network, config or make_config(), embedding_and_head()[1])


def some_batch() -> PackedBatch:
    return make_batch(
        make_sequence("a", 9, prompt_len=4),
        make_sequence("b", 6, prompt_len=2, start=5),
        make_sequence("c", 12, prompt_len=3),
    )


@pytest.mark.parametrize("loss", ["kl", "reverse_kl", "tv", "lk"])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_step_is_the_weighted_mean_over_what_counts(kind: str, loss: str) -> None:
    """Row by row, with eager losses and the vocabulary's mask written out."""
    regression = 0.7 if kind == "eagle" else 0.0
    config = make_config(
        loss=loss, unroll_depth=4, step_decay=0.6, loss_weight=0.3, regression_weight=regression
    )
    objective, batch = objective_of(kind, config), some_batch()
    network, head = objective.network, embedding_and_head()[1]
    ids = network.target_ids.tolist()
    found, measured = objective.loss(batch, 10.0)
    total, counts = torch.zeros(()), [0] * 4
    runs = tuple(
        ActiveRun(first, first, end - 1)
        for first, end in zip(batch.doc_starts, batch.doc_starts[1:], strict=False)
    )
    prompts = [first + p - 2 for first, p in zip(batch.doc_starts, (4, 2, 3), strict=False)]
    for step in network.unroll(batch, runs, 4):
        for i, teacher in enumerate(step.teacher_rows.tolist()):
            row, about = teacher - 1 - step.depth, teacher + 1
            document = sum(start <= row for start in batch.doc_starts) - 1
            if row < prompts[document]:
                continue
            is_known = about < batch.doc_starts[document + 1]
            if is_known and int(batch.token_ids[about]) not in ids:
                continue
            logits = head[ids] @ batch.hidden[teacher].float()
            part = 0.3 * reference_loss(loss, step.logits[i : i + 1], logits[None])[0]
            if regression:
                gap = (step.hidden[i] - batch.hidden[teacher].float()).abs()
                part = part + 0.7 * torch.where(gap < 1, gap**2 / 2, gap - 0.5).mean()
            total = total + 0.6**step.depth * part / 10.0
            counts[step.depth] += 1
    assert measured.sums[3].tolist() == counts
    assert counts[0] == objective.num_counted(batch)
    assert found is not None
    torch.testing.assert_close(found, total, rtol=2e-5, atol=1e-6)
    parameters = list(network.parameters.values())
    for mine, its in zip(
        torch.autograd.grad(found, parameters), torch.autograd.grad(total, parameters), strict=True
    ):
        torch.testing.assert_close(mine, its, rtol=1e-3, atol=1e-5)


def test_prompts_are_learnt_where_they_are_asked_for() -> None:
    objective = objective_of("eagle", make_config(learn_prompts=True))
    batch = make_batch(make_sequence("a", 9, prompt_len=7), make_sequence("b", 5, prompt_len=5))
    assert objective.num_counted(batch) == 8 + 4
    assert objective.loss(batch, 12.0)[1].sums[3].tolist() == [12, 10, 8]


def test_micro_batches_add_up_to_the_batch() -> None:
    objective = objective_of()
    one, two = make_sequence("a", 14), make_sequence("b", 9, prompt_len=4)
    both = make_batch(one, two)
    counted = objective.num_counted(both)
    parts = [make_batch(one), make_batch(two)]
    assert counted == sum(objective.num_counted(part) for part in parts)
    found, measured = objective.loss(both, counted)
    halves = [objective.loss(part, counted) for part in parts]
    added = torch.stack([loss for loss, _ in halves if loss is not None]).sum()
    torch.testing.assert_close(found, added, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(measured.sums, (halves[0][1] + halves[1][1]).sums)


def gradients_of(
    objective: DraftObjective, batch: PackedBatch, rows: range
) -> tuple[list[Tensor], list[Tensor]]:
    """(losses of some rows by depth, gradients of their sum)."""
    network = objective.network
    runs, teacher = objective.runs(batch), embedding_and_head()[1][network.target_ids]
    losses = []
    for step in network.unroll(batch, runs, 3):
        kept = (step.teacher_rows >= rows.start) & (step.teacher_rows < rows.stop)
        logits = batch.hidden[step.teacher_rows[kept]].float() @ teacher.t()
        losses.append(reference_loss("kl", step.logits[kept], logits))
    found = torch.autograd.grad(torch.cat(losses).sum(), list(network.parameters.values()))
    return [loss.detach() for loss in losses], list(found)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_changed_document_changes_no_other_loss_or_gradient_by_a_bit(kind: str) -> None:
    objective = objective_of(kind)
    a, b, c = make_sequence("a", 12), make_sequence("b", 9), make_sequence("c", 7)
    packs = [make_batch(a, x, c) for x in (b, make_sequence("other", 9))]
    for rows in (range(12), range(21, 28)):
        (losses, gradients), (others, other_gradients) = (
            gradients_of(objective, batch, rows) for batch in packs
        )
        assert all(map(torch.equal, losses, others))
        assert all(map(torch.equal, gradients, other_gradients))
    changed = [gradients_of(objective, batch, range(12, 21))[0][0] for batch in packs]
    assert not torch.equal(*changed)


def test_a_document_alone_is_what_it_is_in_a_pack() -> None:
    objective = objective_of()
    a, b = make_sequence("a", 12), make_sequence("b", 9)
    losses, gradients = gradients_of(objective, make_batch(b, a), range(9, 21))
    alone, own = gradients_of(objective, make_batch(a), range(12))
    for mine, its in zip(losses + gradients, alone + own, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


def test_nothing_to_learn_is_no_loss() -> None:
    objective = objective_of()
    batch = make_batch(make_sequence("a", 5, prompt_len=9), make_sequence("b", 1))
    loss, measured = objective.loss(batch, 1.0)
    assert loss is None
    assert objective.num_counted(batch) == measured.num_rows == 0
    assert measured.acceptance_length("alpha") == 1.0


def test_regression_is_for_heads_that_predict_features() -> None:
    with pytest.raises(ValueError, match="regression_weight must be 0 for an eagle3 head, got 1"):
        objective_of("eagle3", make_config(regression_weight=1.0))


def test_alpha_and_agreement_are_of_the_drafts_vocabulary() -> None:
    objective, batch = objective_of(config=make_config(unroll_depth=1)), some_batch()
    network = objective.network
    measured = objective.loss(batch, 1.0)[1]
    (step,) = network.unroll(batch, objective.runs(batch), 1)
    tokens = batch.token_ids.tolist()
    ids = network.target_ids.tolist()
    kept = [
        i for i, t in enumerate(step.teacher_rows.tolist())
        if t + 1 in batch.doc_starts or tokens[t + 1] in ids
    ]  # fmt: skip
    teacher = batch.hidden[step.teacher_rows[kept]].float() @ embedding_and_head()[1][ids].t()
    draft = step.logits[kept]
    alpha = torch.minimum(teacher.softmax(-1), draft.softmax(-1)).sum()
    agrees = (teacher.argmax(-1) == draft.argmax(-1)).sum()
    assert measured.sums[1, 0].item() == pytest.approx(alpha.item(), rel=1e-5)
    assert measured.sums[2, 0].item() == agrees.item()
    assert measured.means("alpha") == [pytest.approx(alpha.item() / len(kept), rel=1e-5)]


def test_acceptance_length_by_hand() -> None:
    sums = torch.tensor([[4.0, 3, 2], [5, 2, 1], [8, 2, 0], [10, 8, 4]], dtype=torch.float64)
    measured = Measured(sums)
    assert measured.means("loss") == [0.4, 0.375, 0.5]
    assert measured.acceptance_length("alpha") == pytest.approx(1 + 0.5 + 0.125 + 0.03125)
    assert measured.acceptance_length("agrees") == pytest.approx(1 + 0.8 + 0.2)
    assert (measured + measured).acceptance_length("alpha") == measured.acceptance_length("alpha")
    assert measured.num_rows == 22


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("train_head", [True, False])
def test_useful_flops_are_those_that_a_pass_does(kind: str, train_head: bool) -> None:
    """Against torch's own count of matrix products, less attention's."""
    config = make_config(unroll_depth=3, train_head=train_head)
    network = make_network(kind)
    if not train_head:
        network = DrafterNetwork(
            network.config, network.tensors(), *embedding_and_head(), window=0, train_head=False
        )
    objective = DraftObjective(network, config, embedding_and_head()[1])
    batch = make_batch(make_sequence("a", 30, prompt_len=9), make_sequence("b", 11, prompt_len=2))
    with FlopCounterMode(display=False) as counter:
        loss, _ = objective.loss(batch, 10.0)
        assert loss is not None
        torch.autograd.grad(loss, list(network.parameters.values()))
    counts = counter.get_flop_counts()["Global"]
    done = sum(n for name, n in counts.items() if "bmm" not in str(name))
    runs = objective.runs(batch)
    num_active = sum(run.end - run.begin for run in runs)
    context = batch.num_tokens - num_active
    found = useful_flops(network.config, config, [num_active] * 3, context)
    # a pass runs every chain to its end, but for the head, and takes the gradient of embeddings too
    beyond = sum(min(depth, run.end - run.begin) for depth in range(3) for run in runs)
    head = 2 * network.config.draft_vocab_size * HIDDEN
    found -= beyond * head * (3 if train_head and kind == "eagle3" else 2)
    if kind == "eagle":
        found += 2 * HIDDEN**2 * num_active * 2
    assert found == done


def test_the_objective_reads_what_a_window_holds_alone() -> None:
    """A window of the middle is a document of its own, with true positions."""
    objective = objective_of()
    sequence = make_sequence("a", 20, prompt_len=3)
    cut = replace(
        sequence, start=8, token_ids=sequence.token_ids[8:15], features=sequence.features[8:15]
    )
    window = pack([TrainingWindow(sequence, 8, 15)], num_taps=3, hidden_size=HIDDEN)
    assert window.positions.tolist() == list(range(8, 15))
    found, expected = (objective.loss(b, 5.0)[1].sums for b in (window, make_batch(cut)))
    assert torch.equal(found, expected)
