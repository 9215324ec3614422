"""What a model is: the reading of an HF ``config.json``, in the old spelling and that of transformers 5.

Owns which architectures and rope scalings exist here. Knows nothing of tensors, files or the engine's options.
Invariant: what ``from_hf`` gives is valid: every key was checked for its type and range, and what cannot be run as
the checkpoint means it is refused by name, always as a ValueError.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

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
_MAX_INT = 2**31 - 1
_MAX_LAYERS = 10_000  # far above any model; a damaged count must not become a table of that length
_ROPE_RANGE = (1e-9, 1e15)  # inside it no formula of models/rope.py leaves the numbers


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
        scaling = _rope_scaling(config)
        given_theta = scaling.pop("rope_theta", None)
        theta = _rope_number("rope_theta", _or(given_theta, _or(config.get("rope_theta"), 10000.0)))
        old_type = scaling.pop("type", None)
        rope_type = _or(scaling.pop("rope_type", None), _or(old_type, "default"))
        if not isinstance(rope_type, str) or rope_type not in _ROPE_KEYS:
            raise ValueError(
                f"rope scaling type {rope_type!r} is not supported; supported: {', '.join(_ROPE_KEYS)}"
            )
        partial = scaling.pop("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        if partial not in (None, 1, 1.0):
            raise ValueError(f"partial_rotary_factor {partial!r} is not supported; only 1.0 is")
        unknown = sorted(str(key) for key in set(scaling) - set(_ROPE_KEYS[rope_type]))
        if unknown:
            raise ValueError(
                f"unknown rope scaling keys {unknown} for type {rope_type!r}; known: "
                f"{', '.join(_ROPE_KEYS[rope_type]) or 'none'}"
            )
        given = {
            key: _rope_value(key, value) for key, value in scaling.items() if value is not None
        }
        missing = [key for key in _ROPE_REQUIRED.get(rope_type, ()) if key not in given]
        if missing:
            raise ValueError(f"rope scaling of type {rope_type!r} lacks {missing}")
        original = _integer(config, "original_max_position_embeddings", max_position_embeddings)
        given.setdefault("original_max_position_embeddings", original)
        found = cls(type=rope_type, theta=theta, **given)
        found._check_formulas()
        return found

    def _check_formulas(self) -> None:
        """Refuse numbers that are each in range and together divide by zero or turn the scaling round."""
        if self.factor < 1:
            raise ValueError(f"rope scaling: factor must be at least 1, got {self.factor}")
        if self.type == "yarn" and self.theta <= 1:
            raise ValueError(f"rope scaling 'yarn' needs a rope_theta above 1, got {self.theta}")
        if self.type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"rope scaling 'llama3' needs high_freq_factor above low_freq_factor, got "
                f"{self.high_freq_factor} and {self.low_freq_factor}"
            )

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
        for name, value in (("config.json", config), ("generation_config.json", generation)):
            if not isinstance(value, Mapping) and (value is not None or name == "config.json"):
                raise ValueError(f"{name} must hold an object, got {type(value).__name__}")
        architecture = _architecture(config)
        llama, qwen2, qwen3 = (architecture == name for name in ARCHITECTURES)
        _check_unquantised(config)
        hidden_size = _integer(config, "hidden_size")
        num_q_heads = _integer(config, "num_attention_heads")
        num_kv_heads = _integer(config, "num_key_value_heads", num_q_heads)
        num_layers = _integer(config, "num_hidden_layers", high=_MAX_LAYERS)
        if num_q_heads % num_kv_heads:
            raise ValueError(
                f"num_attention_heads {num_q_heads} is no multiple of num_key_value_heads {num_kv_heads}"
            )
        head_dim = _integer(config, "head_dim", 128 if qwen3 else hidden_size // num_q_heads)
        if head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embedding, got {head_dim}")
        act = _or(config.get("hidden_act"), "silu")
        if act != "silu":
            raise ValueError(f"hidden_act {act!r} is not supported; only 'silu' is")
        max_position = _integer(config, "max_position_embeddings", 2048 if llama else 32768, low=2)
        rope = RopeConfig.from_hf(config, max_position)
        if rope.type == "dynamic" and head_dim < 4:
            raise ValueError(
                f"rope scaling 'dynamic' needs a head_dim of 4 or more, got {head_dim}"
            )
        vocab_size = _integer(config, "vocab_size")
        attention_bias = _bool(config, "attention_bias")
        mlp_bias = _bool(config, "mlp_bias")
        return cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=_integer(config, "intermediate_size"),
            num_layers=num_layers,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_number("rms_norm_eps", _or(config.get("rms_norm_eps"), 1e-6), 1e-30, 1.0),
            rope=rope,
            max_position_embeddings=max_position,
            windows=_windows(config, architecture, num_layers),
            qkv_bias=qwen2 or attention_bias,
            o_bias=not qwen2 and attention_bias,
            mlp_bias=llama and mlp_bias,
            qk_norm=qwen3,
            tied_head=_bool(config, "tie_word_embeddings"),
            dtype=_model_dtype(config),
            bos_token_id=next(iter(_in_vocabulary("bos_token_id", config, vocab_size)), None),
            eos_token_ids=_eos_token_ids(generation or {}, config, vocab_size=vocab_size),
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


def token_ids(config: Mapping[str, Any], key: str) -> list[int]:
    """The ids under ``eos_token_id`` or its like: none, one or a list.

    Raises:
        ValueError: what is there is something else.
    """
    value = config.get(key)
    ids = [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
    for token_id in ids:
        if not _is_int(token_id) or token_id < 0:
            raise ValueError(
                f"{key} must be a token id (an integer from 0) or a list of them, got {value!r}"
            )
    return ids


def _or(value: Any, default: Any) -> Any:
    """A key that is null is a key that is not there; 0, "" and [] are values and are checked."""
    return default if value is None else value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(
    config: Mapping[str, Any],
    key: str,
    default: int | None = None,
    *,
    low: int = 1,
    high: int = _MAX_INT,
) -> int:
    value = _or(config.get(key), default)
    if value is None:
        raise ValueError(f"the config lacks {key!r}")
    if not _is_int(value) or not low <= value <= high:
        kind = "a positive integer" if low == 1 else f"an integer from {low}"
        limit = f" up to {high}" if _is_int(value) and value > high else ""
        raise ValueError(f"{key} must be {kind}{limit}, got {value!r}")
    return value


def _number(name: str, value: object, low: float, high: float) -> float:
    """A float between finite limits; NaN is between none."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} must be a positive number from {low} to {high}, got {value!r}")
    return float(value)


