"""The long tail of an RL rollout: 32 sequences at once at temperature 1, one of them 24 times as long as most.

Owns the report. Plain decoding, variants of speculation and peers run in the same rounds; beside them stand the
machine's ceilings, the best fixed setting of each batch size (found by sweep), and the optimum that the measured price
of rows allows at the oracle drafter's acceptance. Invariant: every variant's tokens are those of plain decoding, and
the first tokens of every sequence are those that it gets alone.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.field import Field, Rounds
from bench.harness import Samples, paired_median, table
from bench.main import ints
from bench.optimum import PhasePrice, Price, best_by_phase, interpolated
from bench.physics import Work, decode_passes, floor_s, pass_work, total
from bench.speculative import PLAIN, RolloutLog, VariantContestant, Variants, pass_curve
from bench.timeline import draw_rollouts
from bench.workloads import Job, long_tail_jobs, reasoning_jobs, trace_jobs

_VARIANTS = "cost:oracle:0.8,beg:oracle:0.8,cost:suffix"
_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 1 << 20)  # upper ends, of numbers of requests


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--verify-tokens", type=int, default=16, help="of each sequence, run alone")
    parser.add_argument(
        "--variants",
        default=_VARIANTS,
        help="TUNER:DRAFTER[:...], comma-separated, beside plain: cost, beg, fixedN or off, with oracle:P, suffix, "
        f"eagle:DIR or eagle3:DIR; 'none' for plain alone (default: {_VARIANTS})",
    )
    parser.add_argument(
        "--sweep",
        type=ints,
        default=[],
        help="also run these fixed depths with the oracle, for the best of each batch size, such as 1,2,3,4,6,8",
    )
    parser.add_argument("--acceptance", type=float, default=0.8, help="of the oracle in the sweep")
    parser.add_argument("--max-depth", type=int, default=12, help="longest chain of any variant")
    parser.add_argument(
        "--trace", default=None, help="lengths, prompts and seeds of a recorded rollout"
    )
    parser.add_argument(
        "--tasks",
        default=None,
        help="reasoning-gym tasks instead of the tail, such as chain_sum,gcd",
    )
    parser.add_argument("--samples", type=int, default=8, help="of each prompt, with --tasks")
    parser.add_argument(
        "--earlier-epochs", type=int, default=0, help="that the suffix drafter has seen, not timed"
    )
    parser.add_argument(
        "--plot", default=None, help="PNG of batch size, tokens/s and choices over time"
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    field = Field(options, max_len=_longest(options))
    jobs = _jobs(options, field)
    verified = _verify(field, jobs, options.temperature, options.verify_tokens)
    agreements = field.check_peers()
    with tempfile.TemporaryDirectory() as directory:
        variants = Variants(
            field.ours.llm,
            jobs,
            options.temperature,
            trace=Path(directory) / "rollout.jsonl",
            max_depth=options.max_depth,
            num_earlier=options.earlier_epochs,
        )
        entrants = [VariantContestant(name, variants) for name in _names(options)]
        field.contestants = [*entrants, *field.peers]
        field.prepare(
            num_seqs=len(jobs), max_len=max(len(j.prompt_ids) + j.num_tokens for j in jobs)
        )
        rounds = field.rounds(lambda contestant: contestant.generate(jobs, options.temperature))
    same = _compare(entrants, variants.expected)
    passes = _passes(field, jobs)
    print(field.ceilings().text())
    tokens = sum(job.num_tokens for job in jobs)
    print(f"\n{len(jobs)} sequences at once, {tokens} tokens, temperature {options.temperature}\n")
    results = _report(rounds, entrants, passes)
    bounds = _bounds(entrants, jobs, options)
    if options.plot:
        draw_rollouts({e.name: e.logs[-1] for e in entrants}, Path(options.plot))
        print(f"\ntimeline: {options.plot}")
    record = field.record(verified and same, agreements, results)
    work = total(passes)
    return record | {"bounds": bounds, "num_bytes": work.num_bytes, "flops": work.flops}


def _longest(options: argparse.Namespace) -> int | None:
    return round(768 * options.scale) + 128 if not (options.trace or options.tasks) else None


def _jobs(options: argparse.Namespace, field: Field) -> list[Job]:
    if options.trace:
        return trace_jobs(options.trace)
    if options.tasks:
        return reasoning_jobs(
            field.ours.llm.engine.tokenizer,
            options.tasks.split(","),
            num_samples=options.samples,
            num_tokens=max(2, round(128 * options.scale)),
        )
    return long_tail_jobs(field.ours.encoder, options.scale)


def _names(options: argparse.Namespace) -> list[str]:
    names = [PLAIN]
    if options.variants != "none":
        names += options.variants.split(",")
    names += [f"fixed{depth}:oracle:{options.acceptance:g}" for depth in options.sweep]
    return list(dict.fromkeys(names))


def _compare(entrants: Sequence[VariantContestant], expected: Sequence[Sequence[int]]) -> bool:
    """Every run of every variant: plain decoding's tokens."""
    wrong = {
        entrant.name
        for entrant in entrants
        for log in entrant.logs
        if log.failures or [list(ids) for ids in expected] != log.token_ids
    }
    outcome = f"{', '.join(sorted(wrong))} DIFFER or failed" if wrong else "identical"
    print(f"check: tokens of {len(entrants)} variants against plain decoding: {outcome}")
    return not wrong


