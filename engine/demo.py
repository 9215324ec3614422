"""``tlt demo``: a real model answers 8 prompts x 4 samples whose lengths have the long tail of RL rollouts.

Owns the workload's presentation: a progress bar, a table beside the machine's ceilings, a timeline as PNG. Nothing
is set up for show: it is ``Engine.step`` in a loop. Invariant: what it prints was measured in this run.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.machine import Ceilings, measure_ceilings
from bench.workloads import LONG_TAIL, PROMPTS
from engine.llm import LLM
from engine.machine import peak_memory_bytes
from engine.prompts import TokenPrompt
from engine.request_group import RequestGroup
from engine.sampling_params import SamplingParams

_SMOOTH_S = 0.5


@dataclass(frozen=True, slots=True)
class Moment:
    """State after one step."""

    time_s: float
    num_running: int
    num_tokens: int  # generated so far


def run_demo(engine_arguments: Mapping[str, Any], output: str) -> int:
    """Load the model, run the workload, print the table and the path of the timeline. Returns an exit status."""
    path = _checked_path(output)
    started = time.perf_counter()
    llm = LLM(**engine_arguments)
    load_s = time.perf_counter() - started
    ops = llm.engine.runner.decoder.ops
    ceilings = measure_ceilings(ops.isa, ops.num_threads)
    print(f"{llm.config.model.architecture} loaded in {load_s:.1f} s, {llm.config.dtype}")
    print(ceilings.text())
    groups, moments = _run(llm)
    _show_answers(groups)
    print(_table(groups, moments, llm, ceilings))
    _draw(moments, path)
    print(f"timeline: {path}")
    return 0


def _checked_path(output: str) -> Path:
    """Where the timeline goes; whatever would fail after the run fails before it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("the timeline needs matplotlib: pip install 'tlt-engine[demo]'")
    path = Path(output).resolve()
    if path.suffix not in (".png", ".svg", ".pdf") or path.is_dir():
        raise ValueError(f"--output must be a .png, .svg or .pdf file, got {output!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"--output: cannot write into {path.parent}")
    return path


def _run(llm: LLM) -> tuple[list[RequestGroup], list[Moment]]:
    lengths = [length for count, length in LONG_TAIL for _ in range(count)]
    tokenizer = llm.engine.tokenizer
    if tokenizer is None:
        raise ValueError(
            "the demo shows text, but the model has no tokenizer; name another --model"
        )
    engine, groups = llm.engine, []
    for i, length in enumerate(lengths):
        prompt = PROMPTS[i % len(PROMPTS)]
        token_ids = tokenizer.chat([{"role": "user", "content": prompt}])
        params = SamplingParams(
            temperature=1.0, max_tokens=length, ignore_eos=True, seed=1000 + i // len(PROMPTS)
        )
        groups.append(engine.add(f"demo-{i}", TokenPrompt(prompt, token_ids), params))
    counters = engine.counters
    moments = [Moment(0.0, len(groups), 0)]
    start = time.perf_counter()
    with tqdm(total=sum(lengths), unit="token", desc="rollout", mininterval=0.3) as bar:
        while engine.has_unfinished:
            engine.step()
            now = time.perf_counter() - start
            running = engine.scheduler.num_running
            bar.update(counters.num_generated_tokens - moments[-1].num_tokens)
            bar.set_postfix(running=running, refresh=False)
            moments.append(Moment(now, running, counters.num_generated_tokens))
    return groups, moments


def _show_answers(groups: Sequence[RequestGroup]) -> None:
    print()
    for group in groups[-2:]:
        completion = group.output().outputs[0]
        text = " ".join(completion.text.split())
        print(f"  {group.prompt}\n  -> {text[:160]}{'...' if len(text) > 160 else ''}\n")


def _table(
    groups: Sequence[RequestGroup], moments: Sequence[Moment], llm: LLM, ceilings: Ceilings
) -> str:
    total_s, tokens = moments[-1].time_s, moments[-1].num_tokens
    last = groups[-1].samples[0]
    others = [s.finished_time for g in groups[:-1] for s in g.samples if s.finished_time]
    tail_s = (last.finished_time or 0.0) - max(others)
    weights = llm.config.model.num_parameters * (2 if llm.config.dtype == "bfloat16" else 4)
    alone = ceilings.read_gb_s * 1e9 / weights
    peak = peak_memory_bytes() / 2**30
    lines = [
        f"samples                       {len(groups)}",
        f"tokens                        {tokens}",
        f"seconds                       {total_s:.2f}",
        f"tokens/s                      {tokens / total_s:.0f}",
        f"last sample alone             {tail_s:.2f} s, {100 * tail_s / total_s:.0f}% of the time",
        f"ceiling of one sample alone   {alone:.0f} tokens/s (memory read / {weights / 1e6:.0f} MB of weights)",
        f"peak memory                   {peak:.2f} GiB",
    ]
    return "\n".join(lines)


def _draw(moments: Sequence[Moment], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    times = [m.time_s for m in moments]
    figure, (upper, lower) = pyplot.subplots(2, 1, sharex=True, figsize=(9, 5))
    upper.step(times, [m.num_running for m in moments], where="post")
    upper.fill_between(times, [m.num_running for m in moments], step="post", alpha=0.3)
    upper.set_ylabel("running samples")
    upper.set_title("The long tail: most of the time, most of the machine has nothing to do")
    lower.plot(times[1:], _rates(moments))
    lower.set_ylabel("tokens/s")
    lower.set_xlabel("seconds")
    for axis in (upper, lower):
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _rates(moments: Sequence[Moment]) -> list[float]:
    """Tokens per second after each step, over the last half second."""
    rates, first = [], 0
    for moment in moments[1:]:
        while moments[first + 1].time_s < moment.time_s - _SMOOTH_S:
            first += 1
        span = moment.time_s - moments[first].time_s
        rates.append((moment.num_tokens - moments[first].num_tokens) / span)
    return rates
