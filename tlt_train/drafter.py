"""The network of an EAGLE head with gradients: the same function as ``engine/models/eagle.py``, over packed documents.

Owns the fp32 masters of what trains and the unrolled pass. Knows nothing of losses, optimisers or files. The engine's
network runs packed weights in place and has no gradients; this one is written from the same equations on the same
``EagleConfig`` and tensor names, and a test holds the two to the same logits, chain by chain.

A row holds the feature of position p and the token of position p + 1, has rotary position p, and its logits are about
the token of position p + 2; the teacher of these is the target's final hidden state of position p + 1. At unroll step
u the row's chain has grown by u nodes: what the step before gave out instead of a feature, the token of position
p + 1 + u, rotary position p + u, and a teacher at position p + 1 + u. So a document of n positions has n - 1 rows
that draft, and step u loses the last u of these.

Invariants: embedding and target's head are read, never trained; a step's numbers do not depend on how many follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from engine.models.eagle_layout import (
    D2T,
    EMBEDDING,
    HEAD,
    T2D,
    EagleConfig,
    canonical,
    check_names,
)
from engine.models.rope import rope_tables
from tlt_train.attention import ActiveRun, AttentionLayout, packed_attention
from tlt_train.packing import PackedBatch

_LAYER = "midlayer."
_ATTN = "midlayer.self_attn."
_MLP = "midlayer.mlp."
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class UnrollStep:
    """One depth of the unrolled head.

    Attributes:
        depth: 0 for the row itself.
        rows: [M] int64 active rows whose teacher lies within their document; ``logits`` are of these.
        teacher_rows: [M] int64 rows of the batch whose final hidden state is the teacher.
        hidden: [M, H] what goes through the head; EAGLE-1's regression reads it.
        logits: [M, draft vocab] in the dtype of the matrices.
    """

    depth: int
    rows: Tensor
    teacher_rows: Tensor
    hidden: Tensor
    logits: Tensor


class DrafterNetwork:
    """A head that learns.

    Args:
        config: the head.
        tensors: its tensors by any of the names of EAGLE checkpoints; they are copied, as fp32.
        embedding: [V, H] of the target, not copied.
        head: [V, H] of the target's head, for heads without their own; not copied.
        dtype: of matrices and of what enters them, "bfloat16" or "float32"; norms, softmax and residuals are fp32.
        window: of the attention, positions; 0 for all.
        max_positions: where the rotary table ends.
        train_head: False freezes the head's ``lm_head``.

    Raises:
        ValueError: the tensors do not fit the head.
    """

    def __init__(
        self,
        config: EagleConfig,
        tensors: Mapping[str, Tensor],
        embedding: Tensor,
        head: Tensor | None = None,
        *,
        dtype: str = "float32",
        window: int = 512,
        max_positions: int | None = None,
        train_head: bool = True,
    ) -> None:
        named = canonical(tensors)
        check_names(config, {n: tuple(t.shape) for n, t in named.items()}, "drafter weights")
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        if config.draft_vocab_size != config.vocab_size and D2T not in named:
            raise ValueError(
                f"{D2T} is missing: it must map the {config.draft_vocab_size} ids of the draft's vocabulary to the "
                f"target's {config.vocab_size}"
            )
        if not config.own_head and head is None:
            raise ValueError("head is missing: a head without lm_head uses the target's, [V, H]")
        self.config = config
        self.dtype = DTYPES[dtype]
        self.window = window
        self.parameters: dict[str, Tensor] = {}
        self.frozen: dict[str, Tensor] = {}
        for name, tensor in named.items():
            if name in (D2T, T2D, EMBEDDING) or (name == HEAD and not train_head):
                self.frozen[name] = tensor.detach().clone()
            else:
                self.parameters[name] = tensor.detach().float().clone().requires_grad_()
        own = self.frozen.get(EMBEDDING)
        self._embedding = embedding if own is None else own
        if self._embedding.shape[1] != config.hidden_size:
            raise ValueError(
                f"{EMBEDDING} is missing, and the target's does not fit: hidden_size is {config.hidden_size}, the "
                f"target's {embedding.shape[1]}"
            )
        if config.own_head:
            head = self.frozen.get(HEAD)
        self._fixed_head = None if head is None else head.to(self.dtype)
        length = max_positions or config.max_position_embeddings
        self._cos, self._sin = rope_tables(
            config.rope, config.head_dim, config.max_position_embeddings, length
        )

    @property
    def target_ids(self) -> Tensor:
        """[draft vocab] int64: the target's id of each id of the draft's vocabulary."""
        own = torch.arange(self.config.draft_vocab_size)
        return own + self.frozen[D2T].long() if D2T in self.frozen else own

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the head by canonical name, the masters themselves."""
        return {n: t.detach() for n, t in self.parameters.items()} | self.frozen

    def unroll(
        self,
        batch: PackedBatch,
        runs: tuple[ActiveRun, ...],
        depth: int,
        *,
        point: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> Iterator[UnrollStep]:
        """The steps 0 to ``depth - 1`` of the active rows.

        Args:
            batch: documents of at least two positions.
            runs: the active rows, none of them a document's last.
            point: an identity that every step passes before and behind attention and before the head, on the way
                there and on the way back: between two of these lies a fraction of a step's work.

        Raises:
            ValueError: a chain would leave the window before it ends.
        """
        if self.window and depth > self.window + 1:
            raise ValueError(
                f"depth must be at most {self.window + 1}, one more than the window, got {depth}"
            )
        weights = _Weights(self.parameters, self.dtype)
        layout = AttentionLayout(runs, self.window)
        active = torch.cat([torch.arange(run.begin, run.end) for run in runs])
        ends = torch.cat([torch.full((run.end - run.begin,), run.end) for run in runs])
        everything = torch.arange(batch.token_ids.shape[0])
        features = batch.hidden if self.config.kind == "eagle" else batch.taps
        fused = self._project(weights, features)
        entering, residual = self._enter(weights, fused, batch, everything, 0)
        keys, values = self._keys(weights, entering, batch.positions)
        entering, residual = entering[active], residual[active]
        chain: list[tuple[Tensor, Tensor]] = []
        for step in range(depth):
            positions = batch.positions[active] + step
            if step:
                entering, residual = self._enter(weights, residual, batch, active, step)
                chain.append(self._keys(weights, entering, positions))
            residual = point(residual)
            attended = packed_attention(
                self._queries(weights, entering, positions),
                keys,
                values,
                chain,
                layout,
                self._scale,
            )
            residual = point(residual + weights.linear(_ATTN + "o_proj", attended).float())
            hidden, residual = self._leave(weights, residual)
            hidden = point(hidden)
            rows = (active + step < ends).nonzero().squeeze(1)
            picked = hidden if rows.shape[0] == hidden.shape[0] else hidden[rows]
            yield UnrollStep(
                step, rows, active[rows] + step + 1, picked, self._logits(weights, picked)
            )

    @property
    def _scale(self) -> float:
        return self.config.head_dim**-0.5

    def _project(self, weights: _Weights, features: Tensor) -> Tensor:
        """[N, H] fp32: the taps of the target, made one feature; EAGLE-1 reads them as they are."""
        config = self.config
        if config.kind == "eagle":
            return features.float()
        if config.norm_before_fc:
            features = self._norm(features.float(), weights, "input_norm")
        if config.fc_norm:
            parts = features.float().view(features.shape[0], -1, config.target_hidden_size)
            normed = [
                self._norm(parts[:, i], weights, f"fc_norm.{i}") for i in range(parts.shape[1])
            ]
            features = torch.cat(normed, dim=-1)
        return weights.linear("fc", features.to(self.dtype)).float()

    def _enter(
        self, weights: _Weights, fed: Tensor, batch: PackedBatch, rows: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        """(what attention reads, the residual stream) of rows at a step; rows without a token get any."""
        next_rows = (rows + 1 + step).clamp(max=batch.token_ids.shape[0] - 1)
        embedded = self._embedding[batch.token_ids[next_rows]].float()
        if self.config.kind == "eagle":
            joined = torch.cat((embedded, fed), dim=-1).to(self.dtype)
            residual = weights.linear("fc", joined).float()
            return residual.to(self.dtype), residual
        normed = self._norm(fed, weights, _LAYER + "hidden_norm")
        embedded = self._norm(embedded, weights, _LAYER + "input_layernorm")
        entering = torch.cat((embedded.to(self.dtype), normed.to(self.dtype)), dim=-1)
        return entering, normed if self.config.norm_before_residual else fed

    def _heads(self, weights: _Weights, name: str, entering: Tensor) -> Tensor:
        return weights.linear(_ATTN + name, entering).view(
            entering.shape[0], -1, self.config.head_dim
        )

    def _keys(self, weights: _Weights, entering: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        keys = self._heads(weights, "k_proj", entering)
        if self.config.qk_norm:
            keys = self._norm(keys.float(), weights, _ATTN + "k_norm").to(self.dtype)
        return self._rotate(keys, at), self._heads(weights, "v_proj", entering)

    def _queries(self, weights: _Weights, entering: Tensor, at: Tensor) -> Tensor:
        queries = self._heads(weights, "q_proj", entering)
        if self.config.qk_norm:
            queries = self._norm(queries.float(), weights, _ATTN + "q_norm").to(self.dtype)
        return self._rotate(queries, at)

    def _rotate(self, heads: Tensor, at: Tensor) -> Tensor:
        cos = self._cos[at].unsqueeze(1).to(heads.dtype)
        sin = self._sin[at].unsqueeze(1).to(heads.dtype)
        a, b = heads.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    def _leave(self, weights: _Weights, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(what goes through the head, what the next step reads) behind attention."""
        normed = self._norm(residual, weights, _LAYER + "post_attention_layernorm").to(self.dtype)
        gated = silu(weights.linear(_MLP + "gate_proj", normed))
        gated = gated * weights.linear(_MLP + "up_proj", normed)
        residual = residual + weights.linear(_MLP + "down_proj", gated).float()
        hidden = residual
        if self.config.kind == "eagle3":
            hidden = self._norm(residual, weights, "norm")
        return hidden, hidden if self.config.norm_output else residual

    def _logits(self, weights: _Weights, hidden: Tensor) -> Tensor:
        if self._fixed_head is not None:
            return linear(hidden.to(self.dtype), self._fixed_head)
        return weights.linear(HEAD.removesuffix(".weight"), hidden.to(self.dtype))

    def _norm(self, x: Tensor, weights: _Weights, name: str) -> Tensor:
        return rms_norm(
            x, (x.shape[-1],), weights.masters[name + ".weight"], self.config.rms_norm_eps
        )


class _Weights:
    """The matrices of one pass in the dtype that they are multiplied in, each cast once."""

    def __init__(self, masters: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self.masters = masters
        self._dtype = dtype
        self._cast: dict[str, Tensor] = {}

    def linear(self, name: str, x: Any) -> Tensor:
        return linear(x, self._get(name + ".weight"), self._get_if(name + ".bias"))

    def _get(self, name: str) -> Tensor:
        if name not in self._cast:
            self._cast[name] = self.masters[name].to(self._dtype)
        return self._cast[name]

    def _get_if(self, name: str) -> Tensor | None:
        return self._get(name) if name in self.masters else None
