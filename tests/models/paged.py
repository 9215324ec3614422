"""Runs a decoder on sequences laid out over shuffled pages, for tests: a step is a list of (sequence, start, end)."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.batch import PAGE, ForwardBatch
from engine.models.decoder import Decoder, ForwardOutput


class PagedSequences:
    """Token sequences with pages of their own, poisoned with NaN where nothing was stored."""

    def __init__(self, decoder: Decoder, sequences: Sequence[list[int]], *, room: int = 0) -> None:
        config = decoder.config
        self.decoder = decoder
        self.sequences = [list(sequence) for sequence in sequences]
        counts = [(len(sequence) + room + PAGE - 1) // PAGE for sequence in sequences]
        order = list(range(sum(counts) + 1))
        random.Random(7).shuffle(order)
        self.pages = [[order.pop() for _ in range(count)] for count in counts]
        shape = (config.num_layers, 2, sum(counts) + 1, PAGE, config.num_kv_heads, config.head_dim)
        self.kv_cache = torch.full(shape, float("nan"), dtype=decoder.kv_dtype)

    def slot(self, sequence: int, position: int) -> int:
        return self.pages[sequence][position // PAGE] * PAGE + position % PAGE

    def batch(
        self, parts: Sequence[tuple[int, int, int]], logit_rows: Sequence[int] | None = None
    ) -> ForwardBatch:
        """Rows [start, end) of each sequence named, all rows asked for unless ``logit_rows`` says otherwise."""
        positions = [p for _, start, end in parts for p in range(start, end)]
        owners = [s for s, start, end in parts for _ in range(start, end)]
        starts = [0]
        for _, start, end in parts:
            starts.append(starts[-1] + end - start)
        width = max(len(self.pages[s]) for s, _, _ in parts)
        table = [self.pages[s] + [10**6] * (width - len(self.pages[s])) for s, _, _ in parts]
        rows = range(len(positions)) if logit_rows is None else logit_rows
        return ForwardBatch(
            token_ids=_int32(
                [self.sequences[s][p] for s, p in zip(owners, positions, strict=True)]
            ),
            positions=_int32(positions),
            slots=_int32([self.slot(s, p) for s, p in zip(owners, positions, strict=True)]),
            row_start=_int32(starts),
            page_table=_int32(table),
            ctx_len=_int32([p + 1 for p in positions]),
            tail_start=_int32([0] * (len(positions) + 1)),
            tail_slots=_int32([]),
            logit_rows=_int32(list(rows)),
        )

    def run(
        self,
        parts: Sequence[tuple[int, int, int]],
        logit_rows: Sequence[int] | None = None,
        *,
        tap_layers: tuple[int, ...] = (),
        want_hidden: bool = False,
    ) -> ForwardOutput:
        return self.decoder.forward(
            self.batch(parts, logit_rows),
            self.kv_cache,
            tap_layers=tap_layers,
            want_hidden=want_hidden,
        )


def _int32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def greedy(decoder: Decoder, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
    """The most likely continuation of each prompt, all prompts in one batch."""
    pages = PagedSequences(decoder, prompts, room=num_tokens)
    start = [0] * len(prompts)
    for _ in range(num_tokens):
        parts = [(s, start[s], len(tokens)) for s, tokens in enumerate(pages.sequences)]
        last, count = [], 0
        for _, first, end in parts:
            count += end - first
            last.append(count - 1)
        chosen = pages.run(parts, last).logits.argmax(-1).tolist()
        for s, token in enumerate(chosen):
            start[s] = len(pages.sequences[s])
            pages.sequences[s].append(token)
    return [tokens[len(prompt) :] for tokens, prompt in zip(pages.sequences, prompts, strict=True)]
