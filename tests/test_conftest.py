"""The tiny models are what they claim to be: transformers loads them whole and the tokenizer round-trips."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "head_dim": 24}),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
)
def test_transformers_loads_every_tensor(make_model_dir, kind: str, overrides: dict) -> None:
    transformers = pytest.importorskip("transformers")
    path = make_model_dir(kind, **overrides)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    logits = model(torch.tensor([[1, 2, 3]])).logits.detach()
    assert 0.3 < float(logits.std()) < 30.0


def test_byte_tokenizer_round_trips(tiny_llama_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_llama_dir / "tokenizer.json"))
    text = "naïve 日本 <|im_end|>"
    ids = tokenizer.encode(text).ids
    assert ids[-1] == 258
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
