"""Prompts in, whole samples out: an engine that is kept full, step by step, for as long as somebody wants.

Owns which requests run and the figures of those that have ended. Knows nothing of prompts as text, of what is kept of
the samples, or of when to end. Invariant: between two steps, however far apart, what runs stays where it is; nothing
but ``close`` gives a request up.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from engine.engine import Engine
from engine.prompts import TokenPrompt
from engine.request_group import RequestGroup
from engine.sampling_params import SamplingParams

_NO_MORE = object()
_SKIPPED_AT_ONCE = 64  # prompts that cannot be answered, before who calls may look at its clock
_MOST_TAP_BYTES = 256 << 20
_TAP_STEPS = 8  # that a tap's ring has room for; it is read after every one
_HEAD_BYTES = 1024  # of the records of a request in a step, generously
_SHARED_MEMORY = "/dev/shm"

Asked = tuple[list[int], SamplingParams] | ValueError | None
"""Prompt and parameters of the samples of a prompt. None is a prompt that is too long to be answered, a ValueError says
why it has no tokens: the chat template refuses it, say. Both are passed over and counted."""


@dataclass(slots=True)
class RolloutFigures:
    """What a run was. Lengths are of answers, in tokens, in the order in which they ended.

    ``refusal`` says why the first of the ``num_refused`` prompts has no tokens.
    """

    lengths: list[int] = field(default_factory=list)
    num_unfinished: int = 0
    num_too_long: int = 0
    num_refused: int = 0
    refusal: str = ""
    was_stopped: bool = False
    seconds: float = 0.0
    num_generated: int = 0


class Rollouts:
    """Requests of one engine, which nobody else uses meanwhile.

    Args:
        engine: that generates.
        requests: in order; the n-th is named ``data-n``.
        batch: samples that run at once.
        collect: called after every step.
        first: number of the first request.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Iterator[Asked],
        *,
        batch: int,
        collect: Callable[[], Any],
        first: int = 0,
    ) -> None:
        self.figures = RolloutFigures()
        self.num_asked = first  # taken from ``requests``, with those before ``first``
        self._engine = engine
        self._requests = requests
        self._batch = batch
        self._collect = collect
        self._live: dict[str, RequestGroup] = {}
        self._num_generated = engine.counters.num_generated_tokens

    @property
    def num_running(self) -> int:
        """Samples that have not ended."""
        return sum(s.finished_time is None for g in self._live.values() for s in g.samples)

    @property
    def num_held(self) -> int:
        """Positions of samples that run which a tap has handed out: all but the newest token's."""
        return sum(
            len(s.request.token_ids) - 1
            for group in self._live.values()
            for s in group.samples
            if s.finished_time is None and s.request.num_output_tokens
        )

    def step(self) -> bool:
        """One forward with as many requests as there is room for; False, and nothing done, where none is left.

        Of prompts that cannot be answered a call passes over some at most, so it may come back without a forward.
        """
        is_at_end = self._fill()
        engine = self._engine
        if not engine.has_unfinished:
            return not is_at_end
        for group in engine.step():
            if group.finished:
                self.figures.lengths += [s.request.num_output_tokens for s in group.samples]
                del self._live[group.request_id]
        self._collect()
        self.figures.num_generated = engine.counters.num_generated_tokens - self._num_generated
        return True

    def close(self) -> None:
        """Give up what still runs; a tap hands out what it has."""
        for group in self._live.values():
            self.figures.num_unfinished += sum(s.finished_time is None for s in group.samples)
            self.figures.lengths += [s.request.num_output_tokens for s in group.samples]
            self._engine.abort(group)
        self._live.clear()
        self._collect()

    def _fill(self) -> bool:
        """Take requests while there is room; whether there are no more."""
        scheduler = self._engine.scheduler
        num_skipped = 0
        while scheduler.num_running + scheduler.num_waiting < self._batch:
            if num_skipped == _SKIPPED_AT_ONCE:
                return False
            asked: Any = next(self._requests, _NO_MORE)
            if asked is _NO_MORE:
                return True
            name = f"data-{self.num_asked}"
            self.num_asked += 1
            if asked is None or isinstance(asked, ValueError):
                num_skipped += 1
                self._count_skipped(asked)
                continue
            token_ids, params = asked
            self._live[name] = self._engine.add(name, TokenPrompt(None, token_ids), params)
        return False

    def _count_skipped(self, why: ValueError | None) -> None:
        figures = self.figures
        if why is None:
            figures.num_too_long += 1
            return
        figures.num_refused += 1
        figures.refusal = figures.refusal or str(why)


def tap_bytes(num_rows: int, num_requests: int, width: int) -> int:
    """Capacity of the ring of a tap that is read after every step: some steps' rows, and half of what is free at most.

    Args:
        num_rows: of a forward, at most.
        num_requests: that run at once, at most.
        width: of a row in features, the final hidden state's included.

    Raises:
        ValueError: not even the rows of one step fit in what is free.
    """
    row = 2 * width + 4
    step = num_rows * row + num_requests * _HEAD_BYTES
    # Padding at the ring's end takes a record's room, an eighth; and a record has to hold a row.
    least = max(step + step // 4, 8 * (row + _HEAD_BYTES))
    space = os.statvfs(_SHARED_MEMORY)
    free = space.f_bavail * space.f_frsize
    if least + (1 << 16) > free:
        raise ValueError(
            f"the hidden states of one step take {least / 1e6:.1f} MB of shared memory, and {_SHARED_MEMORY} has "
            f"{free / 1e6:.1f} MB free: make it larger (docker run --shm-size=1g, or mount -o remount,size=1g "
            f"{_SHARED_MEMORY}), delete what dead processes left there, or tap fewer layers (--tap-layers)"
        )
    return max(least, min(_MOST_TAP_BYTES, _TAP_STEPS * step, free // 2))
