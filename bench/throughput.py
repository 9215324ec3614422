"""Tokens per second by batch size, and on the shape that lean engines are compared on.

Owns the table. The physics: decoding B sequences reads every weight once a step and does 2 FLOPs a weight and
sequence, so small batches are bound by memory and large ones by arithmetic. Invariant: outputs were compared with
those of each sequence alone before anything is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from bench.contestant import Generation
from bench.field import Field, Rounds
from bench.harness import Samples, paired_median, table
from bench.physics import Work, decode_passes, floor_s, total
from bench.workloads import Job, lean_engine_jobs, uniform_jobs


def add_options(parser: argparse.ArgumentParser) -> None:
    from bench.main import ints

    parser.add_argument("--shape", default="uniform", choices=("uniform", "lean"))
    parser.add_argument("--batch-sizes", type=ints, default=[1, 4, 16, 32], help="uniform shape")
    parser.add_argument("--prompt-len", type=int, default=64, help="uniform shape, tokens")
    parser.add_argument("--output-len", type=int, default=64, help="uniform shape, tokens")
    parser.add_argument("--num-seqs", type=int, default=256, help="lean shape")
    parser.add_argument(
        "--scale", type=float, default=0.1, help="lean shape: of its 100 to 1024 tokens"
    )
    parser.add_argument("--verify-seqs", type=int, default=4, help="sequences also run alone")


def run(options: argparse.Namespace) -> dict[str, Any]:
    lean = options.shape == "lean"
    longest = (
        round(2 * 1024 * options.scale) + 2 if lean else options.prompt_len + options.output_len
    )
    field = Field(options, max_len=max(longest, 64))
    encoder = field.ours.encoder
    if lean:
        batches = [lean_engine_jobs(encoder, num_seqs=options.num_seqs, scale=options.scale)]
    else:
        batches = [
            uniform_jobs(
                encoder,
                num_seqs=size,
                prompt_len=options.prompt_len,
                num_tokens=options.output_len,
            )
            for size in options.batch_sizes
        ]
    verified = _verify(field, max(batches, key=len), options.verify_seqs)
    agreements = field.check_peers()
    rows, results = [], []
    for jobs in batches:
        field.prepare(num_seqs=len(jobs), max_len=longest)
        rounds = field.rounds(lambda contestant, jobs=jobs: contestant.generate(jobs, 0.0))
        for name in rounds.results:
            row, result = _summary(field, name, jobs, rounds)
            rows.append(row)
            results.append(result)
    print(field.ceilings().text())
    print(f"\n{_shape_text(options)}; decode is timed from the last sequence's first token\n")
    header = ("contestant", "batch", "decode tokens/s", "spread", "with prefill")
    print(table((*header, "of memory", "of FLOPs", "of the bound", "ours is"), rows))
    return field.record(verified, agreements, results)


def _shape_text(options: argparse.Namespace) -> str:
    if options.shape == "lean":
        return f"{options.num_seqs} sequences of 100-1024 tokens in and out, x {options.scale}"
    return f"prompts of {options.prompt_len} tokens, {options.output_len} generated"


def _verify(field: Field, jobs: Sequence[Job], num_alone: int) -> bool:
    """Run all jobs at once and some of them alone: token for token the same."""
    together = field.ours.generate(jobs, 0.0).token_ids
    step = max(1, len(jobs) // max(1, num_alone))
    picked = list(range(0, len(jobs), step))[:num_alone]
    alone = [field.ours.generate([jobs[i]], 0.0).token_ids[0] for i in picked]
    wrong = [i for i, ids in zip(picked, alone, strict=True) if together[i] != ids]
    outcome = f"sequences {wrong} DIFFER" if wrong else "identical"
    print(f"check: {len(picked)} of {len(jobs)} sequences against plain decoding alone: {outcome}")
    return not wrong


def _summary(
    field: Field, name: str, jobs: Sequence[Job], rounds: Rounds[Generation]
) -> tuple[list[Any], dict[str, Any]]:
    """A row of the table and of the record. Fractions are of the ceilings of the same round."""
    generations = rounds.results[name]
    ours = rounds.results[field.ours.name]
    speed = Samples(tuple(g.decode_tokens_per_s for g in generations))
    overall = Samples(tuple(g.tokens_per_s for g in generations))
    ratio = paired_median(
        lambda o, g: o.decode_tokens_per_s / g.decode_tokens_per_s, ours, generations
    )
    row: list[Any] = [name, len(jobs), speed.median, f"{speed.spread:.0%}", overall.median]
    result: dict[str, Any] = {
        "contestant": name,
        "batch_size": len(jobs),
        "decode_tokens_per_s": speed,
        "tokens_per_s": overall,
    }
    if name != field.ours.name:
        result["ours_over_this"] = ratio
        return [*row, None, None, None, f"{ratio:.2f}x"], result
    passes = _decode_passes(field, jobs)
    work = total(passes)
    expected = sum(job.num_tokens - 1 for job in jobs)
    memory, compute, bound, fp32 = [], [], [], []
    for rates, g in zip(rounds.rates, generations, strict=True):
        seconds = g.decode_s * expected / max(1, g.num_decode_tokens)
        memory.append(work.memory_s(rates.read_gb_s) / seconds)
        compute.append(work.compute_s(rates.gflop_s) / seconds)
        fp32.append(work.compute_s(rates.fp32_gflop_s) / seconds)
        bound.append(floor_s(passes, rates.read_gb_s, rates.gflop_s) / seconds)
    fractions = [Samples(tuple(values)).median for values in (memory, compute, bound)]
    names = ("memory_fraction", "flop_fraction", "bound_fraction")
    result |= dict(zip(names, fractions, strict=True))
    result["fp32_flop_fraction"] = Samples(tuple(fp32)).median
    result |= {"decode_bytes": work.num_bytes, "decode_flops": work.flops}
    return [*row, *(f"{value:.0%}" for value in fractions), None], result


def _decode_passes(field: Field, jobs: Sequence[Job]) -> list[Work]:
    return decode_passes(
        field.ours.shape,
        [len(job.prompt_ids) for job in jobs],
        [job.num_tokens - 1 for job in jobs],
    )
