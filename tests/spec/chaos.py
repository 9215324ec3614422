"""Drafters and tuners that no one would use: they propose and switch at random, to find what equality forgot.

Owns a drafter that hides the true continuation somewhere in a random tree, and a tuner that changes its mind at every
step for every request. Both are seeded.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from engine.request import Request
from engine.spec.base import DraftJob, DraftPlan, Trial
from engine.spec.tree import ROOT, DraftTree
from engine.spec.tuner import Candidates, Draft, FixedTuner, StepRecord


class RandomTrees:
    """Trees of random shape. Along one path from the root the tokens are those that will come, until one is spoilt.

    Args:
        outputs: (prompt, seed) -> what the request generates.
        truth: probability that the path goes on truly at each level.
    """

    version = 0
    tap_layers: tuple[int, ...] = ()
    wants_hidden = False

    def __init__(
        self,
        outputs: Mapping[tuple[tuple[int, ...], int], Sequence[int]],
        truth: float,
        vocab_size: int,
        seed: int,
    ) -> None:
        self.name = "chaos"
        self._outputs = outputs
        self._truth = truth
        self._vocab_size = vocab_size
        self._rng = random.Random(seed)
        self.num_proposed = 0

    def propose(self, jobs: Sequence[DraftJob]) -> list[DraftTree]:
        return [self._tree(job) for job in jobs]

    def _tree(self, job: DraftJob) -> DraftTree:
        request, plan, rng = job.request, job.plan, self._rng
        coming = list(self._outputs[request.prompt_token_ids, request.seed])[
            request.num_output_tokens :
        ]
        tokens: list[int] = []
        parents: list[int] = []
        depths: dict[int, int] = {ROOT: 0}
        taken: set[tuple[int, int]] = set()
        true_node, on_path = ROOT, True
        for _ in range(rng.randint(0, plan.num_nodes)):
            depth = depths[true_node]
            if on_path and rng.random() < 0.5 and depth < min(plan.depth, len(coming)):
                on_path = rng.random() < self._truth
                parent, token = (
                    true_node,
                    coming[depth] if on_path else rng.randrange(self._vocab_size),
                )
                if (parent, token) in taken:
                    continue
                true_node = len(tokens) if on_path else true_node
            else:
                parent = rng.choice([n for n in depths if depths[n] < plan.depth])
                token = rng.randrange(self._vocab_size)
            if (parent, token) in taken:
                continue
            taken.add((parent, token))
            depths[len(tokens)] = depths[parent] + 1
            tokens.append(token)
            parents.append(parent)
        self.num_proposed += len(tokens)
        return DraftTree(tuple(tokens), tuple(parents))

    def observe(self, requests: Sequence[Request]) -> Sequence[Trial]:
        return ()

    def forget(self, request: Request) -> None:
        pass

    def reset(self) -> None:
        pass

    def load(self, weights: Mapping[str, Any], version: int) -> None:
        raise ValueError("no weights")

    def stats(self) -> dict[str, float]:
        return {}


class ChaosTuner(FixedTuner):
    """On, off, longer, shorter, another drafter: at any step, per request."""

    name = "chaos"

    def __init__(self, drafters: Sequence[str], max_depth: int, max_nodes: int, seed: int) -> None:
        self._drafters = list(drafters)
        self._max_depth, self._max_nodes = max_depth, max_nodes
        self._rng = random.Random(seed)
        self.records: list[StepRecord] = []

    def plan(self, batch: Candidates) -> list[DraftPlan | None]:
        rng = self._rng
        if rng.random() < 0.2:
            return [None] * len(batch.requests)
        return [
            None
            if rng.random() < 0.3
            else DraftPlan(
                rng.choice(self._drafters),
                rng.randint(1, self._max_depth),
                rng.randint(1, self._max_nodes),
                rng.randint(1, 4),
            )
            for _ in batch.requests
        ]

    def trim(self, batch: Candidates, drafts: Sequence[Draft]) -> list[DraftTree]:
        return [d.tree.first(self._rng.randint(0, len(d.tree))) for d in drafts]

    def observe(self, record: StepRecord) -> None:
        self.records.append(record)

    def remove(self, drafter: str) -> None:
        self._drafters = [name for name in self._drafters if name != drafter]
