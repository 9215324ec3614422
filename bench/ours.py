"""This engine as a contestant, and the two looks inside that no peer allows: logits of a pass, time outside kernels.

Owns an ``LLM`` with its prefix cache off (a bench repeats its prompts). Knows where the engine keeps its runner and
its ops. Invariant: ``pass_*`` run on an idle engine, on pages that no request holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from bench.contestant import Generation
from bench.physics import ModelShape
from bench.workloads import Job, TextEncoder
from engine import LLM, SamplingParams
from engine.batch import PAGE, ForwardBatch
from engine.ops.registry import OPS, Ops
from engine.prompts import TokenPrompt

ITEM_BYTES = {"float32": 4, "bfloat16": 2}


class OurEngine:
    """The engine, driven step by step so that prefill and decode can be told apart.

    Args:
        model: as ``LLM``.
        dtype: "bfloat16" or "float32".
        num_threads: None is one a core.
        ops: backend of the ops.
        max_model_len: longest sequence of the bench; None is the model's.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str,
        num_threads: int | None = None,
        ops: str = "auto",
        max_model_len: int | None = None,
    ) -> None:
        self.llm = LLM(
            model,
            dtype=dtype,
            num_threads=num_threads,
            ops=ops,
            max_model_len=max_model_len,
            enable_prefix_caching=False,
        )
        self.dtype = dtype
        self.name = f"tlt {'bf16' if dtype == 'bfloat16' else 'fp32'}"
        self._num_jobs = 0

    @property
    def encoder(self) -> TextEncoder:
        """The model's tokenizer.

        Raises:
            ValueError: it has none.
        """
        tokenizer = self.llm.engine.tokenizer
        if tokenizer is None:
            raise ValueError("the bench's prompts are text, but the model has no tokenizer")
        return tokenizer

    @property
    def ops(self) -> Ops:
        return self.llm.engine.runner.decoder.ops

    @property
    def settings(self) -> str:
        return f"ops={self.llm.config.ops} isa={self.ops.isa} threads={self.llm.config.num_threads}"

    @property
    def shape(self) -> ModelShape:
        model = self.llm.config.model
        size = ITEM_BYTES[self.dtype]
        return ModelShape(
            num_layers=model.num_layers,
            hidden=model.hidden_size,
            mlp=model.intermediate_size,
            num_q_heads=model.num_q_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            vocab=model.vocab_size,
            weight_itemsize=size,
            kv_itemsize=size,
        )

    def prepare(self, *, num_seqs: int, max_len: int) -> None:
        """Nothing to choose: the engine has no settings that depend on the work."""

    def generate(self, jobs: Sequence[Job], temperature: float) -> Generation:
        engine = self.llm.engine
        start = time.perf_counter()
        groups = []
        for job in jobs:
            params = SamplingParams(
                temperature=temperature, max_tokens=job.num_tokens, ignore_eos=True, seed=job.seed
            )
            self._num_jobs += 1
            prompt = TokenPrompt(None, list(job.prompt_ids))
            groups.append(engine.add(f"bench-{self._num_jobs}", prompt, params))
        requests = [group.samples[0].request for group in groups]
        first, decoded_before, last_but_one = 0.0, 0, None
        while engine.has_unfinished:
            engine.step()
            if not first and all(request.num_output_tokens for request in requests):
                first = time.perf_counter()
                decoded_before = sum(request.num_output_tokens for request in requests)
            if last_but_one is None and sum(not r.is_finished for r in requests) == 1 < len(jobs):
                last_but_one = time.perf_counter()
        end = time.perf_counter()
        outputs = [list(group.output().outputs[0].token_ids) for group in groups]
        return Generation(
            outputs,
            prefill_s=first - start,
            decode_s=end - first,
            num_decode_tokens=sum(len(ids) for ids in outputs) - decoded_before,
            tail_s=None if last_but_one is None else end - last_but_one,
        )

    def prefill_s(self, prompt_ids: Sequence[int]) -> float:
        return self.generate([Job(tuple(prompt_ids), 1, seed=0)], 0.0).total_s

    def pass_s(
        self, context_ids: Sequence[int], rows: Sequence[Sequence[int]], repeats: int
    ) -> list[float]:
        self.fill(context_ids)
        best = []
        for row_ids in rows:
            seconds = []
            for _ in range(repeats + 1):
                start = time.perf_counter()
                self._forward(chain_batch(len(context_ids), row_ids))
                seconds.append(time.perf_counter() - start)
            best.append(min(seconds[1:]))
        return best

    # ---- looks inside

    def fill(self, token_ids: Sequence[int]) -> None:
        """Prefill the pages 0, 1, ... with a context, in chunks that the runner can take."""
        chunk = self.llm.config.max_num_batched_tokens
        for start in range(0, len(token_ids), chunk):
            self._forward(prefill_batch(start, token_ids[start : start + chunk]))

    def pass_logits(self, context_len: int, row_ids: Sequence[int]) -> Tensor:
        """Logits [rows, V] of a chain behind a context that ``fill`` has cached."""
        return self._forward(chain_batch(context_len, row_ids)).clone()

    def step_logits(self, start: int, token_ids: Sequence[int]) -> Tensor:
        """Logits [1, V] behind the last of some tokens, which are cached from position ``start`` on."""
        return self._forward(prefill_batch(start, token_ids)).clone()

    def decode_split(self, job: Job) -> tuple[list[float], list[float]]:
        """Seconds of each decode step of one sequence alone, and of the ops within it."""
        engine = self.llm.engine
        params = SamplingParams(
            temperature=1.0, max_tokens=job.num_tokens, ignore_eos=True, seed=job.seed
        )
        self._num_jobs += 1
        group = engine.add(
            f"bench-{self._num_jobs}", TokenPrompt(None, list(job.prompt_ids)), params
        )
        while not group.samples[0].request.num_output_tokens:
            engine.step()
        steps, kernels = [], []
        while engine.has_unfinished:
            with timed_ops(self.ops) as timer:
                start = time.perf_counter()
                engine.step()
                steps.append(time.perf_counter() - start - timer.overhead_s)
            kernels.append(timer.seconds)
        return steps, kernels

    def _forward(self, batch: ForwardBatch) -> Tensor:
        assert not self.llm.engine.has_unfinished
        return self.llm.engine.runner.decoder.forward(batch).logits


