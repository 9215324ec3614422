"""The EAGLE drafter: trees from a head on the target's own hidden states, coupled with the sampler's noise.

Owns the order of a proposal. The network is ``models/eagle.py``, the memories ``eagle_cache.py``, the shape of trees
``eagle_tree.py``. Knows nothing of prices or of verification.

A proposal for requests with tokens 0 .. n - 1 (the target has run all but the newest, so features 0 .. n - 2 exist):

    catch up     keys of the positions that have none yet, at most the last ``window``: rows (feature p, token p + 1)
    first level  row n - 2 reads its window; its logits are about the token at index n
    each level   the best nodes of the level before, all requests in one pass, the head's own hidden state as feature

Catching up costs the same whatever made the positions wait: a long prompt, cached pages, a preemption, a long while
without speculation, new weights. Only keys and values are computed for all but the last row: with one layer they
depend on the row alone. Attention is over a sliding window of the last ``window`` positions, at true rotary positions.

Tokens are proposed by ``coupled_top_k`` with the noise that the sampler will draw with, so the head guesses the sample
and not the mode (or the mode, where ``draft_sampling`` asks for it). Invariant: what is read was written for this request, under these weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.batch import PAGE
from engine.config import ResolvedConfig
from engine.models.eagle import EagleNetwork
from engine.models.eagle_checkpoint import open_drafter
from engine.models.workspace import empty_in_huge_pages
from engine.request import Request
from engine.runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.spec.base import DraftJob, DraftPlan, Trial
from engine.spec.config import MAX_DEPTH, SpeculativeConfig
from engine.spec.eagle_batch import EagleBatches
from engine.spec.eagle_cache import SCRATCH_PAGES, FeatureStore, Seat, Seats
from engine.spec.eagle_draws import MOST_RANKED, DrawParams, Draws
from engine.spec.eagle_tree import TreeGrowth
from engine.spec.tree import NO_TREE, ROOT, DraftTree

_LEAST_RANKED = 8  # tokens among which a coupled proposal's score is a share


@dataclass(slots=True)
class _Growing:
    """One request in the middle of a proposal."""

    job: DraftJob
    seat: Seat
    growth: TreeGrowth
    length: int  # of its tokens
    first: int  # position where its page table begins
    num_scratch: int = 0
    # expanded node -> slots of its expanded ancestors and itself
    tails: dict[int, tuple[int, ...]] = field(default_factory=dict)
    made_by: dict[int, int] = field(default_factory=dict)  # node -> row of the last pass


class EagleDrafter:
    """A ``Drafter`` and ``FeatureReader`` (``spec/base.py``) around a head.

    Args:
        network: the head.
        num_pages: of the target's KV cache.
        max_seqs: most requests of one proposal, and so most seats.
        window: positions that a row of the head reads, itself included; tokens.
        mode: propose the likeliest tokens at every temperature, not those that the sampler's noise favours.
        poison: memories start as NaN. For tests.
    """

    name = "eagle"

    def __init__(
        self,
        network: EagleNetwork,
        *,
        num_pages: int,
        max_seqs: int,
        window: int = 512,
        mode: bool = False,
        poison: bool = False,
    ) -> None:
        if window < 1:
            raise ValueError(f"window must be at least one position, got {window}")
        if max_seqs < 1 or network.max_rows < max_seqs:
            raise ValueError(
                f"max_seqs must be from 1 to the network's max_rows of {network.max_rows}, got {max_seqs}"
            )
        config = network.config
        self.network = network
        self.version = 0
        self.tap_layers = config.tap_layers
        self.wants_hidden = config.kind == "eagle"
        self._window = window
        self._mode = mode
        self._max_seqs = max_seqs
        self._features = FeatureStore(
            num_pages * PAGE,
            config.feature_width,
            network.kv_dtype,
            network.ops.embedding,
            poison=poison,
        )
        self._seats = Seats(max_seqs, window)
        shape = (2, self._seats.num_pages, PAGE, config.num_kv_heads, config.head_dim)
        kv = empty_in_huge_pages(shape, network.kv_dtype)
        if poison:
            kv.fill_(float("nan"))
        network.attach_kv_cache(kv[0], kv[1])
        self._batches = EagleBatches(network.max_rows, max_seqs, self._seats.ring_pages)
        self._draws = Draws(network.max_rows, min(MOST_RANKED, config.draft_vocab_size))
        self._num_rows = {"catch_up": 0, "tree": 0}
        self._num_passes = 0

    # ---- features

    def store_features(self, slots: Tensor, taps: Tensor | None, hidden: Tensor | None) -> None:
        """As ``FeatureReader``."""
        features = hidden if self.wants_hidden else taps
        assert features is not None, "the target ran without the features that the drafter reads"
        self._features.write(slots, features)

    def move_features(self, source: Tensor, target: Tensor) -> None:
        """As ``FeatureReader``."""
        self._features.move(source, target)

    # ---- drafter

    def propose(self, jobs: Sequence[DraftJob]) -> list[DraftTree]:
        """As ``Drafter``: the best nodes by joint score, expanded ``plan.width`` a level."""
        trees = [NO_TREE] * len(jobs)
        able = [
            i
            for i, job in enumerate(jobs)
            if min(job.plan.depth, job.plan.num_nodes) > 0 and len(job.request.token_ids) >= 2
        ]
        for start in range(0, len(able), self._max_seqs):
            part = able[start : start + self._max_seqs]
            with torch.no_grad():
                grown = self._grow([jobs[i] for i in part])
            for i, tree in zip(part, grown, strict=True):
                trees[i] = tree
        return trees

    def observe(self, requests: Sequence[Request]) -> Sequence[Trial]:
        """Nothing: what was not drafted was not guessed."""
        return ()

    def forget(self, request: Request) -> None:
        """As ``Drafter``."""
        self._seats.leave(request)

    def reset(self) -> None:
        """As ``Drafter``."""
        self._seats.clear()

    def load(self, weights: Mapping[str, Any], version: int) -> None:
        """As ``Drafter``; the head's keys are computed anew from the features, of the window only.

        Raises:
            ValueError: the weights do not fit, or the version is not a later one; those in use stay.
        """
        if not isinstance(version, int) or isinstance(version, bool) or version <= self.version:
            raise ValueError(
                f"version must be an integer above the one in use, {self.version}, got {version!r}"
            )
        self.network.flip(self.network.stage(weights))
        self.version = version
        self._seats.clear()

    def stats(self) -> dict[str, float]:
        """Requests with a seat; rows and passes so far."""
        return {
            "num_seats": float(len(self._seats)),
            "num_catch_up_rows": float(self._num_rows["catch_up"]),
            "num_tree_rows": float(self._num_rows["tree"]),
            "num_passes": float(self._num_passes),
        }

    def warm_up(self) -> None:
        """Touch the weights and buffers, so that the first proposal takes what all others take.

        The engine must be idle: features of the first pages are written.
        """
        length = PAGE + 2
        slots = torch.arange(length, dtype=torch.int32)
        nothing = torch.zeros(length, self.network.config.feature_width)
        self._features.write(slots, nothing.view(length, max(len(self.tap_layers), 1), -1))
        params = SamplingParams(max_tokens=8)
        request = Request("", [0] * length, params, seed=0, max_total_len=length + 8)
        request.pages = [0, 1]
        for _ in range(2):
            self.propose([DraftJob(request, DraftPlan(self.name, 3, 3))])
            self._seats.clear()
        self._num_rows, self._num_passes = {"catch_up": 0, "tree": 0}, 0

    # ---- a proposal

    def _grow(self, jobs: Sequence[DraftJob]) -> list[DraftTree]:
        seats = self._seats.take([job.request for job in jobs])
        growing: list[_Growing] = []
        for job, seat in zip(jobs, seats, strict=True):
            length = len(job.request.token_ids)
            first = max(0, length - 1 - self._window) // PAGE * PAGE
            growing.append(_Growing(job, seat, TreeGrowth(job.plan), length, first))
        lengths = [part.length for part in growing]
        draw = DrawParams([job.request for job in jobs], lengths, mode=self._mode)
        width = min(max(job.plan.width for job in jobs), MOST_RANKED)
        count = min(max(width, _LEAST_RANKED), self.network.config.draft_vocab_size, MOST_RANKED)
        logits, hidden = self._catch_up(growing)
        self._propose_children(
            [(s, ROOT) for s in range(len(growing))], growing, logits, draw, count, 1
        )
        for depth in range(2, max(job.plan.depth for job in jobs) + 1):
            nodes = self._frontier(growing, depth)
            if not nodes:
                break
            logits, hidden = self._expand(nodes, growing, hidden, depth)
            self._propose_children(nodes, growing, logits, draw, count, depth)
        return [part.growth.tree() for part in growing]

    def _catch_up(self, growing: Sequence[_Growing]) -> tuple[Tensor, Tensor]:
        """Keys of all positions but the newest token's; logits and hidden state [S, ...] behind the last of each."""
        token_ids: list[int] = []
        positions: list[np.ndarray] = []
        features: list[np.ndarray] = []
        slots: list[np.ndarray] = []
        last_rows: list[int] = []
        for part in growing:
            request, seat, end = part.job.request, part.seat, part.length - 1
            start = min(max(seat.computed, end - self._window), end - 1)
            at = np.arange(start, end)
            pages = np.asarray(request.pages[start // PAGE : (end + PAGE - 1) // PAGE])
            token_ids += request.token_ids[start + 1 : end + 1]
            positions.append(at)
            features.append(pages[at // PAGE - start // PAGE] * PAGE + at % PAGE)
            slots.append(seat.slots(start, end))
            last_rows.append(len(token_ids) - 1)
        rows = (np.concatenate(positions), np.concatenate(features), np.concatenate(slots))
        q, x = self._store_in_chunks(token_ids, rows, last_rows)
        for part in growing:
            part.seat.computed = part.length - 1
        self._batches.set_pages([p.seat.pages(p.first, p.length - 1) for p in growing])
        batch = self._batches.reading(
            None, range(len(growing) + 1), [p.length - 1 - p.first for p in growing]
        )
        return self.network.attend(batch, q, x, self._window)

    def _store_in_chunks(
        self, token_ids: list[int], rows: tuple[np.ndarray, ...], last_rows: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Keys of all rows; queries and residual streams of ``last_rows``."""
        total, chunk = len(token_ids), self.network.max_rows
        workspace, batches = self.network.workspace, self._batches
        positions, feature_slots, slots = rows
        picked, done = workspace.rows(len(last_rows)), 0
        self._num_rows["catch_up"] += total
        self._num_passes += 1
        for start in range(0, total, chunk):
            end = min(start + chunk, total)
            views = workspace.rows(end - start)
            self._features.read(batches.feature_slots(feature_slots[start:end]), views.features)
            batch = batches.stored(token_ids[start:end], positions[start:end], slots[start:end])
            self.network.store(batch, views.features)
            if total == len(last_rows) <= chunk:
                return views.q, views.x
            here = [row - start for row in last_rows[done:] if row < end]
            if here:
                numbers, to = batches.rows(here), slice(done, done + len(here))
                torch.index_select(views.q_flat, 0, numbers, out=picked.picked_q_flat[to])
                torch.index_select(views.x, 0, numbers, out=picked.picked_x[to])
                done += len(here)
        return picked.picked_q, picked.picked_x

    def _frontier(self, growing: Sequence[_Growing], depth: int) -> list[tuple[int, int]]:
        """(request, node) to expand in the next pass, request by request."""
        active = [
            s
            for s, part in enumerate(growing)
            if part.job.plan.depth >= depth and part.length + depth - 3 < self.network.max_positions
        ]
        if not active:
            return []
        share = max(1, self.network.max_rows // len(active))
        nodes: list[tuple[int, int]] = []
        for s in active:
            part = growing[s]
            limit = min(share, SCRATCH_PAGES * PAGE - part.num_scratch)
            nodes += [(s, node) for node in part.growth.frontier(limit)]
        return nodes

    def _expand(
        self,
        nodes: Sequence[tuple[int, int]],
        growing: Sequence[_Growing],
        hidden: Tensor,
        depth: int,
    ) -> tuple[Tensor, Tensor]:
        """One pass over nodes of depth ``depth - 1``: logits and hidden states behind each."""
        token_ids, positions, slots, ctx_len, sources = [], [], [], [], []
        tails: list[tuple[int, ...]] = []
        starts = [0] * (len(growing) + 1)
        for s, node in nodes:
            part = growing[s]
            slot = part.seat.scratch + part.num_scratch
            part.num_scratch += 1
            tail = (*part.tails.get(part.growth.parents[node], ()), slot)
            part.tails[node] = tail
            tails.append(tail)
            token_ids.append(part.growth.token_ids[node])
            positions.append(part.length + depth - 3)
            slots.append(slot)
            ctx_len.append(part.length - 1 - part.first)
            sources.append(part.made_by[node])
            starts[s + 1] += 1
        views = self.network.workspace.rows(len(nodes))
        torch.index_select(hidden, 0, self._batches.rows(sources), out=views.fed_back)
        stored = self._batches.stored(token_ids, positions, slots)
        batch = self._batches.reading(stored, list(accumulate(starts)), ctx_len, tails)
        self._num_rows["tree"] += len(nodes)
        self._num_passes += 1
        self.network.store(batch, views.fed_back, fed_back=True)
        return self.network.attend(batch, views.q, views.x, self._window)

    def _propose_children(
        self,
        nodes: Sequence[tuple[int, int]],
        growing: Sequence[_Growing],
        logits: Tensor,
        draw: DrawParams,
        count: int,
        depth: int,
    ) -> None:
        """Children of each node, from the logits of its row; they draw the tokens of index length + depth - 1."""
        token_ids, scores = draw.rank(
            self.network, self._draws, logits, [s for s, _ in nodes], count, depth
        )
        for part in growing:
            part.growth.next_level()
            part.made_by = {}
        for row, (s, node) in enumerate(nodes):
            part = growing[s]
            before = len(part.growth.token_ids)
            part.growth.add(node, token_ids[row], scores[row])
            if depth == 1 and before == len(part.growth.token_ids):
                raise ValueError("the head's logits are not finite; check its weights")
            for child in range(before, len(part.growth.token_ids)):
                part.made_by[child] = row


def open_eagle(
    config: SpeculativeConfig, target: ResolvedConfig, runner: ModelRunner
) -> EagleDrafter:
    """The drafter of ``config.model``, a raw EAGLE, raw EAGLE-3 or speculators directory, for a runner's target.

    Raises:
        ValueError: what is missing, damaged or does not fit the target.
    """
    assert config.model is not None
    decoder = runner.decoder
    checkpoint = open_drafter(config.model, decoder.config)
    kind = checkpoint.config.kind
    if config.method in ("eagle", "eagle3") and config.method != kind:
        raise ValueError(
            f"speculative_config: method is {config.method!r}, but {checkpoint.path} holds an {kind} head; "
            f"set method to {kind!r}"
        )
    network = EagleNetwork(
        checkpoint.config,
        checkpoint.tensors,
        decoder,
        max_rows=target.max_num_batched_tokens,  # at least max_num_seqs
        max_positions=target.max_model_len + MAX_DEPTH,  # nodes may lie behind the last position
    )
    drafter = EagleDrafter(
        network,
        num_pages=runner.num_pages,
        max_seqs=target.max_num_seqs,
        window=min(config.window, target.max_model_len),
        mode=config.draft_sampling == "mode",
    )
    drafter.warm_up()
    return drafter
