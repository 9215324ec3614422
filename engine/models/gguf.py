"""GGUF files: config and weights of llama, qwen2 and qwen3 models.

Owns the translation of names and metadata to those of HF and the dequantisation. Knows nothing of decoders. Invariant: tensors are dequantised some rows at a time, so an
embedding never exists in fp32 as a whole unless that is asked for.

Sources: the GGUF specification (ggml-org/ggml, docs/gguf.md); llama.cpp's convert_hf_to_gguf.py, which permutes the
rows of q and k of the llama architecture so that rotary pairs are neighbours; that is undone here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from torch import Tensor

from engine.config import ModelConfig
from engine.models.layout import HEAD

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_SUPPORTED_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": HEAD,
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_CHUNK_ELEMENTS = 1 << 21  # dequantised at once


class GgufSource:
    """The tensors of a GGUF file under their HF names, dequantised as they are read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            reader = GGUFReader(path)
            self.metadata: dict[str, Any] = {
                key: entry.contents() for key, entry in reader.fields.items()
            }
        except (ValueError, IndexError, KeyError, TypeError, OverflowError, OSError) as error:
            raise ValueError(
                f"{path} is damaged, cut short or no GGUF file ({error}); fetch it again"
            ) from error
        self.architecture = str(self.metadata.get("general.architecture"))
        if self.architecture not in _ARCHITECTURES:
            raise ValueError(
                f"{path}: GGUF architecture {self.architecture!r} is not supported; supported: "
                f"{', '.join(_ARCHITECTURES)}"
            )
        self._tensors = {_hf_name(tensor.name): tensor for tensor in reader.tensors}
        self._rope_factors = self._tensors.pop(_ROPE_FACTORS, None)
        for name, tensor in self._tensors.items():
            if tensor.tensor_type.name not in _SUPPORTED_TYPES:
                raise ValueError(
                    f"{path}: tensor {name} is of type {tensor.tensor_type.name}; supported: "
                    f"{', '.join(_SUPPORTED_TYPES)}"
                )
        self._shapes = {
            name: tuple(int(size) for size in reversed(tensor.shape))
            for name, tensor in self._tensors.items()
        }
        self._num_heads = {
            "q_proj": int(self._get("attention.head_count")),
            "k_proj": int(self._get("attention.head_count_kv", self._get("attention.head_count"))),
        }

    def _get(self, key: str, *default: Any) -> Any:
        value = self.metadata.get(f"{self.architecture}.{key}", *default)
        if value is None and not default:
            raise ValueError(f"{self._path}: metadata lack {self.architecture}.{key}")
        return value

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def origin(self, name: str) -> str:
        return str(self._path)

    def read(self, name: str, out: Tensor) -> None:
        part = name.split(".")[-2]
        if self.architecture != "llama" or part not in self._num_heads:
            _dequantize_into(self._tensors[name], out)
            return
        neighbours = torch.empty_like(out)
        _dequantize_into(self._tensors[name], neighbours)
        heads, rest = self._num_heads[part], out.shape[1:]
        pairs = neighbours.view(heads, -1, 2, *rest)  # rotary pairs as neighbours
        out.view(heads, 2, -1, *rest).copy_(pairs.transpose(1, 2))

    def hf_config(self) -> dict[str, Any]:
        """The metadata in the words of ``config.json``."""
        if self._get("expert_count", 0):
            raise ValueError(f"{self._path}: mixtures of experts are not supported")
        meta, num_heads = self.metadata, self._num_heads["q_proj"]
        embedding = self._shapes.get("model.embed_tokens.weight", (0, 0))
        head_dim = int(
            self._get("attention.key_length", self._get("embedding_length") // num_heads)
        )
        if self._get("rope.dimension_count", head_dim) != head_dim:
            raise ValueError(
                f"{self._path}: rotary embedding of a part of the head is not supported"
            )
        first = "model.layers.0."
        eos = [meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
        config: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "vocab_size": embedding[0],
            "hidden_size": int(self._get("embedding_length")),
            "intermediate_size": int(self._get("feed_forward_length")),
            "num_hidden_layers": int(self._get("block_count")),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._num_heads["k_proj"],
            "head_dim": head_dim,
            "max_position_embeddings": int(self._get("context_length")),
            "rms_norm_eps": float(self._get("attention.layer_norm_rms_epsilon")),
            "rope_theta": float(self._get("rope.freq_base", 10000.0)),
            "tie_word_embeddings": HEAD not in self._shapes,
            "attention_bias": first + "self_attn.o_proj.bias" in self._shapes,
            "mlp_bias": first + "mlp.down_proj.bias" in self._shapes,
            "hidden_act": "silu",
            "dtype": self._dtype(),
            "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": [token_id for token_id in dict.fromkeys(eos) if token_id is not None],
        }
        scaling = self._get("rope.scaling.type", "none")
        if scaling != "none":
            config["rope_scaling"] = {
                "rope_type": scaling,
                "factor": self._get("rope.scaling.factor", None),
            }
            if scaling == "yarn":
                original = self._get("rope.scaling.original_context_length", None)
                config["rope_scaling"]["original_max_position_embeddings"] = original
        return config

    def config(self) -> ModelConfig:
        config = ModelConfig.from_hf(self.hf_config())
        if self._rope_factors is None:
            return config
        factors = tuple(np.asarray(self._rope_factors.data, dtype=np.float32).ravel().tolist())
        return replace(config, rope=replace(config.rope, freq_factors=factors))

    def _dtype(self) -> str:
        """float32 if the matrices are, else bfloat16: dequantised weights have no use for more."""
        types = {
            tensor.tensor_type.name for name, tensor in self._tensors.items() if "proj" in name
        }
        return "float32" if types == {"F32"} else "bfloat16"


def _hf_name(name: str) -> str:
    """The HF name of a GGUF tensor; one that is not known keeps its own and is refused later."""
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _IN_LAYER:
        return f"model.layers.{parts[1]}.{_IN_LAYER[parts[2]]}.{parts[3]}"
    return name


def _dequantize_into(tensor: Any, out: Tensor) -> None:
    """A tensor's values into ``out`` of its shape, some rows at a time."""
    kind: GGMLQuantizationType = tensor.tensor_type
    data = tensor.data if len(tensor.shape) > 1 else tensor.data[None]
    rows = out.view(data.shape[0], -1)
    step = max(1, _CHUNK_ELEMENTS // rows.shape[1])
    for start in range(0, rows.shape[0], step):
        values = np.array(dequantize(data[start : start + step], kind), dtype=np.float32)
        rows[start : start + step].copy_(torch.from_numpy(values))
