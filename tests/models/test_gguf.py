"""GGUF files: every quantisation and architecture against transformers, the tokenizer, and damage."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from engine.models.decoder import Decoder
from engine.models.loader import open_checkpoint
from engine.ops.reference import ReferenceOps
from tests.models.gguf_files import write_gguf
from tests.models.paged import PagedSequences
from tests.models.tiny import hf_forward, make_model

KINDS = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q6_K]
SHAPE = {  # a row of every matrix is whole blocks of the K-quants
    "vocab_size": 120,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "rms_norm_eps": 1e-5},
    "qwen2": {"tie_word_embeddings": True, "head_dim": 32},
    "qwen3": {"num_attention_heads": 4, "head_dim": 64},
}
BYTES = list("abcdefghij")
TOKENIZER: dict[str, Any] = {
    "pre": "smollm",
    "tokens": [*BYTES, "ab", *(f"<{i}>" for i in range(11, 120))],
    "types": [1] * 11 + [3] * 109,
    "merges": ["a b"],
    "bos": 100,
    "eos": 101,
}
IDS = random.Random(0).sample(range(120), 20)


def logits_of(path: Path, dtype: str = "float32") -> torch.Tensor:
    checkpoint = open_checkpoint(path)
    decoder = Decoder(checkpoint.config, checkpoint.weights, ReferenceOps(), dtype=dtype)
    return PagedSequences(decoder, [IDS]).run([(0, 0, len(IDS))]).logits


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, kind: Kind, tmp_path: Path) -> None:
    model = make_model(family, SHAPE | FAMILIES[family])
    before = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    path = tmp_path / "model.gguf"
    write_gguf(path, model, kind, tokenizer=TOKENIZER)
    if kind not in (Kind.Q4_K, Kind.Q6_K):  # those are random blocks
        after = model.model.layers[0].mlp.up_proj.weight
        assert (before - after).abs().max() <= {"Q4_0": 0.04, "Q4_1": 0.02}.get(kind.name, 0.002)
    expected, _ = hf_forward(model, IDS)
    assert expected.std() > 0.1
    assert (logits_of(path) - expected).abs().max() <= 1e-4
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.eos_token_ids == (101,)
    assert checkpoint.config.dtype == ("float32" if kind == Kind.F32 else "bfloat16")


def test_llama3_frequencies_of_the_file(tmp_path: Path) -> None:
    """llama.cpp stores the llama3 scaling as a tensor that divides the frequencies."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 1000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    model = make_model("llama", SHAPE | {"rope_parameters": rope})
    plain = 1.0 / (1000.0 ** (torch.arange(0, 32, 2).float() / 32))
    factors = (plain / model.model.rotary_emb.inv_freq).numpy()
    path = tmp_path / "model.gguf"
    write_gguf(
        path, model, Kind.F32, tokenizer=TOKENIZER, extra_tensors={"rope_freqs.weight": factors}
    )
    expected, _ = hf_forward(model, IDS)
    assert (logits_of(path) - expected).abs().max() <= 1e-4
    write_gguf(path, model, Kind.F32, tokenizer=TOKENIZER)
    assert (logits_of(path) - expected).abs().max() > 0.01


def test_yarn_and_linear_in_the_metadata(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    linear = {"rope_type": "linear", "factor": 3.0}
    for rope in (yarn, linear):
        model = make_model("llama", SHAPE | {"rope_parameters": dict(rope)})
        metadata = {
            "rope.scaling.type": rope["rope_type"],
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": 16,
        }
        path = tmp_path / "model.gguf"
        write_gguf(path, model, Kind.F32, tokenizer=TOKENIZER, metadata=metadata)
        assert (logits_of(path) - hf_forward(model, IDS)[0]).abs().max() <= 1e-4


@pytest.fixture(scope="module")
def llama_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path, make_model("llama", SHAPE), Kind.Q8_0, tokenizer=TOKENIZER)
    return path


