"""What the tests of the FeatureTap share: a model to compute by hand, a watcher of records, the dense oracle.

The hand model's layers add nothing (``o_proj`` and ``down_proj`` are zero), so every tap at a position *is* the
embedding of the token there, and the final hidden state is that embedding, normed: a shift by one position, a rejected
node or another request's row shows at once, whatever path the engine took.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from engine import LLM, SamplingParams
from engine.request import Request
from engine.request_group import RequestGroup
from engine.scheduler import ScheduledRows
from engine.speculation import Speculator
from engine.tap_record import TapReader, TapRecord
from tests.conftest import tiny_config, tiny_weights, write_byte_tokenizer
from tests.spec.chaos import ChaosTuner, RandomTrees

LAYERS = (2, 0, 1)  # of a model of two layers, out of order
HIDDEN = 64


def make_hand_model(path: Path) -> Path:
    path.mkdir()
    config = tiny_config("llama")
    weights = tiny_weights(config, seed=3)
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    save_file(weights, str(path / "model.safetensors"), metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 258}))
    write_byte_tokenizer(path)
    return path


def bits(features: torch.Tensor) -> np.ndarray:
    """fp32 [n, ...] -> uint16 [n, W], rounded as torch does."""
    return features.to(torch.bfloat16).flatten(1).view(torch.int16).numpy().view(np.uint16)


def by_hand(weights: dict[str, torch.Tensor], token_ids: list[int]) -> np.ndarray:
    """What the hand model's features must be: from its files and the definition of the norm alone."""
    rows = weights["model.embed_tokens.weight"][token_ids].double()
    normed = rows * (rows.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    normed = normed * weights["model.norm.weight"].double()
    return bits(torch.stack([*[rows] * len(LAYERS), normed], 1).float())


def dense(llm: LLM, token_ids: list[int], layers: tuple[int, ...] = LAYERS) -> np.ndarray:
    """Features of a whole sequence in one forward of an idle engine: no chunk, cache, tree or neighbour."""
    count, runner = len(token_ids), llm.engine.runner
    request = Request("", token_ids, SamplingParams(max_tokens=1), seed=0, max_total_len=count + 1)
    request.pages = list(range((count + 15) // 16))
    rows = [ScheduledRows(request, 0, count, True)]
    _, output = runner.forward(rows, [count - 1], tap_layers=layers, want_hidden=True)
    assert output.taps is not None
    assert output.hidden is not None
    return bits(torch.cat([output.taps, output.hidden.unsqueeze(1)], 1))


@dataclass
class Seen:
    """All that came of one request."""

    group_id: str
    sample_index: int
    prompt_len: int
    tokens: dict[int, int] = field(default_factory=dict)  # by position
    features: dict[int, np.ndarray] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)  # of stretches without a gap
    end: str | None = None


class Watcher:
    """Reads a tap after every step, copies, and refuses what no record may do."""

    def __init__(self, name: str) -> None:
        self.reader = TapReader(name)
        self.seen: dict[str, Seen] = {}
        self.num_records = 0

    def poll(self) -> None:
        for record in self.reader.read():
            self._take(record)
        self.reader.release()

    def _take(self, record: TapRecord) -> None:
        self.num_records += 1
        count = len(record.token_ids)
        assert record.features.shape[0] == count
        assert (record.token_ids.dtype, record.features.dtype) == (np.int32, np.uint16)
        assert count or record.finish_reason, "an empty record that ends nothing"
        new = Seen(record.group_id, record.sample_index, record.prompt_len)
        seen = self.seen.setdefault(record.request_id, new)
        assert seen.end is None, ("a record behind the last one", record.request_id)
        assert (seen.group_id, seen.sample_index, seen.prompt_len) == (
            record.group_id,
            record.sample_index,
            record.prompt_len,
        )
        at = record.start
        assert not seen.tokens or at > max(seen.tokens) or not count, ("twice or backwards", record)
        if count and at - 1 not in seen.tokens:
            seen.starts.append(at)
        for i in range(count):
            seen.tokens[at + i] = int(record.token_ids[i])
            seen.features[at + i] = record.features[i].copy()
            seen.versions[at + i] = record.target_version
        seen.end = record.finish_reason


def speculate_at_random(llm: LLM, groups: list[RequestGroup], truth: float, seed: int) -> None:
    """From here on: trees of random shape that hide what plain decoding gave in ``groups``."""
    outputs = {
        (s.request.prompt_token_ids, s.request.seed): s.request.output_token_ids
        for group in groups
        for s in group.samples
    }
    vocab_size = llm.config.model.vocab_size
    drafter = RandomTrees(outputs, truth, vocab_size, seed)
    tuner = ChaosTuner(["chaos"], max_depth=6, max_nodes=10, seed=seed)
    llm.engine.speculator = Speculator([drafter], tuner, vocab_size=vocab_size)


Job = tuple[str, dict[str, Any]]


def run(
    llm: LLM,
    jobs: list[Job],
    watcher: Watcher | None = None,
    abort_after: dict[int, int] | None = None,
) -> list[RequestGroup]:
    """Drive an engine over jobs, each a prompt and its parameters; ``abort_after``: job -> step."""
    engine = llm.engine
    groups = []
    for i, (prompt, given) in enumerate(jobs):
        tokens = llm._reader.read(prompt)
        groups.append(engine.add(f"job-{i}", tokens, SamplingParams(**given)))
    num_steps = 0
    while engine.has_unfinished:
        engine.step()
        num_steps += 1
        for job, step in (abort_after or {}).items():
            if step == num_steps:
                engine.abort(groups[job])
        if watcher is not None:
            watcher.poll()
    engine.scheduler.check()
    return groups
