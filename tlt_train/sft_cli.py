"""``tlt sft``: the words of a supervised run on the command line.

Owns options and what is printed. Knows nothing of training. Invariant: as ``engine.cli``, which adds this command to
its own and answers for its errors.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from typing import Any


def add_commands(commands: Any) -> None:
    """Add ``sft`` to the sub-commands of ``tlt``."""
    from tlt_train.sft_options import SftOptions

    text = "teach a model worked solutions: a policy that is sure of what it writes"
    sft = commands.add_parser("sft", help=text, description=text)
    sft.add_argument("--target", default="smollm2", help="smollm2 or an HF directory of a Llama")
    sft.add_argument("--out", required=True, help="directory to write, a model and prompts.jsonl")
    sft.add_argument("--minutes", type=float, default=None, help="of training")
    sft.add_argument("--steps", type=int, default=None, help="instead of --minutes")
    defaults = {field.name: field.default for field in fields(SftOptions)}
    for name, text in (
        ("learning_rate", "highest, after the warm-up"),
        ("warmup_steps", "of the learning rate"),
        ("weight_decay", "of matrices"),
        ("max_grad_norm", "longer gradients are cut to it"),
        ("tokens_per_step", "a step takes documents until it has so many"),
        ("num_prompts", "in prompts.jsonl"),
        ("num_held_out", "problems to judge the result by"),
        ("seed", "of the problems"),
    ):
        option = f"--{name.replace('_', '-')}"
        default: Any = defaults[name]
        sft.add_argument(
            option, type=type(default), default=default, help=f"{text} (default {default})"
        )
    sft.add_argument("--train-dtype", default=defaults["dtype"], choices=("bfloat16", "float32"))
    sft.add_argument("--num-threads", type=int, default=None, help="of torch")
    sft.add_argument("--json", action="store_true", help="end with the figures as a JSON line")
    sft.set_defaults(run=_sft, verbose=False)


def _sft(options: argparse.Namespace) -> int:
    from tlt_train.sft import SftOptions, train_policy

    given = {
        field.name: getattr(options, field.name)
        for field in fields(SftOptions)
        if field.name != "dtype"
    }
    figures = train_policy(
        options.target, options.out, SftOptions(dtype=options.train_dtype, **given)
    )
    print(
        f"{figures['num_steps']} steps in {figures['training_s']:.0f} s: {figures['num_documents']} solutions, "
        f"{figures['num_tokens']} tokens, {figures['tokens_per_s']:.0f} tokens/s, "
        f"{figures['gflops_per_s']:.0f} useful GFLOP/s"
    )
    print(
        f"loss {figures['first_loss']:.3f} -> {figures['last_loss']:.3f} nats a token; held-out solutions: "
        f"{figures['held_out_loss']:.3f}, {figures['held_out_accuracy']:.1%} of tokens are the likeliest"
    )
    print(f"written: {figures['out']} (prompts: {figures['out']}/prompts.jsonl)")
    if options.json:
        print(json.dumps(figures))
    return 0
