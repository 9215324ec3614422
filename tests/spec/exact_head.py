"""A target and EAGLE heads that predict it exactly, by construction: acceptance below 100% is a bug.

The target's next token depends on its last two tokens; all of the older one's part reaches the head through the
features, so a feature that is one position off, stale or never written shows at once.

    target   hidden 64 = two halves of 32; 32 tokens, embedding (u, 0) with u a unit vector of the first half.
             One layer of window 2 with q = k = 0: attention averages two values; its output is c/2 (u[p-1] + u[p]) in
             the second half. So x[p] = (u[p], c/2 (u[p-1] + u[p])), and logits = head(norm(x[p])).
    eagle3   feature = x[p], the tap behind the last layer, through fc. The layer's attention adds
             (u' - x1, c/2 (x1 + u') - x2) for the new token u' and x = (x1, x2): what is left is x[p+1].
    eagle    feature = norm(x[p]); fc alone makes norm(x[p+1]) of it and u', the layer adds nothing.

Tokens never repeat directly (the target's head forbids it), which makes |x| the same everywhere and norm(x) linear. The
eagle3 head's attention must read its own row alone: its q and k are one vector of the fastest rotary frequency, so strong that
within 16 positions every other row gets nothing. Beyond that (at 44 positions the angle comes round again) it would:
so the sliding window and the true rotary positions are tested with the same stroke.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.config import ModelConfig
from engine.models.eagle_checkpoint import save_drafter
from engine.models.eagle_init import drafter_config, random_drafter

VOCAB, HIDDEN, HALF, HEADS, HEAD_DIM = 32, 64, 32, 4, 16
C = 1.5  # size of the second half
EPS = 1e-6
WINDOW = 16
_STRENGTH = 100.0


def make_exact(directory: Path) -> dict[str, Path]:
    """Directories of the target ("target") and of its heads, by kind."""
    target = directory / "target"
    target.mkdir()
    raw = _target_config()
    weights = _target_weights()
    (target / "config.json").write_text(json.dumps(raw))
    save_file(weights, target / "model.safetensors")
    model = ModelConfig.from_hf(raw)
    config = replace(drafter_config(model), tap_layers=(0, 0, 1), qkv_bias=True, rms_norm_eps=EPS)
    save_drafter(directory / "eagle3", config, _head_tensors(config, weights))
    config = replace(drafter_config(model, "eagle"), qkv_bias=False)
    save_drafter(directory / "eagle", config, _eagle1_tensors(config, weights))
    return {name: directory / name for name in ("target", "eagle3", "eagle")}


def _target_config() -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": HIDDEN,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 1024,
        "rms_norm_eps": EPS,
        "tie_word_embeddings": False,
        "use_sliding_window": True,
        "sliding_window": 2,
        "max_window_layers": 0,
        "torch_dtype": "float32",
    }


def _target_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    eye, none = torch.eye(HALF), torch.zeros(HALF, HALF)
    layer = "model.layers.0."
    embedding = torch.cat((torch.eye(VOCAB), torch.zeros(VOCAB, HALF)), dim=1)
    norm = torch.rand(HIDDEN, generator=generator) + 0.5
    head = torch.randn(VOCAB, HIDDEN, generator=generator) * 1.5
    head[:, :HALF] -= 40.0 * eye  # never the newest token again
    weights = {
        "model.embed_tokens.weight": embedding,
        layer + "input_layernorm.weight": torch.ones(HIDDEN),
        layer + "post_attention_layernorm.weight": torch.ones(HIDDEN),
        # the norm makes sqrt(64) u of u, and attention brings the average of two
        layer + "self_attn.v_proj.weight": torch.eye(HIDDEN) / HIDDEN**0.5 * _unnorm(1 / HIDDEN),
        layer + "self_attn.o_proj.weight": torch.cat(
            (torch.cat((none, none), 1), torch.cat((C * eye, none), 1))
        ),
        layer + "mlp.gate_proj.weight": torch.zeros(16, HIDDEN),
        layer + "mlp.up_proj.weight": torch.zeros(16, HIDDEN),
        layer + "mlp.down_proj.weight": torch.zeros(HIDDEN, 16),
        "model.norm.weight": norm,
        "lm_head.weight": head,
    }
    for name in ("q_proj", "k_proj"):
        weights[f"{layer}self_attn.{name}.weight"] = torch.zeros(HIDDEN, HIDDEN)
    for name in ("q_proj", "k_proj", "v_proj"):
        weights[f"{layer}self_attn.{name}.bias"] = torch.zeros(HIDDEN)
    return weights


def _unnorm(mean_square: float) -> float:
    """What the epsilon of a norm takes away from a vector of that mean square."""
    return ((mean_square + EPS) / mean_square) ** 0.5


def _head_tensors(config: Any, target: dict[str, Tensor]) -> dict[str, Tensor]:
    tensors = {name: torch.zeros_like(t) for name, t in random_drafter(config).items()}
    for name, tensor in tensors.items():
        if "norm" in name:
            tensor.fill_(1.0)
    eye, none, layer = torch.eye(HALF), torch.zeros(HALF, HALF), "midlayer."
    tensors["fc.weight"][:, 2 * HIDDEN :] = torch.eye(HIDDEN)
    mean_square = (1.0 + C**2 / 2) / HIDDEN  # of every x
    x = mean_square**0.5 * _unnorm(mean_square)  # norm(x) times this is x
    u = HIDDEN**-0.5 * _unnorm(1 / HIDDEN)
    top = torch.cat((u * eye, none, -x * eye, none), dim=1)
    bottom = torch.cat((C / 2 * u * eye, none, C / 2 * x * eye, -x * eye), dim=1)
    tensors[layer + "self_attn.v_proj.weight"] = torch.cat((top, bottom))
    tensors[layer + "self_attn.o_proj.weight"] = torch.eye(HIDDEN)
    for name in ("q_proj", "k_proj"):
        bias = torch.zeros(HEADS, HEAD_DIM)
        bias[:, 0] = _STRENGTH
        tensors[f"{layer}self_attn.{name}.bias"] = bias.flatten()
    tensors["norm.weight"] = target["model.norm.weight"].clone()
    # the draft's vocabulary is the target's from its end: d2t and the noise of target ids matter
    tensors["lm_head.weight"] = target["lm_head.weight"].flip(0).clone()
    ids = torch.arange(VOCAB)
    tensors["d2t"] = ids.flip(0) - ids
    return tensors


def _eagle1_tensors(config: Any, target: dict[str, Tensor]) -> dict[str, Tensor]:
    tensors = {name: torch.zeros_like(t) for name, t in random_drafter(config).items()}
    tensors["midlayer.post_attention_layernorm.weight"].fill_(1.0)
    eye, none = torch.eye(HALF), torch.zeros(HALF, HALF)
    scale = target["model.norm.weight"] * ((1.0 + C**2 / 2) / HIDDEN + EPS) ** -0.5  # norm(x) / x
    one, two = scale[:HALF].diag(), scale[HALF:].diag()
    top = torch.cat((one, none, none, none), dim=1)
    bottom = torch.cat((C / 2 * two, none, C / 2 * two @ (eye / scale[:HALF]), none), dim=1)
    tensors["fc.weight"] = torch.cat((top, bottom))
    return tensors
