"""A drafter in the formats that other engines load: raw EAGLE-3 and EAGLE directories, and the speculators library's.

Owns what each format can hold, its config.json and the names of its tensors. Raw directories are written by
``engine/models/eagle_checkpoint.py``, which reads all of them. Knows nothing of training.

A loader of the field skips a tensor that it has no place for, or leaves a parameter at random where none came, without
a word. So what a format's loaders (SGLang, vLLM, speculators) do not all read is refused here, with what would have been
lost. Invariants: a directory under its final name is complete; every tensor of the drafter is in it, also one that shares
its memory with another (safetensors refuses those, transformers' writer drops them), with its bits unless ``dtype`` says
otherwise.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.models.eagle_checkpoint import (
    DrafterCheckpoint,
    open_drafter,
    save_drafter,
    write_config,
)
from engine.models.eagle_layout import D2T, EMBEDDING, HEAD, NUM_TAPS, T2D, EagleConfig
from engine.models.loader import SINGLE, Checkpoint, open_checkpoint, read_json

FORMATS = {
    "eagle3": "raw EAGLE-3: SGLang, SpecForge, vLLM",
    "speculators": "the speculators library's EAGLE-3: vLLM",
    "eagle": "raw EAGLE-1: SGLang, vLLM",
}
DTYPES = ("bfloat16", "float16", "float32")
SPECULATORS_VERSION = "0.3.0"  # whose Eagle3Speculator config this is
_HUB_NAMES = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}
# Keys of a raw config.json that stand outside of speculators' transformer_layer_config
_OUTER = (
    *("architectures", "draft_vocab_size", "target_hidden_size", "eagle_config", "torch_dtype"),
    *("eagle_aux_hidden_state_layer_ids", "norm_before_fc", "fc_norm", "norm_before_residual"),
    *("norm_output", "tie_word_embeddings"),
)


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written. ``added``: tensors that the drafter did not have, taken from the target."""

    directory: Path
    format: str
    num_tensors: int
    num_bytes: int
    added: tuple[str, ...]


