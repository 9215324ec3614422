"""Writes GGUF files as llama.cpp's converter does, from tiny transformers models, for tests.

K-quants are made of random blocks, since the ``gguf`` package cannot quantise to them; ``slow_dequantize`` reads
them by the letter of llama.cpp's ``block_q4_K`` and ``block_q6_K``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from gguf.quants import quantize

IN_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
BLOCK_BYTES = {Kind.Q4_K: 144, Kind.Q6_K: 210}


def gguf_name(name: str) -> str:
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in fixed:
        return fixed[name]
    _, _, layer, *middle, last = name.split(".")
    return f"blk.{layer}.{IN_LAYER['.'.join(middle)]}.{last}"


def permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """``LlamaModel.permute`` of llama.cpp's converter: halves of a head become neighbours."""
    shape = (num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return weights.reshape(shape).swapaxes(1, 2).reshape(weights.shape)


def random_blocks(shape: tuple[int, ...], kind: Kind, seed: int) -> np.ndarray:
    """Random K-quant blocks [rows, bytes] with scales that give weights of about 0.1."""
    generator = np.random.default_rng(seed)
    count = int(np.prod(shape)) // 256
    blocks = generator.integers(0, 256, (count, BLOCK_BYTES[kind]), dtype=np.uint8)
    scale = generator.uniform(0.5, 1.0, (count, 1)).astype(np.float16)
    if kind == Kind.Q4_K:
        blocks[:, 0:2] = (scale * np.float16(4e-4)).view(np.uint8)
        blocks[:, 2:4] = (scale * np.float16(3e-3)).view(np.uint8)
    else:
        blocks[:, 208:210] = (scale * np.float16(6e-5)).view(np.uint8)
    return blocks.reshape(shape[0], -1)


def slow_dequantize(data: np.ndarray, kind: Kind) -> np.ndarray:
    """K-quants [rows, bytes] -> fp32 [rows, columns], one place of the block at a time."""
    blocks = data.reshape(-1, BLOCK_BYTES[kind])
    values = (_q4_k if kind == Kind.Q4_K else _q6_k)(blocks)
    return np.stack(values, axis=1).astype(np.float32).reshape(data.shape[0], -1)


def _q4_k(blocks: np.ndarray) -> list[np.ndarray]:
    halves = blocks[:, :4].copy().view(np.float16).astype(np.float32)
    d, dmin = halves[:, 0], halves[:, 1]
    scales, quants = blocks[:, 4:16].astype(int).T, blocks[:, 16:].astype(int).T
    values = []
    for i in range(256):
        j = i // 32
        if j < 4:
            scale, minimum = scales[j] & 63, scales[j + 4] & 63
        else:
            scale = (scales[j + 4] & 15) | (scales[j - 4] >> 6) << 4
            minimum = (scales[j + 4] >> 4) | (scales[j] >> 6) << 4
        byte = quants[i // 64 * 32 + i % 32]
        quant = byte & 15 if i % 64 < 32 else byte >> 4
        values.append(d * scale * quant - dmin * minimum)
    return values


def _q6_k(blocks: np.ndarray) -> list[np.ndarray]:
    low, high = blocks[:, :128].astype(int).T, blocks[:, 128:192].astype(int).T
    scales = blocks[:, 192:208].view(np.int8).astype(int).T
    d = blocks[:, 208:210].copy().view(np.float16).astype(np.float32)[:, 0]
    values = []
    for i in range(256):
        half, j = divmod(i, 128)
        quarter, k = divmod(j, 32)
        nibble = low[half * 64 + quarter % 2 * 32 + k] >> (4 if quarter >= 2 else 0) & 15
        quant = nibble | (high[half * 32 + k] >> 2 * quarter & 3) << 4
        values.append(d * scales[i // 16] * (quant - 32))
    return values


def write_gguf(
    path: Path,
    model: Any,
    kind: Kind,
    *,
    tokenizer: Mapping[str, Any],
    metadata: Mapping[str, Any] | None = None,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
) -> None:
    """The tensors and config of a transformers model; matrices in ``kind``, vectors in F32.

    The weights of ``model`` become what the file holds, so that it is the oracle of the file.
    """
    config = model.config
    family = config.model_type
    writer = GGUFWriter(path, family)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if family == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    add = {
        str: writer.add_string,
        float: writer.add_float32,
        int: writer.add_uint32,
        list: writer.add_array,
    }
    for key, value in (metadata or {}).items():
        writer.kv_data[0].pop(f"{family}.{key}", None)  # it may say otherwise than the model
        add[type(value)](f"{family}.{key}", value)
    _write_tokenizer(writer, tokenizer)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tied = config.tie_word_embeddings
    for seed, (name, parameter) in enumerate(model.named_parameters()):
        if tied and name == "lm_head.weight":
            continue
        values, num_heads = parameter.detach().numpy(), heads.get(name.split(".")[-2], 0)
        _write_tensor(writer, name, values, kind, num_heads if family == "llama" else 0, seed)
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_tensor(
    writer: GGUFWriter, name: str, values: np.ndarray, kind: Kind, num_heads: int, seed: int
) -> None:
    """Write a parameter and set it, in place, to what was written."""
    if values.ndim == 1:
        written = permute(values, num_heads) if num_heads else values
        writer.add_tensor(gguf_name(name), written.astype(np.float32))
        return
    if kind in BLOCK_BYTES:
        data = random_blocks(values.shape, kind, seed)
        held = slow_dequantize(data, kind)
    else:
        data = quantize(permute(values, num_heads) if num_heads else values, kind)
        held = _plain(data, kind)
    writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
    values[:] = _unpermute(held, num_heads) if num_heads else held


def _unpermute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """By search: the row order that ``permute`` makes, turned round."""
    order = permute(np.arange(weights.shape[0]), num_heads)
    return weights[np.argsort(order)]


def _plain(data: np.ndarray, kind: Kind) -> np.ndarray:
    """Blocks of 32 values with one scale, by the letter of ``block_q4_0``, ``block_q4_1`` and ``block_q8_0``."""
    if kind in (Kind.F32, Kind.F16):
        return data.astype(np.float32)
    rows = data.shape[0]
    if kind == Kind.BF16:
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    size = {Kind.Q8_0: 34, Kind.Q4_0: 18, Kind.Q4_1: 20}[kind]
    blocks = data.reshape(-1, size)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if kind == Kind.Q8_0:
        return (scale * blocks[:, 2:].view(np.int8)).astype(np.float32).reshape(rows, -1)
    body = blocks[:, 2:] if kind == Kind.Q4_0 else blocks[:, 4:]
    quants = np.concatenate([body & 15, body >> 4], axis=1).astype(np.float32)
    if kind == Kind.Q4_0:
        return (scale * (quants - 8)).reshape(rows, -1)
    minimum = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
    return (scale * quants + minimum).reshape(rows, -1)


def _write_tokenizer(writer: GGUFWriter, tokenizer: Mapping[str, Any]) -> None:
    writer.add_tokenizer_model(tokenizer.get("model", "gpt2"))
    writer.add_tokenizer_pre(tokenizer["pre"])
    writer.add_token_list(tokenizer["tokens"])
    writer.add_token_types(tokenizer["types"])
    writer.add_token_merges(tokenizer["merges"])
    for key in ("bos", "eos", "eot", "pad"):
        if key in tokenizer:
            getattr(writer, f"add_{key}_token_id")(tokenizer[key])
    if "add_bos" in tokenizer:
        writer.add_add_bos_token(tokenizer["add_bos"])
    if "chat_template" in tokenizer:
        writer.add_chat_template(tokenizer["chat_template"])
