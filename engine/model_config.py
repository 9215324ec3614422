"""What a model is: the reading of an HF ``config.json``, in the old spelling and that of transformers 5.

Owns which architectures and rope scalings exist here. Knows nothing of tensors, files or the engine's options.
Invariant: an instance that exists is valid; what cannot be run as the checkpoint means it is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_MODEL_TYPES: dict[str, str] = dict(zip(("llama", "qwen2", "qwen3"), ARCHITECTURES, strict=True))
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}
_ROPE_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding; names as in transformers 5 ``rope_parameters``. See ``models/rope.py`` for the meaning.

    ``freq_factors`` [D / 2] divides the frequencies: GGUF files carry the llama3 scaling in this form.
    """

    type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    freq_factors: tuple[float, ...] = ()

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], max_position_embeddings: int) -> RopeConfig:
        """From the old spelling (``rope_scaling``, ``rope_theta``) or the new one (``rope_parameters``)."""
        scaling = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
        theta = scaling.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
        old_type = scaling.pop("type", None)
        rope_type = scaling.pop("rope_type", None) or old_type or "default"
        if rope_type not in _ROPE_KEYS:
            raise ValueError(
                f"rope scaling type {rope_type!r} is not supported; supported: {', '.join(_ROPE_KEYS)}"
            )
        partial = scaling.pop("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        if partial not in (None, 1, 1.0):
            raise ValueError(f"partial_rotary_factor {partial} is not supported; only 1.0 is")
        unknown = sorted(set(scaling) - set(_ROPE_KEYS[rope_type]))
        if unknown:
            raise ValueError(
                f"unknown rope scaling keys {unknown} for type {rope_type!r}; known: "
                f"{', '.join(_ROPE_KEYS[rope_type]) or 'none'}"
            )
        missing = [k for k in _ROPE_REQUIRED.get(rope_type, ()) if scaling.get(k) is None]
        if missing:
            raise ValueError(f"rope scaling of type {rope_type!r} lacks {missing}")
        given = {key: value for key, value in scaling.items() if value is not None}
        for key, value in [*given.items(), ("rope_theta", theta)]:
            if not isinstance(value, (int, float)) or (key != "truncate" and value <= 0):
                raise ValueError(f"rope scaling: {key} must be a positive number, got {value!r}")
        given.setdefault(
            "original_max_position_embeddings",
            config.get("original_max_position_embeddings") or max_position_embeddings,
        )
        return cls(type=rope_type, theta=float(theta), **given)

    def max_context(self, max_position_embeddings: int) -> int:
        """Longest context in tokens that the scaling is meant for."""
        if self.type in ("linear", "dynamic"):
            return int(max_position_embeddings * self.factor)
        if self.type == "yarn":
            scaled = int(self.original_max_position_embeddings * self.factor)
            return max(max_position_embeddings, scaled)
        return max_position_embeddings


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and meaning of a decoder. ``windows[i]`` is the sliding window of layer i in tokens, 0 for none."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    windows: tuple[int, ...]
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_head: bool
    dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """From the contents of ``config.json`` and, where there is one, ``generation_config.json``.

        Defaults are those of the transformers class of the architecture.

        Raises:
            ValueError: what is missing, wrong or not supported, by name.
        """
        architecture = _architecture(config)
        qwen3 = architecture == "Qwen3ForCausalLM"
        hidden_size = _int(config, "hidden_size")
        num_q_heads = _int(config, "num_attention_heads")
        num_kv_heads = _int(config, "num_key_value_heads", num_q_heads)
        num_layers = _int(config, "num_hidden_layers")
        if num_q_heads % num_kv_heads:
            raise ValueError(
                f"num_attention_heads {num_q_heads} is no multiple of num_key_value_heads {num_kv_heads}"
            )
        head_dim = _int(config, "head_dim", 128 if qwen3 else hidden_size // num_q_heads)
        if head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embedding, got {head_dim}")
        act = config.get("hidden_act") or "silu"
        if act != "silu":
            raise ValueError(f"hidden_act {act!r} is not supported; only 'silu' is")
        if config.get("quantization_config"):
            method = config["quantization_config"].get("quant_method")
            raise ValueError(
                f"quantization_config ({method}) is not supported; use an unquantised checkpoint or a GGUF file"
            )
        max_position = _int(
            config,
            "max_position_embeddings",
            2048 if architecture == "LlamaForCausalLM" else 32768,
        )
        attention_bias = bool(config.get("attention_bias", False))
        qwen2 = architecture == "Qwen2ForCausalLM"
        return cls(
            architecture=architecture,
            vocab_size=_int(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_int(config, "intermediate_size"),
            num_layers=num_layers,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_positive_float(config, "rms_norm_eps", 1e-6),
            rope=RopeConfig.from_hf(config, max_position),
            max_position_embeddings=max_position,
            windows=_windows(config, architecture, num_layers),
            qkv_bias=qwen2 or attention_bias,
            o_bias=not qwen2 and attention_bias,
            mlp_bias=architecture == "LlamaForCausalLM" and bool(config.get("mlp_bias", False)),
            qk_norm=qwen3,
            tied_head=bool(config.get("tie_word_embeddings", False)),
            dtype=_model_dtype(config),
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=_eos_token_ids(generation or {}, config),
        )

    @property
    def max_context(self) -> int:
        """Longest context in tokens that the model's rotary embedding is meant for."""
        return self.rope.max_context(self.max_position_embeddings)

    @property
    def num_parameters(self) -> int:
        """Weights of all matrices; a tied head counts once."""
        attention = (2 * self.num_q_heads + 2 * self.num_kv_heads) * self.head_dim
        layer = self.hidden_size * (attention + 3 * self.intermediate_size)
        tables = (1 if self.tied_head else 2) * self.vocab_size * self.hidden_size
        return self.num_layers * layer + tables

    def kv_bytes_per_token(self, dtype: str) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures") or [_MODEL_TYPES.get(str(config.get("model_type")))]
    name = named[0] or f"model_type {config.get('model_type')!r}"
    if name not in ARCHITECTURES:
        raise ValueError(
            f"architecture {name} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    return name


def _int(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"config.json lacks {key!r}")
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"config.json: {key} must be a positive integer, got {value!r}")
    return value


def _positive_float(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"config.json: {key} must be a positive number, got {value!r}")
    return float(value)


def _windows(config: Mapping[str, Any], architecture: str, num_layers: int) -> tuple[int, ...]:
    """Window of each layer. As in transformers, Llama has none and Qwen's needs ``use_sliding_window``."""
    if architecture == "LlamaForCausalLM":
        return (0,) * num_layers
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", 28)
        return tuple((window or 0) if i >= first else 0 for i in range(num_layers))
    if len(types) != num_layers:
        raise ValueError(
            f"layer_types names {len(types)} layers, num_hidden_layers is {num_layers}"
        )
    for name in set(types) - {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"layer_types: {name!r} is not supported; supported: full_attention, sliding_attention"
        )
    if "sliding_attention" in types and not window:
        raise ValueError(
            "layer_types asks for sliding_attention, but use_sliding_window is false or sliding_window is not set"
        )
    return tuple(int(window or 0) if name == "sliding_attention" else 0 for name in types)


def _model_dtype(config: Mapping[str, Any]) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return name.removeprefix("torch.")


def _eos_token_ids(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    """Every id that any of the files names, in order, once."""
    ids: list[int] = []
    for config in configs:
        value = config.get("eos_token_id")
        ids += [] if value is None else [value] if isinstance(value, int) else list(value)
    return tuple(dict.fromkeys(ids))