def export_drafter(
    drafter: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    format: str,
    target: str = "smollm2",
    dtype: str | None = None,
    with_embedding: bool = False,
    verifier: str | None = None,
    num_speculative_tokens: int = 5,
) -> Exported:
    """Write a drafter for other engines; every tensor is read back and compared before the directory gets its name.

    Args:
        drafter: a directory that ``open_drafter`` reads.
        directory: what to make; may be there if it is empty.
        format: one of ``FORMATS``.
        target: the model that it drafts for.
        dtype: one of ``DTYPES``; None keeps each tensor's.
        with_embedding: put the target's embedding in, for loaders that do not share the target's.
        verifier: what a speculators config calls the target; None is ``target``.
        num_speculative_tokens: that a speculators config proposes.

    Raises:
        ValueError: what is missing or cannot be written, and what to do instead.
    """
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
    if num_speculative_tokens < 1:
        raise ValueError(
            f"--num-speculative-tokens must be at least 1, got {num_speculative_tokens}"
        )
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    out = Path(directory).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty directory; choose another for --out")
    model = open_checkpoint(target)
    found = open_drafter(drafter, model.config)
    if lost := list(_lost(found.config, format, model)):
        raise ValueError(
            f"{found.path} cannot be written as {format} ({FORMATS[format]}): " + "; ".join(lost)
        )
    config, tensors, added = _completed(found, model, with_embedding)
    tensors = {name: _converted(name, tensor, dtype) for name, tensor in tensors.items()}
    staging = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        if format == "speculators":
            name = verifier or _HUB_NAMES.get(target, target)
            raw = speculators_config(
                config,
                verifier=name,
                verifier_architecture=model.config.architecture,
                num_speculative_tokens=num_speculative_tokens,
            )
            _save_speculators(staging, config, tensors, raw)
        else:
            save_drafter(staging, config, tensors, target=model.config)
            if format == "eagle":
                _name_for_both(staging / "config.json", model.config.architecture)
        written = open_drafter(staging, model.config)  # what cannot be read back is not exported
        _check_same(tensors, written.tensors)
        staging.rename(out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    num_bytes = sum(t.numel() * t.element_size() for t in written.tensors.values())
    return Exported(out, format, len(written.tensors), num_bytes, tuple(added))


def _lost(config: EagleConfig, format: str, model: Checkpoint) -> Iterator[str]:
    """What the loaders of a format would leave out."""
    kind = "eagle" if format == "eagle" else "eagle3"
    if config.kind != kind:
        fitting = [f for f in FORMATS if (f == "eagle") == (config.kind == "eagle")]
        yield f"it holds an {config.kind} head; use --format {' or '.join(fitting)}"
        return
    if config.qk_norm:
        yield "its q and k norms have no place in a Llama layer"
    biases = {
        "fc": config.fc_bias,
        "q, k and v": config.qkv_bias,
        "o": config.o_bias,
        "MLP": config.mlp_bias,
    }
    if format == "eagle":
        biases["fc"] = False  # the key `bias`
        if model.config.qkv_bias:  # as in the target's own layer
            biases["q, k and v"] = False
        if config.own_head:
            yield "an lm_head of its own, where loaders use the target's"
    elif format == "speculators":
        biases["MLP"] = False  # the key mlp_bias
        if config.qkv_bias and config.o_bias:
            biases["q, k and v"] = biases["o"] = (
                False  # the key attention_bias, which means all four
            )
    for name, is_there in biases.items():
        if is_there:
            yield f"its {name} bias would be dropped"
    if format == "eagle":
        return
    if len(config.tap_layers) != NUM_TAPS:
        yield f"it reads {len(config.tap_layers)} layers of the target, loaders give {NUM_TAPS}"
    if model.config.num_layers in config.tap_layers:
        yield f"it reads the output of the last layer: no layer {model.config.num_layers} has it as its input"
    if format == "eagle3":
        for flag in ("norm_before_fc", "norm_before_residual"):
            if getattr(config, flag):
                yield f"{flag} is read by vLLM alone; use --format speculators"


def _completed(
    found: DrafterCheckpoint, model: Checkpoint, with_embedding: bool
) -> tuple[EagleConfig, dict[str, Tensor], list[str]]:
    """The drafter with what the formats want of the target: an EAGLE-3 head always, the embedding if asked."""
    config, tensors, added = found.config, dict(found.tensors), []
    dtype = tensors["fc.weight"].dtype
    if config.kind == "eagle3" and not config.own_head:
        raw = read_json(found.path / "config.json")
        if raw.get("tie_word_embeddings") and EMBEDDING in tensors:
            raise ValueError(
                f"{found.path} has no lm_head and its config.json ties it to its own embed_tokens, which loaders read "
                f"in different ways; store the embedding as lm_head.weight too, and set tie_word_embeddings to false"
            )
        config = replace(config, own_head=True)
        tensors[HEAD] = _of_target(model, "lm_head.weight", dtype)
        added.append(HEAD)
    if with_embedding and EMBEDDING not in tensors:
        if config.hidden_size != model.config.hidden_size:
            raise ValueError(
                f"--with-embedding: the target's embedding has {model.config.hidden_size} columns, the drafter "
                f"{config.hidden_size}"
            )
        tensors[EMBEDDING] = _of_target(model, "model.embed_tokens.weight", dtype)
        added.append(EMBEDDING)
    return config, tensors, added


def _of_target(model: Checkpoint, name: str, dtype: torch.dtype) -> Tensor:
    """One of the target's two tables [V, H]."""
    shapes = model.weights.shapes()
    if name not in shapes:  # a tied head
        name = "model.embed_tokens.weight"
    out = torch.empty(shapes[name])
    model.weights.read(name, out)
    return out.to(dtype)


def _converted(name: str, tensor: Tensor, dtype: str | None) -> Tensor:
    if dtype is None or not tensor.is_floating_point():
        return tensor
    found = tensor.to(getattr(torch, dtype))
    if bool(tensor.isfinite().all()) and not bool(found.isfinite().all()):
        raise ValueError(f"--dtype {dtype}: {name} has values beyond its range; use bfloat16")
    return found


def _check_same(wanted: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    """Compare bits, NaN's too; ``t2d``, which is made from ``d2t``, is not among the wanted."""
    for name, tensor in wanted.items():
        if name == T2D:
            continue
        other = found.get(name)
        if other is None:
            raise ValueError(f"{name} is not in what was written; nothing is exported")
        is_alike = (tensor.dtype, tensor.shape) == (other.dtype, other.shape)
        if not is_alike or not torch.equal(_bits(tensor), _bits(other)):
            raise ValueError(
                f"{name} is not read back as it was written; nothing is exported: is the disk damaged or full?"
            )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def _name_for_both(path: Path, family: str) -> None:
    """SGLang and vLLM call an EAGLE-1 model by different names; each takes the first of a list that it knows."""
    raw = read_json(path)
    raw["architectures"] = [family + "Eagle", "Eagle" + family]
    path.write_text(json.dumps(raw, indent=1))


def speculators_config(
    config: EagleConfig,
    *,
    verifier: str,
    verifier_architecture: str,
    num_speculative_tokens: int,
) -> dict[str, Any]:
    """``config.json`` of a speculators EAGLE-3 directory.

    Layer ids are vLLM's: id i is what enters layer i. Keys of EAGLE-3.1 stand there only where they say something, so
    that older versions read the rest.
    """
    raw = write_config(config)
    layer = {key: value for key, value in raw.items() if key not in _OUTER}
    narrow = config.hidden_size == config.target_hidden_size
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_speculative_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    flags = ("norm_before_fc", "fc_norm", "norm_output")
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": None if narrow else config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        **{flag: True for flag in flags if getattr(config, flag)},
        "eagle_aux_hidden_state_layer_ids": list(config.tap_layers),
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": [verifier_architecture]},
        },
    }


def _save_speculators(
    directory: Path, config: EagleConfig, tensors: dict[str, Tensor], raw: dict[str, Any]
) -> None:
    """Tensors as ``layers.0.``, each with memory of its own; ``t2d`` beside ``d2t``, which both loaders expect."""
    out = {
        name.replace("midlayer.", "layers.0."): tensor.detach().clone().contiguous()
        for name, tensor in tensors.items()
    }
    if D2T in out:
        flags = torch.zeros(config.vocab_size, dtype=torch.bool)
        flags[torch.arange(config.draft_vocab_size) + out[D2T].long()] = True
        out[T2D] = flags
    directory.mkdir(parents=True, exist_ok=True)
    save_file(out, directory / SINGLE, metadata={"format": "pt"})
    dtype = str(out["fc.weight"].dtype).removeprefix("torch.")
    (directory / "config.json").write_text(json.dumps(raw | {"torch_dtype": dtype}, indent=1))
