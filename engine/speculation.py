"""Speculation within a step: asks the tuner and the drafters, keeps them informed, survives them.

Owns the drafters, the tuner and the order in which they are called. Knows nothing of schedules, sampling or KV.
Invariants: a tree that leaves here obeys its plan, its request's limits and the vocabulary; a drafter that raises is
switched off for the rest of the run, loudly, and changes nothing else: this is the one place where a broad ``except``
stands between drafters and the rollout, which they can slow down but must never break.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from engine.request import Request
from engine.spec.alarm import AcceptanceAlarm, AlarmEvent
from engine.spec.base import Drafter, DraftJob, DraftPlan, Trial
from engine.spec.tree import NO_TREE, DraftTree
from engine.spec.tuner import Candidates, Draft, StepRecord, Tuner

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class Drafts:
    """What was drafted for a step."""

    trees: dict[str, tuple[DraftPlan, DraftTree]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)  # drafter -> requests, depth
    num_context: int = 0


class Speculator:
    """The drafters and their tuner.

    Args:
        drafters: in order of preference; none for plain decoding.
        tuner: decides.
        vocab_size: of the target: a proposal outside it is the drafter's failure.
        alarm: watches acceptance; None does not.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        tuner: Tuner,
        *,
        vocab_size: int,
        alarm: AcceptanceAlarm | None = None,
    ) -> None:
        self.drafters: dict[str, Drafter] = {drafter.name: drafter for drafter in drafters}
        self.tuner = tuner
        self.failures: dict[str, str] = {}  # drafter -> why it was switched off
        self.events: list[AlarmEvent] = []
        self._alarm = alarm
        self._vocab_size = vocab_size
        self._choose_features()

    @property
    def active(self) -> bool:
        return bool(self.drafters)

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Layers of the target whose input a drafter reads."""
        return self._tap_layers

    @property
    def wants_hidden(self) -> bool:
        return self._wants_hidden

    def draft(
        self,
        decoding: Sequence[Request],
        *,
        num_spare_rows: int = 1 << 30,
        has_prefill: bool = False,
    ) -> Drafts:
        """Trees for the decoding requests of the next step; ``request.num_tree_nodes`` asks for their rows.

        Args:
            decoding: all of them, also where nothing is drafted: what they asked for before no longer counts.
            num_spare_rows: that the step can have beside theirs.
            has_prefill: others want rows as well.
        """
        drafts = Drafts()
        for request in decoding:
            request.num_tree_nodes = 0
        if not self.drafters or not decoding or num_spare_rows < 1:
            return drafts
        drafts.num_context = sum(len(request.token_ids) for request in decoding)
        limits = [(request, _max_depth(request)) for request in decoding]
        limits = [(request, depth) for request, depth in limits if depth > 0]
        if not limits:
            return drafts
        batch = Candidates(
            [request for request, _ in limits],
            [depth for _, depth in limits],
            len(decoding),
            has_prefill,
            drafts.num_context,
            num_spare_rows,
        )
        plans = self.tuner.plan(batch)
        found = self._propose(batch, plans, drafts)
        if len(self.drafters) > 1 and any(plans):
            others = self.tuner.reconsider(batch, _pair(batch, plans, found))
            better = self._propose(batch, others, drafts)
            found |= better
            plans = [
                other if request.request_id in better else plan
                for request, plan, other in zip(batch.requests, plans, others, strict=True)
            ]
        if not found:
            return drafts
        given = _pair(batch, plans, found)
        for draft, tree in zip(given, self.tuner.trim(batch, given), strict=True):
            if draft.plan is not None and len(tree):
                draft.request.num_tree_nodes = len(tree)
                drafts.trees[draft.request.request_id] = (draft.plan, tree)
        return drafts

    def _propose(
        self, batch: Candidates, plans: Sequence[DraftPlan | None], drafts: Drafts
    ) -> dict[str, DraftTree]:
        jobs: dict[str, list[DraftJob]] = {}
        for request, max_depth, plan in zip(batch.requests, batch.max_depths, plans, strict=True):
            if plan is not None:
                job = DraftJob(request, _clip(plan, request, max_depth))
                jobs.setdefault(plan.drafter, []).append(job)
        found: dict[str, DraftTree] = {}
        for name, asked in jobs.items():
            start = time.perf_counter()
            trees = self._guard(name, lambda d, asked=asked: self._checked(d, asked))
            drafts.seconds[name] = time.perf_counter() - start
            drafts.sizes[name] = (len(asked), max(job.plan.depth for job in asked))
            for job, tree in zip(asked, trees or (), strict=False):
                if len(tree):
                    found[job.request.request_id] = tree
        return found

    def _checked(self, drafter: Drafter, jobs: Sequence[DraftJob]) -> list[DraftTree]:
        trees = drafter.propose(jobs)
        if len(trees) != len(jobs):
            raise ValueError(f"{len(jobs)} requests were given {len(trees)} trees")
        for job, tree in zip(jobs, trees, strict=True):
            plan = job.plan
            if len(tree) > plan.num_nodes or tree.depth > plan.depth:
                raise ValueError(
                    f"a tree of {len(tree)} nodes and depth {tree.depth} for request {job.request.request_id!r}, "
                    f"the plan allows {plan.num_nodes} and {plan.depth}"
                )
            if (
                tree.token_ids
                and not 0 <= min(tree.token_ids) <= max(tree.token_ids) < self._vocab_size
            ):
                raise ValueError(
                    f"a token outside the vocabulary of {self._vocab_size}: {tree.token_ids}"
                )
        return trees

    def store_features(self, slots: Tensor, taps: Tensor | None, hidden: Tensor | None) -> None:
        """The target's hidden states of every row of a forward, for the drafter that reads them."""
        if self._reader is not None:
            self._guard(self._reader, lambda d: _reader(d).store_features(slots, taps, hidden))

    def move_features(self, source: Tensor, target: Tensor) -> None:
        if self._reader is not None:
            self._guard(self._reader, lambda d: _reader(d).move_features(source, target))

    def observe(self, record: StepRecord, gained: Sequence[Request]) -> None:
        """A step has been committed: ``gained`` are the requests that got tokens."""
        if not self.drafters:
            return
        going = [request for request in gained if not request.is_finished]
        self.tuner.observe(record)
        for name in list(self.drafters):
            trials = self._guard(name, lambda d: _checked_trials(d.observe(going)))
            if trials:
                self.tuner.observe_trials(name, trials)
        for request in gained:
            if request.is_finished:  # ``forget`` came before its last step was known
                self.tuner.forget(request.request_id)
        if self._alarm is not None and record.verified:
            versions = {name: drafter.version for name, drafter in self.drafters.items()}
            for event in self._alarm.observe(record.verified, versions):
                logger.warning("acceptance: %s", event.message)
                self.events.append(event)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        for name in list(self.drafters):
            self._guard(name, lambda d: d.forget(request))
        self.tuner.forget(request.request_id)

    def reset(self) -> None:
        """Every live request has been given up."""
        for name in list(self.drafters):
            self._guard(name, lambda d: d.reset())
        self.tuner.forget_all()

    def set_target_version(self, version: int) -> None:
        """The target's weights have changed: what was learnt of acceptance is about the old ones."""
        self.tuner.reset()
        if self._alarm is not None:
            self._alarm.set_target_version(version)

    @property
    def draft_version(self) -> int:
        """Of the weights of the model drafter; 0 where there is none."""
        return max((drafter.version for drafter in self.drafters.values()), default=0)

    def explain(self) -> dict[str, Any]:
        """The drafters, what the tuner chose and believes, what failed, and the alarms of acceptance so far."""
        stats = {
            name: self._guard(name, lambda d: {"version": d.version, **d.stats()})
            for name in list(self.drafters)
        }
        return {
            "drafters": {name: found for name, found in stats.items() if found is not None},
            "tuner": self.tuner.explain(),
            "failures": dict(self.failures),
            "num_acceptance_alarms": len(self.events),
            "acceptance_alarms": [event.message for event in self.events[-8:]],
        }

    def load(self, name: str, weights: Mapping[str, Any], version: int) -> None:
        """Replace a drafter's weights between two steps.

        Raises:
            ValueError: no such drafter, or the weights do not fit; nothing has changed then.
        """
        drafter = self.drafters.get(name)
        if drafter is None:
            known = ", ".join(self.drafters) or "none"
            raise ValueError(f"there is no drafter {name!r} to load weights into; running: {known}")
        drafter.load(weights, version)
        self.tuner.reset(name)

    def _guard(self, name: str, call: Callable[[Drafter], T]) -> T | None:
        """Call a drafter; if it raises, it is out, and the result is None."""
        drafter = self.drafters.get(name)
        if drafter is None:
            return None
        try:
            return call(drafter)
        except Exception as error:
            logger.exception("drafter %s failed and is switched off for this run", name)
            self.failures[name] = repr(error)
            del self.drafters[name]
            self.tuner.remove(name)
            self._choose_features()
            return None

    def _choose_features(self) -> None:
        readers = [d for d in self.drafters.values() if d.tap_layers or d.wants_hidden]
        assert len(readers) <= 1, [d.name for d in readers]
        self._reader = readers[0].name if readers else None
        self._tap_layers = readers[0].tap_layers if readers else ()
        self._wants_hidden = bool(readers) and readers[0].wants_hidden