def test_bf16_is_the_rounded_fp32(llama_file: Path) -> None:
    """Tensors are rounded as they are read, in pieces that do not show."""
    source = open_checkpoint(llama_file).weights
    for name, shape in source.shapes().items():
        exact, rounded = torch.empty(shape), torch.empty(shape, dtype=torch.bfloat16)
        source.read(name, exact)
        source.read(name, rounded)
        assert torch.equal(exact.bfloat16(), rounded), name


def test_damaged_files_are_named(llama_file: Path, tmp_path: Path) -> None:
    """Cut at any length, or with any early byte wrong, a file is refused by name or read; nothing else happens."""
    data = llama_file.read_bytes()
    broken = tmp_path / "broken.gguf"
    for share in (0.0, 1e-5, 1e-3, 0.003, 0.01, 0.05, 0.5, 0.999):
        broken.write_bytes(data[: int(len(data) * share)])
        with pytest.raises(ValueError, match=r"broken\.gguf"):
            open_checkpoint(broken)
    generator = random.Random(3)
    refused = 0
    for _ in range(40):
        wrong = bytearray(data)
        wrong[generator.randrange(3000)] ^= 1 << generator.randrange(8)
        broken.write_bytes(wrong)
        message = _refusal(broken)
        assert "broken.gguf" in message or not message
        refused += bool(message)
    assert refused > 20