def _report(
    rounds: Rounds, entrants: Sequence[VariantContestant], passes: Sequence[Work]
) -> list[dict[str, Any]]:
    logs = {entrant.name: entrant.logs for entrant in entrants}
    plain = rounds.results[PLAIN]
    rows, results = [], []
    for name, generations in rounds.results.items():
        seconds = Samples(tuple(g.total_s for g in generations))
        tail = Samples(tuple(g.tail_s or 0.0 for g in generations))
        faster = paired_median(lambda g, p: p.total_s / g.total_s, generations, plain)
        tail_faster = paired_median(
            lambda g, p: (p.tail_s or 0.0) / (g.tail_s or 1.0), generations, plain
        )
        bound = paired_median(
            lambda r, g: floor_s(passes, r.read_gb_s, r.gflop_s) / g.total_s,
            rounds.rates,
            generations,
        )
        accepted = [log.acceptance_length for log in logs.get(name, [])]
        off = [log.off_share for log in logs.get(name, [])]
        result = {
            "contestant": name,
            "seconds": seconds,
            "tail_seconds": tail,
            "num_tokens": generations[0].num_tokens,
            "bound_fraction": bound,
            "plain_over_this": faster,
            "plain_tail_over_this": tail_faster,
            "acceptance_length": Samples(tuple(accepted)) if accepted else None,
            "off_share": Samples(tuple(off)) if off else None,
        }
        results.append(result)
        rows.append(
            [
                *(name, seconds.median, f"{seconds.spread:.0%}"),
                *(generations[0].num_tokens / seconds.median, tail.median, f"{bound:.0%}"),
                Samples(tuple(accepted)).median if accepted else None,
                f"{Samples(tuple(off)).median:.0%}" if off else None,
                *(f"{faster:.2f}x", f"{tail_faster:.2f}x"),
            ]
        )
    header = ("contestant", "seconds", "spread", "tokens/s", "last alone, s", "of plain's roofline")
    print(table((*header, "acceptance length", "off", "x plain", "x plain, alone"), rows))
    print(
        "\nacceptance length: tokens of a step, the bonus token included; off: share of decoding time"
    )
    return results


