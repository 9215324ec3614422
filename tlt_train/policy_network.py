"""A Llama decoder with gradients, over packed documents: what a supervised run trains.

Owns the fp32 masters and the passes. Knows nothing of optimisers, data or files. The function is that of
``engine/models/decoder.py``, which has no gradients; it is written from the same config and tensor names, and tests hold
it to transformers' LlamaForCausalLM, gradients included, and to the engine.

Made for a CPU: matrices are multiplied in bf16 (fp32 on request) with those of one input fused, residuals and norms are
fp32, documents lie one behind the other without padding, and only rows that are learnt from go through the head. The
operations whose derivatives autograd takes in many passes over memory (norm, attention, cross entropy) have their own.

The embedding and the head are frozen: they are a fifth of SmolLM2's weights and know the words already.

    N  rows: every position of every document      H  hidden size      D  head size
    M  rows that are learnt from                   V  vocabulary

Invariant: no document's numbers enter another's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from engine.config import ModelConfig
from engine.models.layout import EMBEDDING, FINAL_NORM, HEAD, WeightSource, expected_shapes
from engine.models.rope import rope_tables

_FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
    "input_norm": ("input_layernorm",),
    "post_norm": ("post_attention_layernorm",),
}
_LOSS_ROWS = 256  # rows of logits that exist at once


class PolicyNetwork:
    """A decoder that learns.

    Args:
        config: of the model.
        weights: its tensors; they are copied.
        dtype: of matrix multiplications, ``torch.bfloat16`` or ``torch.float32``.
        max_positions: longest document.

    Raises:
        ValueError: the architecture is not one that trains here.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        *,
        dtype: torch.dtype = torch.bfloat16,
        max_positions: int = 2048,
    ) -> None:
        has_bias = config.qkv_bias or config.o_bias or config.mlp_bias
        if config.architecture != "LlamaForCausalLM" or has_bias:
            raise ValueError(
                f"{config.architecture}{' with biases' if has_bias else ''} cannot be trained here yet; give a "
                f"LlamaForCausalLM without biases, such as smollm2"
            )
        self.config = config
        self.dtype = dtype
        shapes = expected_shapes(config)

        def read(name: str, kind: torch.dtype) -> Tensor:
            out = torch.empty(shapes[name], dtype=kind)
            weights.read(name, out)
            return out

        self.embedding = read(EMBEDDING, dtype)  # [V, H]
        self.head = self.embedding if config.tied_head else read(HEAD, dtype)
        self.final_norm = read(FINAL_NORM, torch.float32).requires_grad_()
        self.layers: list[dict[str, Tensor]] = []
        for i in range(config.num_layers):
            fused = {
                name: torch.cat([read(_full(i, part), torch.float32) for part in parts])
                for name, parts in _FUSED.items()
            }
            self.layers.append({name: tensor.requires_grad_() for name, tensor in fused.items()})
        cos, sin = rope_tables(
            config.rope, config.head_dim, config.max_position_embeddings, max_positions
        )
        self._cos, self._sin = cos.unsqueeze(1).to(dtype), sin.unsqueeze(1).to(dtype)

    @property
    def parameters(self) -> list[Tensor]:
        """The fp32 masters that train."""
        return [tensor for layer in self.layers for tensor in layer.values()] + [self.final_norm]

    @property
    def matrix_elements(self) -> int:
        """Elements of the matrices of all layers: a row's forward takes twice as many operations, a step's six times."""
        return sum(t.numel() for layer in self.layers for t in layer.values() if t.dim() == 2)

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Every tensor by its name in HF checkpoints, copied, without the head where it is tied."""
        found = {
            EMBEDDING: self.embedding,
            FINAL_NORM: self.final_norm,
            **({} if self.config.tied_head else {HEAD: self.head}),
        }
        shapes = expected_shapes(self.config)
        for i, layer in enumerate(self.layers):
            for name, parts in _FUSED.items():
                names = [_full(i, part) for part in parts]
                pieces = layer[name].split([shapes[n][0] for n in names])
                found.update(zip(names, pieces, strict=True))
        return {n: t.detach().to(dtype, copy=True).contiguous() for n, t in found.items()}

    def hidden(self, token_ids: Tensor, doc_starts: Sequence[int]) -> Tensor:
        """[N, H] in the dtype of the matrices: what enters the head.

        Args:
            token_ids: [N] int64, documents one behind the other.
            doc_starts: offsets into N, the first 0, the last N.

        Raises:
            ValueError: a document is longer than ``max_positions``.
        """
        lengths = [end - start for start, end in zip(doc_starts, doc_starts[1:], strict=False)]
        if max(lengths) > self._cos.shape[0]:
            raise ValueError(
                f"a document has {max(lengths)} tokens, at most {self._cos.shape[0]} (max_positions) are supported"
            )
        cos = torch.cat([self._cos[:length] for length in lengths])  # [N, 1, D/2]
        sin = torch.cat([self._sin[:length] for length in lengths])
        residual = self.embedding[token_ids].float()
        for layer in self.layers:
            entering = self._norm(residual, layer["input_norm"])
            attended = self._attend(
                linear(entering, self._cast(layer["qkv"])), cos, sin, doc_starts
            )
            residual = residual + linear(attended, self._cast(layer["o"]))
            entering = self._norm(residual, layer["post_norm"])
            gate, up = linear(entering, self._cast(layer["gate_up"])).chunk(2, dim=-1)
            residual = residual + linear(silu(gate) * up, self._cast(layer["down"]))
        return self._norm(residual, self.final_norm)

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """[M] fp32: minus log-probability of ``targets`` [M] int64 behind the rows ``hidden`` [M, H]."""
        return _CrossEntropy.apply(hidden, self.head, targets)  # type: ignore[no-any-return]

    def _attend(self, qkv: Tensor, cos: Tensor, sin: Tensor, doc_starts: Sequence[int]) -> Tensor:
        config = self.config
        heads = qkv.view(qkv.shape[0], -1, config.head_dim)
        num_rotated = config.num_q_heads + config.num_kv_heads
        a, b = heads[:, :num_rotated].chunk(2, dim=-1)
        rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        q, k = rotated.split((config.num_q_heads, config.num_kv_heads), dim=1)
        return _Attention.apply(q, k, heads[:, num_rotated:], tuple(doc_starts))  # type: ignore[no-any-return]

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return _RmsNorm.apply(x, weight, self.config.rms_norm_eps, self.dtype)  # type: ignore[no-any-return]

    def _cast(self, master: Tensor) -> Tensor:
        return master.to(self.dtype)


def _full(layer: int, part: str) -> str:
    return f"model.layers.{layer}.{part}.weight"


class _RmsNorm(torch.autograd.Function):
    """y = w * x / rms(x), fp32 in, another dtype out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        inverse = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, inverse = ctx.saved_tensors
        grad = grads[0].float()
        normed = x * inverse
        grad_weight = (grad * normed).sum(0)
        grad = grad * weight
        along = (grad * normed).mean(-1, keepdim=True)
        return normed.mul_(-along).add_(grad).mul_(inverse), grad_weight, None, None


