"""``tlt drafter train --live``: the head learns from rollouts that go on, and they use what it has learnt.

Owns the order of the phases. In one process rollouts and steps of training take turns, since two that compute at once
on the same cores slow each other down: a round rolls out some positions into a buffer, then training draws from the
buffer for its share of the time, then the engine gets the new weights between two of its steps, and the next round goes on with
the requests that were running. Each round is a step of reinforcement learning for the buffer; the target's weights
stay. Knows nothing of how any of these work.

Rounds tell the truth about the head: new prompts are rolled out before they are trained on, so the acceptance that the
engine counts is of text that no weights have seen (tasks; the prompts of a file come again). So there is no held-out
part.

Invariant: what a checkpoint, the start and the buffer's sequences hold is enough to go on. Weights, moments and the
number of steps come back bit by bit. Not so: the order in which sequences were added, which decides what goes first
when room is short; requests that were running, which end with what they have; sequences rolled out since the last
orderly end, if the process was killed; and, where shares of time decide, how long rounds are.
"""

from __future__ import annotations

import logging
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from engine import LLM
from engine.models.eagle_checkpoint import open_drafter, save_drafter
from engine.models.eagle_init import drafter_config, random_drafter
from engine.models.loader import Checkpoint, open_checkpoint
from tlt_train.buffer import DataBuffer
from tlt_train.fingerprint import fingerprint
from tlt_train.generate import requests_for, training_prompts
from tlt_train.live_options import LiveOptions
from tlt_train.live_report import RoundReport
from tlt_train.live_rollout import LiveRollouts
from tlt_train.live_state import LiveState, read_state, refill, write_data, write_state
from tlt_train.objective import Measured
from tlt_train.train import (
    DATA,
    START,
    STEPS_END_S,
    TrainOptions,
    begin_head,
    check_out,
    figures_of,
    has_start,
    open_run,
    open_trainer,
    stop_on_signal,
    write_head,
)
from tlt_train.trainer import StepReport
from tlt_train.training_run import TrainingRun

logger = logging.getLogger(__name__)


def train_live(
    target: str,
    out: str | Path,
    options: TrainOptions,
    live: LiveOptions,
    *,
    on_round: Callable[[RoundReport], None] = lambda report: None,
    **engine_options: Any,
) -> dict[str, Any]:
    """Train a head on live rollouts and write it to ``out``.

    Args:
        target: "smollm2", an HF directory or a GGUF file.
        out: directory; what a stopped run left there is gone on from with ``options.run.resume``.
        options: as of ``train_drafter``; ``generate`` says what is rolled out, but for its ends; ``held_out_share``
            is not read.
        on_round: called after the rollouts of each round.
        engine_options: of the ``LLM``.

    Returns:
        Figures of the run, plain values; ``was_stopped`` says that there is no head yet.

    Raises:
        ValueError: an option or a directory is bad, or the prompts give nothing to learn from.
    """
    begin = time.perf_counter()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("--live trains in one process; leave torchrun out, or train from --data")
    if options.generate is None:
        raise ValueError("--live rolls prompts out: give --tasks or --prompts, and no --data")
    wanted = replace(options.generate, num_tokens=None, seconds=math.inf)
    out = Path(out)
    check_out(out, options.run.resume)
    deadline = None if options.minutes is None else begin + options.minutes * STEPS_END_S
    state = read_state(out)
    prompts = training_prompts(wanted)
    opened = open_checkpoint(target)
    has_start(out, opened)  # one that is not whole goes
    mark = fingerprint(opened)
    buffer = DataBuffer(
        live.buffer_bytes,
        spill_dir=live.spill_dir,
        seed=options.config.seed,
        max_window=options.config.tokens_per_step,
    )
    with stop_on_signal() as stop, buffer:
        refill(buffer, out / DATA, state, mark)
        if not (wanted.tasks or any(wanted.temperatures) or buffer.stats().num_sequences):
            # a file is asked once at temperature 0, and a kill has lost the answers
            state.num_asked = 0
        with _engine_with_head(target, opened, out, options, live, engine_options) as llm:
            requests = islice(requests_for(llm, target, prompts, wanted), state.num_asked, None)
            rollouts = LiveRollouts(
                llm,
                requests,
                buffer,
                tap_layers=llm.engine.speculator.tap_layers,
                batch=wanted.batch,
                min_tokens=wanted.min_tokens,
                first=state.num_asked,
                version=state.version,
                has_head=options.drafter is not None and state.round == 0,
                should_stop=stop.is_set,
            )
        course = _Course(out, options, live, rollouts, buffer, state, deadline, on_round)
        try:
            with rollouts:
                figures = course.run(opened, llm.config.max_model_len, stop)
        finally:
            write_state(out, state)
            hidden = opened.config.hidden_size
            write_data(out / DATA, buffer, rollouts.tap_layers, hidden, target, wanted, mark)
    return figures | {"seconds": time.perf_counter() - begin, "out": str(out)}


