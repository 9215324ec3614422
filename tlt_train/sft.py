"""``tlt sft``: a short supervised run on worked solutions, which makes a policy that is sure of what it writes.

Owns the steps of the run and the directory it writes, a model in the Hugging Face layout. Knows nothing of how the
network computes or how problems are made. Only the tokens of solutions are learnt from, the end token included; prompts
are read. A step is one pass over a few documents, packed. Invariants: the directory has its config, and so is a
model, only when everything else is written; no held-out problem is learnt from.

The learning rate follows the share of the run that is over, by time or by steps, so a run of given minutes ends with a
rate of nearly 0 on any machine.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from engine.models.loader import Checkpoint, open_checkpoint, read_json
from engine.tokenizer import Tokenizer
from tlt_train.drafter import DTYPES
from tlt_train.metrics_log import MetricsLog
from tlt_train.policy_network import PolicyNetwork
from tlt_train.sft_options import SftOptions
from tlt_train.worked_solutions import WorkedProblem, take, worked_problems, write_prompts

logger = logging.getLogger(__name__)

PROMPTS = "prompts.jsonl"
_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
)
_PROMPTS_SEED = 1  # of the file, beside the run's seed; the streams of two seeds differ
_HELD_OUT_TOKENS = 1024  # of one pass of the validation


@dataclass(frozen=True, slots=True)
class SolvedBatch:
    """N tokens of packed documents and the M rows that are learnt from."""

    token_ids: Tensor  # [N] int64
    doc_starts: tuple[int, ...]
    rows: Tensor  # [M] int64: the token behind each is one of a solution
    targets: Tensor  # [M] int64: these tokens


def pack_solved(documents: Sequence[tuple[Sequence[int], Sequence[int]]]) -> SolvedBatch:
    """Documents (ids of the prompt, ids of the solution), one behind the other."""
    token_ids = torch.tensor([i for prompt, answer in documents for i in (*prompt, *answer)])
    starts = (0, *accumulate(len(prompt) + len(answer) for prompt, answer in documents))
    rows = torch.cat(
        [
            torch.arange(start + len(prompt) - 1, end - 1)
            for start, end, (prompt, _) in zip(starts, starts[1:], documents, strict=False)
        ]
    )
    return SolvedBatch(token_ids, starts, rows, token_ids[rows + 1])


class SolvedDocuments:
    """Problems as token ids, batch after batch.

    Raises:
        ValueError: the model has no tokenizer, or no end token that its tokenizer knows.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        if checkpoint.tokenizer is None:
            raise ValueError(f"{checkpoint.path} has no tokenizer.json, and problems are text")
        self.tokenizer: Tokenizer = checkpoint.tokenizer
        ends = checkpoint.config.eos_token_ids
        own = self.tokenizer.eos_token_id
        if not ends:
            raise ValueError(f"{checkpoint.path}: config.json names no eos_token_id to end with")
        self.end_token_id = own if own in ends else ends[0]

    def document(self, problem: WorkedProblem) -> tuple[list[int], list[int]]:
        """(ids of the prompt through the chat template, ids of the solution and the end)."""
        solution = self.tokenizer.encode(problem.solution, add_special_tokens=False)
        return problem.chat.token_ids(self.tokenizer), [*solution, self.end_token_id]

    def batches(self, problems: Iterator[WorkedProblem], num_tokens: int) -> Iterator[SolvedBatch]:
        """Batches of at least ``num_tokens`` tokens while there are problems; the last may have fewer."""
        documents: list[tuple[list[int], list[int]]] = []
        count = 0
        for problem in problems:
            documents.append(self.document(problem))
            count += sum(map(len, documents[-1]))
            if count >= num_tokens:
                yield pack_solved(documents)
                documents, count = [], 0
        if documents:
            yield pack_solved(documents)


class SftRun:
    """The steps of a run.

    Args:
        network: updated in place.
        options: of the run.
    """

    def __init__(self, network: PolicyNetwork, options: SftOptions) -> None:
        self.network = network
        self.options = options
        self.num_steps = 0
        self.num_skipped_steps = 0
        self._parameters = network.parameters
        matrices = [p for p in self._parameters if p.dim() > 1]
        vectors = [p for p in self._parameters if p.dim() == 1]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": options.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            betas=(0.9, 0.95),
            fused=True,
        )

    def step(self, batch: SolvedBatch, progress: float) -> dict[str, float]:
        """Learn from a batch. A loss or gradient that is not finite changes nothing."""
        hidden = self.network.hidden(batch.token_ids, batch.doc_starts)
        loss = self.network.loss(hidden[batch.rows], batch.targets).mean()
        loss.backward()
        norm = float(
            torch.nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        )
        rate = self.options.learning_rate_at(self.num_steps, progress)
        if math.isfinite(norm) and math.isfinite(loss.item()):
            for parameter in self._parameters:
                if parameter.grad is not None and norm > self.options.max_grad_norm:
                    parameter.grad.mul_(self.options.max_grad_norm / norm)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
        else:
            self.num_skipped_steps += 1
            logger.warning("step %d is skipped: gradient norm %g", self.num_steps, norm)
        self._optimizer.zero_grad(set_to_none=True)
        self.num_steps += 1
        return {"loss": loss.item(), "grad_norm": norm, "learning_rate": rate}

    @torch.no_grad()
    def validate(self, batches: Iterator[SolvedBatch]) -> tuple[float, float]:
        """(mean loss, share of tokens that are the likeliest) of solutions."""
        losses, num_right, count = 0.0, 0, 0
        for batch in batches:
            hidden = self.network.hidden(batch.token_ids, batch.doc_starts)[batch.rows]
            losses += float(self.network.loss(hidden, batch.targets).sum())
            best = torch.nn.functional.linear(hidden, self.network.head).argmax(dim=-1)
            num_right += int((best == batch.targets).sum())
            count += len(batch.targets)
        return losses / count, num_right / count


