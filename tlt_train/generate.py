"""``tlt drafter data``: rollouts of the target, written down with the hidden states that it had anyway.

Owns the order in which prompts become requests, when a run ends, and its figures. The engine generates, a FeatureTap
hands out what its forwards computed, a Collector joins the records and a ShardWriter keeps the sequences: there is no
second forward for the features.

Two decisions:
- The prefix cache is off. Cached positions are never emitted, so with it every sample of a prompt but the first would
  begin with a gap, and so would every prompt behind a shared system prompt; a drafter reads the positions before a
  token, and the prompt is where they start. The price is a prefill for every sample: with several samples of long
  prompts and short answers it is most of the work, so one sample of more prompts is the default and the better data.
- A run that ends early keeps what its unfinished requests have. Leaving them out would leave out the longest samples.

Invariant: the requests are a function of the prompts and the options, the batch apart: the n-th request has the same
prompt, temperature and seed in every run.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from engine import LLM, SamplingParams
from engine.engine import Engine
from engine.feature_tap import FeatureTap, TapReader
from engine.models.eagle_checkpoint import open_drafter
from engine.models.eagle_layout import default_taps
from tlt_train.collector import Collector
from tlt_train.prompts import ChatPrompt, prompts_of
from tlt_train.rollouts import Asked, RolloutFigures, Rollouts
from tlt_train.shards import ShardWriter

_TAP_BYTES = 256 << 20  # read after every step, so that a step's rows are all that must fit
_SEED_STRIDE = 1_000_003


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """What to generate.

    Args:
        tasks, prompts: where prompts come from, one of the two: reasoning-gym tasks, or a file.
        num_tokens: end once so many positions are written, prompts included; None has no such end.
        seconds: end after so long, model loading apart; None has no such end.
        temperatures: requests take them in turn.
        max_tokens: longest answer.
        samples: of each prompt; a prompt at temperature 0 has one.
        batch: samples that run at once.
        min_tokens: pieces shorter than this are not kept.
        seed: of the sampler, and of which questions tasks ask.
        split_seed: of the split of ``prompts.py``; only the training side is used.

    Raises:
        ValueError: names the option, what came, and the fix.
    """

    tasks: tuple[str, ...] = ()
    prompts: str | None = None
    num_tokens: int | None = None
    seconds: float | None = None
    temperatures: tuple[float, ...] = (1.0,)
    max_tokens: int = 256
    samples: int = 1
    batch: int = 32
    min_tokens: int = 16
    seed: int = 0
    split_seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_tokens", "seconds", "max_tokens", "samples", "batch", "min_tokens"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {value!r}")
        if not self.temperatures or min(self.temperatures) < 0.0:
            raise ValueError(
                f"--temperature must be one or more numbers from 0 up, got {self.temperatures}"
            )
        if self.tasks and self.num_tokens is None and self.seconds is None:
            raise ValueError(
                "tasks have questions without end: give --num-tokens or --seconds as well"
            )


def generate_data(
    target: str,
    out: str | Path,
    options: DataOptions,
    *,
    drafter: str | None = None,
    tap_layers: Sequence[int] | None = None,
    show_progress: bool = True,
    **engine_options: Any,
) -> dict[str, Any]:
    """Write a directory of training sequences for a drafter of ``target``.

    Args:
        target: "smollm2", an HF directory or a GGUF file.
        out: the directory to make.
        drafter: a head whose layers are tapped.
        tap_layers: the layers to tap, where no head is given; None are those of a new EAGLE-3 head. The final hidden
            state, which EAGLE-1 reads, always comes with them.
        engine_options: of ``LLM``.

    Returns:
        Figures of the run, plain values.

    Raises:
        ValueError: an option is bad, or the prompts have nothing for training; nothing is left behind.
    """
    prompts = training_prompts(options)
    llm = LLM(target, enable_prefix_caching=False, max_num_seqs=options.batch, **engine_options)
    model = llm.config.model
    if drafter is not None:
        if tap_layers is not None:
            raise ValueError(
                "the layers come from --drafter or from --tap-layers: give one of them"
            )
        tap_layers = open_drafter(drafter, model).config.tap_layers
    layers = tuple(default_taps(model.num_layers) if tap_layers is None else tap_layers)
    requests = requests_for(llm, target, prompts, options)
    sampling = {
        "temperatures": list(options.temperatures),
        "max_tokens": options.max_tokens,
        "samples": options.samples,
        "seed": options.seed,
        "split_seed": options.split_seed,
    }
    with ShardWriter(
        out,
        tap_layers=layers,
        hidden_size=model.hidden_size,
        target=target,
        sampling=sampling,
        tasks=options.tasks,
    ) as writer:
        figures = _record(llm, requests, options, layers, writer, show_progress)
    return figures | {"out": str(out), "tap_layers": list(layers)}


def _record(
    llm: LLM,
    requests: Iterator[Asked],
    options: DataOptions,
    layers: tuple[int, ...],
    writer: ShardWriter,
    show_progress: bool,
) -> dict[str, Any]:
    """Run the requests with a tap that is read after every step."""
    written = _Written(writer)
    with FeatureTap(layers, capacity_bytes=_TAP_BYTES) as tap:
        reader = TapReader(tap.name)
        collector = Collector(reader, written.add, min_tokens=options.min_tokens)
        llm.attach_tap(tap)
        try:
            figures = run_rollout(
                llm.engine, requests, options, written, collector.poll, show_progress=show_progress
            )
        finally:
            llm.detach_tap()
        collector.poll()
        reader.close()
        lost = {
            "num_dropped_tokens": tap.stats()["num_dropped_tokens"],
            "num_too_short_tokens": collector.stats().num_too_short_tokens,
        }
    return report(figures, written) | lost


class _Written:
    """The sink of a Collector: writes and counts."""

    def __init__(self, writer: ShardWriter) -> None:
        self._writer = writer
        self.num_tokens = 0
        self.num_sequences = 0

    def add(self, sequence: Any) -> None:
        self._writer.add(sequence)
        self.num_tokens += sequence.num_tokens
        self.num_sequences += 1


def training_prompts(options: DataOptions) -> Iterator[ChatPrompt]:
    """The prompts that are not held out.

    Raises:
        ValueError: there are none, or a task or file is bad.
    """
    return prompts_of(
        tasks=options.tasks,
        file=options.prompts,
        held_out=False,
        seed=options.seed if options.tasks else 0,
        split_seed=options.split_seed,
    )


def requests_for(
    llm: LLM, target: str, prompts: Iterator[ChatPrompt], options: DataOptions
) -> Iterator[Asked]:
    """``requests_of`` with the tokenizer and the longest sequence of ``llm``, which is ``target``'s.

    Raises:
        ValueError: it has no tokenizer.
    """
    tokenizer = llm.engine.tokenizer
    if tokenizer is None:
        raise ValueError(f"prompts are text, but the model {target!r} has no tokenizer")
    return requests_of(
        prompts, options, lambda prompt: prompt.token_ids(tokenizer), llm.config.max_model_len
    )


def requests_of(
    prompts: Iterator[ChatPrompt],
    options: DataOptions,
    encode: Callable[[ChatPrompt], list[int]],
    max_model_len: int,
) -> Iterator[Asked]:
    """The requests, in order: one pass where nothing else ends the run, else pass after pass with other seeds.

    Temperatures shift from round to round of the tasks, so that none is bound to a task. A further pass at temperature
    0 would repeat the first and is left out.
    """
    seen: list[ChatPrompt] = []
    num_sources = max(len(options.tasks), 1)
    goes_on = options.num_tokens is not None or options.seconds is not None
    number = 0
    for round_number in itertools.count():
        useful = False
        for i, prompt in enumerate(prompts if round_number == 0 else seen):
            if round_number == 0 and goes_on:
                seen.append(prompt)
            turn = i // num_sources + i % num_sources + round_number
            temperature = options.temperatures[turn % len(options.temperatures)]
            number += 1
            if temperature == 0.0 and round_number >= len(options.temperatures):
                continue
            token_ids = encode(prompt)
            if len(token_ids) + 2 > max_model_len:
                yield None
                continue
            useful = True
            params = SamplingParams(
                n=options.samples if temperature else 1,
                temperature=temperature,
                max_tokens=options.max_tokens,
                seed=(options.seed * _SEED_STRIDE + number) * 4096 % 2**63,
            )
            yield token_ids, params
        if not (goes_on and useful):
            return


def run_rollout(
    engine: Engine,
    requests: Iterator[Asked],
    options: DataOptions,
    written: Any,
    collect: Callable[[], Any],
    *,
    show_progress: bool = False,
) -> RolloutFigures:
    """Keep the engine full until the requests, the tokens or the seconds are at their end.

    Args:
        written: ``num_tokens`` that have been kept; those of running requests count when they end.
        collect: called after every step.
    """
    rollouts = Rollouts(engine, requests, batch=options.batch, collect=collect)
    start = time.perf_counter()
    unit, total = "tokens", options.num_tokens
    if total is None and options.seconds is not None:
        unit, total = "s", round(options.seconds)
    with tqdm(
        total=total, disable=None if show_progress else True, unit=unit, dynamic_ncols=True
    ) as bar:
        while rollouts.step():
            seconds = rollouts.figures.seconds = time.perf_counter() - start
            kept = written.num_tokens + rollouts.num_held
            _show(bar, unit == "s", kept, seconds)
            if options.num_tokens is not None and kept >= options.num_tokens:
                break
            if options.seconds is not None and seconds >= options.seconds:
                break
    rollouts.close()
    return rollouts.figures


def _show(bar: Any, by_seconds: bool, kept: int, seconds: float) -> None:
    bar.set_postfix_str(f"{kept} tokens, {kept / max(seconds, 1e-9):.0f} tokens/s", refresh=False)
    done = int(seconds) if by_seconds else kept
    bar.update(max(min(done, bar.total or done) - bar.n, 0))


def report(figures: RolloutFigures, written: Any) -> dict[str, Any]:
    """Figures of a run as plain values."""
    lengths = sorted(figures.lengths)

    def percentile(share: float) -> int:
        return lengths[min(int(share * len(lengths)), len(lengths) - 1)] if lengths else 0

    return {
        "num_sequences": written.num_sequences,
        "num_tokens": written.num_tokens,
        "num_generated_tokens": figures.num_generated,
        "seconds": figures.seconds,
        "tokens_per_s": written.num_tokens / max(figures.seconds, 1e-9),
        "generated_tokens_per_s": figures.num_generated / max(figures.seconds, 1e-9),
        "mean_len": sum(lengths) / max(len(lengths), 1),
        "len_percentiles": {str(p): percentile(p / 100) for p in (10, 50, 90, 99, 100)},
        "num_unfinished": figures.num_unfinished,
        "num_prompts_too_long": figures.num_too_long,
    }
