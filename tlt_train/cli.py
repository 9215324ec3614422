"""``tlt drafter``: make, feed, judge and export drafters.

Owns the words of the command line; the commands live in their own modules, imported when they are called.
Invariant: as ``engine.cli``, which adds these commands to its own and answers for their errors.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tlt_train.cli_options import (
    TARGET,
    add_prompts,
    add_target,
    engine_options,
    integers,
    numbers,
    words,
)
from tlt_train.train_cli import add_train


def add_commands(commands: Any) -> None:
    """Add ``drafter`` to the sub-commands of ``tlt``."""
    parser = commands.add_parser("drafter", help="make, train, judge and export drafters")
    actions = parser.add_subparsers(dest="action", required=True)
    _add_init(actions)
    _add_data(actions)
    add_train(actions)
    _add_eval(actions)
    _add_export(actions)


# ---- init


def _add_init(actions: Any) -> None:
    init = actions.add_parser("init", help="a new head with random weights, to be trained")
    init.add_argument("--target", required=True, help=TARGET)
    init.add_argument("--kind", default="eagle3", choices=("eagle", "eagle3"))
    init.add_argument("--output", "--out", required=True, help="directory to write")
    init.add_argument(
        "--draft-vocab-size", type=int, default=None, help="of an eagle3 head: the lowest N ids"
    )
    init.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    init.add_argument("--seed", type=int, default=0)
    init.set_defaults(run=_init, verbose=False)


def _init(options: argparse.Namespace) -> int:
    import torch

    from engine.models.eagle_checkpoint import save_drafter
    from engine.models.eagle_init import drafter_config, random_drafter
    from engine.models.loader import open_checkpoint

    output = Path(options.output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"--output {options.output} exists and is not an empty directory")
    target = open_checkpoint(options.target).config
    config = drafter_config(target, options.kind, draft_vocab_size=options.draft_vocab_size)
    tensors = random_drafter(config, seed=options.seed, dtype=getattr(torch, options.dtype))
    save_drafter(output, config, tensors, target=target)
    count = sum(t.numel() for t in tensors.values() if t.is_floating_point())
    print(f"{options.kind} head of {count / 1e6:.1f}M parameters for {options.target}: {output}")
    return 0


# ---- data


def _add_data(actions: Any) -> None:
    data = actions.add_parser(
        "data", help="roll prompts out and keep what the target computed, for training"
    )
    add_target(data)
    add_prompts(data)
    data.add_argument("--num-tokens", type=int, default=None, help="end with so many positions")
    data.add_argument("--seconds", type=float, default=None, help="end after so long")
    data.add_argument(
        "--temperature", type=numbers, default=(1.0,), help="one, or several by commas: in turn"
    )
    data.add_argument("--max-tokens", type=int, default=256, help="longest answer")
    data.add_argument("--max-model-len", type=int, default=None, help="longest sequence, tokens")
    data.add_argument("--samples", "-n", type=int, default=1, help="of each prompt")
    data.add_argument("--batch", type=int, default=32, help="samples that run at once")
    data.add_argument("--min-tokens", type=int, default=16, help="shorter pieces are not kept")
    data.add_argument("--drafter", default=None, help="a head whose layers to tap")
    data.add_argument(
        "--tap-layers", type=integers, default=None, help="default: those of a new EAGLE-3 head"
    )
    data.add_argument("--out", required=True, help="directory to write")
    data.add_argument("--json", action="store_true", help="end with the figures as a JSON line")
    data.set_defaults(run=_data)


def _data(options: argparse.Namespace) -> int:
    from tlt_train.generate import DataOptions, generate_data
    from tlt_train.train_process import stop_on_signal

    wanted = DataOptions(
        tasks=options.tasks,
        prompts=options.prompts,
        num_tokens=options.num_tokens,
        seconds=options.seconds,
        temperatures=options.temperature,
        max_tokens=options.max_tokens,
        samples=options.samples,
        batch=options.batch,
        min_tokens=options.min_tokens,
        seed=options.seed,
        split_seed=options.split_seed,
    )
    with stop_on_signal() as stop:
        figures = generate_data(
            options.target,
            options.out,
            wanted,
            drafter=options.drafter,
            tap_layers=options.tap_layers,
            max_model_len=options.max_model_len,
            should_stop=stop.is_set,
            **engine_options(options),
        )
    _print_data(figures)
    if options.json:
        print(json.dumps(figures))
    return 1 if figures["was_stopped"] else 0


def _print_data(figures: dict[str, Any]) -> None:
    if not figures["num_sequences"]:
        print("stopped before there was anything to keep: nothing is written")
        return
    lengths = figures["len_percentiles"]
    print(
        f"{figures['num_sequences']} sequences of {figures['num_tokens']} tokens, prompts included, in "
        f"{figures['seconds']:.1f} s: {figures['tokens_per_s']:.0f} tokens/s, "
        f"{figures['generated_tokens_per_s']:.0f} generated"
    )
    print(
        f"answers: {figures['mean_len']:.0f} tokens on average, half up to {lengths['50']}, nine in ten up to "
        f"{lengths['90']}, the longest {lengths['100']}; {figures['num_unfinished']} cut off by the end of the run"
    )
    print(
        f"lost: {figures['num_dropped_tokens']} tokens dropped by the tap, {figures['num_too_short_tokens']} in "
        f"pieces too short, "
        f"{figures['num_prompts_too_long']} prompts too long for the context"
    )
    if figures["num_prompts_refused"]:
        print(
            f"{figures['num_prompts_refused']} prompts were refused, the first because {figures['refusal']}"
        )
    if figures["was_stopped"]:
        print(f"stopped; what there was by then is whole and written: {figures['out']}")
    else:
        print(f"written: {figures['out']}")


# ---- eval


def _add_eval(actions: Any) -> None:
    evaluate = actions.add_parser(
        "eval", help="acceptance by position and temperature, and the speed-up, on held-out prompts"
    )
    add_target(evaluate)
    evaluate.add_argument("--drafter", required=True, help="directory of the head")
    add_prompts(evaluate)
    evaluate.add_argument(
        "--data", default=None, help="the prompts of training data; these are not held out"
    )
    evaluate.add_argument("--temperatures", type=numbers, default=(0.0, 0.6, 1.0))
    evaluate.add_argument("--draft-sampling", type=words, default=("coupled", "mode"))
    evaluate.add_argument("--depth", type=int, default=5, help="of chains")
    evaluate.add_argument("--num-prompts", type=int, default=32, help="for acceptance")
    evaluate.add_argument("--num-timed", type=int, default=8, help="of these, for the speed-up")
    evaluate.add_argument("--max-tokens", type=int, default=128, help="longest answer")
    evaluate.add_argument(
        "--rounds", type=int, default=3, help="of the timing; 0 measures acceptance only"
    )
    evaluate.add_argument("--json", default=None, help="append the record to this file as well")
    evaluate.set_defaults(run=_eval)


def _eval(options: argparse.Namespace) -> int:
    from bench.harness import json_line
    from tlt_train.evaluate import EvalOptions, evaluate, opened_record, report

    wanted = EvalOptions(
        tasks=options.tasks,
        prompts=options.prompts,
        data=options.data,
        temperatures=options.temperatures,
        draft_sampling=options.draft_sampling,
        depth=options.depth,
        num_prompts=options.num_prompts,
        num_timed=options.num_timed,
        max_tokens=options.max_tokens,
        rounds=options.rounds,
        seed=options.seed,
        split_seed=options.split_seed,
    )
    with opened_record(options.json) as file:
        record = evaluate(options.target, options.drafter, wanted, **engine_options(options))
        line = json_line({"eval": "drafter", **record})
        if file is not None:
            file.write(line + "\n")
    print(report(record))
    print(line)
    return 0 if record["verified"] else 1


# ---- export


def _add_export(actions: Any) -> None:
    export = actions.add_parser("export", help="write a head for SGLang, vLLM or speculators")
    export.add_argument("--target", default="smollm2", help=TARGET)
    export.add_argument("--drafter", required=True, help="directory of the head")
    export.add_argument("--format", required=True, choices=("eagle3", "speculators", "eagle"))
    export.add_argument("--out", required=True, help="directory to write")
    export.add_argument(
        "--dtype",
        default=None,
        choices=("bfloat16", "float16", "float32"),
        help="default: as it is",
    )
    export.add_argument(
        "--with-embedding", action="store_true", help="put the target's embedding in as well"
    )
    export.add_argument(
        "--verifier", default=None, help="what a speculators config calls the target"
    )
    export.add_argument(
        "--num-speculative-tokens", type=int, default=5, help="that it is to propose"
    )
    export.set_defaults(run=_export, verbose=False)


def _export(options: argparse.Namespace) -> int:
    from tlt_train.export import FORMATS, export_drafter

    made = export_drafter(
        options.drafter,
        options.out,
        format=options.format,
        target=options.target,
        dtype=options.dtype,
        with_embedding=options.with_embedding,
        verifier=options.verifier,
        num_speculative_tokens=options.num_speculative_tokens,
    )
    added = f"; of the target: {', '.join(made.added)}" if made.added else ""
    print(
        f"{made.num_tensors} tensors, {made.num_bytes / 1e6:.1f} MB, read back bit for bit{added}"
    )
    print(f"written for {FORMATS[made.format]}: {made.directory}")
    return 0
