"""Tiny random models of transformers, saved as HF directories, in every configuration that the decoder knows.

Weights are drawn wide, biases and norms too: with transformers' own initialisation a missing bias or norm would
change nothing and logits would be too small for a difference to show.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

CONFIGS: dict[str, type] = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
BASE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-mha-tied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-head": ("llama", {"head_dim": 24}),
    "llama-eps": ("llama", {"rms_norm_eps": 0.1}),
    "llama-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0}}),
    "llama-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3 | {"rope_theta": 500.0}}),
    "llama-yarn": ("llama", {"rope_parameters": YARN | {"rope_theta": 500.0}}),
    "llama-yarn-mscale": (
        "llama",
        {
            "rope_parameters": YARN
            | {"mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 20.0, "beta_slow": 2.0}
        },
    ),
    "llama-yarn-factor": (
        "llama",
        {"rope_parameters": YARN | {"attention_factor": 1.5, "truncate": False}},
    ),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", WINDOW),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-tied-bias": (
        "qwen3",
        {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "qwen3-layer-types": (
        "qwen3",
        WINDOW
        | {
            "head_dim": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3-default-head": ("qwen3", {"num_attention_heads": 2}),  # head_dim 128
    "qwen3-llama3": ("qwen3", {"head_dim": 16, "rope_parameters": LLAMA3}),
}


def make_model(family: str, changes: dict[str, Any], seed: int = 0) -> Any:
    """A transformers model in fp32 with weights that make every part matter."""
    torch.manual_seed(seed)
    config = CONFIGS[family](**(BASE | changes))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            elif "embed_tokens" in name:
                parameter.normal_(0.0, 0.5)
            else:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5)
    return model


def save(model: Any, directory: Path, *, max_shard_size: str = "1GB") -> Path:
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


def hf_forward(model: Any, token_ids: list[int]) -> Any:
    """Logits [n, V] and hidden states of transformers for one sequence."""
    with torch.no_grad():
        out = model(torch.tensor([token_ids]), output_hidden_states=True, use_cache=False)
    return out.logits[0].float(), [hidden[0] for hidden in out.hidden_states]
