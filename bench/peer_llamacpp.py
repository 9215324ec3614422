"""llama.cpp as a contestant, driven through its batch API (llama-cpp-python's low-level bindings).

Owns: one model and one context at a time. Fairness: weights are the same numbers (``peer_gguf``), the batch API
decodes all sequences in one call, sampling is llama.cpp's own (greedy: argmax), and ``prepare`` times a few steps with flash
attention on and off and with the KV cache unified or split by sequence, and keeps the fastest. Invariant: the KV
cache is empty between two calls.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import llama_cpp as _api  # pyright: ignore[reportMissingImports]
import numpy as np

from bench.contestant import Generation
from bench.workloads import Job

llama_cpp: Any = _api  # its handles are typed as optional, its functions as taking none

_silent = llama_cpp.llama_log_callback(lambda level, text, data: None)


@dataclass(frozen=True, slots=True)
class Settings:
    """What ``prepare`` chooses from."""

    flash_attention: bool
    unified_kv: bool

    def text(self) -> str:
        return f"flash_attn={int(self.flash_attention)} kv_unified={int(self.unified_kv)}"


CHOICES = tuple(
    Settings(flash, unified) for flash, unified in itertools.product((True, False), repeat=2)
)


@dataclass(frozen=True, slots=True)
class Row:
    """One token to run."""

    token_id: int
    position: int
    seq: int
    wants_logits: bool


class LlamaCppPeer:
    """llama.cpp on one GGUF file.

    Args:
        path: the GGUF file.
        label: what the report calls it, such as "bf16".
        num_threads: threads of decoding and of prefill.
    """

    def __init__(self, path: Path, label: str, num_threads: int) -> None:
        llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.name = f"llama.cpp {label}"
        self._num_threads = num_threads
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {path}")
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self._context: Any = None
        self._shape = (0, 0)
        self._settings = CHOICES[0]
        self._batch_size = 2048

    @property
    def settings(self) -> str:
        return f"{self._settings.text()} threads={self._num_threads} f16 KV"

    def prepare(self, *, num_seqs: int, max_len: int) -> None:
        if self._shape == (num_seqs, max_len):
            return
        timed = []
        for settings in CHOICES if num_seqs > 1 else [c for c in CHOICES if c.unified_kv]:
            self._open(settings, num_seqs, max_len)
            prompt_len = min(16, max_len - 6)
            jobs = [Job(tuple(range(100, 100 + prompt_len)), 5, i) for i in range(num_seqs)]
            self.generate(jobs, 0.0)  # builds the graphs
            seconds = min(self.generate(jobs, 0.0).decode_s for _ in range(2))
            timed.append((seconds, settings.text(), settings))
        self._open(min(timed)[2], num_seqs, max_len)

    def generate(self, jobs: Sequence[Job], temperature: float) -> Generation:
        self._clear()
        samplers = [self._sampler(job.seed, temperature) for job in jobs]
        start = time.perf_counter()
        outputs = [[token] for token in self._prefill_all(jobs, samplers)]
        first = time.perf_counter()
        positions = [len(job.prompt_ids) for job in jobs]
        last_but_one = first
        while live := [i for i, job in enumerate(jobs) if len(outputs[i]) < job.num_tokens]:
            if len(live) > 1:
                last_but_one = 0.0
            elif last_but_one == 0.0:
                last_but_one = time.perf_counter()
            self._decode([Row(outputs[i][-1], positions[i], i, True) for i in live])
            tokens = self._sample([samplers[i] for i in live], list(range(len(live))))
            for i, token in zip(live, tokens, strict=True):
                outputs[i].append(token)
                positions[i] += 1
        end = time.perf_counter()
        for sampler in samplers:
            if sampler is not None:
                llama_cpp.llama_sampler_free(sampler)
        return Generation(
            outputs,
            prefill_s=first - start,
            decode_s=end - first,
            num_decode_tokens=sum(len(ids) - 1 for ids in outputs),
            tail_s=end - last_but_one if last_but_one else None,
        )

    def prefill_s(self, prompt_ids: Sequence[int]) -> float:
        self._clear()
        last = len(prompt_ids) - 1
        rows = [Row(token, i, 0, i == last) for i, token in enumerate(prompt_ids)]
        start = time.perf_counter()
        self._decode(rows)
        self._greedy(1)
        return time.perf_counter() - start

    def pass_s(
        self, context_ids: Sequence[int], rows: Sequence[Sequence[int]], repeats: int
    ) -> list[float]:
        self._clear()
        self._decode([Row(token, i, 0, False) for i, token in enumerate(context_ids)])
        base, memory = len(context_ids), llama_cpp.llama_get_memory(self._context)
        best = []
        for row_ids in rows:
            batch = [Row(token, base + i, 0, True) for i, token in enumerate(row_ids)]
            seconds = []
            for _ in range(repeats + 1):  # the first call of a shape builds its graph
                llama_cpp.llama_memory_seq_rm(memory, 0, base, -1)
                start = time.perf_counter()
                self._decode(batch)
                seconds.append(time.perf_counter() - start)
            best.append(min(seconds[1:]))
        return best

    # ---- llama.cpp's own terms

    def _open(self, settings: Settings, num_seqs: int, max_len: int) -> None:
        if self._context is not None:
            llama_cpp.llama_free(self._context)
        self._settings, self._shape = replace(settings), (num_seqs, max_len)
        params = llama_cpp.llama_context_default_params()
        per_seq = (max_len + 255) // 256 * 256  # split caches round up to that themselves
        params.n_ctx = per_seq * num_seqs
        params.n_batch = self._batch_size
        params.n_ubatch = 512
        params.n_seq_max = num_seqs
        params.n_threads = params.n_threads_batch = self._num_threads
        params.kv_unified = settings.unified_kv
        params.flash_attn_type = (
            llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
            if settings.flash_attention
            else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        params.no_perf = True
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp made no context with {settings.text()}")

    def _clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)

    def _decode(self, rows: Sequence[Row]) -> None:
        assert len(rows) <= self._batch_size, len(rows)
        batch = llama_cpp.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for i, row in enumerate(rows):
            batch.token[i] = row.token_id
            batch.pos[i] = row.position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = row.seq
            batch.logits[i] = row.wants_logits
        status = llama_cpp.llama_decode(self._context, batch)
        llama_cpp.llama_synchronize(self._context)
        llama_cpp.llama_batch_free(batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")

    def _prefill_all(self, jobs: Sequence[Job], samplers: Sequence[Any]) -> list[int]:
        """Run all prompts, several in a batch where they fit; the first token of each job."""
        tokens: list[int] = []
        pending: list[Row] = []
        waiting: list[tuple[Any, int]] = []

        def flush() -> None:
            self._decode(pending)
            tokens.extend(self._sample([s for s, _ in waiting], [i for _, i in waiting]))
            pending.clear()
            waiting.clear()

        for seq, job in enumerate(jobs):
            if pending and len(pending) + len(job.prompt_ids) > self._batch_size:
                flush()
            last = len(job.prompt_ids) - 1
            pending += [Row(t, i, seq, i == last) for i, t in enumerate(job.prompt_ids)]
            waiting.append((samplers[seq], len(pending) - 1))
        flush()
        return tokens

    def _sampler(self, seed: int, temperature: float) -> Any:
        """None is greedy."""
        if temperature == 0.0:
            return None
        chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_temp(temperature))
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_dist(seed))
        return chain

    def _sample(self, samplers: Sequence[Any], batch_rows: Sequence[int]) -> list[int]:
        if samplers[0] is None:
            return self._greedy(len(samplers))
        return [
            llama_cpp.llama_sampler_sample(sampler, self._context, row)
            for sampler, row in zip(samplers, batch_rows, strict=True)
        ]

    def _greedy(self, num_outputs: int) -> list[int]:
        """Argmax of each row whose logits were asked for, in the order of the batch."""
        pointer = llama_cpp.llama_get_logits(self._context)
        logits = np.ctypeslib.as_array(pointer, shape=(num_outputs, self._vocab_size))
        return logits.argmax(axis=1).tolist()
