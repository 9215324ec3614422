"""``tlt replay``: record a rollout, and score drafters and tuners on it.

Owns the words of the command line and what is printed. Invariant: bad input is refused, with the file and the line,
before anything is written; status 1 says that a score is not exact, because the target did not repeat the recording.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.spec.config import TUNERS, SpeculativeConfig

if TYPE_CHECKING:  # the command line must not wait for torch
    from engine.llm import LLM
    from engine.replay import Replayed

Adder = Callable[[argparse.ArgumentParser], None]


def add_commands(
    commands: Any, add_engine_options: Adder, add_sampling_options: Adder
) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """Add ``replay record`` and ``replay score`` to the sub-commands of ``tlt``; their parsers."""
    replay = commands.add_parser("replay", help="score drafters and tuners on a recorded rollout")
    kinds = replay.add_subparsers(dest="kind", required=True)
    record = kinds.add_parser("record", help="generate, and write down what it takes to repeat it")
    add_engine_options(record)
    record.add_argument(
        "--prompts",
        default=None,
        help="a prompt a line: text, or in a .jsonl file objects with prompt, prompt_token_ids or messages; "
        "default: eight of the benches', through the chat template",
    )
    add_sampling_options(record)
    record.add_argument("--chat", action="store_true", help="put text through the chat template")
    record.add_argument("--ignore-eos", action="store_true", help="always generate --max-tokens")
    record.add_argument("--output", required=True, help="JSON lines to write")
    score = kinds.add_parser(
        "score", help="acceptance of a drafter, and what it would be worth here"
    )
    score.add_argument("rollout", help="file of tlt replay record")
    add_engine_options(score)
    score.add_argument(
        "--drafter", default="suffix", help="suffix, eagle:DIR, eagle3:DIR or oracle[:ACCEPTANCE]"
    )
    score.add_argument(
        "--tuner", default=None, choices=TUNERS, help="also time its decisions on the whole rollout"
    )
    score.add_argument("--num-speculative-tokens", type=int, default=8, help="depth of trees")
    score.add_argument("--top-k", type=int, default=1, help="most children of a node")
    score.add_argument("--num-nodes", type=int, default=None, help="most nodes of a tree")
    score.add_argument("--batch-size", type=int, default=32, help="most samples at once")
    return record, score


def run_replay(engine_arguments: Mapping[str, Any], options: argparse.Namespace) -> int:
    """Run either command; the exit status."""
    run = _record if options.kind == "record" else _score
    return run(engine_arguments, options)


def _record(engine_arguments: Mapping[str, Any], options: argparse.Namespace) -> int:
    from engine.llm import LLM
    from engine.rollout_file import RolloutSample, write_rollout
    from engine.sampling_params import SamplingParams

    output = Path(options.output)
    if output.is_dir() or not os.access(output.parent, os.W_OK):
        raise ValueError(f"--output {options.output} is no file in a directory that can be written")
    sampling = SamplingParams(
        n=options.n,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        stop=options.stop,
        ignore_eos=options.ignore_eos,
    )
    entries = None if options.prompts is None else list(_read_prompts(Path(options.prompts)))
    llm = LLM(**engine_arguments)
    prompts = _token_ids(llm, entries, options.chat)
    # seeds that differ by prompt as well: a prompt that comes twice is then still told apart
    seeds = [options.seed + i * options.n for i in range(len(prompts))]
    params = [replace(sampling, seed=seed) for seed in seeds]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    samples = [
        RolloutSample(
            1 + i * options.n + completion.index,
            tuple(result.prompt_token_ids),
            (seed + completion.index) % 2**63,
            tuple(completion.token_ids),
            sampling,
            completion.finish_reason,
            engine_arguments["model"],
        )
        for i, (result, seed) in enumerate(zip(outputs, seeds, strict=True))
        for completion in result.outputs
    ]
    write_rollout(output, samples)
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    print(f"{len(samples)} samples of {len(prompts)} prompts, {num_tokens} tokens: {output}")
    return 0


def _read_prompts(path: Path) -> Iterator[tuple[str, Any]]:
    """(where it stands, a text, a list of messages or a mapping), each checked as far as a file can be."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(
            f"--prompts {str(path)!r} cannot be read: {error.strerror or error}"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompts {str(path)!r} is not UTF-8 text: {error}") from error
    if not any(line.strip() for line in lines):
        raise ValueError(f"--prompts {str(path)!r} holds no prompts")
    for number, line in enumerate(lines, 1):
        where = f"--prompts {str(path)!r}, line {number}"
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            yield where, line
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: it is no JSON: {error}") from error
        if isinstance(entry, str):
            entry = {"prompt": entry}
        known = ("prompt", "prompt_token_ids", "messages")
        if not isinstance(entry, dict) or sum(key in entry for key in known) != 1:
            raise ValueError(f"{where}: it must be an object with one of {', '.join(known)}")
        key = next(key for key in known if key in entry)
        yield where, entry["prompt"] if key == "prompt" else {key: entry[key]}


def _token_ids(llm: LLM, entries: Sequence[tuple[str, Any]] | None, chat: bool) -> list[list[int]]:
    """Prompts as token ids; errors name the file and the line."""
    from engine.prompts import PromptReader

    tokenizer = llm.engine.tokenizer
    if entries is None:
        from bench.workloads import PROMPTS

        entries = [(f"prompt {i}", text) for i, text in enumerate(PROMPTS)]
        chat = tokenizer is not None and tokenizer.chat_template is not None
    reader = PromptReader(
        tokenizer,
        vocab_size=llm.config.model.vocab_size,
        max_model_len=llm.config.max_model_len,
    )
    found: list[list[int]] = []
    for where, entry in entries:
        messages = entry.get("messages") if isinstance(entry, dict) else None
        if chat and isinstance(entry, str):
            messages = [{"role": "user", "content": entry}]
        try:
            if messages is not None:
                if tokenizer is None:
                    raise ValueError("messages need a tokenizer, and the model has none")
                entry = tokenizer.chat(messages)
            found.append(reader.read(entry, where).token_ids)
        except ValueError as error:
            text = str(error)
            raise ValueError(text if text.startswith(where) else f"{where}: {text}") from error
    return found


