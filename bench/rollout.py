"""The long tail of an RL rollout: 32 sequences at once at temperature 1, one of them 24 times as long as most.

Owns the table. The physics: while all run the machine is bound by arithmetic, and when the last one runs alone, by
memory. Invariant: the first tokens of every sequence were compared with those it gets alone, at the same seed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench.field import Field
from bench.harness import Samples, paired_median, table
from bench.physics import Work, decode_passes, floor_s, pass_work, total
from bench.workloads import Job, long_tail_jobs


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--verify-tokens", type=int, default=16, help="of each sequence, run alone")


def run(options: argparse.Namespace) -> dict[str, Any]:
    field = Field(options, max_len=round(768 * options.scale) + 128)
    jobs = long_tail_jobs(field.ours.encoder, options.scale)
    verified = _verify(field, jobs, options.temperature, options.verify_tokens)
    agreements = field.check_peers()
    longest = max(len(job.prompt_ids) + job.num_tokens for job in jobs)
    field.prepare(num_seqs=len(jobs), max_len=longest)
    rounds = field.rounds(lambda contestant: contestant.generate(jobs, options.temperature))
    passes = _passes(field, jobs)
    work = total(passes)
    ours = rounds.results[field.ours.name]
    rows, results = [], []
    for name, generations in rounds.results.items():
        seconds = Samples(tuple(g.total_s for g in generations))
        tail = Samples(tuple(g.tail_s or 0.0 for g in generations))
        ratio = paired_median(lambda g, o: g.total_s / o.total_s, generations, ours)
        bound = paired_median(
            lambda r, g: floor_s(passes, r.read_gb_s, r.gflop_s) / g.total_s,
            rounds.rates,
            generations,
        )
        is_ours = name == field.ours.name
        rows.append(
            [
                *(name, seconds.median, f"{seconds.spread:.0%}"),
                *(generations[0].num_tokens / seconds.median, tail.median, f"{bound:.0%}"),
                None if is_ours else f"{ratio:.2f}x",
            ]
        )
        results.append(
            {
                "contestant": name,
                "seconds": seconds,
                "tail_seconds": tail,
                "num_tokens": generations[0].num_tokens,
                "num_bytes": work.num_bytes,
                "flops": work.flops,
                "bound_fraction": bound,
                "ours_over_this": None if is_ours else ratio,
            }
        )
    print(field.ceilings().text())
    tokens = sum(job.num_tokens for job in jobs)
    print(f"\n{len(jobs)} sequences at once, {tokens} tokens, temperature {options.temperature}\n")
    header = ("contestant", "seconds", "spread", "tokens/s", "last alone, s", "of the bound")
    print(table((*header, "ours is"), rows))
    return field.record(verified, agreements, results)


def _passes(field: Field, jobs: Sequence[Job]) -> list[Work]:
    shape = field.ours.shape
    prefill = pass_work(shape, [(0, len(job.prompt_ids)) for job in jobs], len(jobs))
    return [
        prefill,
        *decode_passes(
            shape, [len(job.prompt_ids) for job in jobs], [job.num_tokens - 1 for job in jobs]
        ),
    ]


def _verify(field: Field, jobs: Sequence[Job], temperature: float, num_tokens: int) -> bool:
    """The first tokens of every sequence, together and alone: the same."""
    short = [replace(job, num_tokens=min(num_tokens, job.num_tokens)) for job in jobs]
    together = field.ours.generate(short, temperature).token_ids
    alone = [field.ours.generate([job], temperature).token_ids[0] for job in short]
    wrong = [i for i, ids in enumerate(alone) if together[i] != ids]
    outcome = f"sequences {wrong} DIFFER" if wrong else "identical"
    print(f"check: {num_tokens} tokens of {len(jobs)} sequences against plain decoding: {outcome}")
    return not wrong
