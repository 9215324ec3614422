"""The buffers of a decoder's forward: allocated once for the most rows, seen through cached views.

Owns the memory of activations, logits and taps. Knows nothing of what is computed in it. Invariant: a view of n
rows is the first n rows of its buffer, contiguous, so views of different row counts share memory: what is read
across row counts needs a buffer of its own (``picked``).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.config import ModelConfig

_MAX_VIEWS = 128  # row counts remembered; a miss costs some microseconds

K = TypeVar("K")
V = TypeVar("V")


class Views(NamedTuple):
    """Activations of a forward of R rows, fp32."""

    x: Tensor  # [R, H] residual stream
    h: Tensor  # [R, H] normed
    qkv: Tensor  # [R, (Hq + 2 Hkv) D]
    q: Tensor  # [R, Hq, D]
    attended: Tensor  # [R, Hq, D]
    attended_flat: Tensor  # the same memory, [R, Hq D]
    proj: Tensor  # [R, H] output of a sublayer
    gate_up: Tensor  # [R, 2 I]
    act: Tensor  # [R, I]
    picked: Tensor  # [R, H] rows taken out of ``x`` or ``h``
    picked_attended: Tensor  # [R, Hq D] rows taken out of ``attended_flat``


class Workspace:
    """Buffers for at most ``max_rows`` rows; those of logits and taps grow to the most that was asked for."""

    def __init__(self, config: ModelConfig, max_rows: int) -> None:
        self._config = config
        self._max_rows = max_rows
        q_width = config.num_q_heads * config.head_dim
        hidden = config.hidden_size
        self._buffers = [
            torch.empty(max_rows, width)
            for width in (
                hidden,
                hidden,
                q_width + 2 * config.num_kv_heads * config.head_dim,
                q_width,
                q_width,
                hidden,
                2 * config.intermediate_size,
                config.intermediate_size,
                hidden,
                q_width,
            )
        ]
        self._logits = torch.empty(0, config.vocab_size)
        self._taps = torch.empty(max_rows, 0, hidden)
        self._views: OrderedDict[int, Views] = OrderedDict()
        self._logit_views: OrderedDict[int, Tensor] = OrderedDict()
        self._tap_views: OrderedDict[tuple[int, int], tuple[Tensor, ...]] = OrderedDict()

    def rows(self, num_rows: int) -> Views:
        """Activations of ``num_rows`` rows."""
        return cached(self._views, num_rows, self._make_views)

    def _make_views(self, num_rows: int) -> Views:
        assert 0 < num_rows <= self._max_rows, f"{num_rows} rows, made for {self._max_rows}"
        config = self._config
        x, h, qkv, q, attended, proj, gate_up, act, picked, picked_attended = (
            buffer[:num_rows] for buffer in self._buffers
        )
        heads = (num_rows, config.num_q_heads, config.head_dim)
        return Views(
            x=x,
            h=h,
            qkv=qkv,
            q=q.view(heads),
            attended=attended.view(heads),
            attended_flat=attended,
            proj=proj,
            gate_up=gate_up,
            act=act,
            picked=picked,
            picked_attended=picked_attended,
        )

    def logits(self, num_rows: int) -> Tensor:
        """[num_rows, V]."""
        if num_rows > self._logits.shape[0]:
            capacity = min(max(num_rows, 2 * self._logits.shape[0]), max(self._max_rows, num_rows))
            self._logit_views.clear()
            self._logits = torch.empty(capacity, self._config.vocab_size)
        return cached(self._logit_views, num_rows, lambda rows: self._logits[:rows])

    def taps(self, num_rows: int, num_taps: int) -> tuple[Tensor, ...]:
        """[num_rows, num_taps, H], followed by each of its taps alone, [num_rows, H]."""
        if num_taps != self._taps.shape[1]:
            self._tap_views.clear()
            self._taps = torch.empty(self._max_rows, num_taps, self._config.hidden_size)
        return cached(self._tap_views, (num_rows, num_taps), self._make_tap_views)

    def _make_tap_views(self, key: tuple[int, int]) -> tuple[Tensor, ...]:
        taps = self._taps[: key[0]]
        return taps, *taps.unbind(1)


def cached(cache: OrderedDict[K, V], key: K, make: Callable[[K], V]) -> V:
    """The value of a key, made on a miss; the least recently used goes when there are too many."""
    value = cache.get(key)
    if value is None:
        value = cache[key] = make(key)
        if len(cache) > _MAX_VIEWS:
            cache.popitem(last=False)
    else:
        cache.move_to_end(key)
    return value


def empty_in_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialised memory, resident only where it is touched; numpy asks the kernel for huge pages, torch does not."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.empty(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
