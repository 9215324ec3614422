"""Which tensors a decoder is made of, where they come from, and the check that a source has just these.

Owns the table name -> shape and the protocol of a weight source. Knows nothing of how the decoder computes or of
file formats. Invariant: a source that passed ``check`` can be read to the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor

from engine.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
_DERIVED = re.compile(
    r"\.rotary_emb\.inv_freq$"
)  # written by old checkpoints, a function of config.json


@runtime_checkable
class WeightSource(Protocol):
    """Named tensors that are read one by one, so that the whole need never be in memory twice."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor."""
        ...

    def origin(self, name: str) -> str:
        """Where a tensor is, for messages: the file."""
        ...

    def read(self, name: str, out: Tensor) -> None:
        """Copy a tensor into ``out`` of the same shape, rounded to its dtype."""
        ...


class TensorSource:
    """Tensors that are in memory, such as a ``state_dict``."""

    def __init__(self, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        try:
            self._tensors = dict(tensors)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"weights must be a dict name -> tensor or pairs of these, got {type(tensors).__name__} ({error})"
            ) from error
        for name, tensor in self._tensors.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise ValueError(
                    f"weights must map names to tensors, got {name!r}: {type(tensor).__name__}"
                )
            if not tensor.is_floating_point() or tensor.is_meta:
                kind = "has no data (meta device)" if tensor.is_meta else f"is of {tensor.dtype}"
                raise ValueError(f"weights: tensor {name} {kind}; give floating point values")

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def origin(self, name: str) -> str:
        return "the tensors given"

    def read(self, name: str, out: Tensor) -> None:
        out.copy_(self._tensors[name].detach())


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model, in the names of HF checkpoints."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_width, kv_width = (
        config.num_q_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
    )
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    linears = (
        ("self_attn.q_proj", q_width, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv_width, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv_width, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q_width, config.o_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    )
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        if config.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (config.head_dim,)
        for name, width_out, width_in, bias in linears:
            shapes[f"{prefix}{name}.weight"] = (width_out, width_in)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (width_out,)
    shapes[FINAL_NORM] = (hidden,)
    if not config.tied_head:
        shapes[HEAD] = (config.vocab_size, hidden)
    return shapes


def check(config: ModelConfig, source: WeightSource) -> None:
    """Refuse a source whose tensors are not the model's.

    A tied model may bring ``lm_head.weight``: it is the embedding again and is not read.

    Raises:
        ValueError: tensors that are missing, unexpected or of another shape, by name and file.
    """
    found = source.shapes()
    somewhere = source.origin(next(iter(found), ""))
    if config.num_layers > len(found):  # before names are made: a damaged count may be any number
        raise ValueError(
            f"{somewhere}: the config says {config.num_layers} layers, but there are {len(found)} tensors in all; "
            f"the checkpoint is incomplete, or the config describes another model"
        )
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in found]
    if missing:
        raise ValueError(
            f"{somewhere}: {len(missing)} tensors are missing: {_some(missing)}; the checkpoint is incomplete, or "
            f"the config describes another model"
        )
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            raise ValueError(
                f"{source.origin(name)}: tensor {name} has shape {list(found[name])}, "
                f"the config says {list(shape)}"
            )
    extra = [name for name in found if name not in expected and not _DERIVED.search(name)]
    if config.tied_head:
        extra = [name for name in extra if name != HEAD]
    if extra:
        raise ValueError(
            f"{source.origin(extra[0])}: {len(extra)} unexpected tensors: {_some(extra)}; "
            f"the config describes another model"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
