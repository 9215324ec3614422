"""``tlt drafter data``: rollouts of the target, written down with the hidden states that it had anyway.

Owns the order in which prompts become requests, and when a run ends. The engine generates, a FeatureTap
hands out what its forwards computed, a Collector joins the records and a ShardWriter keeps the sequences: there is no
second forward for the features.

Two decisions:
- The prefix cache is off. Cached positions are never emitted, so with it every sample of a prompt but the first would
  begin with a gap, and so would every prompt behind a shared system prompt; a drafter reads the positions before a
  token, and the prompt is where they start. The price is a prefill for every sample: with several samples of long
  prompts and short answers it is most of the work, so one sample of more prompts is the default and the better data.
- A run that ends early keeps what its unfinished requests have. Leaving them out would leave out the longest samples.
  That holds for a run that is stopped, too.
- A prompt that cannot be answered (too long for the context, refused by the chat template) is passed over and counted:
  one line of a large file is no reason to lose hours. If there is nothing else, the run is an error that says so.

Invariant: the requests are a function of the prompts and the options, the batch apart: the n-th request has the same
prompt, temperature and seed in every run.
"""

from __future__ import annotations

import glob
import itertools
import logging
import math
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
from engine.models.loader import open_checkpoint
from tlt_train.collector import Collector
from tlt_train.data_report import report, why_nothing
from tlt_train.fingerprint import fingerprint
from tlt_train.prompts import ChatPrompt, prompts_of
from tlt_train.rollouts import Asked, RolloutFigures, Rollouts, tap_bytes
from tlt_train.shards import ShardWriter

logger = logging.getLogger(__name__)

_MOST_SKIPPED = 1000  # prompts of tasks in a row that cannot be answered: they have no end
_SEED_STRIDE = 1_000_003


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """What to generate.

    Args:
        tasks, prompts: where prompts come from, one of the two: reasoning-gym tasks, or a file.
        num_tokens: end once so many positions are written, prompts included; None has no such end.
        seconds: end after so long, model loading apart; None has no such end. Infinity is for callers who end the run
            themselves; ``generate_data`` refuses it.
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
            if value is None:
                continue
            option = f"--{name.replace('_', '-')}"
            if not value > 0:  # nor is NaN
                raise ValueError(f"{option} must be above 0, got {value!r}")
            if name != "seconds" and not isinstance(value, int):
                raise ValueError(f"{option} must be an integer, got {value!r}")
        if not self.temperatures or not all(0.0 <= t < math.inf for t in self.temperatures):
            raise ValueError(
                f"--temperature must be one or more finite numbers from 0 up, got {self.temperatures}"
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
    should_stop: Callable[[], bool] = lambda: False,
    **engine_options: Any,
) -> dict[str, Any]:
    """Write a directory of training sequences for a drafter of ``target``.

    Args:
        target: "smollm2", an HF directory or a GGUF file.
        out: the directory to make.
        drafter: a head whose layers are tapped.
        tap_layers: the layers to tap, where no head is given; None are those of a new EAGLE-3 head. The final hidden
            state, which EAGLE-1 reads, always comes with them.
        should_stop: asked before every step; what there is by then is written.
        engine_options: of ``LLM``.

    Returns:
        Figures of the run, plain values. After a stop ``was_stopped`` is true; the directory is whole, or not there if
        ``num_sequences`` is 0.

    Raises:
        ValueError: an option is bad, or the prompts have nothing for training; nothing is left behind.
    """
    if options.seconds is not None and not math.isfinite(options.seconds):
        raise ValueError(f"--seconds must be finite, got {options.seconds!r}; or give --num-tokens")
    _warn_of_parts(Path(out))
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
        target_fingerprint=fingerprint(open_checkpoint(target)),
        sampling=sampling,
        tasks=options.tasks,
    ) as writer:
        figures = _record(llm, requests, options, layers, writer, show_progress, should_stop)
        if not figures["num_sequences"]:
            writer.abandon()
            if not figures["was_stopped"]:
                raise ValueError(
                    why_nothing(
                        figures,
                        min_tokens=options.min_tokens,
                        max_model_len=llm.config.max_model_len,
                    )
                )
    return figures | {"out": str(out), "tap_layers": list(layers)}


def _record(
    llm: LLM,
    requests: Iterator[Asked],
    options: DataOptions,
    layers: tuple[int, ...],
    writer: ShardWriter,
    show_progress: bool,
    should_stop: Callable[[], bool],
) -> dict[str, Any]:
    """Run the requests with a tap that is read after every step."""
    written = _Written(writer)
    config = llm.config
    width = (len(layers) + 1) * config.model.hidden_size
    capacity = tap_bytes(config.max_num_batched_tokens, config.max_num_seqs, width)
    with FeatureTap(layers, capacity_bytes=capacity) as tap:
        reader = TapReader(tap.name)
        collector = Collector(reader, written.add, min_tokens=options.min_tokens)
        llm.attach_tap(tap)
        try:
            figures = run_rollout(
                llm.engine,
                requests,
                options,
                written,
                collector.poll,
                show_progress=show_progress,
                should_stop=should_stop,
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


def _warn_of_parts(out: Path) -> None:
    """Say what killed runs left: whether one is still running cannot be known, so nothing is deleted."""
    parts = sorted(out.parent.glob(f".{glob.escape(out.name)}.part-*"))
    if parts:
        logger.warning(
            "%s: unfinished data of a run that was killed, or is still running; delete them if none is",
            ", ".join(map(str, parts)),
        )


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

    Tasks ask without end, so they are given up after a thousand questions in a row that cannot be answered.

    Temperatures shift from round to round of the tasks, so that none is bound to a task. A further pass at temperature
    0 would repeat the first and is left out.

    Raises:
        ValueError: tasks are given up, and no question could be answered before; else the requests end, with a warning.
    """
    seen: list[ChatPrompt] = []
    num_sources = max(len(options.tasks), 1)
    goes_on = options.num_tokens is not None or options.seconds is not None
    number = num_skipped = 0
    any_useful, refusal = False, None
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
            if options.tasks and num_skipped >= _MOST_SKIPPED:
                _give_up(any_useful, refusal, max_model_len)
                return
            try:
                token_ids, refusal = encode(prompt), None
            except ValueError as error:
                token_ids, refusal = [], error
            if refusal is not None or len(token_ids) + 2 > max_model_len:
                num_skipped += 1
                yield refusal
                continue
            useful = any_useful = True
            num_skipped = 0
            params = SamplingParams(
                n=options.samples if temperature else 1,
                temperature=temperature,
                max_tokens=options.max_tokens,
                seed=(options.seed * _SEED_STRIDE + number) * 4096 % 2**63,
            )
            yield token_ids, params
        if not (goes_on and useful):
            return


