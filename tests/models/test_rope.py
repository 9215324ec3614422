"""Rotary tables against transformers' rotary embedding, at the sizes of real models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.config import ModelConfig
from engine.models.rope import rope_tables

PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn-all": {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 16.0,
        "beta_slow": 3.0,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
        "truncate": False,
    },
}
NUM_POSITIONS = 4096


def transformers_tables(parameters: dict[str, Any], length: int) -> tuple[torch.Tensor, ...]:
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        max_position_embeddings=NUM_POSITIONS,
        rope_parameters=dict(parameters),
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
    return cos[0, :, :64], sin[0, :, :64]


def our_tables(parameters: dict[str, Any], length: int, **extra: Any) -> tuple[torch.Tensor, ...]:
    config = ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 10,
            "hidden_size": 256,
            "intermediate_size": 10,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "max_position_embeddings": NUM_POSITIONS,
            **(extra or {"rope_parameters": parameters}),
        }
    )
    return rope_tables(config.rope, 128, NUM_POSITIONS, length)


@pytest.mark.parametrize("name", PARAMETERS)
def test_tables_equal_transformers(name: str) -> None:
    ours = our_tables(PARAMETERS[name], NUM_POSITIONS)
    theirs = transformers_tables(PARAMETERS[name], NUM_POSITIONS)
    for table, expected in zip(ours, theirs, strict=True):
        assert table.shape == (NUM_POSITIONS, 64)
        assert table.dtype == torch.float32
        torch.testing.assert_close(table, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", [name for name in PARAMETERS if name != "default"])
def test_each_scaling_changes_the_tables(name: str) -> None:
    """If a type fell through to the default the comparison above would be the only thing to say so."""
    plain = {"rope_type": "default", "rope_theta": PARAMETERS[name]["rope_theta"]}
    length = 2 * NUM_POSITIONS  # dynamic is the default up to the original context
    scaled = our_tables(PARAMETERS[name], length)
    assert (scaled[0] - our_tables(plain, length)[0]).abs().max() > 0.1


def test_old_spelling_is_the_same() -> None:
    new = our_tables(PARAMETERS["llama3"], 64)
    old_scaling = dict(PARAMETERS["llama3"])
    theta = old_scaling.pop("rope_theta")
    old_scaling["type"] = old_scaling.pop("rope_type")
    old = our_tables({}, 64, rope_scaling=old_scaling, rope_theta=theta)
    assert all(torch.equal(a, b) for a, b in zip(new, old, strict=True))


def test_dynamic_beyond_the_context_is_that_of_the_longest_sequence() -> None:
    """The documented choice: up to the context exactly transformers, beyond it the base of the full length."""
    length = 3 * NUM_POSITIONS
    ours = our_tables(PARAMETERS["dynamic"], length)
    theirs = transformers_tables(PARAMETERS["dynamic"], length)
    for table, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(table, expected, rtol=0, atol=2e-5)
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    within = our_tables(PARAMETERS["dynamic"], 100)
    assert torch.equal(within[0], our_tables(plain, 100)[0])
