"""The network of an EAGLE head: one decoder layer on features of the target.

Owns the packed weights of the head and its rotary table. Knows nothing of requests, trees or files. The embedding and,
where the head has none, the output head are the target's, read from the decoder at each use, so that an update of the
target can never leave a copy behind. One network for both kinds (``eagle_layout.py``):

    eagle    x = fc(cat(embedding, hidden));        attention reads x;          logits = target's head(x')
    eagle3   x = fc(taps);  attention reads cat(norm(embedding), norm(x));      logits = own head(norm(x'))

with x' = x after the layer, which is also what the next depth reads in place of a feature. A row at rotary position p
holds the feature of position p and the token of position p + 1, and its logits are about the token of position p + 2.

The layer is run in two halves. Keys and values of a row depend on its own inputs alone, since there is one layer; so
``store`` is all that a row of the past needs, and only rows whose logits are wanted go through ``attend``.

Invariants: a row's result depends on its own logical sequence alone; ``flip`` replaces every weight at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.batch import ForwardBatch
from engine.models.decoder import Decoder
from engine.models.eagle_layout import (
    D2T,
    EMBEDDING,
    HEAD,
    T2D,
    EagleConfig,
    canonical,
    check_names,
    check_target,
)
from engine.models.eagle_workspace import EagleViews, EagleWorkspace
from engine.models.load_threads import one_torch_thread
from engine.models.rope import rope_tables

Weights = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
_LAYER = "midlayer."


class EagleWeights(NamedTuple):
    """All that an update replaces, as one value. None: the head has none, or uses the target's."""

    embedding: Tensor | None
    target_ids: Tensor | None  # [draft vocab] int32: id in the target's vocabulary; None: the same
    input_norm: Tensor | None
    fc_norm: Tensor | None  # [taps * target hidden]
    fc: Any
    embedding_norm: Tensor | None
    hidden_norm: Tensor | None
    qkv: Any
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Any
    post_norm: Tensor
    gate_up: Any
    down: Any
    final_norm: Tensor | None
    head: Any