def _refusal(path: Path) -> str:
    """The message of the ValueError that opening the file raises, "" if it opens."""
    try:
        open_checkpoint(path)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("architecture", "tokenizer", "metadata", "message"),
    [
        ("gpt2", {}, {}, "GGUF architecture 'gpt2' is not supported; supported: llama, qwen2, qwen3"),
        (None, {"pre": "tekken"}, {}, "pre-tokenizer 'tekken' is not supported; supported: gpt-2"),
        (None, {"model": "llama"}, {}, "tokenizer model 'llama' is not supported; supported: gpt2"),
        (None, {}, {"expert_count": 8}, "mixtures of experts"),
        (None, {}, {"rope.dimension_count": 16}, "rotary embedding of a part of the head"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused(
    architecture: str | None, tokenizer: Any, metadata: Any, message: str, tmp_path: Path
) -> None:
    model = make_model("llama", SHAPE | {"num_hidden_layers": 1})
    if architecture:
        model.config.model_type = architecture
    path = tmp_path / "model.gguf"
    write_gguf(path, model, Kind.F16, tokenizer=TOKENIZER | tokenizer, metadata=metadata)
    with pytest.raises(ValueError, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"attention.head_count": [4, 4]}, r"llama.attention.head_count must be a positive integer, got \[4, 4\]"),
        ({"attention.head_count": 0}, "llama.attention.head_count must be a positive integer, got 0"),
        ({"attention.head_count_kv": 0}, "llama.attention.head_count_kv must be"),
        ({"attention.head_count": "8"}, "llama.attention.head_count must be"),
        ({"attention.key_length": 0}, "llama.attention.key_length must be"),
        ({"block_count": 10**9}, "num_hidden_layers must be a positive integer up to"),
        ({"block_count": 9999}, "the config says 9999 layers, but there are .. tensors"),
        ({"context_length": 2.5}, "llama.context_length must be a positive integer"),
        ({"attention.layer_norm_rms_epsilon": "x"}, "layer_norm_rms_epsilon must be a positive number"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon must be a positive"),
        ({"rope.freq_base": float("inf")}, "llama.rope.freq_base must be a positive number"),
        ({"rope.scaling.attn_factor": 2.0}, "llama.rope.scaling.attn_factor = 2.0 is not supported"),
        ({"rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier = 0.1.* is not supported"),
        ({"rope.scaling.type": "longrope"}, "rope scaling type 'longrope' is not supported"),
        ({"rope.scaling.type": 5}, "rope scaling type 5 is not supported"),
        ({"rope.scaling.type": "linear"}, r"'linear' lacks \['factor'\]"),
        ({"attention.sliding_window": 16}, "llama.attention.sliding_window = 16 is not supported"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping = 30.0 is not supported"),
    ],
)  # fmt: skip
def test_metadata_that_would_compute_something_else_are_refused(
    metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    model = make_model("llama", SHAPE | {"num_hidden_layers": 1})
    write_gguf(path, model, Kind.F32, tokenizer=TOKENIZER, metadata=metadata)
    with pytest.raises(ValueError, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


def test_neutral_metadata_pass_and_a_factor_without_type_is_linear(tmp_path: Path) -> None:
    """As in llama.cpp, where the type is linear unless the file names another."""
    path = tmp_path / "model.gguf"
    neutral = {"rope.scaling.attn_factor": 1.0, "attention.sliding_window": 64, "expert_count": 0}
    plain = make_model("llama", SHAPE)
    write_gguf(path, plain, Kind.F32, tokenizer=TOKENIZER, metadata=neutral)
    assert (logits_of(path) - hf_forward(plain, IDS)[0]).abs().max() <= 1e-4
    linear = make_model(
        "llama", SHAPE | {"rope_parameters": {"rope_type": "linear", "factor": 3.0}}
    )
    for key in ("rope.scaling.factor", "rope.scale_linear"):
        write_gguf(path, linear, Kind.F32, tokenizer=TOKENIZER, metadata={key: 3.0})
        assert (logits_of(path) - hf_forward(linear, IDS)[0]).abs().max() <= 1e-4


@pytest.mark.parametrize(
    "factors", [np.ones(15), np.ones((2, 8)), np.zeros(16), np.full(16, np.nan)]
)
def test_rope_factors_that_do_not_fit_are_refused(factors: np.ndarray, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    extra = {"rope_freqs.weight": factors.astype(np.float32)}
    write_gguf(path, make_model("llama", SHAPE), Kind.F32, tokenizer=TOKENIZER, extra_tensors=extra)
    with pytest.raises(ValueError, match=r"model\.gguf: tensor rope_freqs\.weight must"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        ({"types": [1] * 5}, "token_type must be a list of 120 integers"),
        ({"merges": ["a zz"]}, "merges do not fit the tokens"),
        ({"merges": ["ab"]}, "merges do not fit the tokens"),
        ({"bos": 120}, "bos_token_id must be an integer from 0 to 119, got 120"),
    ],
)
def test_a_damaged_tokenizer_is_named(tokenizer: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = make_model("llama", SHAPE | {"num_hidden_layers": 1})
    write_gguf(path, model, Kind.F32, tokenizer=TOKENIZER | tokenizer)
    with pytest.raises(ValueError, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


def test_an_endless_array_is_refused_at_once(llama_file: Path, tmp_path: Path) -> None:
    """The package's reader walks past the end of the file for every element that a length claims."""
    data, broken = bytearray(llama_file.read_bytes()), tmp_path / "broken.gguf"
    at = data.index(b"tokenizer.ggml.token_type") + len(b"tokenizer.ggml.token_type") + 4 + 4
    data[at : at + 8] = (10**12).to_bytes(8, "little")
    broken.write_bytes(data)
    with pytest.raises(ValueError, match=r"broken\.gguf is damaged.*goes past the end"):
        open_checkpoint(broken)


def test_other_tensor_types_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, make_model("llama", SHAPE), Kind.Q8_0, tokenizer=TOKENIZER)
    wrong = path.read_bytes().replace(
        b"token_embd.weight" + _info(256, 120, Kind.Q8_0),
        b"token_embd.weight" + _info(256, 120, Kind.Q5_1),
    )
    path.write_bytes(wrong)
    with pytest.raises(ValueError, match=r"embed_tokens.* of type Q5_1; supported: F32"):
        open_checkpoint(path)


def _info(columns: int, rows: int, kind: Kind) -> bytes:
    return (
        np.uint32(2).tobytes()
        + np.array([columns, rows], np.uint64).tobytes()
        + np.uint32(kind).tobytes()
    )


TEXTS = [
    "The quick brown fox jumps over the lazy dog. It's 12345 o'clock, WE'LL see!",
    "  two  spaces\n\n\nand\r\nlines\t\ttabs   ",
    "naïve café — Ünïcödé, 日本語テキスト, 한국어, العربية, हिन्दी",
    "emoji 👩‍👩‍👧‍👦 🏳️‍🌈 and \u0301combining e\u0301, zero\u200bwidth, \u00a0nbsp",
    "<s>inside<|tool|> x<s></s>",
    "x=1;y[2]={'a':3.14e-10} // comment 0x1F",
    "",
]


def split_of_transformers(pre: str) -> pre_tokenizers.PreTokenizer:
    """How the family's tokenizer splits text, taken from transformers."""
    from transformers.convert_slow_tokenizer import TikTokenConverter
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        return pre_tokenizers.Sequence([digits, words])
    pattern = PRETOKENIZE_REGEX if pre == "qwen2" else TikTokenConverter(vocab_file="-").pattern
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, byte_level])


def reference_backend(pre: str) -> Backend:
    """The tokenizer as transformers builds it for the family.

    Its merges cross what the families split (numbers), and some words have no merges, so that each rule shows.
    """
    trained = Backend(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    trained.train_from_iterator([*TEXTS, "12345 345 45 123 " * 9] * 3, trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [(left, right) for left, right in model["merges"] if not right.endswith("n")]
    backend = Backend(
        models.BPE(vocab=model["vocab"], merges=merges, ignore_merges=pre == "llama-bpe")
    )
    backend.pre_tokenizer = split_of_transformers(pre)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    specials = [AddedToken(t, special=True, normalized=False) for t in ("<s>", "</s>")]
    backend.add_special_tokens(specials)
    backend.add_tokens([AddedToken("<|tool|>", special=False, normalized=False)])
    return backend


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "qwen2"])
def test_tokenizer_equals_the_one_it_was_written_from(pre: str, tmp_path: Path) -> None:
    backend = reference_backend(pre)
    size = backend.get_vocab_size()
    written = json.loads(backend.to_str())
    special = {"<s>": 3, "</s>": 3, "<|tool|>": 4}
    tokens = [backend.id_to_token(i) or "" for i in range(size)] + ["[PAD0]"]
    tokenizer = {
        "pre": pre,
        "tokens": tokens,
        "types": [special.get(token, 1) for token in tokens[:-1]] + [5],
        "merges": [" ".join(merge) for merge in written["model"]["merges"]],
        "bos": backend.token_to_id("<s>"),
        "eos": backend.token_to_id("</s>"),
        "eot": backend.token_to_id("<|tool|>"),
        "chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
    }
    model = make_model("llama", SHAPE | {"vocab_size": len(tokens), "num_hidden_layers": 1})
    path = tmp_path / "model.gguf"
    write_gguf(path, model, Kind.F16, tokenizer=tokenizer)
    checkpoint = open_checkpoint(path)
    found = checkpoint.tokenizer
    assert found is not None
    assert checkpoint.config.eos_token_ids == (tokenizer["eos"], tokenizer["eot"])
    for text in TEXTS:
        ids = backend.encode(text).ids
        assert found.encode(text, add_special_tokens=False) == ids, text
        for skip in (True, False):
            expected = backend.decode(ids, skip_special_tokens=skip)
            assert found.decode(ids, skip_special_tokens=skip) == expected
    # llama.cpp adds a bos for the Llama 3 family unless the file says no
    starts = found.encode("x")[:1] == [tokenizer["bos"]]
    assert starts == (pre == "llama-bpe")
    assert found.render_chat([{"role": "user", "content": "hi"}]) == "<s>hi"
    assert found.decode([size], skip_special_tokens=False) == "", "an unused token is no text"
