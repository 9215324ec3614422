"""A recorded rollout once more, without the model: what would a drafter, or a tuner, have made of it?

The token at a position is a pure function of the text before it and the seed, so a draft is accepted exactly as far as
it agrees with the recording: replaying costs no forward and is no estimate. It is the engine itself that runs, with its
scheduler, its speculator and its drafters, over a runner that computes nothing and a sampler that reads the recording;
so drafters see what they would see (which samples run beside each other, who has ended, what was observed when), and
every step verifies what a real one would. Drafters that read the target's hidden states need the target: for them the
engine runs with the real runner and sampler, and its tokens are compared with the recording.

Owns those two stand-ins, the clock of a replay (target passes at measured prices, drafting as it takes) and its log.
Invariant: a replay that returns has made every recorded token in order, or counts those samples that differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.batch import PAGE
from engine.engine import Engine
from engine.kv_cache import KVCache
from engine.llm import LLM
from engine.outputs import LogprobsAt
from engine.prompts import TokenPrompt
from engine.request import Request
from engine.request_group import RequestGroup
from engine.rollout_file import RolloutSample
from engine.sampler import Sampled, SampleRow
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.spec.config import MAX_NODES
from engine.spec.oracle import OracleDrafter
from engine.spec.price import TargetPrice
from engine.spec.tree import NO_TREE, ROOT, DraftTree
from engine.spec.tuner import OffTuner, StepRecord, Tuner
from engine.speculation import Speculator


class Turn(NamedTuple):
    """One request in one step of decoding.

    ``start``: output tokens before it. ``gained``: tokens committed, the bonus token counted. ``tree``: what was
    verified. ``node``: where the walk ended, ``ROOT`` where nothing was accepted. ``finished``: it was the last.
    """

    request_id: str
    start: int
    num_context: int
    gained: int
    tree: DraftTree
    node: int
    finished: bool

    @property
    def num_accepted(self) -> int:
        """As the engine counts it: the last token of a step is the bonus token."""
        return self.gained - 1


class Pass(NamedTuple):
    """One step: sizes, and seconds of the target (by price) and of drafting (as it took)."""

    num_rows: int
    num_decoding: int
    num_nodes: int
    num_tokens: int
    target_s: float
    draft_s: float
    drafted: tuple[int, int]  # requests, depth; (0, 0) where nobody was asked


@dataclass(slots=True)
class Replayed:
    """The log of a replay."""

    num_samples: int
    num_tokens: int
    num_different: int  # samples whose tokens are not the recorded ones: 0 without a target
    first_different: tuple[int, int] | None  # line of the file, output position
    turns: list[Turn]
    passes: list[Pass]

    @property
    def seconds(self) -> float:
        return sum(p.target_s + p.draft_s for p in self.passes)


class _NoModel:
    """A runner that computes nothing."""

    logits: tuple[()] = ()

    def forward(self, *arguments: Any, **options: Any) -> tuple[_NoModel, _NoModel]:
        return self, self

    def move_kv(self, source: Any, target: Any) -> None:
        pass


class _Recording:
    """A sampler that draws what was recorded.

    A node off the recorded path is given a token too, but no walk comes by: its parent would have to agree with the
    recording, and the token under it is then the recorded one.
    """

    def __init__(self, tokens: dict[str, tuple[int, ...]]) -> None:
        self._tokens = tokens

    def sample(self, logits: Any, rows: Sequence[SampleRow]) -> list[Sampled]:
        drawn: list[Sampled] = []
        for row in rows:
            tokens = self._tokens[row.request.request_id]
            at = row.position - row.request.prompt_len
            drawn.append(Sampled(tokens[at] if at < len(tokens) else tokens[-1]))
        return drawn

    def admit(self, request: Request, bad_words: Any) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass

    def forget_all(self) -> None:
        pass

    def prompt_logprobs(self, logits: Any, token_ids: Any, k: int) -> list[LogprobsAt]:
        raise AssertionError("a replay asks for no log-probabilities")


class _Priced:
    """A tuner that is told what passes cost by the price list, and whose last record can be read."""

    def __init__(self, tuner: Tuner, price: TargetPrice) -> None:
        self._tuner, self._price = tuner, price
        self.last: StepRecord | None = None

    def observe(self, record: StepRecord) -> None:
        seconds = self._price.seconds(record.num_rows, record.num_attended)
        self.last = dataclasses.replace(record, target_s=seconds)
        self._tuner.observe(self.last)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tuner, name)


def replay(
    llm: LLM,
    samples: Sequence[RolloutSample],
    speculator: Speculator,
    price: TargetPrice,
    *,
    batch_size: int,
) -> Replayed:
    """Run a rollout again under a speculator.

    Args:
        llm: of the target; its runner and sampler are used only where a drafter reads hidden states.
        samples: of the rollout, in the order in which they are added; each group's should stand together.
        speculator: fresh; its tuner is told the prices of ``price``.
        price: seconds of a pass.
        batch_size: most samples that run at once.

    Raises:
        ValueError: a sample does not fit the target (its line is named), or a drafter failed.
    """
    is_real = bool(speculator.tap_layers) or speculator.wants_hidden
    engine = _engine(llm, samples, speculator, batch_size, is_real=is_real)
    priced = _Priced(speculator.tuner, price)
    speculator.tuner = priced  # type: ignore[assignment]
    groups = [_add(engine, sample, llm, is_real=is_real) for sample in samples]
    log = Replayed(len(samples), 0, 0, None, [], [])
    while engine.has_unfinished:
        before = [(request, len(request.token_ids)) for request in engine.scheduler.decoding]
        priced.last = None
        engine.step()
        if speculator.failures:
            raise ValueError(f"the drafter failed during the replay: {speculator.failures}")
        record: StepRecord | None = priced.last
        assert record is not None, "a step that no tuner was told of"
        _log_step(log, record, before)
    _compare(log, samples, groups)
    assert is_real or not log.num_different, log.first_different
    return log


def plain(llm: LLM, samples: Sequence[RolloutSample], price: TargetPrice) -> Replayed:
    """The rollout as one batch without speculation: what a tuner's is compared with."""
    vocab_size = llm.config.model.vocab_size
    idle = OracleDrafter([], acceptance=0.0, vocab_size=vocab_size)  # steps are told only to one
    speculator = Speculator([idle], OffTuner(), vocab_size=vocab_size)
    return replay(llm, samples, speculator, price, batch_size=len(samples))


