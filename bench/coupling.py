"""What it is worth to draft with the sampler's own noise: acceptance of coupled proposals against most likely ones.

Owns the table. The drafter is the target's own early exit: the input of a late layer through the final norm and the
head. Every sampled position of a rollout is judged alone: is the sampled token among the first k proposals? Invariant:
the rollout's tokens were recomputed from the target's logits by the same ranking, so that the noise is the sampler's.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

from bench.harness import table
from bench.ours import OurEngine, prefill_batch
from bench.workloads import PROMPTS, Job

SIZES = (1, 2, 4)  # proposals


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--exit-layer", type=int, default=None, help="default: the last layer's input"
    )
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--num-tokens", type=int, default=64, help="sampled for each prompt")


def run(options: argparse.Namespace) -> dict[str, Any]:
    if options.peer:
        raise ValueError("--peer: no other engine takes part in this bench")
    ours = OurEngine(
        options.model, dtype=options.dtype, num_threads=options.num_threads, ops=options.ops
    )
    num_layers = ours.llm.config.model.num_layers
    exit_layer = num_layers - 1 if options.exit_layer is None else options.exit_layer
    if not 0 <= exit_layer <= num_layers:
        raise ValueError(f"--exit-layer must be 0..{num_layers}, got {exit_layer}")
    jobs = [
        Job(_prompt_ids(ours, PROMPTS[i % len(PROMPTS)]), options.num_tokens, 1000 + i)
        for i in range(options.num_prompts)
    ]
    outputs = ours.generate(jobs, options.temperature).token_ids
    hits = {name: torch.zeros(max(SIZES)) for name in ("most likely", "coupled")}
    num_positions, verified = 0, True
    for job, output in zip(jobs, outputs, strict=True):
        draft, target = _logits(ours, job, output, exit_layer)
        sampled = torch.tensor(output, dtype=torch.int32).unsqueeze(1)
        verified &= torch.equal(_rank(ours, target, job, options.temperature, 1), sampled)
        for name, temperature in (("most likely", 0.0), ("coupled", options.temperature)):
            proposed = _rank(ours, draft, job, temperature, max(SIZES))
            hits[name] += (proposed == sampled).sum(dim=0)
        num_positions += len(output)
    rows, results = [], []
    for name, found in hits.items():
        accepted = (found.cumsum(0) / num_positions).tolist()
        values = [accepted[k - 1] for k in SIZES]
        rows.append([name, *values])
        results.append({"proposals": name, "acceptance": dict(zip(SIZES, values, strict=True))})
    outcome = "every token" if verified else "NOT every token"
    print(f"check: {outcome} of the rollout is the first of the ranking of the target's own logits")
    print(
        f"\nacceptance of one token, {num_positions} positions, temperature {options.temperature:g}, drafter: the "
        f"target's exit before layer {exit_layer} of {num_layers}\n"
    )
    print(table(("proposals", *(f"k = {k}" for k in SIZES)), rows))
    return {
        "verified": verified,
        "settings": ours.settings,
        "temperature": options.temperature,
        "exit_layer": exit_layer,
        "num_positions": num_positions,
        "results": results,
    }


def _prompt_ids(ours: OurEngine, text: str) -> tuple[int, ...]:
    """A prompt as the model expects it: through its chat template, where it has one."""
    tokenizer = ours.llm.engine.tokenizer
    if tokenizer is not None and tokenizer.chat_template is not None:
        text = tokenizer.render_chat([{"role": "user", "content": text}])
        return tuple(tokenizer.encode(text, add_special_tokens=False))
    return tuple(ours.encoder.encode(text))


def _logits(ours: OurEngine, job: Job, output: list[int], exit_layer: int) -> tuple[Tensor, Tensor]:
    """Logits [tokens, V] of the early exit and of the target, behind which each token of an output was sampled."""
    decoder = ours.llm.engine.runner.decoder
    ids, start = [*job.prompt_ids, *output][:-1], len(job.prompt_ids) - 1
    chunk = ours.llm.config.max_num_batched_tokens
    hidden, taps = [], []
    for at in range(0, len(ids), chunk):
        found = decoder.forward(prefill_batch(at, ids[at : at + chunk]), tap_layers=(exit_layer,))
        assert found.hidden is not None
        assert found.taps is not None
        hidden.append(found.hidden.clone())
        taps.append(found.taps[:, 0].clone())
    early = torch.cat(taps)[start:].contiguous()
    weights, ops = decoder.weights, decoder.ops
    normed = torch.empty_like(early)
    ops.rms_norm(early, weights.layers[-1].next_norm, decoder.config.rms_norm_eps, normed)
    logits = []
    for rows in (normed, torch.cat(hidden)[start:].contiguous()):
        logits.append(torch.empty(rows.shape[0], decoder.config.vocab_size))
        ops.linear(rows, weights.head, logits[-1])
    return logits[0], logits[1]


def _rank(ours: OurEngine, logits: Tensor, job: Job, temperature: float, count: int) -> Tensor:
    """The first ``count`` proposals [tokens, count] for each position of an output."""
    rows = logits.shape[0]
    token_ids = torch.empty((rows, count), dtype=torch.int32)
    scores, logprobs = torch.empty(2, rows, count).unbind(0)
    positions = torch.arange(rows, dtype=torch.int32) + len(job.prompt_ids)
    ours.ops.coupled_top_k(
        logits,
        torch.full((rows,), temperature),
        torch.zeros(rows, dtype=torch.int32),
        torch.ones(rows),
        torch.zeros(rows),
        torch.full((rows,), job.seed, dtype=torch.int64),
        positions,
        None,
        token_ids,
        scores,
        logprobs,
    )
    return token_ids
