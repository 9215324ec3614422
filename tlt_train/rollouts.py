"""Prompts in, whole samples out: an engine that is kept full, step by step, for as long as somebody wants.

Owns which requests run and the figures of those that have ended. Knows nothing of prompts as text, of what is kept of
the samples, or of when to end. Invariant: between two steps, however far apart, what runs stays where it is; nothing
but ``close`` gives a request up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from engine.engine import Engine
from engine.prompts import TokenPrompt
from engine.request_group import RequestGroup
from engine.sampling_params import SamplingParams

_NO_MORE = object()

Asked = tuple[list[int], SamplingParams] | None
"""Prompt and parameters of the samples of a prompt; None is a prompt that is too long to be answered."""


@dataclass(slots=True)
class RolloutFigures:
    """What a run was. Lengths are of answers, in tokens, in the order in which they ended."""

    lengths: list[int] = field(default_factory=list)
    num_unfinished: int = 0
    num_too_long: int = 0
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
        """One forward with as many requests as there is room for; False, and nothing done, where none is left."""
        self._fill()
        engine = self._engine
        if not engine.has_unfinished:
            return False
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

    def _fill(self) -> None:
        scheduler = self._engine.scheduler
        while scheduler.num_running + scheduler.num_waiting < self._batch:
            asked: Any = next(self._requests, _NO_MORE)
            if asked is _NO_MORE:
                return
            name = f"data-{self.num_asked}"
            self.num_asked += 1
            if asked is None:
                self.figures.num_too_long += 1
                continue
            token_ids, params = asked
            self._live[name] = self._engine.add(name, TokenPrompt(None, token_ids), params)