def _engine(
    llm: LLM,
    samples: Sequence[RolloutSample],
    speculator: Speculator,
    batch_size: int,
    *,
    is_real: bool,
) -> Engine:
    config, real = llm.config, llm.engine
    seats = batch_size if not is_real else min(batch_size, config.max_num_seqs)
    num_rows = max(config.max_num_batched_tokens, seats)
    num_pages = real.runner.num_pages
    if not is_real:  # room for all: pages cost nothing here
        slack = MAX_NODES + 2 * PAGE
        lengths = [len(s.prompt_token_ids) + len(s.token_ids) + slack for s in samples]
        num_pages = (sum(lengths) + config.max_model_len) // PAGE + 1

    def make_scheduler() -> Scheduler:
        kv = KVCache(num_pages, page_size=PAGE, enable_prefix_caching=config.enable_prefix_caching)
        return Scheduler(
            kv,
            max_num_seqs=seats,
            max_num_batched_tokens=num_rows,
            max_model_len=config.max_model_len,
        )

    tokens = {_name(sample): sample.token_ids for sample in samples}
    runner: Any = real.runner if is_real else _NoModel()
    sampler: Any = real.sampler if is_real else _Recording(tokens)
    return Engine(
        make_scheduler,
        runner,
        sampler,
        speculator,
        tokenizer=real.tokenizer if is_real else None,
        eos_token_ids=frozenset(config.model.eos_token_ids) if is_real else frozenset(),
        max_model_len=config.max_model_len,
        seed=0,
    )


def _add(engine: Engine, sample: RolloutSample, llm: LLM, *, is_real: bool) -> RequestGroup:
    vocab_size = llm.config.model.vocab_size
    prompt = list(sample.prompt_token_ids)
    highest = max(*prompt, *sample.token_ids)
    if highest >= vocab_size:
        raise ValueError(
            f"rollout, line {sample.line}: token id {highest} is outside the target's vocabulary of {vocab_size}; "
            f"it was recorded with {sample.model or 'another model'}"
        )
    length, limit = len(prompt) + len(sample.token_ids), llm.config.max_model_len
    if length > limit:
        raise ValueError(
            f"rollout, line {sample.line}: prompt and output have {length} tokens, the context is {limit}; "
            f"raise --max-model-len"
        )
    params = dataclasses.replace(sample.params, n=1, seed=sample.seed, speculation=True)
    if not is_real:
        params = _as_recorded(params, sample.token_ids)
    try:
        return engine.add(_name(sample), TokenPrompt(None, prompt), params)
    except ValueError as error:
        raise ValueError(f"rollout, line {sample.line}: {error}") from error


def _as_recorded(params: SamplingParams, token_ids: Sequence[int]) -> SamplingParams:
    """Parameters under which a request ends where the recording does, whatever ended it there."""
    return dataclasses.replace(
        params,
        stop=None,
        bad_words=None,
        structured_outputs=None,
        ignore_eos=True,
        min_tokens=len(token_ids),
        stop_token_ids=(token_ids[-1],),
    )


def _name(sample: RolloutSample) -> str:
    return f"line {sample.line}"


def _log_step(log: Replayed, record: StepRecord, before: Sequence[tuple[Request, int]]) -> None:
    verified = {entry.request_id: entry for entry in record.verified}
    num_tokens = 0
    for request, length in before:
        gained = len(request.token_ids) - length
        if gained <= 0:  # preempted
            continue
        entry = verified.get(request.request_id)
        tree, node = NO_TREE, ROOT
        if entry is not None:
            tree = entry.tree
            node = entry.accepted[gained - 2] if gained > 1 else ROOT
        start = length - request.prompt_len
        finished = request.is_finished
        log.turns.append(Turn(request.request_id, start, length, gained, tree, node, finished))
        num_tokens += gained
    drafted = [(num, depth) for num, depth in record.drafted.values()]
    log.passes.append(
        Pass(
            record.num_rows,
            record.num_decoding,
            record.num_nodes,
            num_tokens,
            record.target_s,
            sum(record.draft_s.values()),
            (sum(n for n, _ in drafted), max((d for _, d in drafted), default=0)),
        )
    )


def _compare(
    log: Replayed, samples: Sequence[RolloutSample], groups: Sequence[RequestGroup]
) -> None:
    for sample, group in zip(samples, groups, strict=True):
        made, recorded = group.samples[0].request.output_token_ids, list(sample.token_ids)
        log.num_tokens += len(made)
        if made != recorded:
            log.num_different += 1
            pairs = enumerate(zip(made, recorded, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(made), len(recorded)))
            log.first_different = log.first_different or (sample.line, at)
