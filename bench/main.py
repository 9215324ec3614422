"""``tlt bench``: the command line of the benches.

Owns the options and who takes part. Each bench is a module with ``add_options`` and ``run``; its record is printed
here as the last line. Invariant: bad input, or a peer that is not installed, is one line on stderr and status 2; an
output that failed its check is status 1.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence

from bench.harness import json_line
from engine.option_parser import OptionParser

BENCHES = {
    "throughput": "tokens/s by batch size; the lean-engine shape of 256 mixed sequences",
    "latency": "one pass over 1 to 64 rows (the price of verification); time outside kernels",
    "prefill": "seconds from a new prompt to its first token",
    "rollout": "the long tail: 32 sequences at once, one of them 24 times as long as most",
    "coupling": "acceptance of proposals drawn with the sampler's noise against most likely ones",
    "training": "the drafter's trainer: share of the FLOP ceiling, packing against padding, time to stop",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a bench; the exit status."""
    parser = OptionParser(
        prog="tlt bench",
        description="Measure the engine, and peers in the same rounds. The last line is JSON.",
        epilog="The per-op suite: python -m pytest bench (or make bench).",
    )
    commands = parser.add_subparsers(dest="bench", required=True)
    for name, text in BENCHES.items():
        command = commands.add_parser(name, help=text, description=text)
        _add_common_options(command)
        importlib.import_module(f"bench.{name}").add_options(command)
    options = parser.read(sys.argv[1:] if argv is None else argv)
    if isinstance(options, int):
        return options
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        record = importlib.import_module(f"bench.{options.bench}").run(options)
    except ValueError as error:
        print(f"tlt bench {options.bench}: {error}", file=sys.stderr)
        return 2
    print(json_line({"bench": options.bench, **record}))
    return 0 if record["verified"] else 1


def _add_common_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="smollm2", help="smollm2, an HF directory or a GGUF file"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--ops", default="auto", choices=("auto", "native", "reference"))
    parser.add_argument("--num-threads", type=int, default=None, help="default: one a core")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of every variant")
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME[:TYPE]",
        help="also run transformers[:bfloat16|:float32] or llama.cpp[:bf16|:f32|:q8_0|:source] "
        "(default: bfloat16, bf16); may be given several times",
    )


def ints(text: str) -> list[int]:
    """An option of comma-separated positive integers."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected integers like 1,4,16, got {text!r}") from error
    if not values or min(values) < 1:
        raise argparse.ArgumentTypeError(f"expected integers of at least 1, got {text!r}")
    return values


if __name__ == "__main__":
    sys.exit(main())
