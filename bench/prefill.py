"""Seconds from a prompt that was never seen to its first token.

Owns the table. The physics: every weight is used once a token, 2 FLOPs each, so prefill is bound by arithmetic.
Invariant: the logits behind a prompt that runs at once were compared, bit for bit, with those of running it one token
at a time.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from bench.field import Field
from bench.harness import Samples, paired_median, table
from bench.physics import pass_work
from bench.workloads import prompt_ids


def add_options(parser: argparse.ArgumentParser) -> None:
    from bench.main import ints

    parser.add_argument("--prompt-lens", type=ints, default=[256, 1024])
    parser.add_argument("--verify-len", type=int, default=64, help="tokens run one at a time")


def run(options: argparse.Namespace) -> dict[str, Any]:
    longest = max(*options.prompt_lens, options.verify_len, 64)
    field = Field(options, max_len=longest + 1)
    verified = _verify(field, options.verify_len)
    agreements = field.check_peers()
    rows, results = [], []
    field.prepare(num_seqs=1, max_len=longest + 1)
    for length in options.prompt_lens:
        ids = prompt_ids(field.ours.encoder, 0, length)
        rounds = field.rounds(lambda contestant, ids=ids: contestant.prefill_s(ids))
        work = pass_work(field.ours.shape, [(0, length)], 1)
        ours = rounds.results[field.ours.name]
        for name, seconds in rounds.results.items():
            taken = Samples(tuple(seconds))
            ratio = paired_median(lambda s, o: s / o, seconds, ours)
            fraction = paired_median(
                lambda r, s, work=work: work.compute_s(r.gflop_s) / s, rounds.rates, seconds
            )
            fp32 = paired_median(
                lambda r, s, work=work: work.compute_s(r.fp32_gflop_s) / s, rounds.rates, seconds
            )
            is_ours = name == field.ours.name
            rows.append(
                [
                    *(name, length, 1e3 * taken.median, f"{taken.spread:.0%}"),
                    *(length / taken.median, work.flops / taken.median / 1e9, f"{fraction:.0%}"),
                    None if is_ours else f"{ratio:.2f}x",
                ]
            )
            results.append(
                {
                    "contestant": name,
                    "prompt_len": length,
                    "seconds": taken,
                    "tokens_per_s": length / taken.median,
                    "flops": work.flops,
                    "num_bytes": work.num_bytes,
                    "flop_fraction": fraction,
                    "fp32_flop_fraction": fp32,
                    "ours_over_this": None if is_ours else ratio,
                }
            )
    print(field.ceilings().text())
    print("\na new prompt to its first token; FLOPs are what the mathematics needs\n")
    header = ("contestant", "tokens", "ms", "spread", "tokens/s", "GFLOP/s", "of FLOPs", "ours is")
    print(table(header, rows))
    return field.record(verified, agreements, results)


def _verify(field: Field, length: int) -> bool:
    """Prefill at once against one token at a time: the same bits behind the last token."""
    ids = prompt_ids(field.ours.encoder, 0, length)
    for position, token_id in enumerate(ids):
        one_by_one = field.ours.step_logits(position, [token_id])
    whole = field.ours.step_logits(0, ids)
    same = torch.equal(one_by_one, whole)
    outcome = "same bits" if same else "logits DIFFER"
    print(f"check: a prompt of {length} tokens at once against one token at a time: {outcome}")
    return same
