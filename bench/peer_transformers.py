"""transformers as a contestant, with its forward called in a plain loop.

Owns one model. Fairness: the loop does only what decoding needs (no ``generate`` machinery), all sequences run as one
batch (padded on the left where lengths differ), sequences that are done leave it, and sdpa attention is used.
Invariant: the tokens are those of each sequence alone, up to rounding.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils.logging import disable_progress_bar

from bench.contestant import Generation
from bench.workloads import Job


class TransformersPeer:
    """transformers on an HF directory.

    Args:
        path: the directory.
        dtype: "bfloat16" or "float32".
        num_threads: threads of torch.
    """

    def __init__(self, path: Path, dtype: str, num_threads: int) -> None:
        self.name = f"transformers {'bf16' if dtype == 'bfloat16' else 'fp32'}"
        self._num_threads = num_threads
        torch.set_num_threads(num_threads)
        disable_progress_bar()
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()

    @property
    def settings(self) -> str:
        return f"sdpa threads={self._num_threads}"

    def prepare(self, *, num_seqs: int, max_len: int) -> None:
        self.generate([Job((1, 2, 3), 2, 0)], 0.0)

    @torch.inference_mode()
    def generate(self, jobs: Sequence[Job], temperature: float) -> Generation:
        torch.set_num_threads(self._num_threads)
        start = time.perf_counter()
        cache = DynamicCache(config=self._model.config)
        ids, mask = _left_padded(jobs)
        tokens = self._step(ids, mask, cache, temperature)
        first = time.perf_counter()
        outputs = [[token] for token in tokens.tolist()]
        rows = list(range(len(jobs)))
        alone_since = None
        while live := [i for i in rows if len(outputs[i]) < jobs[i].num_tokens]:
            if len(live) < len(rows):
                keep = torch.tensor([rows.index(i) for i in live])
                cache.batch_select_indices(keep)
                tokens, rows = tokens[keep], live
                mask = None if mask is None else mask[keep]
            if len(live) == 1 < len(jobs) and alone_since is None:
                alone_since = time.perf_counter()
            if mask is not None:
                mask = torch.cat((mask, mask.new_ones(len(rows), 1)), dim=1)
            tokens = self._step(tokens.unsqueeze(1), mask, cache, temperature)
            for i, token in zip(rows, tokens.tolist(), strict=True):
                outputs[i].append(token)
        end = time.perf_counter()
        return Generation(
            outputs,
            prefill_s=first - start,
            decode_s=end - first,
            num_decode_tokens=sum(len(ids) - 1 for ids in outputs),
            tail_s=None if alone_since is None else end - alone_since,
        )

    @torch.inference_mode()
    def prefill_s(self, prompt_ids: Sequence[int]) -> float:
        torch.set_num_threads(self._num_threads)
        ids = torch.tensor([list(prompt_ids)])
        start = time.perf_counter()
        self._step(ids, None, DynamicCache(config=self._model.config), 0.0)
        return time.perf_counter() - start

    @torch.inference_mode()
    def pass_s(
        self, context_ids: Sequence[int], rows: Sequence[Sequence[int]], repeats: int
    ) -> list[float]:
        torch.set_num_threads(self._num_threads)
        cache = DynamicCache(config=self._model.config)
        self._step(torch.tensor([list(context_ids)]), None, cache, 0.0)
        best = []
        for row_ids in rows:
            ids = torch.tensor([list(row_ids)])
            seconds = []
            for _ in range(repeats + 1):
                cache.crop(len(context_ids))
                start = time.perf_counter()
                self._model(ids, past_key_values=cache, use_cache=True)
                seconds.append(time.perf_counter() - start)
            best.append(min(seconds[1:]))
        return best

    def _step(
        self, ids: Tensor, mask: Tensor | None, cache: DynamicCache, temperature: float
    ) -> Tensor:
        """Run new ids [B, n] and draw a token [B] behind the last of each."""
        positions = None
        if mask is not None:
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = self._model(
            ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits = out.logits[:, -1].float()
        if temperature == 0.0:
            return logits.argmax(-1)
        return torch.multinomial(torch.softmax(logits / temperature, -1), 1).squeeze(1)


def _left_padded(jobs: Sequence[Job]) -> tuple[Tensor, Tensor | None]:
    """Prompts as one tensor [B, n], and their attention mask, None where none is padded."""
    width = max(len(job.prompt_ids) for job in jobs)
    pads = [width - len(job.prompt_ids) for job in jobs]
    ids = torch.tensor([[0] * pad + list(j.prompt_ids) for pad, j in zip(pads, jobs, strict=True)])
    if not any(pads):
        return ids, None
    return ids, torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads])