class EagleNetwork:
    """A head, packed for its target's ops.

    Args:
        config: the head.
        weights: its tensors by any of the names of EAGLE checkpoints; they are copied.
        decoder: the target: its ops, dtype, embedding and head.
        max_rows: most rows of one pass.
        max_positions: where the rotary table ends, whatever the head was trained for.

    Raises:
        ValueError: the head does not fit the target, or the tensors do not fit the head; says what differs.
    """

    def __init__(
        self,
        config: EagleConfig,
        weights: Weights,
        decoder: Decoder,
        *,
        max_rows: int = 512,
        max_positions: int | None = None,
    ) -> None:
        check_target(config, decoder.config)
        self.config = config
        self.decoder = decoder
        self.ops = decoder.ops
        self.kv_dtype = decoder.kv_dtype
        self.max_rows = max_rows
        self.max_positions = max_positions or decoder.max_positions
        self.cos, self.sin = rope_tables(
            config.rope, config.head_dim, config.max_position_embeddings, self.max_positions
        )
        self.workspace = EagleWorkspace(config, max_rows)
        self._scale = config.head_dim**-0.5
        self._ones = torch.ones(config.target_hidden_size)
        self._keys = self._values = torch.empty(0)
        self._weights: EagleWeights | None = None
        self.flip(self.stage(weights))

    # ---- weights

    @property
    def weights(self) -> EagleWeights:
        assert self._weights is not None
        return self._weights

    def stage(self, weights: Weights) -> EagleWeights:
        """Check every tensor and pack them beside the weights in use, which stay as they are.

        An update may leave out ``d2t`` and the embedding: those in use are kept. An embedding that equals the
        target's is not kept: the target's is used.

        Raises:
            ValueError: as the constructor; also values that are not finite in the dtype that is kept, and ids outside
                the vocabulary.
        """
        tensors = canonical(weights)
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor) or tensor.is_meta:
                kind = "has no data" if isinstance(tensor, Tensor) else type(tensor).__name__
                raise ValueError(
                    f"drafter weights: {name} must be a tensor with values, got {kind}"
                )
            if tensor.layout is not torch.strided:
                raise ValueError(
                    f"drafter weights: {name} must be a dense tensor, got {tensor.layout}; use to_dense()"
                )
            if name not in (D2T, T2D) and not tensor.is_floating_point():
                raise ValueError(
                    f"drafter weights: {name} must be floating point, got {tensor.dtype}"
                )
        check_names(self.config, {n: tuple(t.shape) for n, t in tensors.items()}, "drafter weights")
        with one_torch_thread(), torch.no_grad():
            for name, tensor in tensors.items():
                if not tensor.is_floating_point():
                    continue
                # norms and biases are kept as fp32; what is finite in a wider type may not be in that of matrices
                kept = torch.float32 if tensor.dim() == 1 else self.kv_dtype
                if not bool(tensor.detach().to(kept).isfinite().all()):
                    raise ValueError(
                        f"drafter weights: {name} holds values that are not finite in {kept}"
                    )
            return self._pack(_Reader(tensors, self.ops, self.kv_dtype), tensors)

    def _pack(self, read: _Reader, tensors: Mapping[str, Tensor]) -> EagleWeights:
        config = self.config
        attn, mlp = _LAYER + "self_attn.", _LAYER + "mlp."
        fc_norm = None
        if config.fc_norm:
            fc_norm = torch.cat([read.norm(f"fc_norm.{i}") for i in range(len(config.tap_layers))])
        return EagleWeights(
            embedding=self._embedding(tensors.get(EMBEDDING)),
            target_ids=self._target_ids(tensors.get(D2T), tensors.get(T2D)),
            input_norm=read.norm("input_norm") if config.norm_before_fc else None,
            fc_norm=fc_norm,
            fc=read.linear("fc"),
            embedding_norm=read.norm_if(_LAYER + "input_layernorm"),
            hidden_norm=read.norm_if(_LAYER + "hidden_norm"),
            qkv=read.linear(attn + "q_proj", attn + "k_proj", attn + "v_proj"),
            q_norm=read.norm_if(attn + "q_norm"),
            k_norm=read.norm_if(attn + "k_norm"),
            o=read.linear(attn + "o_proj"),
            post_norm=read.norm(_LAYER + "post_attention_layernorm"),
            gate_up=read.linear(mlp + "gate_proj", mlp + "up_proj"),
            down=read.linear(mlp + "down_proj"),
            final_norm=read.norm_if("norm"),
            head=read.linear(HEAD.removesuffix(".weight")) if config.own_head else None,
        )

    def _embedding(self, given: Tensor | None) -> Tensor | None:
        config, shared = self.config, self.decoder.weights.embedding
        if given is None:
            if self._weights is not None:
                return self._weights.embedding
            if config.hidden_size != shared.shape[1]:
                raise ValueError(
                    f"drafter weights: {EMBEDDING} is missing, and the target's does not fit: hidden_size is "
                    f"{config.hidden_size}, the target's {shared.shape[1]}"
                )
            return None
        table = given.detach().to(self.kv_dtype, copy=True).contiguous()
        return None if torch.equal(table, shared) else table

    def _target_ids(self, d2t: Tensor | None, t2d: Tensor | None) -> Tensor | None:
        config = self.config
        if d2t is None:
            if self._weights is not None:
                return self._weights.target_ids
            if config.draft_vocab_size != config.vocab_size:
                raise ValueError(
                    f"drafter weights: {D2T} is missing: it must map the {config.draft_vocab_size} ids of the draft's "
                    f"vocabulary to the target's {config.vocab_size}"
                )
            return None
        if d2t.is_floating_point() or d2t.dtype is torch.bool:
            raise ValueError(f"drafter weights: {D2T} must hold integers, got {d2t.dtype}")
        own = torch.arange(config.draft_vocab_size)
        ids = own + d2t.detach().long()
        if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
            raise ValueError(
                f"drafter weights: {D2T} (an offset: target id = draft id + d2t[draft id]) leads to ids "
                f"{int(ids.min())}..{int(ids.max())}, the target's vocabulary is 0..{config.vocab_size - 1}"
            )
        if ids.unique().shape[0] != ids.shape[0]:
            raise ValueError(f"drafter weights: {D2T} maps two draft ids to one target id")
        if t2d is not None:
            flags = torch.zeros(config.vocab_size, dtype=torch.bool)
            flags[ids] = True
            if not torch.equal(flags, t2d.detach().bool()):
                raise ValueError(f"drafter weights: {T2D} does not flag the target ids of {D2T}")
        return None if torch.equal(ids, own) else ids.int()

    def flip(self, staged: EagleWeights) -> None:
        """Use what ``stage`` made from the next pass on."""
        self._weights = staged

    # ---- passes

    def attach_kv_cache(self, keys: Tensor, values: Tensor) -> None:
        """Keys and values [P, PAGE, Hkv, D] of ``kv_dtype`` that the passes use."""
        self._keys, self._values = keys, values

    def store(self, batch: ForwardBatch, features: Tensor, *, fed_back: bool = False) -> None:
        """Keys and values of rows; their queries and residual streams are left in the workspace's views of R rows.

        Args:
            batch: ``token_ids``, ``positions`` and ``slots`` are used.
            features: [R, feature_width] fp32 of the target, or [R, H] what ``attend`` gave.
            fed_back: the latter.
        """
        ops, eps, weights = self.ops, self.config.rms_norm_eps, self.weights
        views = self.workspace.rows(features.shape[0])
        embedding = weights.embedding
        if embedding is None:
            embedding = self.decoder.weights.embedding
        ops.embedding(batch.token_ids, embedding, views.embedded)
        if self.config.kind == "eagle":
            torch.cat((views.embedded, features), dim=1, out=views.joined)
            ops.linear(views.joined, weights.fc, views.x)
            entering = views.x
        else:
            assert weights.embedding_norm is not None
            assert weights.hidden_norm is not None
            if fed_back:
                views.x.copy_(features)
            else:
                self._project(weights, features, views)
            ops.rms_norm(views.x, weights.hidden_norm, eps, views.h)
            ops.rms_norm(views.embedded, weights.embedding_norm, eps, views.embedded_normed)
            torch.cat((views.embedded_normed, views.h), dim=1, out=views.joined)
            if self.config.norm_before_residual:
                views.x.copy_(views.h)
            entering = views.joined
        ops.linear(entering, weights.qkv, views.qkv)
        ops.rope_store(
            views.qkv,
            batch,
            self.cos,
            self.sin,
            weights.q_norm,
            weights.k_norm,
            eps,
            self._keys,
            self._values,
            views.q,
        )

    def _project(self, weights: EagleWeights, features: Tensor, views: EagleViews) -> None:
        """views.x = the taps of the target, made one feature."""
        ops, config = self.ops, self.config
        if weights.input_norm is not None:
            ops.rms_norm(features, weights.input_norm, config.rms_norm_eps, views.taps)
            features = views.taps
        if weights.fc_norm is not None:
            taps = features.view(-1, config.target_hidden_size)
            normed = views.taps_normed
            ops.rms_norm(taps, self._ones, config.rms_norm_eps, normed)
            features = normed.view(features.shape).mul_(weights.fc_norm)
        ops.linear(features, weights.fc, views.x)

    def attend(
        self, batch: ForwardBatch, q: Tensor, x: Tensor, window: int
    ) -> tuple[Tensor, Tensor]:
        """The rest of the layer for rows that ``store`` has seen.

        Args:
            batch: what each row reads; its own key has been stored.
            q: [R, Hq, D] their queries.
            x: [R, H] their residual streams, overwritten.
            window: of logical positions, the row itself included; 0 for all.

        Returns:
            (logits [R, draft vocab], what the next depth reads [R, H]), valid until the next pass.
        """
        ops, config, weights = self.ops, self.config, self.weights
        views, eps = self.workspace.rows(x.shape[0]), config.rms_norm_eps
        ops.attention(q, self._keys, self._values, batch, self._scale, window, views.attended)
        ops.linear(views.attended_flat, weights.o, views.proj)
        ops.add_rms_norm(views.proj, x, weights.post_norm, eps, views.h)
        ops.linear(views.h, weights.gate_up, views.gate_up)
        ops.silu_mul(views.gate_up, views.act)
        ops.linear(views.act, weights.down, views.proj)
        if weights.final_norm is None:
            hidden = x.add_(views.proj)
        else:
            ops.add_rms_norm(views.proj, x, weights.final_norm, eps, views.h)
            hidden = views.h
        logits = self.workspace.logits(x.shape[0])
        head = self.decoder.weights.head if weights.head is None else weights.head
        ops.linear(hidden, head, logits)
        return logits, (hidden if config.norm_output else x)


class _Reader:
    """Tensors by canonical name, stacked and packed."""

    def __init__(self, tensors: Mapping[str, Tensor], ops: Any, dtype: torch.dtype) -> None:
        self._tensors = tensors
        self._ops = ops
        self._dtype = dtype

    def norm(self, name: str) -> Tensor:
        return self._tensors[name + ".weight"].detach().to(torch.float32, copy=True).contiguous()

    def norm_if(self, name: str) -> Tensor | None:
        return self.norm(name) if name + ".weight" in self._tensors else None

    def linear(self, *names: str) -> Any:
        weights = [self._tensors[name + ".weight"].detach().to(self._dtype) for name in names]
        weight = torch.cat(weights)  # a copy, also of one
        if names[0] + ".bias" not in self._tensors:
            return self._ops.pack_linear(weight)
        biases = [self._tensors[name + ".bias"].detach().float() for name in names]
        return self._ops.pack_linear(weight, torch.cat(biases))
