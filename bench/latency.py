"""The price of verification: one pass over 1 to 64 rows of one sequence; and the engine's time outside its kernels.

Owns the table. The physics: a pass reads the weights once, whatever its rows, so rows are nearly free until
arithmetic takes as long as the reading; what a tuner can win follows from this curve. Invariant: the logits of a pass
over many rows were compared, bit for bit, with those of one row at a time.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from bench.field import Field, Rounds
from bench.harness import Samples, paired_median, table
from bench.physics import floor_s, pass_work
from bench.workloads import Job, prompt_ids

REPEATS = 5


def add_options(parser: argparse.ArgumentParser) -> None:
    from bench.main import ints

    parser.add_argument("--rows", type=ints, default=[1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64])
    parser.add_argument("--context-len", type=int, default=128, help="tokens cached before")
    parser.add_argument("--steps", type=int, default=32, help="decode steps timed for the overhead")


def run(options: argparse.Namespace) -> dict[str, Any]:
    counts = sorted({1, *options.rows})
    max_len = options.context_len + max(counts[-1], options.steps + 1)
    field = Field(options, max_len=max(max_len, 64))
    ids = prompt_ids(field.ours.encoder, 0, options.context_len + counts[-1])
    context, chain = ids[: options.context_len], ids[options.context_len :]
    verified = _verify(field, context, chain[: min(16, len(chain))])
    agreements = field.check_peers()
    field.prepare(num_seqs=1, max_len=max_len)
    rounds = field.rounds(
        lambda contestant: contestant.pass_s(context, [chain[:n] for n in counts], REPEATS)
    )
    rows, results = [], []
    for name in rounds.results:
        for index, count in enumerate(counts):
            row, result = _summary(field, name, index, count, len(context), rounds)
            rows.append(row)
            results.append(result)
    overhead = _overhead(field, Job(context, options.steps + 1, seed=0))
    print(field.ceilings().text())
    print(f"\none pass over a chain of tokens behind {len(context)} cached ones, all logits\n")
    header = ("contestant", "rows", "ms", "spread", "x 1 row", "GB/s", "GFLOP/s", "of the bound")
    print(table((*header, "ours is"), rows))
    print(
        f"\nbatch 1 step {1e3 * overhead['step_s']:.2f} ms, outside kernels "
        f"{1e3 * overhead['outside_s']:.2f} ms = {overhead['outside_fraction']:.1%}"
    )
    return field.record(verified, agreements, results) | {"overhead": overhead}


def _summary(
    field: Field, name: str, index: int, count: int, context_len: int, rounds: Rounds[list[float]]
) -> tuple[list[Any], dict[str, Any]]:
    """A row of the table and of the record; ratios and fractions are taken within each round."""
    passes = rounds.results[name]
    taken = Samples(tuple(seconds[index] for seconds in passes))
    relative = Samples(tuple(seconds[index] / seconds[0] for seconds in passes)).median
    work = pass_work(field.ours.shape, [(context_len, count)], count)
    bound = paired_median(
        lambda r, s: floor_s([work], r.read_gb_s, r.gflop_s) / s[index], rounds.rates, passes
    )
    ours = rounds.results[field.ours.name]
    ratio = paired_median(lambda s, o: s[index] / o[index], passes, ours)
    is_ours = name == field.ours.name
    row = [
        *(name, count, 1e3 * taken.median, f"{taken.spread:.0%}", relative),
        *(work.num_bytes / taken.median / 1e9, work.flops / taken.median / 1e9),
        *(f"{bound:.0%}", None if is_ours else f"{ratio:.2f}x"),
    ]
    return row, {
        "contestant": name,
        "rows": count,
        "seconds": taken,
        "relative_to_one_row": relative,
        "num_bytes": work.num_bytes,
        "flops": work.flops,
        "bound_fraction": bound,
        "ours_over_this": None if is_ours else ratio,
    }


def _overhead(field: Field, job: Job) -> dict[str, float]:
    """Step time outside ops, from steps in which every op was timed."""
    field.ours.decode_split(job)
    steps, kernels = field.ours.decode_split(job)
    outside = paired_median(lambda s, k: s - k, steps, kernels)
    step = Samples(tuple(steps)).median
    return {"step_s": step, "outside_s": outside, "outside_fraction": outside / step}


def _verify(field: Field, context: tuple[int, ...], chain: tuple[int, ...]) -> bool:
    """A pass over many rows against plain decoding, one row at a time: the same bits in every row."""
    ours = field.ours
    ours.fill(context)
    together = ours.pass_logits(len(context), chain)
    alone = [ours.step_logits(len(context) + i, [token]) for i, token in enumerate(chain)]
    same = torch.equal(together, torch.cat(alone))
    outcome = "same bits" if same else "logits DIFFER"
    print(f"check: a pass over {len(chain)} rows against one row at a time: {outcome}")
    return same
