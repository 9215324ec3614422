"""One decoder for Llama, Qwen2 and Qwen3: rows in, logits and hidden states out.

Owns the packed weights and the rotary tables. Knows nothing of requests, sampling or speculation: a token tree is
rows like any others (``engine/batch.py``). Which model it is shows only in which weights are there (biases, norms
of heads) and in the windows.

A step of a small model takes 9 ms, so the Python of a forward is kept to one call an op: buffers and their views
are ready (``workspace.py``), and so are the arguments of each layer.

Invariants: a row's result depends on its own logical sequence alone; ``load_weights`` replaces every weight or
none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.batch import ForwardBatch
from engine.config import ModelConfig
from engine.models.layout import EMBEDDING, FINAL_NORM, HEAD, TensorSource, WeightSource, check
from engine.models.load_threads import one_torch_thread
from engine.models.rope import rope_tables
from engine.models.workspace import Views, Workspace

Weights = WeightSource | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """Results of a forward, all fp32. They live in the decoder's buffers: valid until its next forward.

    Attributes:
        logits: [L, V] of the rows ``batch.logit_rows``.
        hidden: [R, H] final normed hidden states, None unless they or taps were asked for.
        taps: [R, len(tap_layers), H], None unless asked for. The tap of layer i is the residual stream that enters
            it, transformers' ``hidden_states[i]``: 0 is the embedding. That of ``num_layers`` is what leaves the
            last layer, not yet normed.
    """

    logits: Tensor
    hidden: Tensor | None = None
    taps: Tensor | None = None


class LayerWeights(NamedTuple):
    """One layer. ``next_norm`` is the norm after it: the next layer's first one, or the final one."""

    qkv: Any
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Any
    post_norm: Tensor
    gate_up: Any
    down: Any
    next_norm: Tensor


class DecoderWeights(NamedTuple):
    """All that an update replaces, as one value, so that a flip is one assignment."""

    embedding: Tensor
    first_norm: Tensor
    layers: tuple[LayerWeights, ...]
    head: Any


