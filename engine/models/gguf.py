"""GGUF files: config and weights of llama, qwen2 and qwen3 models.

Owns the translation of names and metadata to those of HF and the dequantisation. Knows nothing of decoders.
Invariants: tensors are dequantised some rows at a time, so an embedding never exists in fp32 as a whole unless that
is asked for; metadata that change what the model computes are honoured or refused by name.

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
_NEUTRAL: dict[str, tuple[Any, ...]] = {  # keys that are not honoured -> values that change nothing
    "attention.causal": (True,),
    "attn_logit_softcapping": (0,),
    "expert_count": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "rope.scaling.alpha": (0, 1),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (-1, 1),  # -1 is llama.cpp's "as the type says"
    "rope.scaling.yarn_log_multiplier": (0,),
}
_MAX_COUNT = 2**31 - 1


class _BoundedReader(GGUFReader):
    """A reader that stops at the end of the file, where the package's goes on with empty arrays, in an array that a
    damaged length makes endless for hours."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self.data):
            raise ValueError(f"a value at byte {int(offset)} goes past the end")
        return super()._get(offset, dtype, count, override_order)


class GgufSource:
    """The tensors of a GGUF file under their HF names, dequantised as they are read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            reader = _BoundedReader(path)
            self.metadata: dict[str, Any] = {
                key: entry.contents() for key, entry in reader.fields.items()
            }
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            MemoryError,
            OSError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise ValueError(
                f"{path} is damaged, cut short or no GGUF file ({error}); fetch it again"
            ) from error
        if reader.byte_order == "S":
            raise ValueError(f"{path} is in the other byte order; convert it for this machine")
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
            "q_proj": self._count("attention.head_count"),
            "k_proj": self._count("attention.head_count_kv", self._count("attention.head_count")),
        }

    def _get(self, key: str, *default: Any) -> Any:
        value = self.metadata.get(f"{self.architecture}.{key}", *default)
        if value is None and not default:
            raise ValueError(f"{self._path}: metadata lack {self.architecture}.{key}")
        return value

    def _count(self, key: str, *default: int) -> int:
        value = self._get(key, *default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MAX_COUNT:
            raise ValueError(
                f"{self._path}: {self.architecture}.{key} must be a positive integer, got {_short(value)}"
            )
        return value

    def _number(self, key: str, *default: float) -> float:
        value = self._get(key, *default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e30:
            raise ValueError(
                f"{self._path}: {self.architecture}.{key} must be a positive number, got {_short(value)}"
            )
        return float(value)

    def _check_neutral(self, head_dim: int, context_len: int) -> None:
        """Refuse metadata that ask for what is not computed here."""
        if self._get("expert_count", 0):
            raise ValueError(f"{self._path}: mixtures of experts are not supported")
        if self._get("rope.dimension_count", head_dim) != head_dim:
            raise ValueError(
                f"{self._path}: rotary embedding of a part of the head is not supported"
            )
        wrong = [
            key for key, neutral in _NEUTRAL.items() if self._get(key, None) not in (None, *neutral)
        ]
        window = self._get("attention.sliding_window", 0)
        if window and not (isinstance(window, int) and window >= context_len):
            wrong.append("attention.sliding_window")
        if wrong:
            found = ", ".join(
                f"{self.architecture}.{key} = {_short(self._get(key))}" for key in wrong
            )
            raise ValueError(f"{self._path}: {found} is not supported; use the HF checkpoint")

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
        meta, num_heads = self.metadata, self._num_heads["q_proj"]
        embedding = self._shapes.get("model.embed_tokens.weight", (0, 0))
        hidden_size, context_len = self._count("embedding_length"), self._count("context_length")
        head_dim = self._count("attention.key_length", hidden_size // num_heads)
        self._check_neutral(head_dim, context_len)
        first = "model.layers.0."
        eos = [meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
        config: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "vocab_size": embedding[0],
            "hidden_size": hidden_size,
            "intermediate_size": self._count("feed_forward_length"),
            "num_hidden_layers": self._count("block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._num_heads["k_proj"],
            "head_dim": head_dim,
            "max_position_embeddings": context_len,
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._number("rope.freq_base", 10000.0),
            "tie_word_embeddings": HEAD not in self._shapes,
            "attention_bias": first + "self_attn.o_proj.bias" in self._shapes,
            "mlp_bias": first + "mlp.down_proj.bias" in self._shapes,
            "hidden_act": "silu",
            "dtype": self._dtype(),
            "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": [token_id for token_id in dict.fromkeys(eos) if token_id is not None],
        }
        if scaling := self._rope_scaling():
            config["rope_scaling"] = scaling
        return config

    def _rope_scaling(self) -> dict[str, Any] | None:
        """As llama.cpp: a factor without a type is linear; ``rope.scale_linear`` is its old name."""
        factor = self._get("rope.scaling.factor", self._get("rope.scale_linear", None))
        kind = self._get("rope.scaling.type", "none" if factor in (None, 0, 1) else "linear")
        if kind == "none":
            return None
        scaling = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            scaling |= {
                "original_max_position_embeddings": self._get(
                    "rope.scaling.original_context_length", None
                ),
                "beta_fast": self._get("rope.scaling.yarn_beta_fast", None),
                "beta_slow": self._get("rope.scaling.yarn_beta_slow", None),
            }
        return scaling

    def config(self) -> ModelConfig:
        config = ModelConfig.from_hf(self.hf_config())
        if self._rope_factors is None:
            return config
        kind, shape = self._rope_factors.tensor_type.name, self._rope_factors.shape.tolist()
        if kind != "F32" or shape != [config.head_dim // 2]:
            raise ValueError(
                f"{self._path}: tensor {_ROPE_FACTORS} must be F32 of shape [{config.head_dim // 2}], got {kind} of "
                f"{shape}"
            )
        factors = tuple(np.asarray(self._rope_factors.data, dtype=np.float32).ravel().tolist())
        if not all(0 < factor < 1e30 for factor in factors):
            raise ValueError(
                f"{self._path}: tensor {_ROPE_FACTORS} must hold positive numbers, got {_short(factors)}"
            )
        return replace(config, rope=replace(config.rope, freq_factors=factors))

    def _dtype(self) -> str:
        """float32 if the matrices are, else bfloat16: dequantised weights have no use for more."""
        types = {
            tensor.tensor_type.name for name, tensor in self._tensors.items() if "proj" in name
        }
        return "float32" if types == {"F32"} else "bfloat16"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


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