def _bool(config: Mapping[str, Any], key: str) -> bool:
    value = _or(config.get(key), False)
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, got {value!r}")
    return value


def _rope_scaling(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``rope_scaling`` or ``rope_parameters``, whichever says something."""
    for key in ("rope_scaling", "rope_parameters"):
        value = _or(config.get(key), {})
        if not isinstance(value, Mapping):
            raise ValueError(f"{key} must be null or an object with rope_type, got {value!r}")
        if value:
            return dict(value)
    return {}


def _rope_number(key: str, value: object) -> float:
    low, high = _ROPE_RANGE
    return _number(
        "rope_theta" if key == "rope_theta" else f"rope scaling: {key}", value, low, high
    )


def _rope_value(key: str, value: object) -> Any:
    if key == "truncate":
        return _bool({key: value}, key)
    if key == "original_max_position_embeddings":
        return _integer({key: value}, key)
    return _rope_number(key, value)


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    if named is not None and not (
        isinstance(named, (list, tuple)) and all(isinstance(name, str) for name in named)
    ):
        raise ValueError(f"architectures must be a list of names, got {named!r}")
    model_type = config.get("model_type")
    name = named[0] if named else _MODEL_TYPES.get(str(model_type), f"model_type {model_type!r}")
    if name not in ARCHITECTURES:
        raise ValueError(
            f"architecture {name} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    return name


def _check_unquantised(config: Mapping[str, Any]) -> None:
    found = _or(config.get("quantization_config"), {})
    if found != {}:
        method = found.get("quant_method") if isinstance(found, Mapping) else repr(found)
        raise ValueError(
            f"quantization_config ({method}) is not supported; use an unquantised checkpoint or a GGUF file"
        )


def _windows(config: Mapping[str, Any], architecture: str, num_layers: int) -> tuple[int, ...]:
    """Window of each layer. As in transformers, Llama has none and Qwen's needs ``use_sliding_window``."""
    used = _bool(config, "use_sliding_window")
    size = config.get("sliding_window", 4096)
    if size is not None:
        size = _integer(config, "sliding_window", 4096, low=1 if used else 0)
    first = _integer(config, "max_window_layers", 28, low=0)
    types = config.get("layer_types")
    if types is not None and not (
        isinstance(types, (list, tuple)) and all(isinstance(name, str) for name in types)
    ):
        raise ValueError(f"layer_types must be a list of names, one a layer, got {types!r}")
    if architecture == "LlamaForCausalLM":
        return (0,) * num_layers
    window = (size or 0) if used else 0
    if types is None:
        return tuple(window if i >= first else 0 for i in range(num_layers))
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
    return tuple(window if name == "sliding_attention" else 0 for name in types)


def _model_dtype(config: Mapping[str, Any]) -> str:
    """A name such as "bfloat16"; a torch dtype, as transformers' configs in memory have it, is read by its name."""
    for key in ("dtype", "torch_dtype"):
        value = config.get(key)
        if value is not None:
            if not isinstance(value, str) and not str(value).startswith("torch."):
                raise ValueError(f"{key} must be a name such as 'bfloat16', got {value!r}")
            return str(value).removeprefix("torch.")
    return "float32"


def _in_vocabulary(key: str, config: Mapping[str, Any], vocab_size: int) -> list[int]:
    """The ids under a key; one that the model cannot produce is dropped, which is logged."""
    ids = token_ids(config, key)
    for token_id in ids:
        if token_id >= vocab_size:
            logger.warning(
                "%s %d is outside the vocabulary of %d: ignored", key, token_id, vocab_size
            )
    return [token_id for token_id in ids if token_id < vocab_size]


def _eos_token_ids(*configs: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Every id that any of the files names, in order, once."""
    ids = [i for config in configs for i in _in_vocabulary("eos_token_id", config, vocab_size)]
    return tuple(dict.fromkeys(ids))
