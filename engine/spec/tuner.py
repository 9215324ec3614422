"""How much to speculate: what a tuner promises, and the two that do not think.

Owns the interface, ``fixed`` and ``off``; the tuners that learn are ``tuner_cost`` and ``tuner_beg``. Knows nothing
of tensors or models. A tuner decides from what it was told alone (counts and seconds), in the order it was told,
and draws no randomness but its own seeded one: fed the same records, every rank decides the same.

    plan(batch) -> a plan or None for each request       trim(batch, drafts) -> trees to verify
    reconsider(batch, drafts) -> plans of a second drafter
    observe(record)     observe_trials(drafter, trials)     forget(request_id)     reset(drafter)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.request import Request
from engine.spec.base import DraftPlan, Trial
from engine.spec.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Candidates:
    """The requests of one step that may speculate, and what else the step will run.

    Attributes:
        requests: decoding requests that allow it.
        max_depths: of each, most tokens that can still be accepted (its limit of tokens, its own cap).
        num_decoding: all decoding requests, those included that do not speculate.
        has_prefill: prefill rows will share the forward.
        num_context: tokens in the contexts of all decoding requests.
        num_spare_rows: nodes that the step can have in all.
    """

    requests: Sequence[Request]
    max_depths: Sequence[int]
    num_decoding: int
    has_prefill: bool = False
    num_context: int = 0
    num_spare_rows: int = 1 << 30


@dataclass(frozen=True, slots=True)
class Draft:
    """What came of a plan. Without a plan, or with nothing to say, the tree is empty."""

    request: Request
    plan: DraftPlan | None
    tree: DraftTree


@dataclass(frozen=True, slots=True)
class Verified:
    """A tree after its verification: nodes 0 .. len(tree) - 1 were run, ``accepted`` is the walk."""

    request_id: str
    plan: DraftPlan
    tree: DraftTree
    accepted: Sequence[int]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What a step was, and what it took.

    Attributes:
        num_rows: of the target's forward: decode, prefill, tree nodes.
        num_decoding: decoding requests in it; 0 is a pure prefill.
        num_nodes: tree nodes in it.
        num_context: tokens in the contexts of the decoding requests.
        num_tokens: that decoding requests gained.
        draft_s: seconds of each drafter that was asked, by name.
        target_s: seconds of everything else.
        drafted: each drafter's requests and depth, by name.
        verified: the trees.
    """

    num_rows: int
    num_decoding: int
    num_nodes: int = 0
    num_context: int = 0
    num_tokens: int = 0
    draft_s: Mapping[str, float] = field(default_factory=dict)
    target_s: float = 0.0
    drafted: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    verified: Sequence[Verified] = ()

    @property
    def num_attended(self) -> int:
        """Tokens that the decoding rows and the nodes read, each row its own context."""
        if not self.num_decoding:
            return 0
        return self.num_context * (self.num_decoding + self.num_nodes) // self.num_decoding


class Tuner(Protocol):
    """Decides what is drafted and verified. Called from the engine's thread, under 50 microseconds a step."""

    name: str

    def plan(self, batch: Candidates) -> list[DraftPlan | None]:
        """For each of ``batch.requests`` a plan, or None: off is always a choice."""
        ...

    def reconsider(self, batch: Candidates, drafts: Sequence[Draft]) -> list[DraftPlan | None]:
        """With several drafters: plans of another one, for requests that the first left with little."""
        ...

    def trim(self, batch: Candidates, drafts: Sequence[Draft]) -> list[DraftTree]:
        """The part of each tree that is worth its price, now that it is known what was found."""
        ...

    def observe(self, record: StepRecord) -> None:
        """A step has been committed."""
        ...

    def observe_trials(self, drafter: str, trials: Sequence[Trial]) -> None:
        """Guesses of a drafter that was scored for free."""
        ...

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        ...

    def forget_all(self) -> None:
        """Every live request has been given up."""
        ...

    def reset(self, drafter: str | None = None) -> None:
        """Weights have changed: of a drafter, or (None) of the target, which concerns all of them."""
        ...

    def remove(self, drafter: str) -> None:
        """The drafter is gone; no plan may name it again."""
        ...

    def explain(self) -> dict[str, Any]:
        """What it chose last and what it believes, as plain values."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All that was learnt, as plain values that JSON holds."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken.

        Raises:
            ValueError: it is of another tuner, or malformed; nothing has changed then.
        """
        ...


class FixedTuner:
    """The same plan for every request at every step, as vLLM and SGLang run. For comparison."""

    name = "fixed"

    def __init__(self, plan: DraftPlan) -> None:
        self._plan: DraftPlan | None = plan

    def plan(self, batch: Candidates) -> list[DraftPlan | None]:
        return [self._plan] * len(batch.requests)

    def reconsider(self, batch: Candidates, drafts: Sequence[Draft]) -> list[DraftPlan | None]:
        return [None] * len(drafts)

    def trim(self, batch: Candidates, drafts: Sequence[Draft]) -> list[DraftTree]:
        return [draft.tree for draft in drafts]

    def observe(self, record: StepRecord) -> None:
        pass

    def observe_trials(self, drafter: str, trials: Sequence[Trial]) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass

    def forget_all(self) -> None:
        pass

    def reset(self, drafter: str | None = None) -> None:
        pass

    def remove(self, drafter: str) -> None:
        if self._plan is not None and self._plan.drafter == drafter:
            self._plan = None

    def explain(self) -> dict[str, Any]:
        return {"tuner": self.name, "plan": self._plan}

    def state_dict(self) -> dict[str, Any]:
        return {"tuner": self.name}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state(state, self.name)


class OffTuner(FixedTuner):
    """Never drafts; drafters stay loaded and keep up."""

    name = "off"

    def __init__(self) -> None:
        self._plan = None


def check_state(state: Mapping[str, Any], name: str) -> None:
    """Raise ValueError unless a saved state is that of the tuner ``name``."""
    found = state.get("tuner") if isinstance(state, Mapping) else type(state)
    if found != name:
        raise ValueError(
            f"tuner state: expected one of the {name!r} tuner, got {found!r}; save and load with the same tuner"
        )
