"""Times what runs between kernels for every token or request, with pytest-benchmark: ``make bench``.

Owns the loads. Knows nothing of kernels. Invariant: each result is checked before it is timed.
"""

from __future__ import annotations

import pytest

from bench.workloads import PROMPTS
from engine import LLM
from engine.models.loader import open_checkpoint
from engine.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = open_checkpoint("smollm2").tokenizer
    assert found is not None
    return found


def test_detokenize_one_token_at_a_time(benchmark, tokenizer: Tokenizer) -> None:
    text = " ".join(PROMPTS)
    ids = tokenizer.encode(text)

    def run() -> str:
        detokenizer = tokenizer.detokenizer()
        return "".join([*map(detokenizer.push, ids), detokenizer.finish()])

    assert run() == text
    benchmark.extra_info["num_tokens"] = len(ids)
    benchmark(run)


def test_load(benchmark) -> None:
    """``LLM("smollm2")`` once it has been converted."""
    assert LLM("smollm2").config.model.num_layers == 30
    benchmark.pedantic(lambda: LLM("smollm2"), rounds=3)
