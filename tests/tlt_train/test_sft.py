"""A supervised run: the network against transformers, what is learnt from, and a directory the engine reads alike."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.cli import main
from engine.llm import LLM
from engine.models.decoder import Decoder
from engine.models.loader import open_checkpoint
from engine.ops import resolve_ops
from engine.sampling_params import SamplingParams
from tests.conftest import ModelDirFactory
from tests.models.paged import PagedSequences
from tlt_train import sft as module
from tlt_train.policy_network import PolicyNetwork
from tlt_train.prompts import prompts_of
from tlt_train.sft import SftRun, SolvedDocuments, pack_solved, train_policy
from tlt_train.sft_options import SftOptions
from tlt_train.worked_solutions import WorkedProblem, take

LENGTHS = (7, 1, 12)
SMALL: Any = {"num_prompts": 40, "num_held_out": 2, "tokens_per_step": 256}


def network_of(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> PolicyNetwork:
    checkpoint = open_checkpoint(str(path))
    return PolicyNetwork(checkpoint.config, checkpoint.weights, dtype=dtype, **options)


def random_documents(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 300, (length,), generator=generator) for length in LENGTHS]


def packed(documents: list[Tensor]) -> tuple[Tensor, list[int]]:
    starts = [0]
    for document in documents:
        starts.append(starts[-1] + len(document))
    return torch.cat(documents), starts


def targets_of(ids: Tensor) -> Tensor:
    return (ids * 7 + 3) % 300


@pytest.mark.parametrize("tied", [False, True])
def test_losses_and_gradients_equal_transformers(
    make_model_dir: ModelDirFactory, tied: bool
) -> None:
    """Packed documents against LlamaForCausalLM on each alone; the gradient of every weight that trains."""
    from transformers import AutoModelForCausalLM

    path = make_model_dir("llama", tie_word_embeddings=tied)
    network = network_of(path)
    ids, starts = packed(random_documents())
    losses = network.loss(network.hidden(ids, starts), targets_of(ids))
    weights = torch.linspace(0.5, 2.0, len(ids))
    (losses * weights).sum().backward()

    oracle: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    for start, end in pairwise(starts):
        logits = oracle(ids[None, start:end]).logits[0]
        expected = torch.nn.functional.cross_entropy(
            logits, targets_of(ids[start:end]), reduction="none"
        )
        torch.testing.assert_close(losses[start:end], expected, rtol=1e-4, atol=1e-4)
        (expected * weights[start:end]).sum().backward()
    theirs = {name: p.grad for name, p in oracle.named_parameters()}
    for tensor in network.parameters:
        assert tensor.grad is not None
        with torch.no_grad():
            tensor.copy_(tensor.grad)  # so that ``tensors`` gives gradients by name
    ours = network.tensors(torch.float32)
    frozen = {"model.embed_tokens.weight", "lm_head.weight"}
    assert len(set(ours) - frozen) == 2 * 9 + 1
    for name in set(ours) - frozen:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-4, msg=name)


def test_documents_do_not_see_each_other(make_model_dir: ModelDirFactory) -> None:
    network = network_of(make_model_dir("llama"))
    ids, starts = packed(random_documents())
    changed = ids.clone()
    changed[starts[1] : starts[2]] += 1
    before, after = (network.hidden(x, starts).detach() for x in (ids, changed))
    others = torch.cat([torch.arange(*starts[:2]), torch.arange(*starts[2:])])
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[starts[1] : starts[2]], after[starts[1] : starts[2]])


def test_only_llamas_train_and_not_beyond_their_table(make_model_dir: ModelDirFactory) -> None:
    for kind, options in (("qwen2", {}), ("qwen3", {}), ("llama", {"attention_bias": True})):
        with pytest.raises(ValueError, match="cannot be trained here yet"):
            network_of(make_model_dir(kind, **options))
    network = network_of(make_model_dir("llama"), max_positions=11)
    ids, starts = packed(random_documents())
    with pytest.raises(ValueError, match="has 12 tokens, at most 11"):
        network.hidden(ids, starts)


def test_only_solutions_are_learnt_from(make_model_dir: ModelDirFactory) -> None:
    batch = pack_solved([([1, 2, 3], [4, 5]), ([6], [7]), ([8, 9], [10, 11, 12])])
    assert batch.token_ids.tolist() == list(range(1, 13))
    assert batch.doc_starts == (0, 5, 7, 12)
    assert batch.rows.tolist() == [2, 3, 5, 8, 9, 10]
    assert batch.targets.tolist() == [4, 5, 7, 10, 11, 12]

    documents = SolvedDocuments(open_checkpoint(str(make_model_dir("llama"))))
    problem = WorkedProblem("x", "What?", "So.", 1)
    prompt, solution = documents.document(problem)
    text = documents.tokenizer.decode(prompt + solution, skip_special_tokens=False)
    assert text == "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\nSo.<|im_end|>"
    assert len(solution) == len("So.") + 1
    assert solution[-1] == 258


def test_batches_are_whole_documents(make_model_dir: ModelDirFactory) -> None:
    documents = SolvedDocuments(open_checkpoint(str(make_model_dir("llama"))))
    problems = take(20)
    batches = list(documents.batches(iter(problems), 500))
    ids = [i for batch in batches for i in batch.token_ids.tolist()]
    assert ids == [i for p in problems for part in documents.document(p) for i in part]
    assert all(len(batch.token_ids) >= 500 for batch in batches[:-1])
    assert sum(len(batch.doc_starts) - 1 for batch in batches) == len(problems)


def engine_logits(path: Path, sequence: list[int], dtype: str) -> Tensor:
    checkpoint = open_checkpoint(str(path))
    decoder = Decoder(
        checkpoint.config,
        checkpoint.weights,
        resolve_ops("auto", num_threads=1),
        dtype=dtype,
        max_rows=512,
        max_positions=512,
    )
    logits = PagedSequences(decoder, [sequence]).run([(0, 0, len(sequence))]).logits
    assert logits is not None
    return logits.clone().float()


def test_a_run_learns_and_the_engine_reads_it(
    make_model_dir: ModelDirFactory, tmp_path: Path
) -> None:
    target, out = make_model_dir("llama", max_position_embeddings=2048), tmp_path / "policy"
    options = SftOptions(steps=30, learning_rate=3e-3, dtype="float32", **SMALL)
    figures = train_policy(str(target), out, options, show_progress=False)
    assert figures["num_steps"] == 30
    assert figures["last_loss"] < 0.6 * figures["first_loss"]
    assert figures["held_out_loss"] < 0.7 * figures["first_loss"]
    rows = [json.loads(line) for line in (out / "log" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert rows[-1]["learning_rate"] < 0.02 * max(row["learning_rate"] for row in rows)

    before, after = open_checkpoint(str(target)), open_checkpoint(str(out))
    assert before.tokenizer is not None
    assert after.tokenizer is not None
    for problem in take(5):
        assert problem.chat.token_ids(before.tokenizer) == problem.chat.token_ids(after.tokenizer)
        assert before.tokenizer.encode(problem.solution) == after.tokenizer.encode(problem.solution)
    assert after.config.eos_token_ids == before.config.eos_token_ids

    sequence = problem.chat.token_ids(after.tokenizer)[:200]  # type: ignore[possibly-undefined]
    network = network_of(out)
    hidden = network.hidden(torch.tensor(sequence), (0, len(sequence))).detach()
    expected = hidden @ network.head.T
    torch.testing.assert_close(
        engine_logits(out, sequence, "float32"), expected, rtol=1e-4, atol=1e-3
    )
    first = LLM(str(out), dtype="float32", num_threads=1).generate(
        {"prompt_token_ids": sequence}, SamplingParams(temperature=0.0, max_tokens=1)
    )
    assert first[0].outputs[0].token_ids == [int(expected[-1].argmax())]


def test_what_is_written_is_what_was_trained(
    make_model_dir: ModelDirFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[PolicyNetwork] = []
    original = PolicyNetwork

    def remember(*arguments: Any, **options: Any) -> PolicyNetwork:
        trained.append(original(*arguments, **options))
        return trained[-1]

    monkeypatch.setattr(module, "PolicyNetwork", remember)
    target = make_model_dir("llama", max_position_embeddings=2048)
    before = network_of(target).tensors(torch.bfloat16)
    train_policy(str(target), tmp_path / "out", SftOptions(steps=2, **SMALL), show_progress=False)
    written = network_of(tmp_path / "out").tensors(torch.bfloat16)
    (network,) = trained
    for name, tensor in network.tensors(torch.bfloat16).items():
        assert torch.equal(tensor, written[name]), name
        is_frozen = name in ("model.embed_tokens.weight", "lm_head.weight")
        if is_frozen or tensor.dim() > 1:
            assert torch.equal(tensor, before[name]) == is_frozen, name


def test_nothing_held_out_is_learnt_from(
    make_model_dir: ModelDirFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Problems of training, of validation and of the file: each on its side."""
    training: list[WorkedProblem] = []
    original = module.worked_problems

    def record(**options: Any) -> Iterator[WorkedProblem]:
        for problem in original(**options):
            training.append(problem)
            yield problem

    monkeypatch.setattr(module, "worked_problems", record)
    target = make_model_dir("llama", max_position_embeddings=2048)
    options = SftOptions(steps=6, tokens_per_step=2000, num_prompts=200, num_held_out=2)
    train_policy(str(target), tmp_path / "p", options, show_progress=False)
    file = tmp_path / "p" / "prompts.jsonl"
    held_out = {p.turns[0][1] for p in prompts_of(file=file, held_out=True)}
    assert len(training) > 40
    assert not any(problem.chat.is_held_out() for problem in training)
    assert held_out
    assert len(held_out) + len(list(prompts_of(file=file, held_out=False))) == 200


