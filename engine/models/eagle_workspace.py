"""The buffers of an EAGLE head's passes: allocated once for the most rows, seen through cached views.

Owns the memory. Knows nothing of what is computed in it. Invariant, as in ``workspace.py``: a view of n rows is the
first n rows of its buffer, so views of different row counts share memory; what is read across row counts has buffers
of its own (``picked_*``, ``features``).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor

from engine.models.eagle_layout import EagleConfig
from engine.models.workspace import cached


class EagleViews(NamedTuple):
    """Activations of R rows, fp32."""

    embedded: Tensor  # [R, H]
    embedded_normed: Tensor  # [R, H]
    taps: Tensor  # [R, feature width] normed
    taps_normed: Tensor  # [R taps, target hidden]
    x: Tensor  # [R, H] residual stream
    h: Tensor  # [R, H] normed
    joined: Tensor  # [R, H + H or feature width] what enters the layer, or fc
    qkv: Tensor  # [R, (Hq + 2 Hkv) D]
    q: Tensor  # [R, Hq, D]
    q_flat: Tensor  # the same memory, [R, Hq D]
    attended: Tensor  # [R, Hq, D]
    attended_flat: Tensor  # the same memory, [R, Hq D]
    proj: Tensor  # [R, H] output of a sublayer
    gate_up: Tensor  # [R, 2 I]
    act: Tensor  # [R, I]
    features: Tensor  # [R, feature width] input of a pass
    fed_back: Tensor  # [R, H] input of a pass of a deeper level
    picked_x: Tensor  # [R, H] rows taken out of ``x``
    picked_q: Tensor  # [R, Hq, D] rows taken out of ``q``
    picked_q_flat: Tensor  # the same memory, [R, Hq D]


class EagleWorkspace:
    """Buffers for at most ``max_rows`` rows; that of logits grows to the most that was asked for."""

    def __init__(self, config: EagleConfig, max_rows: int) -> None:
        self._config = config
        self._max_rows = max_rows
        hidden, width = config.hidden_size, config.feature_width
        q_width = config.num_q_heads * config.head_dim
        joined = hidden + (hidden if config.kind == "eagle3" else width)
        widths = {
            **dict.fromkeys(("embedded", "embedded_normed", "x", "h"), hidden),
            **dict.fromkeys(("proj", "fed_back", "picked_x"), hidden),
            **dict.fromkeys(("q", "attended", "picked_q"), q_width),
            **dict.fromkeys(("features", "taps", "taps_normed"), width),
            "joined": joined,
            "qkv": q_width + 2 * config.num_kv_heads * config.head_dim,
            "gate_up": 2 * config.intermediate_size,
            "act": config.intermediate_size,
        }
        self._buffers = {name: torch.empty(max_rows, size) for name, size in widths.items()}
        self._logits = torch.empty(0, config.draft_vocab_size)
        self._views: OrderedDict[int, EagleViews] = OrderedDict()
        self._logit_views: OrderedDict[int, Tensor] = OrderedDict()

    def rows(self, num_rows: int) -> EagleViews:
        """Activations of ``num_rows`` rows."""
        return cached(self._views, num_rows, self._make_views)

    def _make_views(self, num_rows: int) -> EagleViews:
        assert 0 < num_rows <= self._max_rows, f"{num_rows} rows, made for {self._max_rows}"
        config = self._config
        views = {name: buffer[:num_rows] for name, buffer in self._buffers.items()}
        heads = (num_rows, config.num_q_heads, config.head_dim)
        for name in ("q", "attended", "picked_q"):
            views[name + "_flat"] = views[name]
            views[name] = views[name].view(heads)
        views["taps_normed"] = views["taps_normed"].view(-1, config.target_hidden_size)
        return EagleViews(**views)

    def logits(self, num_rows: int) -> Tensor:
        """[num_rows, draft vocab]."""
        if num_rows > self._logits.shape[0]:
            capacity = min(max(num_rows, 2 * self._logits.shape[0]), max(self._max_rows, num_rows))
            self._logit_views.clear()
            self._logits = torch.empty(capacity, self._config.draft_vocab_size)
        return cached(self._logit_views, num_rows, lambda rows: self._logits[:rows])