class _Course:
    """The rounds of a run."""

    def __init__(
        self,
        out: Path,
        options: TrainOptions,
        live: LiveOptions,
        rollouts: LiveRollouts,
        buffer: DataBuffer,
        state: LiveState,
        deadline_s: float | None,
        on_round: Callable[[RoundReport], None],
    ) -> None:
        self._out, self._options, self._live = out, options, live
        self._rollouts, self._buffer, self._state = rollouts, buffer, state
        self._deadline_s = deadline_s
        self._on_round = on_round
        self._last: RoundReport | None = None
        self._run: TrainingRun | None = None
        self._begin_phase()

    def run(self, opened: Checkpoint, max_model_len: int, stop: threading.Event) -> dict[str, Any]:
        """Fill the buffer, then train with rounds in between, to the end or the stop."""
        out, options, buffer = self._out, self._options, self._buffer
        missing = self._live.round_tokens - buffer.stats().num_tokens
        if missing > 0:
            self._roll(missing)
        sequences = buffer.sequences()
        if stop.is_set() and not (out / START).exists():
            return {"num_steps": 0, "was_stopped": True}
        if not sequences:
            raise ValueError(self._rollouts.why_nothing(max_model_len))
        if not (out / START).exists():
            begin_head(opened, out / START, options, sequences, self._rollouts.tap_layers)
        del sequences
        trainer = open_trainer(opened, out / START, options, buffer, max_model_len, stop)
        with open_run(trainer, out, options) as self._run:
            if self._last is not None:
                self._run.log(self._last.values())
            outcome = self._run.run(deadline_s=self._deadline_s, after_step=self._after_step)
        if not outcome.was_stopped:
            write_head(trainer, out, options, opened)
        return figures_of(outcome, buffer.sequences(), trainer, 0.0) | self._figures()

    def _after_step(self, report: StepReport) -> None:
        assert self._run is not None
        self._num_steps += 1
        found = report.measured
        self._measured = found if self._measured is None else self._measured + found
        if self._num_steps == 1:
            self._run.plan()  # now that the round before it counts
        trainer = self._run.trainer
        if trainer.num_steps < trainer.total_steps and self._is_due():
            self._rollouts.publish(trainer.network.tensors())
            self._roll(self._live.round_tokens)

    def _is_due(self) -> bool:
        """Whether the next round begins: not if no time were left to learn from it, nor if nothing is left to ask."""
        last = None if self._last is None else self._last.rolled
        if last is not None and last.is_at_end:
            return False
        now = time.perf_counter()
        rollout_s = 0.0 if last is None else last.seconds
        if self._deadline_s is not None and self._deadline_s - now < rollout_s:
            return False
        if self._live.round_steps is not None:
            return self._num_steps >= self._live.round_steps
        share = self._live.rollout_share
        return now - self._phase_start >= rollout_s * (1.0 - share) / share

    def _roll(self, num_tokens: int) -> None:
        train_s = time.perf_counter() - self._phase_start
        run, state = self._run, self._state
        rolled = self._rollouts.run(num_tokens, state.round, self._deadline_s)
        report = RoundReport(
            state.round,
            0 if run is None else run.trainer.num_steps,
            rolled,
            train_s,
            self._measured,
            self._buffer.stats(),
        )
        for message in rolled.warnings:
            logger.warning("round %d: %s", state.round, message)
        logger.info("%s", report.line())
        state.round += 1
        state.version, state.num_asked = rolled.version, self._rollouts.num_asked
        write_state(self._out, state)
        if run is not None:
            run.log(report.values())
        self._last = report
        self._begin_phase()
        self._on_round(report)

    def _begin_phase(self) -> None:
        self._phase_start = time.perf_counter()
        self._num_steps = 0
        self._measured: Measured | None = None

    def _figures(self) -> dict[str, Any]:
        figures: dict[str, Any] = {
            "num_rounds": self._state.round,
            "draft_version": self._state.version,
        }
        if self._last is not None:
            figures |= self._last.values()
        return figures


@contextmanager
def _engine_with_head(
    target: str,
    opened: Checkpoint,
    out: Path,
    options: TrainOptions,
    live: LiveOptions,
    engine_options: dict[str, Any],
) -> Iterator[LLM]:
    """The engine, with the head that training begins with or, before there is one, a random head of its shape."""
    assert options.generate is not None
    start = out / START
    if options.drafter is not None and not start.exists():
        begin_head(opened, start, options, (), ())
    with tempfile.TemporaryDirectory() as place:
        if not start.exists():
            size = min(options.draft_vocab_size, opened.config.vocab_size)
            config = drafter_config(
                opened.config,
                options.kind,
                draft_vocab_size=size if options.kind == "eagle3" else None,
            )
            start = Path(place) / START
            save_drafter(start, config, random_drafter(config), target=opened.config)
        kind = open_drafter(start, opened.config).config.kind
        yield LLM(
            target,
            enable_prefix_caching=False,
            max_num_seqs=options.generate.batch,
            speculative_config={"method": kind, "model": str(start), "tuner": live.tuner},
            **engine_options,
        )
