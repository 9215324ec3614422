"""The ``cost`` tuner: as many nodes as pay their price, for each request, at every step; none is always a choice.

It maximises expected tokens per second of the step: (requests + expected accepted nodes) / (price of the target's
pass + price of drafting). The length of a chain is not a bandit problem, since verifying K tokens shows the outcome of
every shorter chain: acceptance is estimated by survival (``survival.py``), prices by measurement (``price.py``), and
the best number of nodes follows. Nodes of all requests compete: likelier ones first, whoever's they are.

Owns the decision and its explorations: now and then a plain step, so that the price of not speculating stays known,
and, where speculation is off, a short chain for one request, so that a drafter can prove itself anew. Both are counted
against a small share of the time.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from engine.request import Request
from engine.spec.arm import Arm
from engine.spec.base import DraftPlan, Trial
from engine.spec.price import NEWS, TargetPrice
from engine.spec.saved import PLAIN_EVERY, TURNS, read_turns
from engine.spec.tree import NO_TREE, DraftTree
from engine.spec.tuner import Candidates, Draft, StepRecord, check_state
from engine.spec.worth import MIN_GAIN, Choice, Worth, choices, likeliest

_PROBE_SHARE = 0.004  # of the time, for chains of a drafter that is believed not to pay
_PROBE_DEPTH = 2
_MOST_PROBES = 3  # in a row, however long none was needed
_PLAN_STEPS = 8  # that a plan stands, at most
_EXPECT_EVERY = 4  # steps, of what proposals with scores promise by depth
_FREE_PROBES = 12  # after a change of weights: enough for the alarm to hear of a dead drafter
_YOUNG = 4.0  # times that a price of drafting that is hardly known may be too high
_LEARN_STEPS = 8  # that wait to be learnt from, at most
_FEW_TRIALS = 100  # under which every step may change the plan
_DEPTH_PATIENCE = 3  # depths to look beyond the best one
_FREE = 1e-3  # of a pass of one row, for a depth: not worth limiting the depth for
_CHEAP = 0.01  # of a pass, for a whole proposal
_BETTER = 1.1  # times the tokens of the proposal at hand: when to ask another drafter as well


class CostTuner:
    """See the module.

    Args:
        drafters: names, in order of preference.
        max_depth, max_nodes: limits of one request's tree.
        width: most children of a node.
        measured: rows -> seconds of a target pass, measured beforehand.
        context_s: seconds that a row takes for each token that it attends, measured beforehand.
    """

    name = "cost"

    def __init__(
        self,
        drafters: Sequence[str],
        *,
        max_depth: int,
        max_nodes: int,
        width: int = 1,
        measured: Mapping[int, float] | None = None,
        context_s: float = 0.0,
    ) -> None:
        self.prices = TargetPrice(measured, context_s=context_s)
        self._arms = {name: Arm(name) for name in drafters}
        self._max_depth, self._max_nodes, self._width = max_depth, max_nodes, width
        self._steps_since_plain = 0
        self._plain_every = 2 * PLAIN_EVERY[0]
        self._probe_credit_s = 0.0
        self._probe_turn = self._num_free_probes = 0
        self._probed = False
        self._num_steps = 0
        self._pending: list[StepRecord] = []  # not yet learnt from
        self._last = StepRecord(0, 0)
        # The last plan stands for some steps while the requests are the same: what is believed changes slowly
        self._planned: tuple[Sequence[Request], int] = ((), 0)  # and how many decode
        self._plans: list[DraftPlan | None] = []
        self._plan_age = 0
        self._is_second_unwanted = False
        self._seconds: tuple[list[int], list[DraftPlan | None]] = [], []  # beside trees of sizes

    # ---- decisions

    def plan(self, batch: Candidates) -> list[DraftPlan | None]:
        if batch.has_prefill:
            return self._plan(batch)
        if self._arms and self._steps_since_plain >= self._plain_every:
            return [None] * len(batch.requests)
        self._plan_age += 1
        planned = batch.requests, batch.num_decoding
        if self._plan_age <= min(2 + batch.num_decoding, _PLAN_STEPS) and planned == self._planned:
            return self._plans
        plans = self._plan(batch)
        if not any(plans):
            plans = self._probe(batch)
        self._planned, self._plans, self._plan_age = planned, plans, 0
        self._is_second_unwanted = False
        if any(plan is not None and self._is_young(plan.drafter) for plan in plans):
            self._plan_age = _PLAN_STEPS  # for one step
        return plans

    def _is_young(self, drafter: str) -> bool:
        """Whether a step teaches so much of a drafter that a plan should not stand longer; true of every probe."""
        return self._probed or self._arms[drafter].survival.num_trials < _FEW_TRIALS

    def _plan(self, batch: Candidates) -> list[DraftPlan | None]:
        nothing: list[DraftPlan | None] = [None] * len(batch.requests)
        self._probed = False
        self._seconds = [], []
        self._learn()
        self.prices.settle()
        worth = Worth(self.prices, batch)
        limit = min(worth.most_nodes(self._max_nodes), batch.num_spare_rows)
        if limit == 0 or not self._arms:
            return nothing
        for arm in self._arms.values():
            if arm.has_scores and self._is_cheap(arm, batch):
                return self._ask(arm, batch, worth, limit)
        best, best_gain = nothing, MIN_GAIN
        for arm in self._arms.values():
            chains = self._chains(arm, batch, limit)
            lengths, gain = self._lengths(arm, worth, chains, [True] * len(chains), limit)
            if gain > best_gain:
                best, best_gain = [self._chain_plan(arm, length) for length in lengths], gain
        return best

    def _chains(self, arm: Arm, batch: Candidates, limit: int) -> list[list[float]]:
        """Of each request, P(its first j draft tokens are accepted)."""
        longest = min(self._max_depth, limit)
        return [
            arm.survival.chain(request.request_id, min(depth, longest))
            for request, depth in zip(batch.requests, batch.max_depths, strict=True)
        ]

    def _lengths(
        self,
        arm: Arm,
        worth: Worth,
        chains: Sequence[Sequence[float]],
        is_new: Sequence[bool],
        limit: int,
    ) -> tuple[list[int], float]:
        """The best length of each chain where ``arm`` drafts those that are new and the others lie there already.

        Drafting is paid by depth, so where it has a price every depth is tried as a limit.
        """
        order = likeliest(chains, limit)
        per_depth = arm.price.seconds(sum(is_new), 1) / self.prices.unit_s
        depths = (self._max_depth,) if per_depth < _FREE else range(1, self._max_depth + 1)
        taken, best, best_depth = order, Choice(0, 1.0), 0
        for depth in depths:
            within = [node for node in order if node.place < depth or not is_new[node.request]]
            choice = worth.choose([node.survival for node in within], per_depth * depth)
            if choice.gain > best.gain:
                taken, best, best_depth = within, choice, depth
            elif depth - best_depth > _DEPTH_PATIENCE:
                break
        lengths = [0] * len(chains)
        for node in taken[: best.count]:
            lengths[node.request] += 1
        return lengths, best.gain

    def _chain_plan(self, arm: Arm, length: int) -> DraftPlan | None:
        if length == 0:
            return None
        return DraftPlan(arm.name, length, min(length * self._width, self._max_nodes), self._width)

    def _is_cheap(self, arm: Arm, batch: Candidates) -> bool:
        """Whether to ask first and decide afterwards: drafting costs next to nothing beside a pass."""
        pass_s = self.prices.seconds(batch.num_decoding, batch.num_context)
        return arm.price.seconds(len(batch.requests), self._max_depth) < _CHEAP * pass_s

    def _ask(self, arm: Arm, batch: Candidates, worth: Worth, limit: int) -> list[DraftPlan | None]:
        """Let every request have a proposal as large as could pay; ``trim`` decides by its scores."""
        floor = 0.25 * worth.least_survival()
        most = min(self._max_nodes, limit, 4 + 2 * limit // len(batch.requests))
        plans: list[DraftPlan | None] = []
        for max_depth in batch.max_depths:
            depth = min(max_depth, self._max_depth)
            nodes = min(most, depth * self._width)
            plans.append(DraftPlan(arm.name, depth, nodes, self._width, floor))
        return plans

    def _probe(self, batch: Candidates) -> list[DraftPlan | None]:
        """Nothing pays, as far as is known: once in a while try a drafter on one request all the same."""
        plans: list[DraftPlan | None] = [None] * len(batch.requests)
        blind = [arm for arm in self._arms.values() if not arm.has_trials]
        if not blind:
            return plans
        num = batch.num_decoding
        attended = batch.num_context * (num + _PROBE_DEPTH) // num
        pass_s = self.prices.seconds(num, batch.num_context)
        price_s = self.prices.seconds(num + _PROBE_DEPTH, attended) - pass_s
        arm = blind[self._probe_turn % len(blind)]
        draft_s = arm.price.seconds(1, _PROBE_DEPTH)
        if arm.price.is_young:  # its first samples may have been cold: not to be shut out by them
            draft_s = min(draft_s / _YOUNG, pass_s)
        price_s += draft_s
        self._probe_credit_s = min(self._probe_credit_s, _MOST_PROBES * price_s)
        if self._num_free_probes:
            self._num_free_probes -= 1
        elif self._probe_credit_s < price_s:
            return plans
        at = self._probe_turn // len(blind) % len(plans)
        self._probe_turn += 1
        self._probed = True
        self._probe_credit_s -= price_s
        depth = min(_PROBE_DEPTH, batch.max_depths[at], self._max_depth)
        plans[at] = DraftPlan(arm.name, depth, min(depth, self._max_nodes))
        return plans

    def reconsider(self, batch: Candidates, drafts: Sequence[Draft]) -> list[DraftPlan | None]:
        plans: list[DraftPlan | None] = [None] * len(batch.requests)
        asked = {draft.plan.drafter for draft in drafts if draft.plan is not None}
        others = [arm for arm in self._arms.values() if arm.name not in asked]
        if not asked or not others or self._is_second_unwanted:
            return plans
        sizes = [-1 if draft.tree.scores else len(draft.tree) for draft in drafts]
        if sizes == self._seconds[0] and -1 not in sizes:
            return self._seconds[1]  # nothing is known that was not known to the standing plan
        self._seconds = sizes, plans
        worth = Worth(self.prices, batch)
        limit = worth.most_nodes(self._max_nodes)
        have = [self._alive(draft) for draft in drafts]
        gain = worth.choose([node.survival for node in likeliest(have, limit)]).gain
        for arm in others:
            chains = self._chains(arm, batch, limit)
            is_new = [
                sum(c) > _BETTER * sum(h[: len(c)]) for c, h in zip(chains, have, strict=True)
            ]
            if not any(is_new):
                continue
            mixed = [c if new else h for c, h, new in zip(chains, have, is_new, strict=True)]
            lengths, mixed_gain = self._lengths(arm, worth, mixed, is_new, limit)
            if mixed_gain < MIN_GAIN * gain:  # over what lies there already
                continue
            gain, have = mixed_gain, mixed
            for number, length in enumerate(lengths):
                if length and is_new[number]:
                    plans[number] = self._chain_plan(arm, length)
        self._is_second_unwanted = not any(plans)  # for as long as the first plan stands
        return plans

    def _alive(self, draft: Draft) -> list[float]:
        """P(a walk reaches it) of each node of a proposal, likeliest first."""
        if draft.plan is None or draft.plan.drafter not in self._arms:
            return []
        survival = self._arms[draft.plan.drafter].survival
        return sorted(survival.nodes(draft.request.request_id, draft.tree), reverse=True)

    def trim(self, batch: Candidates, drafts: Sequence[Draft]) -> list[DraftTree]:
        trees = [draft.tree for draft in drafts]
        if not any(tree.scores for tree in trees):
            return trees  # nothing is known now that was not known to ``plan``
        worth = Worth(self.prices, batch)
        least = 0.5 * worth.least_survival()
        learns = self._num_steps % _EXPECT_EVERY == 0
        nodes: list[tuple[float, int, int]] = []
        for number, draft in enumerate(drafts):
            arm = None if draft.plan is None else self._arms.get(draft.plan.drafter)
            if arm is None or not len(draft.tree):
                continue
            if draft.tree.scores:
                arm.has_scores = True
                if learns:
                    arm.survival.expect(draft.tree)
                if arm.survival.first(draft.request.request_id, draft.tree) <= least:
                    continue
            alive = arm.survival.nodes(draft.request.request_id, draft.tree)
            nodes += [(-s, number, node) for node, s in enumerate(alive) if s > least]
        if not nodes:
            return [NO_TREE] * len(trees)
        nodes.sort()
        choice = worth.choose([-s for s, _, _ in nodes])
        kept: dict[int, list[int]] = {}
        for _, number, node in nodes[: choice.count if choice.gain >= MIN_GAIN else 0]:
            kept.setdefault(number, []).append(node)
        return [
            tree.take(kept[number]) if number in kept else NO_TREE
            for number, tree in enumerate(trees)
        ]

    # ---- what happened

    def observe(self, record: StepRecord) -> None:
        self._num_steps += 1
        self._steps_since_plain = 0 if record.num_nodes == 0 else self._steps_since_plain + 1
        self._probe_credit_s += _PROBE_SHARE * record.target_s
        self._pending.append(record)
        if len(self._pending) >= _LEARN_STEPS:
            self._learn()

    def _learn(self) -> None:
        """Take in the steps since the last time: several at once, since between two passes caches forget this code."""
        pending, self._pending = self._pending, []
        for record in pending:
            self._learn_from(record)

    def _learn_from(self, record: StepRecord) -> None:
        is_mixed = record.num_rows != record.num_decoding + record.num_nodes
        if record.num_rows:
            self.prices.observe(
                record.num_rows, record.num_attended, record.target_s, is_mixed=is_mixed
            )
            if record.num_nodes == 0 and not is_mixed and self._last.num_nodes:
                self._compare(record)
        self._last = record
        for name, seconds in record.draft_s.items():
            arm = self._arms.get(name)
            if arm is not None:
                arm.price.observe(*record.drafted[name], seconds)
        for entry in record.verified:
            arm = self._arms.get(entry.plan.drafter)
            if arm is not None:
                arm.survival.observe(entry.request_id, entry.tree, entry.accepted)

    def _compare(self, record: StepRecord) -> None:
        """A plain step among others: as long as it brings news of prices, the next one comes soon."""
        news = self.prices.compare(record.num_rows, record.num_attended, record.target_s)
        first, last = PLAIN_EVERY
        self._plain_every = first if abs(news) > NEWS else min(2 * self._plain_every, last)

    def observe_trials(self, drafter: str, trials: Sequence[Trial]) -> None:
        arm = self._arms.get(drafter)
        if arm is None:
            return
        arm.has_trials = arm.has_scores = True
        for request_id, score, accepted in trials:
            arm.survival.observe_trial(request_id, score, accepted)

    def forget(self, request_id: str) -> None:
        self._learn()  # of its last steps, before it is gone
        for arm in self._arms.values():
            arm.survival.forget(request_id)

    def forget_all(self) -> None:
        self._learn()
        for arm in self._arms.values():
            arm.survival.forget_all()

    def reset(self, drafter: str | None = None) -> None:
        self._learn()
        self._planned, self._num_free_probes = ((), 0), _FREE_PROBES
        for arm in self._arms.values():
            if drafter in (None, arm.name):
                arm.survival.reset()

    def remove(self, drafter: str) -> None:
        self._arms.pop(drafter, None)
        self._planned, self._seconds = ((), 0), ([], [])

    # ---- look, save, restore

    def explain(self) -> dict[str, Any]:
        """Last choice; price of rows over one row; what each drafter is believed to be worth; what follows."""
        self._learn()
        rows = (1, 2, 4, 8, 16, 32, 64)
        return {
            "tuner": self.name,
            "num_steps": self._num_steps,
            "last": {
                "num_decoding": self._last.num_decoding,
                "num_nodes": self._last.num_nodes,
                "drafters": sorted({entry.plan.drafter for entry in self._last.verified}),
            },
            "pass_ms": round(1e3 * self.prices.unit_s, 3),
            "relative_price": {n: round(self.prices.relative(n), 3) for n in rows},
            "drafters": {arm.name: arm.explain() for arm in self._arms.values()},
            "choice": {
                arm.name: choices(self.prices, arm.survival.chain("", self._max_depth))
                for arm in self._arms.values()
            },
        }

    def state_dict(self) -> dict[str, Any]:
        self._learn()
        return {
            "tuner": self.name,
            "prices": self.prices.state_dict(),
            "turns": {name: getattr(self, f"_{name}") for name in TURNS},
            "drafters": {arm.name: arm.state_dict() for arm in self._arms.values()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state(state, self.name)
        prices, arms = copy.deepcopy(self.prices), dict(self._arms)
        try:
            turns = read_turns(state["turns"])
            prices.load_state_dict(state["prices"])
            for name, saved in state["drafters"].items():
                if name in arms:
                    arms[name] = Arm.from_state(name, saved)
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise ValueError(f"tuner state: it is malformed: {error!r}") from error
        self.prices, self._arms, self._planned = prices, arms, ((), 0)
        self._pending = []
        for name, value in turns.items():
            setattr(self, f"_{name}", value)
