"""Configs: what is read from config.json, what is refused by name, and how open values are settled."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig, ModelConfig

HF: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
GIB = 1 << 30
NAN, INF = float("nan"), float("inf")
YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def model(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf(HF | changes)


def test_defaults_are_those_of_transformers() -> None:
    llama = model()
    assert (llama.head_dim, llama.rms_norm_eps, llama.rope.theta) == (16, 1e-6, 10000.0)
    flags = (llama.qkv_bias, llama.o_bias, llama.mlp_bias, llama.qk_norm, llama.tied_head)
    assert flags == (False,) * 5
    assert model(num_key_value_heads=None).num_kv_heads == 4
    qwen2 = model(architectures=["Qwen2ForCausalLM"], attention_bias=False)
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = model(architectures=["Qwen3ForCausalLM"], attention_bias=True)
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm, qwen3.head_dim) == (True, True, True, 128)
    assert model(architectures=None, model_type="qwen2").architecture == "Qwen2ForCausalLM"


@pytest.mark.parametrize("spelling", ["dtype", "torch_dtype"])
def test_dtype_in_both_spellings(spelling: str) -> None:
    assert model(**{spelling: "bfloat16"}).dtype == "bfloat16"


def test_eos_ids_come_from_both_files() -> None:
    config = ModelConfig.from_hf(HF | {"eos_token_id": 7}, {"eos_token_id": [9, 7]})
    assert config.eos_token_ids == (9, 7)
    assert model(eos_token_id=None).eos_token_ids == ()


def test_eos_ids_outside_the_vocabulary_are_dropped_aloud(caplog: pytest.LogCaptureFixture) -> None:
    config = ModelConfig.from_hf(HF | {"eos_token_id": [7, 1000]}, {"eos_token_id": 5000})
    assert config.eos_token_ids == (7,)
    for token_id in (1000, 5000):
        assert f"eos_token_id {token_id} is outside the vocabulary of 1000" in caplog.text
    with pytest.raises(ValueError, match="eos_token_id must be a token id"):
        ModelConfig.from_hf(HF, {"eos_token_id": True})


def test_no_value_of_any_key_gives_another_exception() -> None:
    """Every key with a value of every kind: from_hf answers with a config or a ValueError."""
    keys = [
        *HF,
        "head_dim",
        "rope_scaling",
        "rope_parameters",
        "rope_theta",
        "rms_norm_eps",
        "dtype",
    ]
    keys += ["layer_types", "sliding_window", "max_window_layers", "eos_token_id", "bos_token_id"]
    keys += ["quantization_config", "model_type", "hidden_act", "partial_rotary_factor"]
    values: list[Any] = [None, True, 0, -1, 10**30, 0.5, NAN, INF, "", "x", b"x", [], [None], [[]]]
    values += [{}, {"x": 1}, {"rope_type": "yarn", "factor": "x"}, {1: 2}, object()]
    for key in keys:
        for value in values:
            for architecture in ("LlamaForCausalLM", "Qwen2ForCausalLM"):
                config = HF | {"architectures": [architecture], key: value}
                with contextlib.suppress(ValueError):
                    ModelConfig.from_hf(config | {"use_sliding_window": True})
    for config in (None, 5, [], "x"):
        with pytest.raises(ValueError, match=r"config\.json must hold an object"):
            ModelConfig.from_hf(config)  # type: ignore[arg-type]


def test_windows() -> None:
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 100, "max_window_layers": 3}
    assert model(**qwen).windows == (0, 0, 0, 0)
    assert model(**qwen, use_sliding_window=True).windows == (0, 0, 0, 100)
    types = ["sliding_attention", "full_attention"] * 2
    assert model(**qwen, use_sliding_window=True, layer_types=types).windows == (100, 0, 100, 0)
    assert model(sliding_window=100).windows == (0, 0, 0, 0), "transformers' Llama has none"
    with pytest.raises(ValueError, match="use_sliding_window is false"):
        model(**qwen, layer_types=types)
    with pytest.raises(ValueError, match="names 3 layers"):
        model(**qwen, layer_types=types[:3])
    with pytest.raises(ValueError, match="chunked_attention"):
        model(**qwen, layer_types=["chunked_attention"] * 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM is not supported.*Qwen3"),
        ({"architectures": None, "model_type": "gemma"}, "'gemma' is not supported.*Llama"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \(gptq\)"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer, got '64'"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be"),
        ({"num_key_value_heads": 3}, "4 is no multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be"),
        ({"rope_scaling": {"type": "longrope"}}, "'longrope' is not supported; supported: default"),
        ({"rope_scaling": {"type": "linear"}}, r"'linear' lacks \['factor'\]"),
        ({"rope_parameters": {"rope_type": "default", "factr": 2}}, r"unknown.*\['factr'\]"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor must be a positive number"),
        ({"rope_theta": -1.0}, "rope_theta must be"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of names"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures must be a list of names"),
        ({"architectures": 5}, "architectures must be a list of names, got 5"),
        ({"hidden_act": ["silu"]}, "hidden_act"),
        ({"hidden_size": 64.0}, "hidden_size must be a positive integer, got 64.0"),
        ({"vocab_size": 2**31}, "vocab_size must be a positive integer up to 2147483647"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers must be a positive integer up to 10000"),
        (
            {"max_position_embeddings": 1},
            "max_position_embeddings must be an integer from 2, got 1",
        ),
        ({"attention_bias": "no"}, "attention_bias must be true or false, got 'no'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        ({"rms_norm_eps": NAN}, "rms_norm_eps must be a positive number .* got nan"),
        ({"rms_norm_eps": INF}, "rms_norm_eps must be"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be"),
        ({"quantization_config": "fp8"}, r"quantization_config \('fp8'\) is not supported"),
        ({"quantization_config": False}, "quantization_config"),
        ({"dtype": 5}, "dtype must be a name such as 'bfloat16', got 5"),
        ({"torch_dtype": ["bfloat16"]}, "torch_dtype must be a name"),
        ({"rope_scaling": 5}, "rope_scaling must be null or an object with rope_type, got 5"),
        ({"rope_scaling": [1]}, "rope_scaling must be null or an object"),
        ({"rope_parameters": "yarn"}, "rope_parameters must be null or an object"),
        ({"rope_scaling": {"rope_type": ["x"]}}, r"rope scaling type \['x'\] is not supported"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": INF}},
            "factor must be a positive number",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": True}},
            "factor must be a positive number",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor must be at least 1"),
        (
            {"rope_scaling": {"rope_type": "linear", 5: 1, "a": 1}},
            r"unknown rope scaling keys \['5'",
        ),
        ({"rope_scaling": YARN | {"truncate": 1}}, "truncate must be true or false"),
        ({"rope_scaling": YARN | {"beta_fast": NAN}}, "beta_fast must be a positive number"),
        ({"rope_scaling": YARN | {"beta_fast": 1e308}}, "beta_fast must be a positive number"),
        (
            {"rope_scaling": YARN | {"original_max_position_embeddings": 16.5}},
            "original_max_position_embeddings must be a positive integer, got 16.5",
        ),
        ({"rope_scaling": YARN, "rope_theta": 1}, "'yarn' needs a rope_theta above 1, got 1"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor above low_freq"),
        ({"rope_theta": 0}, "rope_theta must be"),
        ({"rope_theta": NAN}, "rope_theta must be"),
        ({"original_max_position_embeddings": "x"}, "original_max_position_embeddings must be"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "head_dim": 2},
            "'dynamic' needs a head_dim of 4 or more, got 2",
        ),
        ({"layer_types": 5}, "layer_types must be a list of names, one a layer, got 5"),
        ({"layer_types": [["full_attention"]] * 4}, "layer_types must be a list of names"),
        ({"max_window_layers": "x"}, "max_window_layers must be an integer from 0, got 'x'"),
        ({"sliding_window": "x"}, "sliding_window must be .* got 'x'"),
        ({"sliding_window": -5}, "sliding_window must be .* got -5"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window must be a positive"),
        ({"use_sliding_window": "yes"}, "use_sliding_window must be true or false"),
        ({"eos_token_id": "2"}, "eos_token_id must be a token id .* got '2'"),
        ({"eos_token_id": 2.0}, "eos_token_id must be a token id"),
        ({"eos_token_id": [2, -1]}, r"eos_token_id must be a token id .* got \[2, -1\]"),
        ({"eos_token_id": {"a": 1}}, "eos_token_id must be a token id"),
        ({"bos_token_id": "x"}, "bos_token_id must be a token id"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model(**changes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": ""}, "model must be"),
        ({"dtype": "float16"}, "dtype must be one of auto, float32, bfloat16, got 'float16'"),
        ({"device": "tpu"}, "device must be one of"),
        ({"seed": -1}, "seed must be an integer from 0"),
        ({"max_model_len": 0}, "max_model_len must be .* or None, got 0"),
        ({"max_model_len": 1}, "max_model_len must be an integer from 2"),
        ({"max_model_len": 12.0}, "max_model_len must be"),
        ({"model": 5}, "model must be"),
        ({"model": None}, "model must be"),
        ({"dtype": None}, "dtype must be one of"),
        ({"dtype": "torch.float16"}, "dtype must be one of"),
        ({"ops": 5}, "ops must be 'auto', 'native', 'reference' or a dict op -> backend, got 5"),
        ({"ops": None}, "ops must be"),
        ({"ops": ["native"]}, "ops must be"),
        ({"ops": {"linear": 5}}, "ops must map op -> backend, both names, got 'linear': 5"),
        (
            {"max_num_seqs": 64, "max_num_batched_tokens": 63},
            "max_num_batched_tokens=63 is less than max_num_seqs=64.*leave one of them out",
        ),
        ({"kv_cache_bytes": "1GB"}, "kv_cache_bytes must be"),
        ({"max_num_seqs": 0}, "max_num_seqs must be"),
        ({"max_num_batched_tokens": True}, "max_num_batched_tokens must be"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching must be True or False"),
        ({"num_threads": 0}, "num_threads must be"),
        ({"ops": "fastest"}, "ops must be one of"),
        ({"logprobs_mode": "raw"}, "logprobs_mode must be one of raw_logprobs, processed"),
        ({"max_model_length": 5}, "unknown argument max_model_length=5; did you mean max_model_l"),
        ({"zzz": 5}, "unknown argument zzz=5; known: model"),
    ],
)
def test_bad_arguments_name_themselves(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig.from_kwargs(**({"model": "m"} | arguments))


def test_configs_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig(model="m").seed = 1  # type: ignore[misc]


def test_resolve_settles_and_logs_every_open_value(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    resolved = EngineConfig(model="m").resolve(
        model(dtype="float16"), available_bytes=8 * GIB, num_cpus=3
    )
    assert resolved.dtype == "bfloat16"
    assert resolved.device == "cpu"
    assert resolved.max_model_len == 2048
    assert resolved.num_threads == 3
    token_bytes = 2 * 4 * 2 * 16 * 2
    assert resolved.model.kv_bytes_per_token("bfloat16") == token_bytes
    assert resolved.kv_cache_bytes == 256 * token_bytes * (2048 + 32), "all sequences fit"
    for name in ("dtype", "device", "max_model_len", "kv_cache_bytes", "num_threads"):
        assert re.search(rf"^{name} = .* \(.+\)$", "\n".join(caplog.messages), re.MULTILINE), name


def test_given_values_stay() -> None:
    config = EngineConfig(
        model="m", dtype="float32", max_model_len=100, kv_cache_bytes=GIB, num_threads=1
    )
    resolved = config.resolve(model(dtype="bfloat16"), available_bytes=2 * GIB)
    assert (resolved.dtype, resolved.max_model_len) == ("float32", 100)
    assert (resolved.kv_cache_bytes, resolved.num_threads) == (GIB, 1)


def test_paths_and_torch_dtypes_are_taken() -> None:
    import torch

    config = EngineConfig(model=Path("some") / "model", dtype=torch.bfloat16)  # type: ignore[arg-type]
    assert (config.model, config.dtype) == ("some/model", "bfloat16")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (256, 512)),
        ({"max_num_batched_tokens": 32}, (32, 32)),
        ({"max_num_batched_tokens": 4096}, (256, 4096)),
        ({"max_num_seqs": 1000}, (1000, 1000)),
        ({"max_num_seqs": 7}, (7, 512)),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 64}, (64, 64)),
    ],
)
def test_a_forward_has_a_row_for_each_request(
    given: dict[str, int], expected: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    """What the resolved config says must be what runs: no second max() behind it."""
    caplog.set_level(logging.INFO)
    resolved = EngineConfig(model="m", **given).resolve(model(), available_bytes=8 * GIB)  # type: ignore[arg-type]
    assert (resolved.max_num_seqs, resolved.max_num_batched_tokens) == expected
    for name in {"max_num_seqs", "max_num_batched_tokens"} - set(given):
        assert re.search(rf"^{name} = \d+ \(.+\)$", "\n".join(caplog.messages), re.MULTILINE), name


def test_memory_and_context_are_kept() -> None:
    small = model()
    weights = small.num_parameters * 4
    token_bytes = small.kv_bytes_per_token("float32")
    with pytest.raises(ValueError, match=rf"kv_cache_bytes={GIB} is more than .* {GIB - 1} bytes"):
        EngineConfig(model="m", kv_cache_bytes=GIB).resolve(
            small, available_bytes=weights + GIB - 1
        )
    with pytest.raises(ValueError, match="max_model_len=2049 is above the model's context of 2048"):
        EngineConfig(model="m", max_model_len=2049).resolve(small)
    scaled = model(rope_scaling={"type": "dynamic", "factor": 2.0})
    EngineConfig(model="m", max_model_len=4096).resolve(scaled, available_bytes=GIB)
    with pytest.raises(ValueError, match="holds 68 tokens of KV, max_model_len=69 needs"):
        EngineConfig(model="m", max_model_len=69, kv_cache_bytes=100 * token_bytes).resolve(
            small, available_bytes=GIB
        )
    shorter = EngineConfig(model="m", kv_cache_bytes=100 * token_bytes).resolve(
        small, available_bytes=GIB
    )
    assert shorter.max_model_len == 68, "an open length gives way to the memory"
    with pytest.raises(ValueError, match="holds 0 tokens"):
        EngineConfig(model="m").resolve(small, available_bytes=weights)
