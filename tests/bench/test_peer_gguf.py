"""The GGUF files that llama.cpp gets: every field and tensor is there, weights are the same numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize, quantize

from bench.peer_gguf import gguf_in_format


@pytest.fixture
def source(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_token_list(["a", "b", "c"])
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((4, 64)).astype(np.float32)
    q8_0 = GGMLQuantizationType.Q8_0
    writer.add_tensor("blk.0.attn_q.weight", quantize(weights, q8_0), raw_dtype=q8_0)
    writer.add_tensor("output_norm.weight", rng.standard_normal(64).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(("name", "relative"), [("bf16", 2.0**-8), ("f32", 0.0)])
def test_conversion_keeps_numbers_and_metadata(source: Path, name: str, relative: float) -> None:
    path = gguf_in_format(str(source), name)
    before, after = GGUFReader(source), GGUFReader(path)
    assert after.fields["llama.block_count"].contents() == 3
    assert after.fields["tokenizer.ggml.tokens"].contents() == ["a", "b", "c"]
    for a, b in zip(before.tensors, after.tensors, strict=True):
        assert a.name == b.name
        assert list(a.shape) == list(b.shape)
        want = dequantize(a.data, a.tensor_type).ravel()
        got = dequantize(b.data, b.tensor_type).ravel()
        assert np.all(np.abs(got - want) <= relative * np.abs(want))


def test_converted_once(source: Path) -> None:
    first = gguf_in_format(str(source), "bf16")
    stamp = first.stat().st_mtime_ns
    assert gguf_in_format(str(source), "bf16") == first
    assert first.stat().st_mtime_ns == stamp
    assert gguf_in_format(str(source), "source") == source


def test_unknown_format_and_model_are_refused(source: Path) -> None:
    with pytest.raises(ValueError, match="q2"):
        gguf_in_format(str(source), "q2")
    with pytest.raises(ValueError, match="needs smollm2 or a GGUF file"):
        gguf_in_format("/nowhere", "bf16")
