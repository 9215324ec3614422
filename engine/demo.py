"""``tlt demo``: a real model answers 8 prompts x 4 samples whose lengths have the long tail of RL rollouts, three times.

First without speculation. Then adaptively with the suffix drafter, which needs no training and finds little to copy in
fresh stories: what the tuner then does is stay out of the way. Then adaptively with a drafter that replays the answer
and is wrong one time in five, in place of a head that is trained on such text. Owns the workload's presentation: a
progress bar, a table beside the machine's ceilings, a timeline as PNG. Nothing is set up for show: it is
``Engine.step`` in a loop. Invariant: what it prints was measured in this run, and the tokens of all three are compared.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.harness import table
from bench.machine import Ceilings, measure_ceilings
from bench.speculative import PLAIN, RolloutLog, StepLog, Variants
from bench.timeline import checked_path, draw_rollouts
from bench.workloads import LONG_TAIL, PROMPTS, Job
from engine.llm import LLM
from engine.machine import peak_memory_bytes
from engine.tokenizer import Tokenizer

_ACCEPTANCE = 0.8
_VARIANTS = {
    PLAIN: "without speculation",
    "cost:suffix": "adaptive, suffix drafter",
    f"cost:oracle:{_ACCEPTANCE}": f"adaptive, drafter right {_ACCEPTANCE:.0%} of the time",
}
_MAX_DEPTH = 12


def run_demo(engine_arguments: Mapping[str, Any], output: str) -> int:
    """Load the model, run the workload, print the table and the path of the timeline. Returns an exit status."""
    path = checked_path("--output", output)
    started = time.perf_counter()
    llm = LLM(**engine_arguments, enable_prefix_caching=False)
    load_s = time.perf_counter() - started
    ops = llm.engine.runner.decoder.ops
    ceilings = measure_ceilings(ops.isa, ops.num_threads)
    print(f"{llm.config.model.architecture} loaded in {load_s:.1f} s, {llm.config.dtype}")
    print(ceilings.text())
    logs = _run(llm)
    plain = logs[_VARIANTS[PLAIN]]
    _show_answers(llm, plain)
    print(_table(logs))
    print(_facts(plain, llm, ceilings))
    draw_rollouts(logs, path)
    print(f"timeline: {path}")
    same = all(log.token_ids == plain.token_ids and not log.failures for log in logs.values())
    print("tokens with and without speculation: " + ("identical" if same else "DIFFERENT"))
    return 0 if same else 1


def _jobs(tokenizer: Tokenizer) -> list[Job]:
    lengths = [length for count, length in LONG_TAIL for _ in range(count)]
    return [
        Job(
            tuple(tokenizer.chat([{"role": "user", "content": PROMPTS[i % len(PROMPTS)]}])),
            length,
            seed=1000 + i // len(PROMPTS),
        )
        for i, length in enumerate(lengths)
    ]


def _run(llm: LLM) -> dict[str, RolloutLog]:
    tokenizer = llm.engine.tokenizer
    if tokenizer is None:
        raise ValueError(
            "the demo shows text, but the model has no tokenizer; name another --model"
        )
    jobs = _jobs(tokenizer)
    logs: dict[str, RolloutLog] = {}
    total = len(_VARIANTS) * sum(job.num_tokens for job in jobs)
    with (
        tempfile.TemporaryDirectory() as directory,
        tqdm(total=total, unit="token", desc="three rollouts", mininterval=0.3) as bar,
    ):

        def show(step: StepLog) -> None:
            bar.update(step.num_tokens)
            bar.set_postfix(running=step.num_decoding, refresh=False)

        variants = Variants(
            llm,
            jobs,
            1.0,
            trace=Path(directory) / "rollout.jsonl",
            max_depth=_MAX_DEPTH,
            on_step=show,
        )
        logs[_VARIANTS[PLAIN]] = variants.plain_log
        for name, title in _VARIANTS.items():
            if name != PLAIN:
                logs[title] = variants.run(name)
    return logs


def _show_answers(llm: LLM, log: RolloutLog) -> None:
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None
    print()
    for i in (len(log.token_ids) - 2, len(log.token_ids) - 1):
        text = " ".join(tokenizer.decode(log.token_ids[i]).split())
        print(
            f"  {PROMPTS[i % len(PROMPTS)]}\n  -> {text[:160]}{'...' if len(text) > 160 else ''}\n"
        )


def _table(logs: Mapping[str, RolloutLog]) -> str:
    rows: list[Sequence[Any]] = []
    plain = next(iter(logs.values()))
    for title, log in logs.items():
        rows.append(
            (
                title,
                log.seconds,
                log.num_tokens / log.seconds,
                log.tail_s,
                log.acceptance_length,
                f"{log.off_share:.0%}",
                f"{plain.seconds / log.seconds:.2f}x",
                f"{plain.tail_s / log.tail_s:.2f}x",
            )
        )
    header = ("", "seconds", "tokens/s", "last alone, s", "tokens a step", "off")
    return table((*header, "faster", "last alone, faster"), rows)


def _facts(plain: RolloutLog, llm: LLM, ceilings: Ceilings) -> str:
    weights = llm.config.model.num_parameters * (2 if llm.config.dtype == "bfloat16" else 4)
    alone = ceilings.read_gb_s * 1e9 / weights
    share = plain.tail_s / plain.seconds
    lines = [
        "",
        f"samples                       {len(plain.token_ids)}",
        f"tokens of each rollout        {plain.num_tokens}",
        f"last sample alone             {share:.0%} of the time without speculation",
        f"ceiling of one sample alone   {alone:.0f} tokens/s without speculation "
        f"(memory read / {weights / 1e6:.0f} MB of weights)",
        f"peak memory                   {peak_memory_bytes() / 2**30:.2f} GiB",
    ]
    return "\n".join(lines)
