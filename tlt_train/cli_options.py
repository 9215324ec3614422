"""Words that several commands of ``tlt drafter`` share.

Owns the options that mean the same everywhere, and how lists are written. Invariant: an option of one name has one
meaning and one default, whatever the command.
"""

from __future__ import annotations

import argparse
from typing import Any

TARGET = "smollm2, an HF directory or a GGUF file"


def add_target(parser: argparse.ArgumentParser) -> None:
    """Options of the model."""
    parser.add_argument("--target", default="smollm2", help=TARGET)
    parser.add_argument("--dtype", default="auto", help="of the target: auto, float32 or bfloat16")
    parser.add_argument("--num-threads", type=int, default=None, help="threads of the CPU kernels")
    parser.add_argument("--verbose", action="store_true", help="say what auto was resolved to")


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """Options of where prompts come from."""
    parser.add_argument(
        "--tasks", type=words, default=(), help="reasoning-gym tasks: chain_sum,gcd,..."
    )
    parser.add_argument(
        "--prompts", default=None, help="text, one prompt a line, or JSONL (prompt or messages)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--split-seed", type=int, default=0, help="of the held-out part; the same for data and eval"
    )


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    """Those of an ``LLM``."""
    return {"dtype": options.dtype, "num_threads": options.num_threads}


def words(text: str) -> tuple[str, ...]:
    """Of a list with commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def numbers(text: str) -> tuple[float, ...]:
    """Of a list with commas."""
    return tuple(float(word) for word in words(text))


def integers(text: str) -> tuple[int, ...]:
    """Of a list with commas."""
    return tuple(int(word) for word in words(text))