def _give_up(any_useful: bool, refusal: ValueError | None, max_model_len: int) -> None:
    if refusal is not None:
        why = f"are refused or too long, the last because {refusal}; choose other --tasks"
    else:
        why = (
            f"are too long for the context of {max_model_len} tokens, which must hold two more; raise --max-model-len or "
            f"choose other --tasks"
        )
    message = f"{_MOST_SKIPPED} questions in a row {why}"
    if not any_useful:
        raise ValueError(message)
    logger.warning("the run ends early: %s", message)


def run_rollout(
    engine: Engine,
    requests: Iterator[Asked],
    options: DataOptions,
    written: Any,
    collect: Callable[[], Any],
    *,
    show_progress: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
) -> RolloutFigures:
    """Keep the engine full until the requests, the tokens or the seconds are at their end, or somebody stops it.

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
        while not (was_stopped := should_stop()) and rollouts.step():
            seconds = rollouts.figures.seconds = time.perf_counter() - start
            kept = written.num_tokens + rollouts.num_held
            _show(bar, unit == "s", kept, seconds)
            if options.num_tokens is not None and kept >= options.num_tokens:
                break
            if options.seconds is not None and seconds >= options.seconds:
                break
    rollouts.close()
    rollouts.figures.was_stopped = was_stopped
    return rollouts.figures


def _show(bar: Any, by_seconds: bool, kept: int, seconds: float) -> None:
    bar.set_postfix_str(f"{kept} tokens, {kept / max(seconds, 1e-9):.0f} tokens/s", refresh=False)
    done = int(seconds) if by_seconds else kept
    bar.update(max(min(done, bar.total or done) - bar.n, 0))
