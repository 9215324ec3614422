"""The engine: requests in, one step at a time, groups of samples out.

Owns the scheduler, the runner, the sampler and the visible state of every live request. Single-threaded: whoever
calls ``step`` owns it; ``LLM`` and ``AsyncEngine`` see to that. Knows nothing of prompts as text, of progress bars or
event loops. Invariant: a step either happens whole or leaves every request as it was.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from engine.feature_tap import FeatureTap
from engine.metrics import EngineCounters
from engine.models.decoder import ForwardOutput
from engine.output_text import OutputText
from engine.outputs import LogprobsAt
from engine.prompts import TokenPrompt
from engine.request import Request
from engine.request_group import RequestGroup, Sample
from engine.runner import ModelRunner
from engine.sampler import RowError, Sampled, Sampler
from engine.sampling_params import SamplingParams
from engine.scheduler import ScheduledStep, Scheduler
from engine.spec.tuner import StepRecord, Verified
from engine.speculation import Drafts, Speculator
from engine.step_plan import Move, StepPlan, Verdict, plan_step, settle
from engine.tap_socket import TapSocket
from engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


_PromptRows = tuple[Request, int, list[LogprobsAt]]  # request, first position, from there on


class Engine:
    """Runs requests to their end.

    Args:
        make_scheduler: gives a scheduler over an empty cache, of the runner's size.
        runner, sampler, speculator: the other parts, made for one model.
        tokenizer: None for a model without one; then outputs have no text.
        eos_token_ids: end-of-sequence ids of the model.
        max_model_len: longest sequence in tokens.
        seed: seeds requests that bring none.
    """

    def __init__(
        self,
        make_scheduler: Callable[[], Scheduler],
        runner: ModelRunner,
        sampler: Sampler,
        speculator: Speculator,
        *,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        seed: int,
    ) -> None:
        self._make_scheduler = make_scheduler
        self.scheduler = make_scheduler()
        self.runner = runner
        self.sampler = sampler
        self.speculator = speculator
        self.taps = TapSocket()
        self.tokenizer = tokenizer
        self.counters = EngineCounters()
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len
        self._seed = seed
        self._samples: dict[str, Sample] = {}
        self._num_requests = 0

    def add(self, request_id: str, prompt: TokenPrompt, params: SamplingParams) -> RequestGroup:
        """Queue the n samples of a prompt; all of them or, on any error, none.

        Raises:
            ValueError: the id is taken, the request can never fit, or a parameter needs what the model lacks.
        """
        if self.tokenizer is None and (params.stop_strings or params.bad_words):
            raise ValueError("stop and bad_words are text, but the model has no tokenizer")
        group = RequestGroup(request_id, prompt.text, prompt.token_ids, time.monotonic())
        if params.prompt_logprobs is not None:
            unknown: list[LogprobsAt | None] = [None] * len(prompt.token_ids)
            group.prompt_logprobs = unknown
        base = self._next_seed() if params.seed is None else params.seed
        bad_words = self._encode_bad_words(params.bad_words or ())
        try:
            for index in range(params.n):
                self._add_sample(group, params, (base + index) % 2**63, bad_words)
        except BaseException:
            self._drop(group)
            raise
        self._num_requests += 1
        return group

    def abort(self, group: RequestGroup) -> None:
        """End every unfinished sample of a group; its pages are free at once, between two steps."""
        for sample in group.samples:
            if sample.finished_time is None:
                self.scheduler.finish(sample.request, "abort")
                self._retire(sample)
                self.taps.end(sample.request)

    def withdraw(self, groups: Sequence[RequestGroup]) -> None:
        """Take back the groups added last, before any step: as if they had never been added."""
        for group in groups:
            self._drop(group)
        self._num_requests -= len(groups)

    def recover(self) -> None:
        """Give up every request and start new books.

        For an exception that may have come at any moment (Ctrl-C, out of memory): what the scheduler and the cache
        have written down is then in doubt. Weights, counters and the numbering of requests stay.
        """
        version = self.scheduler.kv.version
        self.scheduler = self._make_scheduler()
        self.scheduler.kv.set_version(version)
        self.sampler.forget_all()
        self.speculator.reset()
        self.taps.end_all()
        now = time.monotonic()
        for sample in self._samples.values():
            sample.request.finish("abort")
            sample.finish(now)
        self._samples.clear()

    def attach_tap(self, tap: FeatureTap) -> None:
        """Hand out the features of what is accepted from the next step on. Tokens stay the same.

        Raises:
            ValueError: another tap is attached, or it does not fit the target.
        """
        config = self.runner.decoder.config
        self.taps.attach(tap, config.num_layers, config.hidden_size)

    def detach_tap(self) -> FeatureTap | None:
        """Take the tap off, between two steps: its reader is told that the live requests end there. None: no tap."""
        return self.taps.detach()

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def step(self) -> list[RequestGroup]:
        """One forward of the target; the groups that gained tokens or ended."""
        start = time.perf_counter()
        decoding = self.scheduler.decoding
        drafts = self.speculator.draft(
            decoding,
            num_spare_rows=self.scheduler.max_num_batched_tokens - len(decoding),
            has_prefill=self.scheduler.has_prefill,
        )
        step = self.scheduler.schedule()
        if not step.rows:
            return []
        try:
            plan = plan_step(step, drafts)
            prompt_rows, output = self._run(step, plan)
        except BaseException:
            self.scheduler.fail(step)
            raise
        self._keep_prompt_logprobs(prompt_rows)
        groups = self._commit(step, plan)
        if self.taps.tap is not None:
            self.taps.emit(step, plan, output)
        seconds = time.perf_counter() - start
        self._count(step, plan, seconds)
        self._learn(step, plan, drafts, seconds)
        return groups

    def _run(self, step: ScheduledStep, plan: StepPlan) -> tuple[list[_PromptRows], ForwardOutput]:
        """Forward, sample at every node, walk, and move the keys of what was accepted."""
        start = time.perf_counter()
        speculator = self.speculator
        drafter_layers, hidden = speculator.tap_layers, speculator.wants_hidden
        layers, has_tap = self.taps.layers(drafter_layers), self.taps.tap is not None
        batch, output = self.runner.forward(
            step.rows,
            plan.logit_rows,
            plan.trees,
            tap_layers=layers,
            want_hidden=hidden or has_tap,
        )
        if drafter_layers or hidden:
            taps = output.taps
            if taps is not None and layers != drafter_layers:
                taps = taps[:, : len(drafter_layers)]
            speculator.store_features(batch.slots, taps, output.hidden)
        logits = output.logits
        forwarded = time.perf_counter()
        at = len(plan.sample_rows)
        prompt_rows: list[_PromptRows] = []
        for request, first, count in plan.prompt_parts:
            next_ids = request.prompt_token_ids[first + 1 : first + 1 + count]
            k = request.params.prompt_logprobs or 0
            found = self.sampler.prompt_logprobs(logits[at : at + count], next_ids, k)
            prompt_rows.append((request, first, found))
            at += count
        num_samples = len(plan.sample_rows)
        drawn = self.sampler.sample(logits[:num_samples], plan.sample_rows) if num_samples else []
        self._move_kv(settle(plan, drawn))
        self.counters.forward_time_s += forwarded - start
        self.counters.sample_time_s += time.perf_counter() - forwarded
        return prompt_rows, output

    def _move_kv(self, moves: Sequence[Move]) -> None:
        """Keys, values and features of accepted tree nodes go where their positions are."""
        if not moves:
            return
        kv = self.scheduler.kv
        source = [kv.slots_for(m.rows.request, m.rows.end + m.node, 1)[0] for m in moves]
        target = [kv.slots_for(m.rows.request, m.rows.end + m.place, 1)[0] for m in moves]
        slots = torch.tensor([source, target], dtype=torch.int32)
        self.runner.move_kv(slots[0], slots[1])
        self.speculator.move_features(slots[0], slots[1])

    def _commit(self, step: ScheduledStep, plan: StepPlan) -> list[RequestGroup]:
        touched: dict[str, RequestGroup] = {}
        gained: dict[str, Verdict] = {}
        for verdict in plan.verdicts:
            if verdict.drawn:
                gained[verdict.rows.request.request_id] = verdict
            elif verdict.error is not None:
                group = self._end_with_error(verdict.rows.request, verdict.error)
                touched[group.request_id] = group
        tokens = {i: [s.token_id for s in verdict.drawn] for i, verdict in gained.items()}
        outcome = self.scheduler.commit(step, tokens)
        now = time.monotonic()
        for committed in outcome:
            request = committed.request
            verdict, sample = gained[request.request_id], self._samples[request.request_id]
            touched[sample.group.request_id] = sample.group
            num_shown = self._show(sample, verdict.drawn[: len(committed.token_ids)], now)
            sample.count_step(len(verdict.tree), num_shown - 1)
            self.counters.count_accepted(num_shown - 1)
            if request.is_finished:
                self._retire(sample)
            elif verdict.error is not None:
                self._end_with_error(request, verdict.error)
        return list(touched.values())

    def _show(self, sample: Sample, drawn: Sequence[Sampled], now: float) -> int:
        """Make tokens visible, up to the one that completes a stop string; how many."""
        request = sample.request
        before = request.num_output_tokens - len(drawn)
        for count, token in enumerate(drawn, 1):
            may_stop = before + count > request.params.min_tokens
            stop = sample.add_token(token.token_id, token.logprobs, now, may_stop=may_stop)
            self.counters.num_generated_tokens += 1
            if stop is not None:
                self.scheduler.finish(request, "stop", stop, num_output_tokens=before + count)
                return count
        return len(drawn)

    def _retire(self, sample: Sample) -> None:
        sample.finish(time.monotonic())
        request = sample.request
        self.counters.num_finished_requests += 1
        self.counters.num_prompt_tokens += request.prompt_len
        self.counters.num_cached_prompt_tokens += request.num_cached_tokens
        self.counters.num_preemptions += request.num_preemptions
        self.sampler.forget(request.request_id)
        self.speculator.forget(request)
        del self._samples[request.request_id]

    def _drop(self, group: RequestGroup) -> None:
        """Forget samples that have not run."""
        for sample in group.samples:
            self.scheduler.abort(sample.request.request_id)
            self.sampler.forget(sample.request.request_id)
            self._samples.pop(sample.request.request_id, None)

    def _end_with_error(self, request: Request, error: RowError) -> RequestGroup:
        """A request that cannot be sampled ends alone, with the tokens it has."""
        sample = self._samples[request.request_id]
        logger.error("request %s: %s", request.request_id, error)
        self.scheduler.finish(request, "error", str(error))
        self._retire(sample)
        return sample.group

    def _keep_prompt_logprobs(self, prompt_rows: Sequence[_PromptRows]) -> None:
        for request, first, found in prompt_rows:
            group = self._samples[request.request_id].group
            known: list[LogprobsAt | None] = list(group.prompt_logprobs or ())
            known[first + 1 : first + 1 + len(found)] = found
            group.prompt_logprobs = known

    def _count(self, step: ScheduledStep, plan: StepPlan, seconds: float) -> None:
        counters = self.counters
        counters.num_target_steps += 1
        counters.num_target_rows += step.num_tokens
        for verdict in plan.verdicts:
            counters.num_verifications += 1 if verdict.drawn else 0
            if len(verdict.tree):
                counters.num_drafts += 1
                counters.num_draft_tokens += len(verdict.tree)
                counters.num_target_rows += len(verdict.tree)
        counters.step_time_s += seconds

    def _learn(self, step: ScheduledStep, plan: StepPlan, drafts: Drafts, seconds: float) -> None:
        """Tell the tuner and the drafters what the step was and what came of it."""
        if not self.speculator.active:
            return
        draft_s = sum(drafts.seconds.values())
        self.counters.draft_time_s += draft_s
        decoding = plan.verdicts[: step.num_decoding]
        num_nodes = sum(len(verdict.tree) for verdict in decoding)
        record = StepRecord(
            num_rows=step.num_tokens + num_nodes,
            num_decoding=step.num_decoding,
            num_nodes=num_nodes,
            num_context=drafts.num_context,
            num_tokens=sum(len(verdict.drawn) for verdict in decoding),
            draft_s=drafts.seconds,
            target_s=seconds - draft_s,
            drafted=drafts.sizes,
            verified=[
                Verified(v.rows.request.request_id, v.draft_plan, v.tree, v.accepted)
                for v in decoding
                if v.draft_plan is not None and len(v.tree)
            ],
        )
        self.speculator.observe(record, [v.rows.request for v in plan.verdicts if v.drawn])

    def _add_sample(
        self, group: RequestGroup, params: SamplingParams, seed: int, bad_words: list[list[int]]
    ) -> None:
        index = len(group.samples)
        request = Request(
            f"{group.request_id}-{index}" if params.n > 1 else group.request_id,
            group.prompt_token_ids,
            params,
            seed=seed,
            max_total_len=self._max_model_len,
            eos_token_ids=self._eos_token_ids,
            arrival=self._num_requests,
            group_id=group.request_id,
            sample_index=index,
        )
        if request.request_id in self._samples:
            raise ValueError(f"request id {request.request_id!r} is in use; choose another")
        text = None if self.tokenizer is None else OutputText(self.tokenizer, params)
        sample = Sample(request, group, text, None if params.logprobs is None else [])
        group.samples.append(sample)  # from here on _drop finds it, wherever the rest fails
        self._samples[request.request_id] = sample
        self.sampler.admit(request, bad_words)
        self.scheduler.add(request)

    def _encode_bad_words(self, bad_words: Sequence[str]) -> list[list[int]]:
        """Token sequences of each word, at the start of a text and after a space, as vLLM does."""
        if self.tokenizer is None:
            return []
        found: list[list[int]] = []
        for word in bad_words:
            for text in (word, " " + word.lstrip()):
                token_ids = self.tokenizer.encode(text, add_special_tokens=False)
                if token_ids and token_ids not in found:
                    found.append(token_ids)
        return found

    def _next_seed(self) -> int:
        """Seeds of requests that bring none: the engine's seed and the request's number decide."""
        mixed = (self._seed * 0x9E3779B97F4A7C15 + self._num_requests * 0xBF58476D1CE4E5B9) % 2**64
        mixed = (mixed ^ (mixed >> 31)) * 0x94D049BB133111EB % 2**64
        return (mixed ^ (mixed >> 29)) >> 1
