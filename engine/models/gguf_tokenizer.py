"""The tokenizer that the metadata of a GGUF file describe: byte-level BPE as GPT-2, Llama 3, Qwen2 and SmolLM do it.

Owns the splitting patterns that a file only names. Knows nothing of weights. Invariant: a pattern that is not known
is refused, since a wrong split gives wrong ids in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from engine.tokenizer import Tokenizer

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_PRE_TOKENIZERS = {
    "gpt-2": "gpt2",
    "smollm": "smollm",
    "llama-bpe": "llama3",
    "llama3": "llama3",
    "llama-v3": "llama3",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
}
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # tokenizer.ggml.token_type


def gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer of a GGUF file.

    Raises:
        ValueError: it is of another kind, or its pre-tokenizer is not known.
    """
    backend = gguf_backend(metadata)
    return Tokenizer(backend, gguf_tokenizer_config(metadata))


def _family(metadata: Mapping[str, Any]) -> str:
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ValueError(
            f"GGUF tokenizer model {kind!r} is not supported; supported: gpt2 (byte-level BPE)"
        )
    name = metadata.get("tokenizer.ggml.pre")
    if name not in _PRE_TOKENIZERS:
        raise ValueError(
            f"GGUF pre-tokenizer {name!r} is not supported; supported: {', '.join(_PRE_TOKENIZERS)}"
        )
    return _PRE_TOKENIZERS[name]


def gguf_backend(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Vocabulary, merges, splitting and added tokens."""
    family = _family(metadata)
    tokens, merge_lines = _strings(metadata, "tokens"), _strings(metadata, "merges")
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ValueError(
            f"tokenizer.ggml.token_type must be a list of {len(tokens)} integers, one for each token"
        )
    kinds = list(zip(tokens, types, strict=True))
    merges = [(left, right) for left, _, right in (line.partition(" ") for line in merge_lines)]
    vocab = {token: i for i, (token, kind) in enumerate(kinds) if kind != _UNUSED}
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=family == "llama3")
    except Exception as error:  # the binding raises bare Exception for a merge of unknown tokens
        raise ValueError(f"tokenizer.ggml.merges do not fit the tokens: {error}") from error
    backend = tokenizers.Tokenizer(model)
    if family == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(family)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, kind in kinds if kind == _CONTROL]
    )
    backend.add_tokens(
        [
            AddedToken(t, special=False, normalized=False)
            for t, kind in kinds
            if kind == _USER_DEFINED
        ]
    )
    _add_ends(backend, metadata, tokens, bos_by_default=family == "llama3")
    return backend


def _strings(metadata: Mapping[str, Any], name: str) -> list[str]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if values is None:
        raise ValueError(f"metadata lack tokenizer.ggml.{name}")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"tokenizer.ggml.{name} must be a list of strings")
    return values


def _token_id(metadata: Mapping[str, Any], name: str, num_tokens: int) -> int | None:
    """An id such as that of bos, None where the file names none."""
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < num_tokens:
        raise ValueError(f"{key} must be an integer from 0 to {num_tokens - 1}, got {value!r}")
    return value


def _add_ends(
    backend: tokenizers.Tokenizer,
    metadata: Mapping[str, Any],
    tokens: list[str],
    *,
    bos_by_default: bool,
) -> None:
    """Have ``encode`` add bos and eos where the file says so; the Llama 3 family has a bos unless it says no."""
    add = {
        "bos": metadata.get("tokenizer.ggml.add_bos_token", bos_by_default),
        "eos": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    for end, value in add.items():
        if not isinstance(value, bool):
            raise ValueError(f"tokenizer.ggml.add_{end}_token must be a bool, got {value!r}")
    ids = {end: _token_id(metadata, end, len(tokens)) for end in add}
    used = {end: tokens[i] for end, i in ids.items() if add[end] and i is not None}
    if used:
        before, after = used.get("bos"), used.get("eos")
        single = " ".join(part for part in (before, "$A", after) if part)
        backend.post_processor = processors.TemplateProcessing(
            single=single,
            pair=f"{single} $B",
            special_tokens=[(token, ids[end]) for end, token in used.items()],
        )


def _pre_tokenizer(family: str) -> pre_tokenizers.PreTokenizer:
    if family == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if family == "smollm":
        first = pre_tokenizers.Digits(individual_digits=True)
        second = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    else:
        pattern = _LLAMA3_SPLIT if family == "llama3" else _QWEN2_SPLIT
        first = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        second = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([first, second])


def gguf_tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of a ``tokenizer_config.json``."""
    tokens = _strings(metadata, "tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for key, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = _token_id(metadata, name, len(tokens))
        if token_id is not None:
            config[f"{key}_token"] = tokens[token_id]
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config
