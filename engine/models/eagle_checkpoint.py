"""EAGLE heads on disk: the raw EAGLE and EAGLE-3 directories, and those of the speculators library.

Owns the reading of their ``config.json`` and the writing of raw directories. Knows nothing of how a head computes.
Invariant: what ``open_drafter`` returns has just the tensors of its config; what ``save_drafter`` wrote is read back
the same.

Which hidden states ``eagle_aux_hidden_state_layer_ids`` means has two conventions in the field. At the top level (vLLM,
speculators) id i is what enters layer i, which is ``EagleConfig.tap_layers``. Inside ``eagle_config`` (SGLang,
SpecForge) id i is what leaves layer i, one more. Both are read as they are meant, and both are written.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.config import ModelConfig
from engine.models.eagle_layout import (
    D2T,
    HEAD,
    T2D,
    EagleConfig,
    canonical,
    check_names,
    check_target,
    default_taps,
)
from engine.models.loader import INDEX, SINGLE, read_json

CONFIG = "config.json"
_IDS = "eagle_aux_hidden_state_layer_ids"
_ATTN = "midlayer.self_attn."


@dataclass(frozen=True, slots=True)
class DrafterCheckpoint:
    """A head as it lies on disk; ``tensors`` by canonical name."""

    path: Path
    config: EagleConfig
    tensors: dict[str, Tensor]


def open_drafter(directory: str | os.PathLike[str], target: ModelConfig) -> DrafterCheckpoint:
    """Open a head made for ``target``.

    Raises:
        ValueError: what is missing, damaged, not supported or different from the target, and where.
    """
    path = Path(directory).expanduser()
    if not path.is_dir():
        raise ValueError(
            f"drafter {str(path)!r} is no directory; give one with config.json and {SINGLE}"
        )
    raw = read_json(path / "config.json")
    tensors = canonical(_read_tensors(path))
    try:
        config = read_config(raw, tensors.keys(), target)
        check_target(config, target)
        check_names(config, {n: tuple(t.shape) for n, t in tensors.items()}, str(path))
    except ValueError as error:
        text = str(error)
        raise ValueError(text if str(path) in text else f"{path}: {text}") from error
    return DrafterCheckpoint(path, config, tensors)


def _read_tensors(directory: Path) -> dict[str, Tensor]:
    index = directory / INDEX
    if index.is_file():
        shards = read_json(index).get("weight_map")
        if (
            not isinstance(shards, dict)
            or not shards
            or not all(isinstance(s, str) for s in shards.values())
        ):
            raise ValueError(f"{index} has no weight_map of names to files")
        names = list(dict.fromkeys(shards.values()))
    else:
        names, shards = [SINGLE], {}
    tensors: dict[str, Tensor] = {}
    for name in names:
        path = directory / name
        try:
            with safe_open(str(path), framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (not a mapping)
                    tensors[key] = file.get_tensor(key)
        except FileNotFoundError as error:
            raise ValueError(f"{path} does not exist; a drafter is kept as safetensors") from error
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is damaged or cut short ({error})") from error
    if missing := sorted(set(shards) - set(tensors)):
        raise ValueError(f"{index} lists tensors that its files lack: {', '.join(missing[:4])}")
    return tensors


def read_config(raw: Mapping[str, Any], names: Any, target: ModelConfig) -> EagleConfig:
    """The meaning of a ``config.json`` beside the canonical names of the tensors.

    Which biases and head norms there are is seen from the tensors, since configs of the field do not agree on it.

    Raises:
        ValueError: what is not supported, or not of a head.
    """
    names = set(names)
    kind = _kind(raw, names)
    layer = raw.get("transformer_layer_config", raw)
    nested = raw.get("eagle_config") or {}
    for key, value in (("transformer_layer_config", layer), ("eagle_config", nested)):
        if not isinstance(value, Mapping):
            raise ValueError(f"{key} must be an object, got {value!r}")
    count = layer.get("num_hidden_layers", 1)
    if count != 1:
        raise ValueError(f"num_hidden_layers must be 1 for a drafter, got {count!r}")
    base = _layer_config(layer)
    eagle3 = kind == "eagle3"
    draft_vocab = _or(raw.get("draft_vocab_size"), base.vocab_size) if eagle3 else base.vocab_size
    target_hidden = _or(raw.get("target_hidden_size"), base.hidden_size)
    for key, value in (("draft_vocab_size", draft_vocab), ("target_hidden_size", target_hidden)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{key} must be a positive integer, got {value!r}")
    return EagleConfig(
        kind=kind,
        vocab_size=base.vocab_size,
        draft_vocab_size=draft_vocab,
        hidden_size=base.hidden_size,
        target_hidden_size=target_hidden,
        intermediate_size=base.intermediate_size,
        num_q_heads=base.num_q_heads,
        num_kv_heads=base.num_kv_heads,
        head_dim=base.head_dim,
        rms_norm_eps=base.rms_norm_eps,
        rope=base.rope,
        max_position_embeddings=base.max_position_embeddings,
        tap_layers=_tap_layers(raw, nested, target.num_layers) if eagle3 else (),
        qkv_bias=_ATTN + "q_proj.bias" in names,
        o_bias=_ATTN + "o_proj.bias" in names,
        mlp_bias="midlayer.mlp.gate_proj.bias" in names,
        fc_bias="fc.bias" in names,
        qk_norm=_ATTN + "q_norm.weight" in names,
        norm_before_fc=eagle3 and _flag("norm_before_fc", raw, nested),
        fc_norm=eagle3 and _flag("fc_norm", raw, nested),
        norm_before_residual=eagle3 and _flag("norm_before_residual", raw, nested),
        norm_output=eagle3 and _flag("norm_output", raw, nested),
        own_head=HEAD in names,
    )


def _kind(raw: Mapping[str, Any], names: set[str]) -> Any:
    """ "eagle" or "eagle3"; the target's own architecture, as raw EAGLE-1 has it, says nothing: the tensors do."""
    speculators = raw.get("speculators_model_type")
    if speculators is not None:
        if speculators != "eagle3":
            raise ValueError(
                f"speculators_model_type {speculators!r} is not supported; only 'eagle3' is"
            )
        return "eagle3"
    found = raw.get("architectures") or []
    name = str(found[0]) if isinstance(found, (list, tuple)) and found else ""
    if "eagle" in name.lower():
        return "eagle3" if "eagle3" in name.lower() else "eagle"
    if "fc.weight" not in names:
        raise ValueError(f"this is no EAGLE head: there is no fc.weight (architecture {name!r})")
    return "eagle3" if "midlayer.hidden_norm.weight" in names else "eagle"