def train_policy(
    target: str, out: str | Path, options: SftOptions, *, show_progress: bool = True
) -> dict[str, Any]:
    """Train a model on worked solutions and write it.

    Args:
        target: "smollm2" or an HF directory of a Llama.
        out: a directory that does not exist or is empty.
        options: of the run.
        show_progress: a bar.

    Returns:
        Figures of the run, plain values.

    Raises:
        ValueError: an option, the target or the directory is bad.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {str(out)!r} exists and is not an empty directory; give another")
    checkpoint = open_checkpoint(target)
    if not checkpoint.path.is_dir():
        raise ValueError(
            f"--target {target} must be smollm2 or a directory, a GGUF file cannot be trained"
        )
    documents = SolvedDocuments(checkpoint)
    out.mkdir(parents=True, exist_ok=True)
    with _threads(options.num_threads):
        network = PolicyNetwork(checkpoint.config, checkpoint.weights, dtype=DTYPES[options.dtype])
        run = SftRun(network, options)
        with MetricsLog(out / "log") as log:
            figures = _train(run, documents, log, show_progress)
        held_out = iter(
            take(options.num_held_out, seed=options.seed + _PROMPTS_SEED, held_out=True)
        )
        loss, accuracy = run.validate(documents.batches(held_out, _HELD_OUT_TOKENS))
        _write(checkpoint, network, out, documents.end_token_id, options)
    return {**figures, "held_out_loss": loss, "held_out_accuracy": accuracy, "out": str(out)}


def _train(
    run: SftRun, documents: SolvedDocuments, log: MetricsLog, show_progress: bool
) -> dict[str, Any]:
    options = run.options
    problems = worked_problems(seed=options.seed, held_out=False)
    batches = documents.batches(problems, options.tokens_per_step)
    num_tokens = num_learnt = num_documents = 0
    losses: list[float] = []
    start = time.perf_counter()

    def progress() -> float:
        if options.steps is not None:
            return run.num_steps / options.steps
        assert options.minutes is not None
        return (time.perf_counter() - start) / (options.minutes * 60)

    with tqdm(total=1.0, disable=not show_progress, bar_format="{l_bar}{bar}{postfix}") as bar:
        while (share := progress()) < 1.0:
            batch = next(batches)
            report = run.step(batch, share)
            losses.append(report["loss"])
            num_tokens += len(batch.token_ids)
            num_learnt += len(batch.targets)
            num_documents += len(batch.doc_starts) - 1
            speed = num_tokens / (time.perf_counter() - start)
            log.log(run.num_steps, {**report, "tokens_per_s": speed})
            bar.update(min(progress(), 1.0) - bar.n)
            bar.set_postfix_str(f"loss {report['loss']:.3f}, {speed:.0f} tokens/s")
    seconds = time.perf_counter() - start
    tail = losses[-max(1, len(losses) // 10) :]
    head_elements = run.network.head.numel()
    flops = 6 * run.network.matrix_elements * num_tokens + 4 * head_elements * num_learnt
    return {
        "num_steps": run.num_steps,
        "num_skipped_steps": run.num_skipped_steps,
        "num_documents": num_documents,
        "num_tokens": num_tokens,
        "num_learnt_tokens": num_learnt,
        "training_s": seconds,
        "tokens_per_s": num_tokens / seconds,
        "gflops_per_s": flops / seconds / 1e9,
        "first_loss": losses[0],
        "last_loss": sum(tail) / len(tail),
    }


def _write(
    checkpoint: Checkpoint, network: PolicyNetwork, out: Path, end: int, options: SftOptions
) -> None:
    """The model as bf16; its config comes last."""
    config = read_json(checkpoint.path / "config.json")
    config.pop("torch_dtype", None)
    config |= {"dtype": "bfloat16", "tie_word_embeddings": checkpoint.config.tied_head}
    save_file(network.tensors(torch.bfloat16), out / "model.safetensors", metadata={"format": "pt"})
    for name in _COPIED:
        if (checkpoint.path / name).exists():
            shutil.copyfile(checkpoint.path / name, out / name)
    ends = list(checkpoint.config.eos_token_ids)
    generation = {
        "bos_token_id": config.get("bos_token_id"),
        "eos_token_id": ends[0] if len(ends) == 1 else [end, *(i for i in ends if i != end)],
        "do_sample": True,
        "temperature": 1.0,
    }
    write_prompts(out / PROMPTS, take(options.num_prompts, seed=options.seed + _PROMPTS_SEED))
    for name, value in (("generation_config.json", generation), ("config.json", config)):
        (out / name).write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
