"""What a step reads and what comes of it: which rows draw tokens, what was drafted behind them, what the walk accepts.

Owns the order of the rows whose logits are read. Knows nothing of models or text. Invariant: the rows of a request
are contiguous, its newest token first and then the nodes of its tree; logits are read in the order of the verdicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.request import Request
from engine.sampler import RowError, Sampled, SampleRow
from engine.scheduler import ScheduledRows, ScheduledStep
from engine.spec.base import DraftPlan
from engine.spec.tree import NO_TREE, DraftTree
from engine.spec.verify import walk
from engine.speculation import Drafts


@dataclass(slots=True)
class Verdict:
    """A request that gets tokens in this step: what was drafted, and what the walk accepted of it.

    ``drawn`` are its new tokens, the accepted ones and the bonus token; shorter by that where ``error`` says why no
    further token can be drawn.
    """

    rows: ScheduledRows
    draft_plan: DraftPlan | None
    tree: DraftTree
    accepted: list[int] = field(default_factory=list)
    drawn: list[Sampled] = field(default_factory=list)
    error: RowError | None = None


class Move(NamedTuple):
    """Tree node ``node`` of some rows was accepted as their token ``place``, both counted from behind ``rows.end``."""

    rows: ScheduledRows
    node: int
    place: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Which rows of a step have their logits read: first those that draw a token, then prompt positions."""

    verdicts: list[Verdict]  # to be filled, in order of the rows
    trees: list[DraftTree]  # of the decoding requests, the first rows
    sample_rows: list[SampleRow]  # of each verdict its root, then its nodes
    logit_rows: list[int]
    prompt_parts: list[tuple[Request, int, int]]  # request, first position, number of rows


def plan_step(step: ScheduledStep, drafts: Drafts) -> StepPlan:
    """Which rows have their logits read, given what was scheduled of what was drafted."""
    verdicts: list[Verdict] = []
    trees: list[DraftTree] = []
    sample_rows: list[SampleRow] = []
    sampled_at: list[int] = []
    prompt_at: list[int] = []
    parts: list[tuple[Request, int, int]] = []
    row = 0
    for rows in step.rows:
        request = rows.request
        if request.params.prompt_logprobs is not None and rows.start < request.prompt_len - 1:
            count = min(rows.end, request.prompt_len - 1) - rows.start
            prompt_at += range(row, row + count)
            parts.append((request, rows.start, count))
        row += rows.num_tokens
        if not rows.samples:
            continue
        draft_plan, tree = drafts.trees.get(request.request_id, (None, NO_TREE))
        tree = tree.first(rows.num_tree_nodes)
        verdicts.append(Verdict(rows, draft_plan, tree))
        if len(trees) < step.num_decoding:
            trees.append(tree)
        sampled_at += range(row - 1, row + len(tree))
        sample_rows.append(SampleRow(request, rows.end))
        sample_rows += [SampleRow(request, rows.end, tree.path(i)) for i in range(len(tree))]
        row += len(tree)
    return StepPlan(verdicts, trees, sample_rows, sampled_at + prompt_at, parts)


def settle(plan: StepPlan, drawn: Sequence[Sampled | RowError]) -> list[Move]:
    """Walk every tree along what was drawn at its nodes, in the order of ``plan.sample_rows``.

    Fills in the verdicts; returns the accepted nodes whose keys do not lie where their positions are.
    """
    moves: list[Move] = []
    at = 0
    for verdict in plan.verdicts:
        tree = verdict.tree
        results = drawn[at : at + 1 + len(tree)]
        at += len(results)
        if len(tree):
            ids = [None if isinstance(r, RowError) else r.token_id for r in results]
            verdict.accepted = walk(tree, ids)
            results = [results[0], *(results[1 + node] for node in verdict.accepted)]
            places = enumerate(verdict.accepted)
            moves += [Move(verdict.rows, node, place) for place, node in places if node != place]
        for result in results:
            if isinstance(result, RowError):
                verdict.error = result
            else:
                verdict.drawn.append(result)
    return moves