def _checked_trials(trials: Sequence[Trial]) -> list[Trial]:
    for trial in trials:
        if not (isinstance(trial, Trial) and 0.0 < trial.score <= 1.0):
            raise ValueError(f"a trial must have a score in (0, 1], got {trial}")
    return list(trials)


def _pair(
    batch: Candidates, plans: Sequence[DraftPlan | None], found: Mapping[str, DraftTree]
) -> list[Draft]:
    return [
        Draft(request, plan, found.get(request.request_id, NO_TREE))
        for request, plan in zip(batch.requests, plans, strict=True)
    ]


def _reader(drafter: Any) -> Any:
    """A drafter as the ``FeatureReader`` that its attributes say it is."""
    return drafter


def _max_depth(request: Request) -> int:
    """Most draft tokens that a step can still commit for a request: the last token is the target's own."""
    allowed = request.params.speculation
    if allowed is False:
        return 0
    room = request.num_remaining_tokens - 1
    return room if allowed is True else min(room, allowed)


def _clip(plan: DraftPlan, request: Request, max_depth: int) -> DraftPlan:
    """The plan within the request's own limits."""
    allowed = request.params.speculation
    nodes = plan.num_nodes if allowed is True else min(plan.num_nodes, allowed)
    if plan.depth <= max_depth and nodes == plan.num_nodes:
        return plan
    return DraftPlan(plan.drafter, min(plan.depth, max_depth), nodes, plan.width, plan.min_score)
