"""What drafters promise, and the records that pass between them, the tuner and the engine.

Owns the interface. Knows nothing of tensors, models or prices. A drafter can make things slower, never wrong:
whatever it proposes, the target's own sampler decides. A drafter that raises is switched off for the run.

    propose(jobs) -> one tree a job       observe(requests) -> trials
    forget(request)                       reset()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from engine.request import Request
from engine.spec.tree import DraftTree


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """What the tuner asks of a drafter for one request in one step.

    Attributes:
        drafter: its name.
        depth: most tokens from the root to a leaf.
        num_nodes: most nodes.
        width: most children of one node; 1 asks for a chain.
        min_score: nodes whose joint score (product of ``DraftTree.scores`` from the root) is below it are not worth
            their price; a drafter with scores leaves them out.
    """

    drafter: str
    depth: int
    num_nodes: int
    width: int = 1
    min_score: float = 0.0


@dataclass(frozen=True, slots=True)
class DraftJob:
    """A request that is decoding, and what to draft behind ``request.token_ids``."""

    request: Request
    plan: DraftPlan


class Trial(NamedTuple):
    """A guess that cost nothing: the token that came was, or was not, the drafter's best guess for its place."""

    request_id: str
    score: float  # as in ``DraftTree.scores``
    accepted: bool


class Drafter(Protocol):
    """Guesses the tokens that follow. Called from the engine's thread only.

    Attributes:
        name: "suffix", "eagle", ...; stands in configs and metrics.
        version: of its weights; 0 for those it was made with, and for a drafter without weights.
        tap_layers: layers of the target whose input it reads (``ForwardOutput.taps``), () for none.
        wants_hidden: reads the target's final normed hidden states.
    """

    name: str
    version: int
    tap_layers: tuple[int, ...]
    wants_hidden: bool

    def propose(self, jobs: Sequence[DraftJob]) -> list[DraftTree]:
        """A tree for each job, in order, within its plan; best nodes first, so that any first k nodes are the
        best tree of k. An empty tree says that nothing worth trying is known.

        A model drafter draws proposals for the token at index t of a request (t = len(token_ids) for the first)
        with the sampler's own noise of ``(request.seed, t)`` and the request's temperature.
        """
        ...

    def observe(self, requests: Sequence[Request]) -> Sequence[Trial]:
        """After every step, drafted or not: these requests gained tokens (``request.token_ids``).

        Where scoring is free, what its best guess for each of those tokens had been, and whether it was right:
        so the tuner knows the worth of a drafter that it did not use. Else nothing.
        """
        ...

    def forget(self, request: Request) -> None:
        """The request has ended, by whatever way; called once, with its final tokens. Unknown ones are ignored."""
        ...

    def reset(self) -> None:
        """Every live request has been given up, without ``forget``. What was learnt from ended ones may stay."""
        ...

    def load(self, weights: Mapping[str, Any], version: int) -> None:
        """Replace the weights between two steps, whole or not at all.

        Raises:
            ValueError: the drafter has no weights, or they do not fit; those in use stay.
        """
        ...

    def stats(self) -> dict[str, float]:
        """Sizes and counts of its own, for reports."""
        ...


class FeatureReader(Protocol):
    """The part of a drafter that reads the target's hidden states (``tap_layers`` or ``wants_hidden``).

    The arguments are torch tensors, typed ``Any`` because this layer imports no torch. Features lie by KV slot,
    so prefix-cached pages keep those of their tokens, and accepted tree nodes move with their keys.
    """

    def store_features(self, slots: Any, taps: Any, hidden: Any) -> None:
        """Every row of a target forward: slots [R] int32, taps [R, len(tap_layers), H] fp32 or None, hidden
        [R, H] fp32 or None. Valid during the call only."""
        ...

    def move_features(self, source: Any, target: Any) -> None:
        """Slots [n] int32: what lay at ``source[i]`` lies at ``target[i]`` now; all are read before any is written."""
        ...
