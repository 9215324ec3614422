"""Where an engine takes a FeatureTap, and which rows of a step it is given.

Owns the choice of rows and columns: the forward is asked for the drafter's layers and the tap's together, none twice;
after the commit the rows whose tokens stay are handed out. No forward is run for a tap. Knows nothing of records and
rings. Invariant: whatever a tap does, the rollout goes on as if there were none. That takes a broad ``except``, the
second of two in the engine (the other one stands before drafters, ``speculation.py``): it logs, counts, takes the tap
off and closes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from engine.feature_tap import Features, FeatureTap
from engine.models.decoder import ForwardOutput
from engine.request import Request
from engine.scheduler import ScheduledStep
from engine.step_plan import StepPlan
from engine.tap_record import DETACHED

logger = logging.getLogger(__name__)


class TapSocket:
    """Where an engine takes a tap, at most one. What a tap does wrong ends the tap, never the rollout."""

    def __init__(self) -> None:
        self.tap: FeatureTap | None = None
        self.num_failures = 0
        self._columns: Sequence[int] = ()

    def attach(self, tap: FeatureTap, num_layers: int, hidden_size: int) -> None:
        """As ``Engine.attach_tap``."""
        if self.tap is not None:
            raise ValueError(f"tap {self.tap.name!r} is attached; detach it first")
        tap.bind(num_layers, hidden_size)
        self.tap = tap

    def detach(self) -> FeatureTap | None:
        """As ``Engine.detach_tap``."""
        tap = self.tap
        self._guard(lambda tap: tap.end_all(DETACHED))
        if tap is not None:
            tap.unbind()
            self.tap = None
        return tap

    def layers(self, drafter_layers: tuple[int, ...]) -> tuple[int, ...]:
        """What to ask the next forward for: the drafter's layers first, then those that the tap needs beside them."""
        if self.tap is None:
            return drafter_layers
        wanted = self.tap.tap_layers
        if wanted == drafter_layers[: len(wanted)]:
            self._columns = range(len(wanted))
            return drafter_layers
        others = dict.fromkeys(layer for layer in wanted if layer not in drafter_layers)
        layers = (*drafter_layers, *others)
        self._columns = [layers.index(layer) for layer in wanted]
        return layers

    def emit(self, step: ScheduledStep, plan: StepPlan, output: ForwardOutput) -> None:
        """A step has been committed: hand out what was accepted."""
        self._guard(lambda tap: _emit(tap, step, plan, output, self._columns))

    def end(self, request: Request) -> None:
        """A request has ended between two steps."""
        self._guard(lambda tap: tap.end(request))

    def end_all(self) -> None:
        """Every live request has been given up."""
        self._guard(lambda tap: tap.end_all("abort"))

    def explain(self) -> dict[str, Any]:
        """Whether a tap is attached, how many have failed, and its counts."""
        found: dict[str, Any] = {
            "is_attached": self.tap is not None,
            "num_failures": self.num_failures,
        }
        return found | (self.tap.stats() if self.tap is not None else {})

    def _guard(self, call: Callable[[FeatureTap], None]) -> None:
        tap = self.tap
        if tap is None:
            return
        if tap.is_closed:
            tap.unbind()
            self.tap = None
            return
        try:
            call(tap)
        except Exception:
            logger.exception("feature tap %s failed; it is taken off and closed", tap.name)
            self.num_failures += 1
            self.tap = None
            tap.close()  # so that its reader waits for nothing


def accepted_rows(
    step: ScheduledStep, plan: StepPlan
) -> Iterator[tuple[Request, int, Sequence[int]]]:
    """(request, start, rows) of a committed step: the rows whose tokens stay, at contiguous positions from start.

    Rows of scheduled tokens, then the accepted nodes of the tree behind them; what a stop or a limit has cut off the
    request is not among them. The newest token has no row yet.
    """
    verdicts = iter(plan.verdicts)
    row = 0
    for part in step.rows:
        first, row = row, row + part.num_tokens
        rows: Sequence[int] = range(first, row)
        if part.samples:
            verdict = next(verdicts)
            if verdict.accepted:
                rows = [*rows, *(row + node for node in verdict.accepted)]
            row += len(verdict.tree)
        yield part.request, part.start, rows[: len(part.request.token_ids) - part.start]


def _emit(
    tap: FeatureTap,
    step: ScheduledStep,
    plan: StepPlan,
    output: ForwardOutput,
    columns: Sequence[int],
) -> None:
    features = Features(output, columns, step.version)
    for request, start, rows in accepted_rows(step, plan):
        tap.emit(request, start, rows, features)
