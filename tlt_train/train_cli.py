"""``tlt drafter train``: its options, and what it prints.

Owns the words. Knows nothing of training: what is done lives in ``train`` and ``live``, imported when they are
called. Invariant: as ``tlt_train.cli``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from tlt_train.cli_options import add_prompts, add_target, engine_options, numbers

if TYPE_CHECKING:
    from tlt_train.config import TrainConfig
    from tlt_train.generate import DataOptions
    from tlt_train.train import TrainOptions


def add_train(actions: Any) -> None:
    """Add ``train`` to the actions of ``tlt drafter``."""
    from tlt_train.config import DTYPES, LOSSES, PRESETS, TrainConfig

    train = actions.add_parser("train", help="train a head, on recorded rollouts or on new ones")
    add_target(train)
    add_prompts(train)
    train.add_argument("--data", nargs="+", default=(), help="directories of tlt drafter data")
    train.add_argument("--temperature", type=numbers, default=(1.0,), help="of the rollouts")
    train.add_argument("--max-tokens", type=int, default=256, help="longest answer of these")
    train.add_argument("--batch", type=int, default=48, help="samples that run at once")
    train.add_argument(
        "--data-share", type=float, default=0.3, help="of --minutes, for making rollouts first"
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
    _add_live(train)
    train.add_argument(
        "--held-out-share", type=float, default=0.03, help="of recorded data, for validation"
    )
    train.add_argument("--checkpoint-every", type=int, default=100, help="steps; 0 never")
    train.add_argument("--validate-every", type=int, default=100, help="steps; 0 only at the end")
    train.add_argument("--keep", type=int, default=3, help="checkpoints to leave")
    train.add_argument("--resume", action="store_true", help="go on with what --out holds")
    train.add_argument("--out", required=True, help="directory to write")
    train.add_argument("--json", action="store_true", help="end with the figures as a JSON line")
    train.set_defaults(run=_train)


def _add_live(train: argparse.ArgumentParser) -> None:
    from tlt_train.live_options import LiveOptions

    group = train.add_argument_group("live rollouts")
    group.add_argument(
        "--live",
        action="store_true",
        help="rollouts and training take turns, and rollouts use what has been learnt",
    )
    defaults = {field.name: field.default for field in fields(LiveOptions)}
    for name, kind, text in (
        ("round_tokens", int, "positions of a round's rollouts, prompts included"),
        ("round_steps", int, "steps of training after them, instead of --rollout-share"),
        ("rollout_share", float, "of the time, for rollouts"),
        ("buffer_bytes", int, "of sequences in memory"),
        ("spill_dir", str, "where those beyond go; without it the oldest are dropped"),
    ):
        group.add_argument(
            f"--{name.replace('_', '-')}", type=kind, default=defaults[name], help=text
        )
    group.add_argument(
        "--tuner", default="cost", choices=("cost", "fixed"), help="of the engine that rolls out"
    )


def _train(options: argparse.Namespace) -> int:
    from tlt_train.train import train_drafter

    wanted = _train_options(options)
    try:
        if options.live:
            figures = _train_live(options, wanted)
        else:
            figures = train_drafter(options.target, options.out, wanted, **engine_options(options))
    except FloatingPointError as error:  # the run's fault, not the program's: one line, no head
        raise ValueError(f"no head is written: {error}") from error
    if os.environ.get("RANK", "0") == "0":  # of several trainers the first one speaks
        _print_training(figures)
        if options.json:
            print(json.dumps(_plain(figures), allow_nan=False))
    return 1 if figures["was_stopped"] else 0


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinities: null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _train_live(options: argparse.Namespace, wanted: TrainOptions) -> dict[str, Any]:
    from tqdm import tqdm

    from tlt_train.live import train_live
    from tlt_train.live_options import LiveOptions

    live = LiveOptions(
        **{field.name: getattr(options, field.name) for field in fields(LiveOptions)}
    )
    return train_live(
        options.target,
        options.out,
        wanted,
        live,
        on_round=lambda report: tqdm.write(report.line()),
        **engine_options(options),
    )


def _train_options(options: argparse.Namespace) -> TrainOptions:
    from tlt_train.train import TrainOptions
    from tlt_train.training_run import RunOptions

    return TrainOptions(
        data=tuple(options.data),
        generate=_data_options(options),
        minutes=options.minutes,
        steps=options.steps,
        kind="eagle3" if options.objective == "eagle3" else "eagle",
        drafter=options.drafter,
        draft_vocab_size=options.draft_vocab_size,
        held_out_share=options.held_out_share,
        config=_train_config(options),
        run=RunOptions(
            checkpoint_every=options.checkpoint_every,
            validate_every=options.validate_every,
            resume=options.resume,
        ),
        keep=options.keep,
    )


def _train_config(options: argparse.Namespace) -> TrainConfig:
    from tlt_train.config import TrainConfig

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
    return TrainConfig.of(options.objective, **changes)


def _data_options(options: argparse.Namespace) -> DataOptions | None:
    from tlt_train.generate import DataOptions

    if not (options.tasks or options.prompts):
        return None
    return DataOptions(
        tasks=options.tasks,
        prompts=options.prompts,
        seconds=math.inf if options.live else _data_seconds(options),
        temperatures=options.temperature,
        max_tokens=options.max_tokens,
        batch=options.batch,
        seed=options.seed,
        split_seed=options.split_seed,
    )


def _data_seconds(options: argparse.Namespace) -> float:
    if not 0.0 < options.data_share < 1.0:
        raise ValueError(f"--data-share must be between 0 and 1, got {options.data_share}")
    if options.minutes is None:
        raise ValueError(
            "making rollouts first takes --minutes; with --steps give --data or --live"
        )
    return options.minutes * 60 * options.data_share


def _print_training(figures: dict[str, Any]) -> None:
    if "training_s" in figures:
        print(
            f"{figures['num_steps']} steps in {figures['training_s']:.0f} s ({figures['seconds']:.0f} s in all), "
            f"{figures['tokens_per_s']:.0f} tokens/s, {figures['useful_gflops_per_s']:.0f} useful GFLOP/s; data: "
            f"{figures['num_data_tokens']} tokens, {figures['vocabulary_coverage']:.1%} of answers in the draft's "
            f"vocabulary"
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