def _layer_config(layer: Mapping[str, Any]) -> ModelConfig:
    """The layer as a model of one layer: the checks and defaults of ``ModelConfig`` are those wanted here."""
    kept = {
        key: value
        for key, value in layer.items()
        if key not in ("bos_token_id", "eos_token_id", "layer_types", "tie_word_embeddings")
    }
    if layer.get("model_type") == "qwen3" and layer.get("head_dim") is None:
        kept["head_dim"] = 128  # that architecture's default
    return ModelConfig.from_hf({**kept, "architectures": ["LlamaForCausalLM"]})


def _tap_layers(
    raw: Mapping[str, Any], nested: Mapping[str, Any], num_layers: int
) -> tuple[int, ...]:
    ids, shift = raw.get(_IDS), 0
    if not ids:
        ids, shift = nested.get(_IDS), 1
    if not ids:
        return default_taps(num_layers)
    if not isinstance(ids, (list, tuple)) or not all(
        isinstance(i, int) and not isinstance(i, bool) for i in ids
    ):
        raise ValueError(f"{_IDS} must be a list of layer numbers, got {ids!r}")
    return tuple(i + shift for i in ids)


def _flag(key: str, *places: Mapping[str, Any]) -> bool:
    for place in places:
        value = place.get(key)
        if value is not None:
            if not isinstance(value, bool):
                raise ValueError(f"{key} must be true or false, got {value!r}")
            return value
    return False


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def save_drafter(
    directory: str | os.PathLike[str],
    config: EagleConfig,
    tensors: Mapping[str, Tensor],
    *,
    target: ModelConfig | None = None,
) -> None:
    """Write a raw EAGLE or EAGLE-3 directory: ``config.json`` and ``model.safetensors``.

    A kill leaves no half of a head: a new directory gets its name when it is whole, and one that is there has a
    ``config.json`` only while the tensors beside it are whole and that config's.

    Args:
        directory: made if it is not there; what else it holds stays.
        config: the head.
        tensors: by any accepted name, in the dtype that is to be written; ``t2d`` is made from ``d2t``.
        target: its architecture is named for a raw EAGLE head; None names Llama's.

    Raises:
        ValueError: the tensors are not the head's.
    """
    path = Path(directory)
    named = canonical(tensors)
    check_names(config, {n: tuple(t.shape) for n, t in named.items()}, str(path))
    if D2T in named:
        flags = torch.zeros(config.vocab_size, dtype=torch.bool)
        flags[torch.arange(config.draft_vocab_size) + named[D2T].long()] = True
        named = named | {T2D: flags}
    prefix = "midlayer." if config.kind == "eagle3" else "layers.0."
    out = {
        n.replace("midlayer.", prefix): t.detach().clone().contiguous() for n, t in named.items()
    }
    dtype = str(named["fc.weight"].dtype).removeprefix("torch.")
    raw = write_config(config, target) | {"torch_dtype": dtype}
    text = json.dumps(raw, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = (path if path.exists() else path.parent) / f".{path.name}.tmp"
    shutil.rmtree(staging, ignore_errors=True)  # of a writer that was killed
    try:
        staging.mkdir()
        save_file(out, staging / SINGLE, metadata={"format": "pt"})
        (staging / CONFIG).write_text(text)
        for name in (SINGLE, CONFIG):
            with open(staging / name, "rb") as file:
                os.fsync(file.fileno())
        if not path.exists():
            staging.rename(path)
            return
        (path / CONFIG).unlink(missing_ok=True)
        for name in (SINGLE, CONFIG):  # the config last: it makes a head of the directory
            os.replace(staging / name, path / name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def write_config(config: EagleConfig, target: ModelConfig | None = None) -> dict[str, Any]:
    """``config.json`` of a raw directory; ``read_config`` gives the config back."""
    raw: dict[str, Any] = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_q_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": False,
        **_write_rope(config),
    }
    if config.kind == "eagle":
        family = "LlamaForCausalLM" if target is None else target.architecture
        return {"architectures": [family + "Eagle"], **raw, "bias": config.fc_bias}
    taps = list(config.tap_layers)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **raw,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        _IDS: taps,
        "eagle_config": {"use_aux_hidden_state": True, _IDS: [tap - 1 for tap in taps]},
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
    }


def _write_rope(config: EagleConfig) -> dict[str, Any]:
    rope = config.rope
    if rope.freq_factors:
        raise ValueError("rope frequency factors of a GGUF file cannot be written to a config.json")
    written: dict[str, Any] = {"rope_theta": rope.theta, "rope_scaling": None}
    if rope.type == "default":
        return written
    scaling: dict[str, Any] = {"rope_type": rope.type, "factor": rope.factor}
    if rope.type in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = rope.original_max_position_embeddings
    if rope.type == "llama3":
        scaling |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
        }
    elif rope.type == "yarn":
        for key in ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            scaling[key] = getattr(rope, key)
        scaling["truncate"] = rope.truncate
    return written | {"rope_scaling": scaling}