class Decoder:
    """A model, its weights packed for one table of ops.

    Args:
        config: the model.
        weights: its tensors by HF name, in memory or in files; they are copied.
        ops: the ops (``engine/ops``).
        dtype: of weights and KV cache, "float32" or "bfloat16"; activations are fp32.
        max_rows: most rows of one forward.
        max_positions: longest sequence in tokens, where the rotary tables end; None is the model's.

    Raises:
        ValueError: tensors that are missing, unexpected or of another shape.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        ops: Any,
        *,
        dtype: str = "float32",
        max_rows: int = 512,
        max_positions: int | None = None,
    ) -> None:
        self.config = config
        self.ops = ops
        self.kv_dtype: torch.dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
        self.max_rows = max_rows
        self.max_positions = max_positions or config.max_position_embeddings
        self.cos, self.sin = rope_tables(
            config.rope, config.head_dim, config.max_position_embeddings, self.max_positions
        )
        self._scale = config.head_dim**-0.5
        self._workspace = Workspace(config, max_rows)
        self._kv_cache: Tensor | None = None
        self._kv: tuple[tuple[Tensor, Tensor, int], ...] = ()
        self.weights = self.stage(weights)

    def stage(self, weights: Weights) -> DecoderWeights:
        """Check every tensor and pack them beside the weights in use, which stay as they are.

        Raises:
            ValueError: as the constructor.
        """
        source = weights if isinstance(weights, WeightSource) else TensorSource(weights)
        check(self.config, source)
        with one_torch_thread():
            return self._pack(_Reader(source, self.ops, self.kv_dtype))

    def _pack(self, read: _Reader) -> DecoderWeights:
        config = self.config
        embedding = read.table(EMBEDDING)
        norms = [
            read.norm(f"model.layers.{i}.input_layernorm.weight") for i in range(config.num_layers)
        ]
        norms.append(read.norm(FINAL_NORM))
        layers = tuple(
            self._stage_layer(read, f"model.layers.{i}.", norms[i + 1])
            for i in range(config.num_layers)
        )
        head = self.ops.pack_linear(embedding if config.tied_head else read.table(HEAD))
        return DecoderWeights(embedding, norms[0], layers, head)

    def _stage_layer(self, read: _Reader, prefix: str, next_norm: Tensor) -> LayerWeights:
        config = self.config
        attn, mlp = prefix + "self_attn.", prefix + "mlp."
        return LayerWeights(
            qkv=read.linear(
                attn + "q_proj", attn + "k_proj", attn + "v_proj", bias=config.qkv_bias
            ),
            q_norm=read.norm(attn + "q_norm.weight") if config.qk_norm else None,
            k_norm=read.norm(attn + "k_norm.weight") if config.qk_norm else None,
            o=read.linear(attn + "o_proj", bias=config.o_bias),
            post_norm=read.norm(prefix + "post_attention_layernorm.weight"),
            gate_up=read.linear(mlp + "gate_proj", mlp + "up_proj", bias=config.mlp_bias),
            down=read.linear(mlp + "down_proj", bias=config.mlp_bias),
            next_norm=next_norm,
        )

    def flip(self, staged: DecoderWeights) -> None:
        """Use what ``stage`` made from the next forward on."""
        self.weights = staged

    def load_weights(self, weights: Weights) -> None:
        """Replace every weight. For a moment both sets are in memory.

        Raises:
            ValueError: as the constructor; the weights in use are then untouched.
        """
        self.flip(self.stage(weights))

    def attach_kv_cache(self, kv_cache: Tensor) -> None:
        """Make a KV cache [layers, 2, P, PAGE, Hkv, D] of ``kv_dtype`` the one that forwards use."""
        config = self.config
        found = (kv_cache.shape[0], kv_cache.shape[1], *kv_cache.shape[-2:], kv_cache.dtype)
        expected = (config.num_layers, 2, config.num_kv_heads, config.head_dim, self.kv_dtype)
        assert found == expected, f"KV cache {found}, expected {expected}"
        self._kv_cache = kv_cache
        self._kv = tuple(
            (kv_cache[layer, 0], kv_cache[layer, 1], config.windows[layer])
            for layer in range(config.num_layers)
        )

    def forward(
        self,
        batch: ForwardBatch,
        kv_cache: Tensor | None = None,
        *,
        tap_layers: tuple[int, ...] = (),
        want_hidden: bool = False,
    ) -> ForwardOutput:
        """Store the keys and values of the rows, and give what is asked for of them.

        Args:
            batch: the rows. ``positions`` are below ``max_positions``.
            kv_cache: as ``attach_kv_cache``; None is the one attached.
            tap_layers: layers whose input is wanted, see ``ForwardOutput.taps``.
            want_hidden: give ``ForwardOutput.hidden`` even without taps.
        """
        if kv_cache is not None and kv_cache is not self._kv_cache:
            self.attach_kv_cache(kv_cache)
        weights, views = self.weights, self._workspace.rows(batch.token_ids.shape[0])
        all_rows = want_hidden or bool(tap_layers)
        taps = self._taps(views, tap_layers)
        self.ops.embedding(batch.token_ids, weights.embedding, views.x)
        self.ops.rms_norm(views.x, weights.first_norm, self.config.rms_norm_eps, views.h)
        if 0 in taps:
            self._tap(views, taps[0])
        last = len(weights.layers) - 1
        for index, (layer, kv) in enumerate(zip(weights.layers, self._kv, strict=True)):
            self._attend(layer, kv, batch, views)
            if index == last and not all_rows:
                break
            self._transform(layer, views.x, views.attended_flat, views)
            if index + 1 in taps:
                self._tap(views, taps[index + 1])
        if all_rows:
            return self._finish_all(batch, views, tap_layers)
        return self._finish_picked(batch, views)

    def _attend(
        self, layer: LayerWeights, kv: tuple[Tensor, Tensor, int], batch: ForwardBatch, views: Views
    ) -> None:
        """views.attended = attention of views.h; stores keys and values."""
        ops = self.ops
        keys, values, window = kv
        ops.linear(views.h, layer.qkv, views.qkv)
        ops.rope_store(
            views.qkv,
            batch,
            self.cos,
            self.sin,
            layer.q_norm,
            layer.k_norm,
            self.config.rms_norm_eps,
            keys,
            values,
            views.q,
        )
        ops.attention(views.q, keys, values, batch, self._scale, window, views.attended)

    def _transform(self, layer: LayerWeights, x: Tensor, attended: Tensor, views: Views) -> None:
        """The rest of a layer: x [n, H] is brought up to date, views.h is x normed for what comes next."""
        ops, eps = self.ops, self.config.rms_norm_eps
        proj, h = views.proj, views.h
        ops.linear(attended, layer.o, proj)
        ops.add_rms_norm(proj, x, layer.post_norm, eps, h)
        ops.linear(h, layer.gate_up, views.gate_up)
        ops.silu_mul(views.gate_up, views.act)
        ops.linear(views.act, layer.down, proj)
        ops.add_rms_norm(proj, x, layer.next_norm, eps, h)

    def _finish_picked(self, batch: ForwardBatch, views: Views) -> ForwardOutput:
        """The last layer from its attention on, for rows whose logits are asked for: others are done by now."""
        rows = batch.logit_rows
        logits = self._workspace.logits(rows.shape[0])
        if rows.shape[0] == 0:
            return ForwardOutput(logits)
        few = self._workspace.rows(rows.shape[0])
        torch.index_select(views.x, 0, rows, out=few.picked)
        torch.index_select(views.attended_flat, 0, rows, out=few.picked_attended)
        self._transform(self.weights.layers[-1], few.picked, few.picked_attended, few)
        self.ops.linear(few.h, self.weights.head, logits)
        return ForwardOutput(logits)

    def _finish_all(
        self, batch: ForwardBatch, views: Views, tap_layers: tuple[int, ...]
    ) -> ForwardOutput:
        """Logits where the final hidden states of all rows are there."""
        rows = batch.logit_rows
        logits = self._workspace.logits(rows.shape[0])
        if rows.shape[0]:
            picked = self._workspace.rows(rows.shape[0]).picked
            torch.index_select(views.h, 0, rows, out=picked)
            self.ops.linear(picked, self.weights.head, logits)
        taps = None
        if tap_layers:
            taps = self._workspace.taps(views.x.shape[0], len(tap_layers))[0]
        return ForwardOutput(logits, views.h, taps)

    def _taps(self, views: Views, tap_layers: tuple[int, ...]) -> dict[int, list[Tensor]]:
        """Layer -> where its input is to be copied."""
        targets: dict[int, list[Tensor]] = {}
        if tap_layers:
            _, *columns = self._workspace.taps(views.x.shape[0], len(tap_layers))
            for layer, column in zip(tap_layers, columns, strict=True):
                assert 0 <= layer <= self.config.num_layers, f"tap of layer {layer}"
                targets.setdefault(layer, []).append(column)
        return targets

    @staticmethod
    def _tap(views: Views, targets: list[Tensor]) -> None:
        for target in targets:
            target.copy_(views.x)


class _Reader:
    """Reads tensors of a source, several stacked into one, straight into memory of the dtype that is wanted."""

    def __init__(self, source: WeightSource, ops: Any, dtype: torch.dtype) -> None:
        self._source = source
        self._shapes = source.shapes()
        self._ops = ops
        self._dtype = dtype

    def table(self, *names: str, dtype: torch.dtype | None = None) -> Tensor:
        """The tensors one below the other."""
        sizes = [self._shapes[name][0] for name in names]
        shape = (sum(sizes), *self._shapes[names[0]][1:])
        out = torch.empty(shape, dtype=dtype or self._dtype)
        for name, part in zip(names, out.split(sizes), strict=True):
            self._source.read(name, part)
        return out

    def norm(self, name: str) -> Tensor:
        return self.table(name, dtype=torch.float32)

    def linear(self, *prefixes: str, bias: bool) -> Any:
        weight = self.table(*(prefix + ".weight" for prefix in prefixes))
        if not bias:
            return self._ops.pack_linear(weight)
        names = (prefix + ".bias" for prefix in prefixes)
        return self._ops.pack_linear(weight, self.table(*names, dtype=torch.float32))
