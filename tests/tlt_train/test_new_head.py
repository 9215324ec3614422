"""A new head: the vocabulary by frequency, what it takes from the target, nothing missing, the same every time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.models.eagle_checkpoint import open_drafter, save_drafter
from engine.models.eagle_layout import check_names
from engine.models.loader import Checkpoint, open_checkpoint
from tests.conftest import ModelDirFactory
from tests.tlt_train.heads import HIDDEN, make_batch, make_config, make_sequence
from tlt_train.drafter import DrafterNetwork
from tlt_train.new_head import frequent_ids, new_head, read_target
from tlt_train.objective import DraftObjective
from tlt_train.sequence import TrainingSequence

SHARED = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "self_attn.o_proj")


def sequence(tokens: list[int], *, prompt_len: int, start: int = 0) -> TrainingSequence:
    ids = np.array(tokens, np.int32)
    return TrainingSequence("k", start, prompt_len, ids, np.zeros((len(ids), 4), np.uint16), 0)


def test_ids_are_those_that_responses_use_most() -> None:
    """Then those of prompts, then the lowest; a window's prompt ends where the sample's does."""
    sequences = [
        sequence([9, 9, 9, 5, 5, 7], prompt_len=3),
        sequence([8, 2, 2, 2], prompt_len=11, start=10),  # one token of the prompt
        sequence([6, 6], prompt_len=40, start=20),  # of the prompt alone
        sequence([7, 3], prompt_len=2, start=30),  # of the response alone
    ]
    # responses: 2 three times, 5 and 7 twice, 3 once; prompts: 9 three times, 6 twice, 8 once
    order = [2, 5, 7, 3, 9, 6, 8, 0, 1, 4]
    for size in range(1, 11):
        ids, covered = frequent_ids(sequences, 10, size)
        assert ids.tolist() == sorted(order[:size])
        assert covered == pytest.approx([3, 5, 7, 8, 8, 8, 8, 8, 8, 8][size - 1] / 8)
    assert frequent_ids([sequence([1, 2], prompt_len=9)], 10, 2)[1] == 1.0


@pytest.mark.parametrize("size", [0, 11])
def test_a_vocabulary_that_cannot_be_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"draft_vocab_size must be 1..10, got {size}"):
        frequent_ids([], 10, size)


@pytest.fixture(scope="module")
def target(make_model_dir: ModelDirFactory) -> Checkpoint:
    return open_checkpoint(str(make_model_dir("llama", num_hidden_layers=4)))


def data() -> list[TrainingSequence]:
    return [make_sequence(f"s{i}", 30, prompt_len=4) for i in range(3)]


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_nothing_is_missing_and_it_is_the_same_every_time(
    target: Checkpoint, kind: str, tmp_path: Path
) -> None:
    made = [
        new_head(
            target.config, target.weights, data(),
            kind=kind, tap_layers=(0, 2, 3), draft_vocab_size=50, seed=seed,
        )
        for seed in (3, 3, 4)
    ]  # fmt: skip
    (config, tensors), (other_config, other), (_, third) = made
    check_names(config, {n: tuple(t.shape) for n, t in tensors.items()}, "x")
    assert config == other_config
    assert tensors.keys() == other.keys()
    assert all(torch.equal(tensors[n], other[n]) for n in tensors)
    assert any(not torch.equal(tensors[n], third[n]) for n in tensors)
    assert all(t.isfinite().all() for t in tensors.values())
    save_drafter(tmp_path, config, tensors, target=target.config)
    found = open_drafter(tmp_path, target.config)
    assert found.config == config
    assert all(torch.equal(found.tensors[n], tensors[n]) for n in tensors)
    assert config.tap_layers == ((0, 2, 3) if kind == "eagle3" else ())
    for name in SHARED:
        own = tensors[f"midlayer.{name}.weight"]
        its = torch.empty_like(own)
        target.weights.read(f"model.layers.3.{name}.weight", its)
        assert torch.allclose(own / own.norm(), its / its.norm(), atol=1e-6)


def test_the_vocabulary_and_its_rows_are_the_targets(target: Checkpoint) -> None:
    config, tensors = new_head(
        target.config, target.weights, data(),
        kind="eagle3", tap_layers=(0, 2, 3), draft_vocab_size=50,
    )  # fmt: skip
    ids = torch.arange(50) + tensors["d2t"]
    assert torch.equal(ids, frequent_ids(data(), 320, 50)[0])
    embedding, head = read_target(target.weights, target.config)
    assert torch.equal(tensors["lm_head.weight"], head[ids])
    assert not torch.equal(embedding, head)
    assert config.draft_vocab_size == 50
    whole = new_head(
        target.config, target.weights, data(),
        kind="eagle3", tap_layers=(0, 2, 3), draft_vocab_size=10**6,
    )  # fmt: skip
    assert whole[0].draft_vocab_size == 320
    assert not whole[1]["d2t"].any()


def test_a_tied_target_has_one_tensor(make_model_dir: ModelDirFactory) -> None:
    tied = open_checkpoint(str(make_model_dir("llama", tie_word_embeddings=True)))
    embedding, head = read_target(tied.weights, tied.config)
    assert head is embedding


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_every_tensor_trains_from_the_first_step(target: Checkpoint, kind: str) -> None:
    sequences = data()
    config, tensors = new_head(
        target.config, target.weights, sequences,
        kind=kind, tap_layers=(0, 2, 3), draft_vocab_size=300,
    )  # fmt: skip
    embedding, head = read_target(target.weights, target.config)
    network = DrafterNetwork(config, tensors, embedding, head)
    batch = make_batch(make_sequence("s0", 30, num_taps=len(config.tap_layers)),
                       num_taps=len(config.tap_layers))  # fmt: skip
    objective = DraftObjective(network, make_config(), head)
    loss, _ = objective.loss(batch, 10.0)
    assert loss is not None
    names = list(network.parameters)
    found = torch.autograd.grad(loss, [network.parameters[n] for n in names])
    assert all(bool(g.any()) for g in found)
    assert network.config.hidden_size == HIDDEN
