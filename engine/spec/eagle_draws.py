"""How an EAGLE drafter draws: the arguments of ``coupled_top_k`` for each row, and what its results are worth.

Owns the parameters and the scores. Knows nothing of networks or trees. Invariant: the noise of a row is the sampler's,
of the request's seed and the index of the token that is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.models.eagle import EagleNetwork
from engine.request import Request

MOST_RANKED = 64  # that coupled_top_k gives
_MAX_CACHED = 256
# Scores of a coupled draft are worth this many times less than their distance says. Measured on SmolLM2's early exits,
# where shares among 8 are then the acceptance within a few percent for a good drafter; the tuner calibrates the rest.
_SOFTENING = 1.5
_LOWEST = np.finfo(np.float32).min


class Draws:
    """Arguments and results of ``coupled_top_k`` for the rows of one pass."""

    def __init__(self, max_rows: int, most: int) -> None:
        self._floats = torch.empty((3, max_rows))
        self._ints = torch.empty((2, max_rows), dtype=torch.int32)
        self._seeds = torch.empty(max_rows, dtype=torch.int64)
        self._np = (self._floats.numpy(), self._ints.numpy(), self._seeds.numpy())
        self._token_ids = torch.empty(max_rows * most, dtype=torch.int32)
        self._scores, self._logprobs = torch.empty(2, max_rows * most).unbind(0)
        self._views: dict[tuple[int, int], tuple[tuple[Tensor, ...], tuple[np.ndarray, ...]]] = {}

    def run(
        self,
        coupled_top_k: Any,
        logits: Tensor,
        target_ids: Tensor | None,
        count: int,
        *,
        floats: np.ndarray,
        top_k: np.ndarray,
        positions: np.ndarray,
        seeds: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(token ids, scores, log-probabilities), each [R, count]; ``floats`` [3, R]: temperature, top_p, min_p."""
        rows = logits.shape[0]
        own_floats, own_ints, own_seeds = self._np
        own_floats[:, :rows] = floats
        own_ints[0, :rows], own_ints[1, :rows] = top_k, positions
        own_seeds[:rows] = seeds
        views = self._views.get((rows, count))
        if views is None:
            if len(self._views) >= _MAX_CACHED:
                self._views.clear()
            views = self._views[rows, count] = self._make_views(rows, count)
        (temperature, top_p, min_p, k, at, seed, *out), results = views
        coupled_top_k(logits, temperature, k, top_p, min_p, seed, at, target_ids, *out)
        token_ids, scores, logprobs = results
        return token_ids, scores, logprobs

    def _make_views(self, rows: int, count: int) -> Any:
        out = [t[: rows * count].view(rows, count) for t in self._outputs]
        temperature, top_p, min_p = (self._floats[j, :rows] for j in range(3))
        k, at = (self._ints[j, :rows] for j in range(2))
        arguments = (temperature, top_p, min_p, k, at, self._seeds[:rows], *out)
        return arguments, tuple(t.numpy() for t in out)

    @property
    def _outputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._token_ids, self._scores, self._logprobs


class DrawParams:
    """How each request of a proposal draws its tokens.

    With ``mode`` the likeliest tokens are proposed, without noise. The sampler then meets the proposal with the
    probability that its token has at the request's temperature, so that is its score; what filters and penalties take
    away is left to the tuner's calibration.
    """

    def __init__(
        self, requests: Sequence[Request], lengths: Sequence[int], *, mode: bool = False
    ) -> None:
        params = [request.params for request in requests]
        # top_k of 1 is greedy, and a greedy request's second choices are worth proposing
        self._floats = np.array(
            [(0.0 if p.top_k == 1 else p.temperature, p.top_p, p.min_p) for p in params],
            dtype=np.float32,
        ).T
        self._sharpness: Tensor | None = None
        if mode:
            warmth = np.where(self._floats[0] == 0.0, 1.0, self._floats[0])
            if not np.all(warmth == 1.0):
                self._sharpness = torch.from_numpy(1.0 / warmth)
            self._floats = np.stack([np.zeros_like(warmth), *self._floats[1:]])
        self._top_k = np.array([max(p.top_k, 0) for p in params], dtype=np.int32)
        self._seeds = np.array([request.seed for request in requests], dtype=np.int64)
        self._lengths = np.array(lengths, dtype=np.int32)

    def rank(
        self,
        network: EagleNetwork,
        draws: Draws,
        logits: Tensor,
        owners: Sequence[int],
        count: int,
        depth: int,
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Token ids and scores [R, count], best first; ``logits`` may be overwritten.

        The score of a greedy or mode proposal is its probability. Of a coupled one it is its share of the softmax over the
        (softened) perturbed scores of the first ``count``: near 1 where no other token comes near under the same noise, so that
        a small error of the head does not change the winner.
        """
        rows = np.asarray(owners)
        floats = self._floats[:, rows]
        if self._sharpness is not None:
            logits.mul_(self._sharpness[torch.from_numpy(rows)].unsqueeze(1))
        token_ids, scores, logprobs = draws.run(
            network.ops.coupled_top_k,
            logits,
            network.weights.target_ids,
            count,
            floats=floats,
            top_k=self._top_k[rows],
            positions=self._lengths[rows] + depth - 1,
            seeds=self._seeds[rows],
        )
        # empty places are -inf, and a row may have nothing else
        best = np.maximum(scores[:, :1], _LOWEST)
        share = np.exp((scores - best) / _SOFTENING)
        share /= np.maximum(share.sum(axis=1, keepdims=True), 1.0)
        greedy = floats[0] == 0.0
        if greedy.any():
            share[greedy] = np.exp(logprobs[greedy])
        return token_ids.tolist(), share.tolist()
