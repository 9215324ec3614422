"""``tlt drafter``: make, feed, judge and export drafters.

Owns the words of the command line; the commands live in their own modules, imported when they are called.
Invariant: as ``engine.cli``, which adds these commands to its own and answers for their errors.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

_TARGET = "smollm2, an HF directory or a GGUF file"


def add_commands(commands: Any) -> None:
    """Add ``drafter`` to the sub-commands of ``tlt``."""
    parser = commands.add_parser("drafter", help="make, train, judge and export drafters")
    actions = parser.add_subparsers(dest="action", required=True)
    _add_init(actions)
    _add_data(actions)
    _add_train(actions)
    _add_eval(actions)
    _add_export(actions)


# ---- init


def _add_init(actions: Any) -> None:
    init = actions.add_parser("init", help="a new head with random weights, to be trained")
    init.add_argument("--target", required=True, help=_TARGET)
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
    _add_target(data)
    _add_prompts(data)
    data.add_argument("--num-tokens", type=int, default=None, help="end with so many positions")
    data.add_argument("--seconds", type=float, default=None, help="end after so long")
    data.add_argument(
        "--temperature", type=_numbers, default=(1.0,), help="one, or several by commas: in turn"
    )
    data.add_argument("--max-tokens", type=int, default=256, help="longest answer")
    data.add_argument("--max-model-len", type=int, default=None, help="longest sequence, tokens")
    data.add_argument("--samples", "-n", type=int, default=1, help="of each prompt")
    data.add_argument("--batch", type=int, default=32, help="samples that run at once")
    data.add_argument("--min-tokens", type=int, default=16, help="shorter pieces are not kept")
    data.add_argument("--drafter", default=None, help="a head whose layers to tap")
    data.add_argument(
        "--tap-layers", type=_integers, default=None, help="default: those of a new EAGLE-3 head"
    )
    data.add_argument("--out", required=True, help="directory to write")
    data.add_argument("--json", action="store_true", help="end with the figures as a JSON line")
    data.set_defaults(run=_data)


def _data(options: argparse.Namespace) -> int:
    from tlt_train.generate import DataOptions, generate_data

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
    figures = generate_data(
        options.target,
        options.out,
        wanted,
        drafter=options.drafter,
        tap_layers=options.tap_layers,
        max_model_len=options.max_model_len,
        **_engine_options(options),
    )
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
    print(f"written: {figures['out']}")
    if options.json:
        print(json.dumps(figures))
    return 0


# ---- train


def _add_train(actions: Any) -> None:
    from tlt_train.config import DTYPES, LOSSES, PRESETS, TrainConfig

    train = actions.add_parser("train", help="train a head, on recorded rollouts or on new ones")
    _add_target(train)
    _add_prompts(train)
    train.add_argument("--data", nargs="+", default=(), help="directories of tlt drafter data")
    train.add_argument(
        "--temperature", type=_numbers, default=(1.0, 0.0), help="of the rollouts made first"
    )
    train.add_argument("--max-tokens", type=int, default=256, help="longest answer of these")
    train.add_argument("--batch", type=int, default=48, help="samples that run at once")
    train.add_argument(
        "--data-share", type=float, default=0.3, help="of --minutes, for making rollouts"
    )
    train.add_argument("--minutes", type=float, default=None, help="of everything, data included")
    train.add_argument("--steps", type=int, default=None, help="instead of --minutes")
    train.add_argument("--drafter", default=None, help="a head to go on from")
    train.add_argument("--objective", default="eagle3", choices=tuple(PRESETS))
    train.add_argument("--loss", default=None, choices=LOSSES, help="of the draft distribution")
    train.add_argument("--unroll-depth", type=int, default=None, help="steps of the unrolled head")
    train.add_argument("--draft-vocab-size", type=int, default=4096, help="of a new EAGLE-3 head")
    defaults = {field.name: field.default for field in fields(TrainConfig)}
    for name in ("learning_rate", "warmup_steps", "weight_decay", "max_grad_norm", "window"):
        default = defaults[name]
        train.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    for name in ("tokens_per_step", "tokens_per_micro_batch"):
        train.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=defaults[name], help="positions"
        )
    train.add_argument(
        "--train-dtype", default=defaults["dtype"], choices=DTYPES, help="of matrices in the passes"
    )
    train.add_argument("--learn-prompts", action="store_true", help="also guess prompts")
    train.add_argument("--freeze-head", action="store_true", help="lm_head stays the target's")
    train.add_argument("--held-out-share", type=float, default=0.03, help="for validation")
    train.add_argument("--checkpoint-every", type=int, default=100, help="steps; 0 never")
    train.add_argument("--validate-every", type=int, default=100, help="steps; 0 only at the end")
    train.add_argument("--keep", type=int, default=3, help="checkpoints to leave")
    train.add_argument("--resume", action="store_true", help="go on with what --out holds")
    train.add_argument("--out", required=True, help="directory to write")
    train.add_argument("--json", action="store_true", help="end with the figures as a JSON line")
    train.set_defaults(run=_train)


def _train(options: argparse.Namespace) -> int:
    from tlt_train.config import TrainConfig
    from tlt_train.generate import DataOptions
    from tlt_train.train import TrainOptions, train_drafter
    from tlt_train.training_run import RunOptions

    changes = {
        name: getattr(options, name)
        for name in (
            *("learning_rate", "warmup_steps", "weight_decay", "max_grad_norm", "window"),
            *("tokens_per_step", "tokens_per_micro_batch", "learn_prompts", "seed"),
        )
    }
    changes |= {"dtype": options.train_dtype, "train_head": not options.freeze_head}
    for name in ("loss", "unroll_depth"):
        if getattr(options, name) is not None:
            changes[name] = getattr(options, name)
    generate = None
    if options.tasks or options.prompts:
        generate = DataOptions(
            tasks=options.tasks,
            prompts=options.prompts,
            seconds=_data_seconds(options),
            temperatures=options.temperature,
            max_tokens=options.max_tokens,
            batch=options.batch,
            seed=options.seed,
            split_seed=options.split_seed,
        )
    wanted = TrainOptions(
        data=tuple(options.data),
        generate=generate,
        minutes=options.minutes,
        steps=options.steps,
        kind="eagle3" if options.objective == "eagle3" else "eagle",
        drafter=options.drafter,
        draft_vocab_size=options.draft_vocab_size,
        held_out_share=options.held_out_share,
        config=TrainConfig.of(options.objective, **changes),
        run=RunOptions(
            checkpoint_every=options.checkpoint_every,
            validate_every=options.validate_every,
            resume=options.resume,
        ),
        keep=options.keep,
    )
    figures = train_drafter(options.target, options.out, wanted, **_engine_options(options))
    _print_training(figures)
    if options.json:
        print(json.dumps(figures))
    return 1 if figures["was_stopped"] else 0


def _data_seconds(options: argparse.Namespace) -> float:
    if not 0.0 < options.data_share < 1.0:
        raise ValueError(f"--data-share must be between 0 and 1, got {options.data_share}")
    if options.minutes is None:
        raise ValueError("making rollouts takes --minutes; with --steps give --data")
    return options.minutes * 60 * options.data_share


def _print_training(figures: dict[str, Any]) -> None:
    print(
        f"{figures['num_steps']} steps in {figures['training_s']:.0f} s ({figures['seconds']:.0f} s in all), "
        f"{figures['tokens_per_s']:.0f} tokens/s, {figures['useful_gflops_per_s']:.0f} useful GFLOP/s; data: "
        f"{figures['num_data_tokens']} tokens, {figures['vocabulary_coverage']:.1%} of answers in the draft's vocabulary"
    )
    for name, label in (("acceptance", "sampled"), ("accuracy", "most likely")):
        if f"held_out_{name}" in figures:
            by_position = " ".join(f"{x:.2f}" for x in figures[f"held_out_{name}"])
            print(
                f"held-out, {label}: {by_position} by position, acceptance length "
                f"{figures[f'held_out_{name}_length']:.2f} (bonus token counted)"
            )
    if figures["was_stopped"]:
        print(f"stopped; go on with the same command and --resume: {figures['out']}")
    else:
        print(f"written: {figures['out']}")


# ---- eval


def _add_eval(actions: Any) -> None:
    evaluate = actions.add_parser(
        "eval", help="acceptance by position and temperature, and the speed-up, on held-out prompts"
    )
    _add_target(evaluate)
    evaluate.add_argument("--drafter", required=True, help="directory of the head")
    _add_prompts(evaluate)
    evaluate.add_argument(
        "--data", default=None, help="the prompts of training data; these are not held out"
    )
    evaluate.add_argument("--temperatures", type=_numbers, default=(0.0, 0.6, 1.0))
    evaluate.add_argument("--draft-sampling", type=_words, default=("coupled", "mode"))
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
    from tlt_train.evaluate import EvalOptions, evaluate, report

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
    record = evaluate(options.target, options.drafter, wanted, **_engine_options(options))
    line = json_line({"eval": "drafter", **record})
    if options.json is not None:
        with Path(options.json).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    print(report(record))
    print(line)
    return 0 if record["verified"] else 1


# ---- export


def _add_export(actions: Any) -> None:
    export = actions.add_parser("export", help="write a head for SGLang, vLLM or speculators")
    export.add_argument("--target", default="smollm2", help=_TARGET)
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


# ---- shared


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", default="smollm2", help=_TARGET)
    parser.add_argument("--dtype", default="auto", help="of the target: auto, float32 or bfloat16")
    parser.add_argument("--num-threads", type=int, default=None, help="threads of the CPU kernels")
    parser.add_argument("--verbose", action="store_true", help="say what auto was resolved to")


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tasks", type=_words, default=(), help="reasoning-gym tasks: chain_sum,gcd,..."
    )
    parser.add_argument(
        "--prompts", default=None, help="text, one prompt a line, or JSONL (prompt or messages)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--split-seed", type=int, default=0, help="of the held-out part; the same for data and eval"
    )


def _engine_options(options: argparse.Namespace) -> dict[str, Any]:
    return {"dtype": options.dtype, "num_threads": options.num_threads}


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in _words(text))


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in _words(text))
