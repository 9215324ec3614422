"""The half of a live run that generates: an engine, a tap and a Collector that fill a buffer, for a while at a time.

Owns the tap, what a while measured of the drafter, and the swap of its weights. Knows nothing of trainers or of when
a while begins. Invariants: a swap comes between two steps and touches no request; what the engine refuses or has
switched off is said once and ends nothing, since rollouts need no drafter.

A head that does not exist yet: its vocabulary is made from rollouts, but an engine gets its drafter when it is made.
So it is made with a random head of the same shape, whose features are kept from the first row on, with a tuner that
never drafts; the first swap brings weights, vocabulary (``d2t``) and the tuner that was asked for, and requests that
were running then are drafted for like any other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from engine import LLM
from engine.feature_tap import FeatureTap, TapReader
from engine.spec.eagle import EagleDrafter
from engine.spec.tuner import OffTuner
from tlt_train.buffer import DataBuffer
from tlt_train.collector import Collector
from tlt_train.live_report import RolledOut
from tlt_train.rollouts import Asked, Rollouts, tap_bytes

logger = logging.getLogger(__name__)

_LEAST_TOKENS = 3  # of a sequence that a head can learn from


class LiveRollouts:
    """Rollouts that fill ``buffer``; a context manager, which gives up what runs at its end.

    Args:
        llm: with the drafter, without a prefix cache (``generate`` says why).
        requests: in order, from number ``first`` on.
        tap_layers: what the drafter reads.
        batch, min_tokens: of ``DataOptions``.
        version: of the drafter's weights so far.
        has_head: False: nothing is drafted before the first ``publish``.
        should_stop: asked before every step.
    """

    def __init__(
        self,
        llm: LLM,
        requests: Iterator[Asked],
        buffer: DataBuffer,
        *,
        tap_layers: Sequence[int],
        batch: int,
        min_tokens: int,
        first: int = 0,
        version: int = 0,
        has_head: bool = True,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.version = version
        self._engine = llm.engine
        self._buffer = buffer
        self._should_stop = should_stop
        self._tuner = llm.engine.speculator.tuner
        if not has_head:
            llm.engine.speculator.tuner = OffTuner()
        config = llm.config
        width = (len(tap_layers) + 1) * config.model.hidden_size
        capacity = tap_bytes(config.max_num_batched_tokens, config.max_num_seqs, width)
        self._tap = FeatureTap(tap_layers, capacity_bytes=capacity)
        self._reader = TapReader(self._tap.name)
        self._min_tokens = max(min_tokens, _LEAST_TOKENS)
        self._collector = Collector(self._reader, buffer.add, min_tokens=self._min_tokens)
        llm.attach_tap(self._tap)
        self._rollouts = Rollouts(
            llm.engine, requests, batch=batch, collect=self._collector.poll, first=first
        )
        self._num_events = 0
        self._warnings: list[str] = []
        self._is_off = False

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return self._tap.tap_layers

    @property
    def num_asked(self) -> int:
        """Requests taken so far, with those before ``first``."""
        return self._rollouts.num_asked

    def run(self, num_positions: int, rl_step: int, deadline_s: float | None = None) -> RolledOut:
        """Go on until so many positions have come, the deadline, a stop, or the end of the requests.

        What runs goes on in the next call; what it has so far is in the buffer, and is replaced when it is longer.

        Args:
            rl_step: of requests that begin here, and of the buffer.
            deadline_s: of ``time.perf_counter``.
        """
        collector = self._collector
        self._buffer.set_step(rl_step, self._engine.scheduler.kv.version)
        collector.set_step(rl_step)
        before = self._counts()
        start, is_at_end = time.perf_counter(), False
        while collector.stats().num_tokens - before[-1] < num_positions:
            if self._should_stop() or (
                deadline_s is not None and time.perf_counter() >= deadline_s
            ):
                break
            if not self._rollouts.step():
                is_at_end = True
                break
        collector.flush(keep_open=True)
        seconds = time.perf_counter() - start
        steps, generated, drafts, accepted, positions = (
            now - then for now, then in zip(self._counts(), before, strict=True)
        )
        return RolledOut(
            version=self.version,
            seconds=seconds,
            num_positions=positions,
            num_generated=generated,
            num_steps=steps,
            num_drafts=drafts,
            num_accepted=accepted,
            num_running=self._rollouts.num_running,
            warnings=self._new_warnings(),
            is_at_end=is_at_end,
        )

    def publish(self, tensors: Mapping[str, Tensor]) -> bool:
        """Give the drafter new weights; whether it took them. Requests go on, and the tuner learns it anew."""
        speculator, version = self._engine.speculator, self.version + 1
        if EagleDrafter.name not in speculator.drafters:
            return False
        try:
            speculator.load(EagleDrafter.name, tensors, version)
        except ValueError as error:
            message = f"version {version} of the head is refused, {self.version} stays: {error}"
            logger.error("%s", message)
            self._warnings.append(message)
            return False
        speculator.tuner = self._tuner
        self.version = version
        return True

    def why_nothing(self, max_model_len: int) -> str:
        """What to say where the buffer is empty after rollouts."""
        stats, figures = self._buffer.stats(), self._rollouts.figures
        if stats.num_failed_writes or stats.num_lost_files:
            why = "what was beyond --buffer-bytes could not be kept in --spill-dir; give a place that can be written"
        elif stats.num_evicted:
            why = (
                f"--buffer-bytes {self._buffer.max_bytes} is less than one sequence takes, so that all "
                f"{stats.num_evicted} were dropped; raise it"
            )
        elif self._collector.stats().num_too_short:
            why = (
                f"all samples had fewer than {self._min_tokens} tokens (min_tokens), prompts included; raise --max-tokens "
                f"or --minutes, or give other prompts"
            )
        elif figures.num_too_long:
            why = (
                f"{figures.num_too_long} prompts are too long for the context of {max_model_len} tokens, which must hold "
                f"two more; give shorter ones"
            )
        elif figures.num_refused:
            why = f"{figures.num_refused} prompts are refused, the first because {figures.refusal}; give others"
        else:
            why = "no prompt was answered; raise --minutes, or give more prompts"
        return f"the rollouts gave no sequence to learn from: {why}"

    def close(self) -> None:
        """Give up what runs, with what it has in the buffer, and take the tap off."""
        try:
            self._rollouts.close()
            self._engine.detach_tap()
            self._collector.poll()
            self._collector.flush()
        finally:
            self._reader.close()
            self._tap.close()

    def __enter__(self) -> LiveRollouts:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _counts(self) -> tuple[int, ...]:
        counters = self._engine.counters
        return (
            counters.num_verifications,
            counters.num_generated_tokens,
            counters.num_drafts,
            counters.num_accepted_draft_tokens,
            self._collector.stats().num_tokens,
        )

    def _new_warnings(self) -> tuple[str, ...]:
        """What has happened to the drafter since the last call."""
        speculator = self._engine.speculator
        found, self._warnings = self._warnings, []
        found += [event.message for event in speculator.events[self._num_events :]]
        self._num_events = len(speculator.events)
        why = speculator.failures.get(EagleDrafter.name)
        if why is not None and not self._is_off:
            self._is_off = True
            found.append(f"the drafter failed and is off, training goes on without it: {why}")
        return tuple(found)