def test_a_gradient_that_is_not_finite_changes_nothing(make_model_dir: ModelDirFactory) -> None:
    network = network_of(make_model_dir("llama"))
    run = SftRun(network, SftOptions(steps=1))
    batch = pack_solved([([1, 2], [3, 4])])
    with torch.no_grad():
        network.head[0, 0] = math.inf
    before = [p.detach().clone() for p in network.parameters]
    run.step(batch, 0.0)
    assert run.num_skipped_steps == 1
    assert all(torch.equal(a, b) for a, b in zip(before, network.parameters, strict=True))


def test_learning_rate() -> None:
    options = SftOptions(minutes=1, learning_rate=1.0, warmup_steps=4)
    rates = [options.learning_rate_at(step, 0.0) for step in range(6)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])
    assert options.learning_rate_at(9, 0.5) == pytest.approx(0.5)
    assert options.learning_rate_at(9, 1.0) == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "--minutes or by --steps"),
        ({"minutes": 1, "steps": 1}, "--minutes or by --steps"),
        ({"minutes": -1}, "--minutes must be above 0, got -1"),
        ({"steps": 1, "tokens_per_step": 0}, "--tokens-per-step must be at least 1"),
        ({"steps": 1, "learning_rate": math.nan}, "--learning-rate must be a number above 0"),
        ({"steps": 1, "dtype": "float16"}, "--dtype must be one of bfloat16, float32"),
    ],
)
def test_bad_options(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SftOptions(**given)


def test_command(
    make_model_dir: ModelDirFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(make_model_dir("llama", max_position_embeddings=2048))
    arguments = ["sft", "--target", target, "--out", str(tmp_path / "p"), "--tokens-per-step", "99"]
    short = ["--num-prompts", "16", "--num-held-out", "1", "--json"]
    assert main([*arguments, *short, "--minutes", "0.01"]) == 0
    printed = capsys.readouterr().out.splitlines()
    figures = json.loads(printed[-1])
    assert figures["num_steps"] >= 1
    assert "written" in printed[-2]
    assert main([*arguments, "--steps", "1"]) == 2, "the directory is not empty"
    assert "is not an empty directory" in capsys.readouterr().err
    assert main([*arguments[:-3], str(tmp_path / "q")]) == 2
    assert "--minutes or by --steps" in capsys.readouterr().err


@pytest.mark.smollm2
def test_two_steps_of_the_real_model(tmp_path: Path, smollm2_name: str) -> None:
    out = tmp_path / "policy"
    options = SftOptions(steps=2, tokens_per_step=120, num_prompts=16, num_held_out=1)
    figures = train_policy(smollm2_name, out, options, show_progress=False)
    assert figures["first_loss"] < 2.0, "it knows how to add before it is taught"
    checkpoint = open_checkpoint(str(out))
    documents = SolvedDocuments(checkpoint)
    prompt, solution = documents.document(take(1)[0])
    sequence = prompt + solution
    expected, found = [], engine_logits(out, sequence, "bfloat16").log_softmax(-1)
    for dtype in (torch.bfloat16, torch.float32):
        network = network_of(out, dtype)
        with torch.no_grad():
            hidden = network.hidden(torch.tensor(sequence), (0, len(sequence)))
            expected.append((hidden @ network.head.T).float().log_softmax(-1))
    rounding = (expected[0] - expected[1]).abs().mean()
    assert (found - expected[1]).abs().mean() < 1.5 * rounding
    torch.testing.assert_close(
        engine_logits(out, sequence, "float32").log_softmax(-1), expected[1], rtol=1e-3, atol=5e-3
    )
    assert checkpoint.config.eos_token_ids == open_checkpoint("smollm2").config.eos_token_ids