def _score(engine_arguments: Mapping[str, Any], options: argparse.Namespace) -> int:
    from engine.llm import LLM
    from engine.replay import plain
    from engine.replay import replay as run
    from engine.replay_report import acceptance_text, expected, expected_text, phases_text, summary
    from engine.rollout_file import read_rollout
    from engine.runner import measure_passes
    from engine.spec.price import TargetPrice
    from engine.spec.tuner_cost import CostTuner
    from engine.spec_assembly import build_speculator

    if options.batch_size < 1:
        raise ValueError(f"--batch-size must be at least 1, got {options.batch_size}")
    config = _config(options, "fixed")  # whatever is wrong is said at once
    samples = read_rollout(options.rollout)
    llm = LLM(**engine_arguments)
    measured, context_s = measure_passes(llm.engine.runner)
    price = TargetPrice(measured, context_s=context_s)
    speculator = build_speculator(config, llm.config, llm.engine.runner)
    scored = run(llm, samples, speculator, price, batch_size=options.batch_size)
    rows = expected(scored, price)
    print(
        f"{options.drafter}, {config.num_speculative_tokens} deep, at most {config.max_nodes} nodes, on "
        f"{scored.num_samples} samples of {scored.num_tokens} tokens, {options.batch_size} at once"
    )
    print(_exactness(scored, is_real=_reads_target(speculator)))
    print(acceptance_text(scored))
    print("\nexpected of a step with all requests decoding, this machine's passes measured now")
    print("(drawing tokens and the engine's own bookkeeping apart):")
    print(expected_text(rows))
    result = summary(scored, rows)
    if options.tuner is not None:
        tuned_config = _config(options, options.tuner)
        speculator = build_speculator(tuned_config, llm.config, llm.engine.runner)
        if isinstance(speculator.tuner, CostTuner):  # two measurements differ, and one is the clock
            speculator.tuner.prices = TargetPrice(measured, context_s=context_s)
        tuned = run(llm, samples, speculator, price, batch_size=len(samples))
        bare = plain(llm, samples, price)
        print(f"\ntuner {options.tuner}, all {len(samples)} samples at once, until the last ends:")
        print(phases_text(tuned, bare))
        print(
            f"{tuned.seconds:.2f} s, plain {bare.seconds:.2f} s: {bare.seconds / tuned.seconds:.2f}x"
        )
        result["rollout"] = _rollout(options.tuner, tuned, bare)
    passes = {str(n): round(1e3 * s, 4) for n, s in measured.items()}
    given = {
        "drafter": options.drafter,
        "batch_size": options.batch_size,
        "rollout_file": options.rollout,
    }
    print(json.dumps({"replay": "score"} | given | {"pass_ms": passes} | result))
    return 1 if scored.num_different else 0


def _config(options: argparse.Namespace, tuner: str) -> SpeculativeConfig:
    method, _, detail = options.drafter.partition(":")
    config: dict[str, Any] = {
        "method": method,
        "tuner": tuner,
        "num_speculative_tokens": options.num_speculative_tokens,
        "top_k": options.top_k,
        "num_nodes": options.num_nodes,
        "on_acceptance_drop": "ignore",
    }
    if method not in ("suffix", "eagle", "eagle3", "oracle"):
        raise ValueError(
            f"--drafter must be suffix, eagle:DIR, eagle3:DIR or oracle[:ACCEPTANCE], got {options.drafter!r}"
        )
    if method == "oracle":
        config["trace"] = options.rollout
        try:
            config["acceptance"] = float(detail or 1.0)
        except ValueError:
            raise ValueError(
                f"--drafter: {options.drafter} must end in a number from 0 to 1"
            ) from None
    elif detail:
        config["model"] = detail
    found = SpeculativeConfig.of(config)
    assert found is not None
    return found


def _reads_target(speculator: Any) -> bool:
    return bool(speculator.tap_layers) or speculator.wants_hidden


def _exactness(scored: Replayed, *, is_real: bool) -> str:
    if not is_real:
        return "exact: every draft was compared with the recording, no target was run"
    if not scored.num_different:
        return "exact: the target ran with the recorded seeds, and every token was the recorded one"
    line, at = scored.first_different or (0, 0)
    return (
        f"NOT EXACT: {scored.num_different} samples differ from the recording, first line {line} at output token "
        f"{at}; the model, its dtype or the device are not those of the recording"
    )


def _rollout(tuner: str, tuned: Replayed, bare: Replayed) -> dict[str, Any]:
    from engine.replay_report import phases, tally

    total = tally(tuned.turns)
    return {
        "tuner": tuner,
        "seconds": round(tuned.seconds, 4),
        "plain_seconds": round(bare.seconds, 4),
        "speed_up": round(bare.seconds / tuned.seconds, 4),
        "num_steps": len(tuned.passes),
        "num_plain_steps": len(bare.passes),
        "num_different": tuned.num_different,
        "acceptance_length": round(total.length, 4) if total.num_turns else None,
        "num_draft_tokens": total.num_proposed,
        "num_accepted_draft_tokens": total.num_accepted,
        "phases": [asdict(phase) for phase in phases(tuned.passes)],
    }