class _Attention(torch.autograd.Function):
    """Causal attention within each document; query head i reads key head i // (Hq / Hkv).

    Documents are short here, so a document's weights [Hq, L, L] are kept for the way back. torch's fused kernel for
    CPUs takes twice as long there.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, doc_starts: tuple[int, ...]) -> Tensor:
        ctx.doc_starts = doc_starts
        ctx.scale = q.shape[2] ** -0.5
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        kept: list[Tensor] = []
        for start, end in zip(doc_starts, doc_starts[1:], strict=False):
            queries = _grouped(q[start:end] * ctx.scale, k.shape[1])
            scores = torch.bmm(queries, k[start:end].permute(1, 2, 0))
            length = end - start
            future = torch.full((length, length), float("-inf"), dtype=q.dtype).triu_(1)
            scores.view(-1, length, length).add_(future)
            weights = scores.softmax(dim=-1)
            kept.append(weights)
            _ungroup(torch.bmm(weights, v[start:end].transpose(0, 1)), out[start:end])
        ctx.save_for_backward(q, k, v, *kept)
        return out.view(out.shape[0], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, *kept = ctx.saved_tensors
        grad = grads[0].view(q.shape)
        grad_q, grad_k, grad_v = (
            torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)
        )
        for start, end, weights in zip(ctx.doc_starts, ctx.doc_starts[1:], kept, strict=False):
            keys, values = k[start:end].transpose(0, 1), v[start:end].transpose(0, 1)
            grad_out = _grouped(grad[start:end], k.shape[1])
            grad_v[start:end] = torch.bmm(weights.transpose(1, 2), grad_out).transpose(0, 1)
            grad_weights = torch.bmm(grad_out, values.transpose(1, 2))
            grad_scores = torch._softmax_backward_data(  # pyright: ignore[reportPrivateImportUsage]
                grad_weights, weights, -1, weights.dtype
            )
            grad_scores.mul_(ctx.scale)
            _ungroup(torch.bmm(grad_scores, keys), grad_q[start:end])
            queries = _grouped(q[start:end], k.shape[1])
            grad_k[start:end] = torch.bmm(grad_scores.transpose(1, 2), queries).transpose(0, 1)
        return grad_q, grad_k, grad_v, None


def _grouped(x: Tensor, num_kv: int) -> Tensor:
    """[L, Hq, D] to [Hkv, G * L, D]: the query heads of a key head one behind the other."""
    length, num_heads, head_dim = x.shape
    parts = x.view(length, num_kv, num_heads // num_kv, head_dim).permute(1, 2, 0, 3)
    return parts.reshape(num_kv, -1, head_dim)


def _ungroup(x: Tensor, out: Tensor) -> None:
    """The inverse of ``_grouped``, into ``out`` [L, Hq, D]."""
    length, num_heads, head_dim = out.shape
    num_kv = x.shape[0]
    parts = x.view(num_kv, num_heads // num_kv, length, head_dim).permute(2, 0, 1, 3)
    out.view(length, num_kv, num_heads // num_kv, head_dim).copy_(parts)


class _CrossEntropy(torch.autograd.Function):
    """-log softmax(h E^T)[target], some rows at a time, for a head E that does not train.

    The gradient of h is taken on the way there, while the logits exist: [M, V] never does.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        losses = torch.empty(hidden.shape[0], dtype=torch.float32)
        gradient = torch.empty_like(hidden)
        needs_grad = ctx.needs_input_grad[0]
        for begin in range(0, hidden.shape[0], _LOSS_ROWS):
            rows = slice(begin, begin + _LOSS_ROWS)
            wanted = targets[rows].unsqueeze(1)
            log_probs = linear(hidden[rows], head).log_softmax(dim=-1, dtype=torch.float32)
            losses[rows] = -log_probs.gather(1, wanted).squeeze(1)
            if needs_grad:
                probs = log_probs.exp_()
                probs.scatter_add_(1, wanted, torch.full_like(wanted, -1.0, dtype=torch.float32))
                gradient[rows] = probs.to(hidden.dtype) @ head
        ctx.save_for_backward(gradient)
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].unsqueeze(1).to(gradient.dtype), None, None