def _ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def prefill_batch(start: int, token_ids: Sequence[int]) -> ForwardBatch:
    """Plain rows of one sequence in pages 0, 1, ..., logits behind the last."""
    rows, end = len(token_ids), start + len(token_ids)
    positions = torch.arange(start, end, dtype=torch.int32)
    return ForwardBatch(
        token_ids=_ints(token_ids),
        positions=positions,
        slots=positions,
        row_start=_ints((0, rows)),
        page_table=torch.arange((end + PAGE - 1) // PAGE, dtype=torch.int32).unsqueeze(0),
        ctx_len=positions + 1,
        tail_start=torch.zeros(rows + 1, dtype=torch.int32),
        tail_slots=_ints(()),
        logit_rows=_ints((rows - 1,)),
    )


def chain_batch(context_len: int, token_ids: Sequence[int]) -> ForwardBatch:
    """A token tree that is one chain, as verification runs it: every node reads the context and its ancestors."""
    rows = len(token_ids)
    positions = torch.arange(context_len, context_len + rows, dtype=torch.int32)
    return ForwardBatch(
        token_ids=_ints(token_ids),
        positions=positions,
        slots=positions,
        row_start=_ints((0, rows)),
        page_table=torch.arange(
            (context_len + rows + PAGE - 1) // PAGE, dtype=torch.int32
        ).unsqueeze(0),
        ctx_len=torch.full((rows,), context_len, dtype=torch.int32),
        tail_start=_ints([r * (r + 1) // 2 for r in range(rows + 1)]),
        tail_slots=torch.cat([positions[: r + 1] for r in range(rows)]),
        logit_rows=torch.arange(rows, dtype=torch.int32),
    )


class OpTimer:
    """Seconds inside ops, number of calls, and what the timing itself cost outside of them."""

    __slots__ = ("calls", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0

    def wrap(self, call: Callable[..., None]) -> Callable[..., None]:
        clock = time.perf_counter

        def run(*args: object) -> None:
            start = clock()
            call(*args)
            self.seconds += clock() - start
            self.calls += 1

        return run

    @property
    def overhead_s(self) -> float:
        return self.calls * _wrapper_cost_s()


@cache
def _wrapper_cost_s() -> float:
    """Seconds that one timed call adds outside the interval it measures."""
    timer, count = OpTimer(), 20000
    nothing = timer.wrap(lambda *args: None)
    start = time.perf_counter()
    for _ in range(count):
        nothing(1, 2, 3)
    return (time.perf_counter() - start - timer.seconds) / count


@contextmanager
def timed_ops(ops: Ops) -> Iterator[OpTimer]:
    """While open, every op of ``ops`` is timed; results do not change."""
    timer = OpTimer()
    originals = {op: getattr(ops, op) for op in OPS}
    for op, call in originals.items():
        setattr(ops, op, timer.wrap(call))
    try:
        yield timer
    finally:
        for op, call in originals.items():
            setattr(ops, op, call)
