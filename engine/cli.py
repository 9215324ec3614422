"""The ``tlt`` command: demo, generate, bench, check, replay, explain, drafter, sft.

Owns the words of the command line. What each command does lives in its own module, imported when it is called, so
that ``tlt --help`` is quick. ``tlt drafter`` and ``tlt sft`` belong to tlt_train, which engine never imports: as an
entry point that serves both packages, this module looks their words up by name. Invariant: bad input ends in one line
on stderr and exit status 2, never a traceback.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from engine.check_lossless import add_parser as add_check
from engine.check_lossless import run_check
from engine.option_parser import OptionParser
from engine.replay_cli import add_commands as add_replay
from engine.replay_cli import run_replay


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["bench"]:  # bench has a command line of its own
        return _bench(arguments[1:])
    options = _parser().read(arguments)
    if isinstance(options, int):
        return options
    level = logging.INFO if options.verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    try:
        status = options.run(options)
        sys.stdout.flush()
        return status
    except ValueError as error:
        print(f"tlt {options.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        print(f"tlt {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> OptionParser:
    parser = OptionParser(
        prog="tlt", description="An inference engine for adaptive speculative decoding in RL."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    importlib.import_module("tlt_train.cli").add_commands(commands)
    importlib.import_module("tlt_train.sft_cli").add_commands(commands)
    demo = commands.add_parser(
        "demo", help="8 prompts x 4 samples with a long tail, timed and drawn"
    )
    _add_engine_options(demo)
    demo.add_argument("--output", default="tlt-demo.png", help="where the timeline goes")
    demo.set_defaults(run=_demo)
    generate = commands.add_parser("generate", help="answer a prompt")
    _add_engine_options(generate)
    generate.add_argument("prompt", nargs="*", help="prompts; none reads one a line from stdin")
    _add_sampling_options(generate)
    generate.add_argument("--chat", action="store_true", help="use the model's chat template")
    generate.add_argument("--json", action="store_true", help="one JSON line a prompt")
    generate.set_defaults(run=_generate)
    commands.add_parser("bench", help="measure; see tlt bench --help", add_help=False)
    add_check(commands, _add_engine_options).set_defaults(run=_check)
    for kind in add_replay(commands, _add_engine_options, _add_sampling_options):
        kind.set_defaults(run=_replay)
    explain = commands.add_parser(
        "explain", help="which backend runs each op, and why; what the tuner would choose"
    )
    _add_engine_options(explain)
    explain.add_argument("--tuner", action="store_true", help="explain the tuner, not the ops")
    explain.add_argument(
        "--speculative-config", default='{"method": "suffix"}', help="JSON, as LLM takes it"
    )
    explain.add_argument(
        "--tuner-state", default=None, help="JSON of LLM.tuner_state to start from"
    )
    explain.add_argument("--max-tokens", type=int, default=48, help="of the batch that is run")
    explain.set_defaults(run=_explain)
    return parser


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="smollm2", help="smollm2, an HF directory or a GGUF file"
    )
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16")
    parser.add_argument("--seed", type=int, default=0, help="seeds requests that bring none")
    parser.add_argument("--max-model-len", type=int, default=None, help="longest sequence, tokens")
    parser.add_argument("--kv-cache-bytes", type=int, default=None, help="memory of the KV cache")
    _add_ops_options(parser)


def _add_ops_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ops", default="auto", help="auto, native or reference")
    parser.add_argument("--num-threads", type=int, default=None, help="threads of the CPU kernels")
    parser.add_argument("--verbose", action="store_true", help="say what auto was resolved to")


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", type=int, default=1, help="samples of each prompt")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--stop", action="append", default=None, help="may be given several times")


def _engine_arguments(options: argparse.Namespace) -> dict[str, Any]:
    names = ("model", "dtype", "ops", "num_threads", "seed", "max_model_len", "kv_cache_bytes")
    return {name: getattr(options, name) for name in names}


def _demo(options: argparse.Namespace) -> int:
    from engine.demo import run_demo

    return run_demo(_engine_arguments(options), options.output)


def _generate(options: argparse.Namespace) -> int:
    from engine.llm import LLM
    from engine.sampling_params import SamplingParams

    prompts = options.prompt or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not prompts:
        raise ValueError("no prompt: give one as an argument, or one a line on stdin")
    params = SamplingParams(
        n=options.n,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        stop=options.stop,
    )
    llm = LLM(**_engine_arguments(options))
    if options.chat:
        outputs = llm.chat([[{"role": "user", "content": p}] for p in prompts], params)
    else:
        outputs = llm.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        if options.json:
            record = {"prompt": prompt, "outputs": [asdict(o) for o in output.outputs]}
            print(json.dumps(record, ensure_ascii=False))
            continue
        for completion in output.outputs:
            print(f"--- {prompt} [{completion.index}, {completion.finish_reason}]")
            print(completion.text)
    return 0


def _check(options: argparse.Namespace) -> int:
    return run_check(_engine_arguments(options), options)


def _replay(options: argparse.Namespace) -> int:
    return run_replay(_engine_arguments(options), options)


def _explain(options: argparse.Namespace) -> int:
    from engine.explain import explain_ops, explain_tuner

    if options.tuner:
        return explain_tuner(options, _engine_arguments(options))
    return explain_ops(options)


def _bench(arguments: Sequence[str]) -> int:
    try:
        from bench.main import main as bench_main
    except ImportError as error:
        print(f"tlt bench: {error}; run it from a checkout of the project", file=sys.stderr)
        return 2
    return bench_main(list(arguments))


if __name__ == "__main__":
    sys.exit(main())
