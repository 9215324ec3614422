"""The drafter's trainer: useful FLOPs as a share of the machine's ceiling, packing against padding, time to stop.

Owns the synthetic data (long-tailed lengths, random features of the target's shape) and the report. The work is what
training does: the unrolled head, its losses, gradients, the update. Padding is the same trainer on the same documents
stretched to the longest of their micro-batch, whose padding rows are computed and then masked, as a padding trainer
does. Invariant: both variants learn from the same rows, but for the last ones of each
document, whose next token is known only where padding follows; their first losses agree within 2%.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.harness import interleave, paired_median, table
from bench.machine import Ceilings, Probe, Rates
from engine.models.loader import open_checkpoint
from tlt_train.config import TrainConfig
from tlt_train.drafter import DTYPES, DrafterNetwork
from tlt_train.new_head import new_head, read_target
from tlt_train.objective import useful_flops
from tlt_train.sequence import TrainingSequence, TrainingWindow
from tlt_train.trainer import StepReport, Trainer


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--draft-vocab-size", type=int, default=4096)
    parser.add_argument("--tokens-per-step", type=int, default=8192)
    parser.add_argument("--tokens-per-micro-batch", type=int, default=None, help="default: 2048")
    parser.add_argument("--median-len", type=int, default=150, help="of documents, tokens")
    parser.add_argument("--longest-len", type=int, default=2048)
    parser.add_argument("--sigma", type=float, default=1.0, help="of the log-normal lengths")
    parser.add_argument(
        "--padded-batch",
        type=int,
        default=8,
        help="documents that the padding trainer stretches alike",
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    if options.peer:
        raise ValueError("--peer: no other engine takes part in this bench")
    opened = open_checkpoint(options.model)
    taps = (2, opened.config.num_layers // 2, opened.config.num_layers - 3)
    documents = _documents(options, opened.config.hidden_size, options.draft_vocab_size)
    micro = options.tokens_per_micro_batch or 2048
    config = TrainConfig.of(
        "eagle3",
        loss="kl",  # the LK hybrid weighs by pass, and the two have other passes
        tokens_per_step=options.tokens_per_step,
        tokens_per_micro_batch=max(micro, options.longest_len),
        dtype=options.dtype,
        learning_rate=1e-5,
    )
    head, tensors = new_head(
        opened.config,
        opened.weights,
        documents,
        kind="eagle3",
        tap_layers=taps,
        draft_vocab_size=options.draft_vocab_size,
    )
    embedding, target_head = read_target(opened.weights, opened.config, DTYPES[options.dtype])

    def trainer(windows: Sequence[Sequence[TrainingWindow]]) -> _Clocked:
        network = DrafterNetwork(
            head, tensors, embedding, target_head, dtype=options.dtype, max_positions=4096
        )
        return _Clocked(network, config, windows, target_head)

    probe = Probe("none", torch.get_num_threads(), bf16_weights=options.dtype == "bfloat16")
    rates: list[Rates] = []
    steps = _steps(documents, options.tokens_per_step)
    packed = trainer(steps)
    padded = trainer(
        [_padded(step, options.padded_batch, opened.config.vocab_size - 1) for step in steps]
    )
    first = packed.step(), padded.step()
    verified = abs(first[0].loss - first[1].loss) <= 0.02 * abs(first[0].loss)
    packed.gaps_s.clear()

    def once(which: _Clocked) -> StepReport:
        rates.append(probe.sample())
        return which.step()

    found = interleave(
        {"packed": lambda: once(packed), "padded": lambda: once(padded)}, options.rounds
    )
    return _report(options, config, head, found, packed, probe.ceilings(rates), verified)


def _report(
    options: argparse.Namespace,
    config: TrainConfig,
    head: Any,
    found: dict[str, list[StepReport]],
    packed: _Clocked,
    ceilings: Ceilings,
    verified: bool,
) -> dict[str, Any]:
    rates = [
        useful_flops(head, config, r.num_drafting, r.num_context) / r.seconds / 1e9
        for r in found["packed"]
    ]
    useful = statistics.median(rates)
    speed_up = paired_median(lambda a, b: b.seconds / a.seconds, found["packed"], found["padded"])
    rows = sum(report.num_tokens for report in found["packed"])
    padded_rows = sum(report.num_tokens for report in found["padded"])
    ratio = padded_rows / rows
    print(ceilings.text())
    print(
        f"check: the first loss of both is {'the same' if verified else 'NOT the same'}; "
        f"{len(packed.gaps_s)} stretches between two chances to stop\n"
    )
    print(
        table(
            ("", "median", "least", "most"),
            [
                ["useful GFLOP/s", useful, min(rates), max(rates)],
                ["share of the ceiling", *(x / ceilings.gflop_s for x in (useful, min(rates), max(rates)))],
                ["tokens/s", *_spread([r.num_tokens / r.seconds for r in found["packed"]])],
                ["ms to a chance to stop", *_spread([1e3 * gap for gap in packed.gaps_s])],
            ],
        )
    )  # fmt: skip
    print(
        f"\npacking is {speed_up:.2f}x padding batches of {options.padded_batch} (rows: {ratio:.2f}x), "
        f"documents of {options.median_len} tokens in the middle, up to {options.longest_len}"
    )
    return {
        "verified": verified,
        "settings": {"dtype": options.dtype, "threads": torch.get_num_threads()},
        "useful_gflop_s": useful,
        "ceiling_gflop_s": ceilings.gflop_s,
        "share_of_ceiling": useful / ceilings.gflop_s,
        "packed_over_padded": speed_up,
        "padded_rows_over_packed": ratio,
        "longest_gap_ms": 1e3 * max(packed.gaps_s),
        "median_tokens_per_s": statistics.median(r.num_tokens / r.seconds for r in found["packed"]),
    }


class _Clocked:
    """A trainer on given steps, and the time between the moments at which it asks whether to stop."""

    def __init__(
        self,
        network: DrafterNetwork,
        config: TrainConfig,
        steps: Sequence[Sequence[TrainingWindow]],
        target_head: Tensor,
    ) -> None:
        self.gaps_s: list[float] = []
        self._steps = steps
        self._last: float | None = None
        self._trainer = Trainer(network, config, self, target_head, should_stop=self._asked)

    def draw(
        self, num_tokens: int, key: int, *, rank: int = 0, world: int = 1
    ) -> list[TrainingWindow]:
        return list(self._steps[key % len(self._steps)])

    def step(self) -> StepReport:
        self._last = None
        return self._trainer.step()

    def _asked(self) -> bool:
        now = time.perf_counter()
        if self._last is not None:
            self.gaps_s.append(now - self._last)
        self._last = now
        return False


def _documents(
    options: argparse.Namespace, hidden_size: int, num_words: int
) -> list[TrainingSequence]:
    """Documents for some steps, the lengths log-normal, of the words that the head knows."""
    generator = np.random.default_rng(0)
    documents: list[TrainingSequence] = []
    total = 0
    while total < 4 * options.tokens_per_step:
        drawn = options.median_len * np.exp(options.sigma * generator.standard_normal())
        length = int(np.clip(drawn, 16, options.longest_len))
        features = torch.from_numpy(
            generator.standard_normal((length, 4 * hidden_size), dtype=np.float32)
        ).bfloat16()
        documents.append(
            TrainingSequence(
                key=str(len(documents)),
                start=0,
                prompt_len=8,
                token_ids=generator.integers(0, num_words, length).astype(np.int32),
                features=features.view(torch.int16).numpy().view(np.uint16),
                target_version=0,
            )
        )
        total += length
    return documents


def _steps(documents: Sequence[TrainingSequence], num_tokens: int) -> list[list[TrainingWindow]]:
    steps: list[list[TrainingWindow]] = [[]]
    for document in documents:
        if sum(w.num_tokens for w in steps[-1]) + document.num_tokens > num_tokens and steps[-1]:
            steps.append([])
        steps[-1].append(TrainingWindow(document, 0, document.num_tokens))
    return steps


def _padded(step: Sequence[TrainingWindow], batch: int, pad_id: int) -> list[TrainingWindow]:
    """The documents of a step, each stretched to the longest of its batch by rows that nothing is learnt from."""
    found: list[TrainingWindow] = []
    for at in range(0, len(step), batch):
        part = step[at : at + batch]
        length = max(window.num_tokens for window in part)
        found += [_stretched(window, length, pad_id) for window in part]
    return found


def _stretched(window: TrainingWindow, length: int, pad_id: int) -> TrainingWindow:
    """With rows of a word that the head does not know behind it, so that they are computed and do not count."""
    source, missing = window.sequence, length - window.num_tokens
    sequence = TrainingSequence(
        key=source.key,
        start=0,
        prompt_len=source.prompt_len,
        token_ids=np.concatenate((window.token_ids, np.full(missing, pad_id, np.int32))),
        features=np.concatenate(
            (window.features, np.zeros((missing, source.features.shape[1]), np.uint16))
        ),
        target_version=0,
    )
    return TrainingWindow(sequence, 0, length)


def _spread(values: Sequence[float]) -> list[float]:
    return [statistics.median(values), min(values), max(values)]