def _bounds(
    entrants: Sequence[VariantContestant], jobs: Sequence[Job], options: argparse.Namespace
) -> dict[str, Any]:
    """The best of the sweep by batch size, the optimum of the price curve, and where each variant stands."""
    plain = entrants[0]
    prefill_s = Samples(tuple(log.by_phase().get(0, (0.0, 0))[0] for log in plain.logs)).median
    logs = [log for entrant in entrants for log in entrant.logs]
    curve = pass_curve(logs)
    lengths = [job.num_tokens for job in jobs]
    oracle = f"oracle:{options.acceptance:g}"
    found: dict[str, Any] = {"pass_curve_ms": {rows: 1e3 * s for rows, s in curve.items()}}
    if any(oracle in entrant.name for entrant in entrants) and len(curve) > 1:
        best = best_by_phase(
            _phase_price(logs, curve),
            lengths,
            [options.acceptance] * len(jobs),
            max_depth=options.max_depth,
        )
        found["optimum_s"] = best.seconds + prefill_s
        found["optimum_tail_s"] = best.tail_s
        found["optimum_depths"] = best.depths
        print(
            f"\noptimum at acceptance {options.acceptance:g}, by the measured price of rows: "
            f"{best.seconds + prefill_s:.2f} s, the last alone {best.tail_s:.2f} s; depth by batch size {best.depths}"
        )
    if options.sweep:
        swept = [e for e in entrants if e.name == PLAIN or e.name.startswith("fixed")]
        found["best_by_batch"] = _best_by_bucket(swept)
        found["swept_s"] = prefill_s + sum(
            entry["seconds"] for entry in found["best_by_batch"].values()
        )
        print(f"best fixed setting of each batch size, by sweep: {found['swept_s']:.2f} s")
        for bucket, entry in found["best_by_batch"].items():
            print(
                f"  up to {bucket:>3} requests: {entry['variant']}, {entry['tokens_per_s']:.0f} tokens/s"
            )
    for key, name in (("optimum_s", "the optimum"), ("swept_s", "the best of the sweep")):
        if key in found:
            shares = {
                e.name: found[key] / Samples(tuple(log.seconds for log in e.logs)).median
                for e in entrants
                if oracle in e.name and not e.name.startswith("fixed")
            }
            found[key.replace("_s", "_fraction")] = shares
            print(f"of {name}: " + ", ".join(f"{n} {share:.2f}" for n, share in shares.items()))
    return found


def _phase_price(logs: Sequence[RolloutLog], curve: Mapping[int, float]) -> PhasePrice:
    """The price of rows from steps with about as many requests, so with about such contexts, where there were some."""
    everywhere = interpolated(curve)
    prices: dict[int, Price] = {}
    least = 0
    for bucket in _BUCKETS:
        found = pass_curve(logs, range(least + 1, bucket + 1))
        prices[bucket] = interpolated(found) if len(found) > 2 else everywhere
        least = bucket
    return lambda num, rows: prices[next(b for b in _BUCKETS if b >= num)](rows)


def _best_by_bucket(entrants: Sequence[VariantContestant]) -> dict[int, dict[str, Any]]:
    """For each range of batch sizes the variant with the most tokens per second, and its seconds for plain's tokens."""
    best: dict[int, dict[str, Any]] = {}
    tokens_of: dict[int, int] = {}
    for entrant in entrants:
        rates: dict[int, list[float]] = {}
        for log in entrant.logs:
            for bucket, (seconds, tokens) in _by_bucket(log).items():
                rates.setdefault(bucket, []).append(tokens / seconds)
                if entrant.name == PLAIN:
                    tokens_of[bucket] = tokens
        for bucket, values in rates.items():
            rate = Samples(tuple(values)).median
            if bucket not in best or rate > best[bucket]["tokens_per_s"]:
                best[bucket] = {"variant": entrant.name, "tokens_per_s": rate}
    for bucket, entry in best.items():
        entry["seconds"] = tokens_of.get(bucket, 0) / entry["tokens_per_s"]
    return dict(sorted(best.items()))


def _by_bucket(log: RolloutLog) -> dict[int, tuple[float, int]]:
    found: dict[int, tuple[float, int]] = {}
    for num, (seconds, tokens) in log.by_phase().items():
        if num:
            bucket = next((b for b in _BUCKETS if b >= num), num)
            before = found.get(bucket, (0.0, 0))
            found[bucket] = (before[0] + seconds, before[1] + tokens)
    return found


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
