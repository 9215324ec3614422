"""Drafters that misbehave: whatever they do, generation goes on and every token is that of plain decoding.

The faulty one is switched off, loudly and once; the others go on. And the books: caps, left-overs, counters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.outputs import RequestOutput, SpeculationMetrics
from engine.request import Request, RequestStatus
from engine.spec.base import DraftJob, DraftPlan, Trial
from engine.spec.oracle import OracleDrafter, Recorded
from engine.spec.tree import NO_TREE, DraftTree
from engine.spec.tuner import Candidates, FixedTuner, StepRecord
from engine.speculation import Speculator

PROMPTS = ("abcabcabc", "the same words", "xyz", "0123456789")
NUM_TOKENS = 24


class Fault:
    """A drafter that does as another one until its n-th call of one method, which goes wrong.

    Args:
        inner: does the work.
        method: that fails; "" for none.
        failure: raised, or called with what ``propose`` would have given.
        after: calls that go well before.
    """

    version = 0

    def __init__(
        self,
        inner: OracleDrafter,
        method: str = "",
        failure: BaseException | Callable[[list[DraftTree]], Any] | None = None,
        after: int = 2,
        name: str = "faulty",
        reads: bool = True,
    ) -> None:
        self.name = name
        self.tap_layers = (0, 1) if reads else ()
        self.wants_hidden = reads
        self.calls: dict[str, int] = {}
        self._inner, self._method, self._failure, self._after = inner, method, failure, after

    def _call(self, method: str) -> bool:
        """Counts; whether it is the call that fails."""
        self.calls[method] = self.calls.get(method, 0) + 1
        fails = method == self._method and self.calls[method] > self._after
        if fails and isinstance(self._failure, BaseException):
            raise self._failure
        return fails

    def propose(self, jobs: Sequence[DraftJob]) -> list[DraftTree]:
        fails = self._call("propose")
        trees = self._inner.propose(jobs)
        return self._failure(trees) if fails and callable(self._failure) else trees

    def observe(self, requests: Sequence[Request]) -> Sequence[Trial]:
        self._call("observe")
        return ()

    def forget(self, request: Request) -> None:
        self._call("forget")
        self._inner.forget(request)

    def reset(self) -> None:
        self._call("reset")
        self._inner.reset()

    def load(self, weights: Mapping[str, Any], version: int) -> None:
        raise ValueError("no weights")

    def stats(self) -> dict[str, float]:
        return {}

    def store_features(self, slots: Any, taps: Any, hidden: Any) -> None:
        assert taps.shape[1] == 2
        assert len(slots) == len(taps) == len(hidden)
        self._call("store_features")

    def move_features(self, source: Any, target: Any) -> None:
        self._call("move_features")


class Wide(OracleDrafter):
    """The recorded token is the second child at every level, so accepted nodes have to be moved."""

    def _propose(self, job: DraftJob) -> DraftTree:
        chain = super()._propose(job)
        tokens: list[int] = []
        parents: list[int] = []
        parent = -1
        for token in chain.token_ids[: job.plan.num_nodes // 2]:
            tokens += [(token + 7) % 300, token]
            parents += [parent, parent]
            parent = len(tokens) - 1
        return DraftTree(tuple(tokens), tuple(parents))


class Lab:
    def __init__(self, model: str) -> None:
        self.llm = LLM(model, kv_cache_bytes=1 << 21, max_model_len=128)
        self.vocab_size = self.llm.config.model.vocab_size
        self.params = [
            SamplingParams(temperature=t, seed=i, max_tokens=NUM_TOKENS, ignore_eos=True)
            for i, t in enumerate((0.0, 1.0, 0.8, 1.0))
        ]
        self.plain = self.generate(Speculator([], FixedTuner(PLAN), vocab_size=self.vocab_size))
        self.records = [
            Recorded(tuple(o.prompt_token_ids), i, tuple(o.outputs[0].token_ids))
            for i, o in enumerate(self.plain)
        ]

    def generate(self, speculator: Speculator) -> list[RequestOutput]:
        self.llm.engine.speculator = speculator
        return self.llm.generate(list(PROMPTS), self.params, use_tqdm=False)

    def oracle(self, acceptance: float = 1.0, cls: type[OracleDrafter] = OracleDrafter) -> Any:
        return cls(self.records, acceptance=acceptance, vocab_size=self.vocab_size)

    def speculator(self, *drafters: Any, tuner: Any = None) -> Speculator:
        return Speculator(list(drafters), tuner or Both(), vocab_size=self.vocab_size)

    def tokens(self, outputs: Sequence[RequestOutput]) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in outputs]


PLAN = DraftPlan("faulty", 4, 8, 2)


class Both(FixedTuner):
    """Requests take turns between the faulty drafter and a good one, as far as they are there."""

    name = "both"

    def __init__(self) -> None:
        self.names = ["faulty", "good"]
        self.records: list[StepRecord] = []

    def plan(self, batch: Candidates) -> list[DraftPlan | None]:
        if not self.names:
            return [None] * len(batch.requests)
        turns = [self.names[r.seed % len(self.names)] for r in batch.requests]
        return [DraftPlan(name, PLAN.depth, PLAN.num_nodes, PLAN.width) for name in turns]

    def observe(self, record: StepRecord) -> None:
        self.records.append(record)

    def remove(self, drafter: str) -> None:
        self.names.remove(drafter)


@pytest.fixture(scope="module")
def lab(make_model_dir: Any) -> Lab:
    return Lab(str(make_model_dir("llama")))


def wrong_trees(trees: list[DraftTree], tree: DraftTree) -> list[DraftTree]:
    return [*trees[:-1], tree]


FAULTS: dict[str, tuple[str, BaseException | Callable[[list[DraftTree]], Any], str]] = {
    "propose": ("propose", RuntimeError("boom"), "boom"),
    "observe": ("observe", KeyError("lost"), "lost"),
    "forget": ("forget", AssertionError(1), "AssertionError"),
    "store_features": ("store_features", torch.cuda.OutOfMemoryError("full"), "full"),
    "move_features": ("move_features", IndexError("slot"), "slot"),
    "a tree too few": ("propose", lambda trees: trees[:-1], "were given"),
    "a tree too many": ("propose", lambda trees: [*trees, NO_TREE], "were given"),
    "no list": ("propose", lambda trees: None, "TypeError"),
    "no tree": ("propose", lambda trees: wrong_trees(trees, None), "TypeError"),  # type: ignore[arg-type]
    "too deep": (
        "propose",
        lambda trees: wrong_trees(trees, DraftTree.chain(range(5))),
        "depth 5",
    ),
    "too many nodes": (
        "propose",
        lambda trees: wrong_trees(trees, DraftTree(tuple(range(9)), (-1,) * 9)),
        "9 nodes",
    ),
    "no such token": (
        "propose",
        lambda trees: wrong_trees(trees, DraftTree.chain([5, 320])),
        "outside the vocabulary",
    ),
    "a negative token": (
        "propose",
        lambda trees: wrong_trees(trees, DraftTree.chain([-1])),
        "outside the vocabulary",
    ),
    "an invalid tree": ("propose", lambda trees: [DraftTree((1,), (5,))], "earlier node"),
}


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_drafter_is_switched_off_and_nothing_else_changes(
    lab: Lab, fault: str, after: int, caplog: pytest.LogCaptureFixture
) -> None:
    method, failure, reason = FAULTS[fault]
    if isinstance(failure, BaseException):
        failure = type(failure)(*failure.args)
    faulty = Fault(lab.oracle(0.8, Wide), method, failure, after)
    good = Fault(lab.oracle(0.9), name="good", reads=False)
    tuner = Both()
    speculator = lab.speculator(faulty, good, tuner=tuner)
    with caplog.at_level(logging.ERROR):
        outputs = lab.generate(speculator)
    assert lab.tokens(outputs) == lab.tokens(lab.plain)
    assert list(speculator.failures) == ["faulty"]
    assert reason in speculator.failures["faulty"]
    assert list(speculator.drafters) == ["good"]
    assert tuner.names == ["good"]
    assert [r.levelname for r in caplog.records] == ["ERROR"]
    assert "drafter faulty failed" in caplog.records[0].message
    assert speculator.tap_layers == ()
    assert not speculator.wants_hidden
    # the others go on, with everyone's requests
    assert good.calls["propose"] > 3
    last = [e for record in tuner.records[-4:] for e in record.verified]
    if method != "forget":  # which comes at the end
        assert {entry.plan.drafter for entry in last} <= {"good"}
    assert faulty.calls[method] == after + 1
    # and stay off in the next call
    calls = dict(faulty.calls)
    assert lab.tokens(lab.generate(speculator)) == lab.tokens(lab.plain)
    assert faulty.calls == calls
    lab.llm.engine.scheduler.check()
    assert lab.llm.engine.scheduler.kv.num_used_pages == 0


def test_without_a_fault_the_drafter_is_really_used(lab: Lab) -> None:
    """What makes the test above bite: every method is called, and more than twice."""
    faulty = Fault(lab.oracle(0.8, Wide))
    assert lab.tokens(lab.generate(lab.speculator(faulty, tuner=FixedTuner(PLAN)))) == lab.tokens(
        lab.plain
    )
    assert set(faulty.calls) == {"propose", "observe", "forget", "store_features", "move_features"}
    assert min(faulty.calls.values()) > 2


def test_the_last_drafter_fails(lab: Lab) -> None:
    faulty = Fault(lab.oracle(0.8), "propose", RuntimeError("boom"))
    speculator = lab.speculator(faulty, tuner=FixedTuner(PLAN))
    assert lab.tokens(lab.generate(speculator)) == lab.tokens(lab.plain)
    assert not speculator.active


def test_reset_that_fails(lab: Lab) -> None:
    faulty = Fault(lab.oracle(0.8), "reset", RuntimeError("boom"), after=0)
    speculator = lab.speculator(faulty, tuner=FixedTuner(PLAN))
    lab.llm.engine.speculator = speculator
    lab.llm.engine.recover()
    assert speculator.failures == {"faulty": "RuntimeError('boom')"}
    assert lab.tokens(lab.generate(speculator)) == lab.tokens(lab.plain)


@pytest.mark.parametrize("method", ["propose", "observe", "forget", "store_features"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_inside_a_drafter_is_the_users(
    lab: Lab, method: str, error: type[BaseException]
) -> None:
    """It is no fault of the drafter: it comes out, and after ``recover`` (which ``generate`` calls) all goes on."""
    faulty = Fault(lab.oracle(0.8), method, error(), after=1)
    speculator = lab.speculator(faulty, tuner=FixedTuner(PLAN))
    with pytest.raises(error):
        lab.generate(speculator)
    assert not speculator.failures
    engine = lab.llm.engine
    assert not engine.has_unfinished
    assert engine.scheduler.kv.num_used_pages == 0
    assert faulty.calls["reset"] == 1
    faulty._method = ""
    assert lab.tokens(lab.generate(speculator)) == lab.tokens(lab.plain)
    assert speculator.active


# ---- limits of a request


@pytest.mark.parametrize("cap", [False, 1, 3])
def test_a_request_never_gets_more_than_its_cap(lab: Lab, cap: bool | int) -> None:
    """Neither nodes nor depth, while its neighbours get all of the plan."""
    tuner = Both()
    oracle = lab.oracle(1.0, OracleDrafter if cap == 1 else Wide)
    lab.llm.engine.speculator = lab.speculator(Fault(oracle), tuner=tuner)
    tuner.names = ["faulty"]
    params = [
        SamplingParams(
            temperature=p.temperature,
            seed=p.seed,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            speculation=cap if i == 1 else True,
        )
        for i, p in enumerate(lab.params)
    ]
    outputs = lab.llm.generate(list(PROMPTS), params, use_tqdm=False)
    assert lab.tokens(outputs) == lab.tokens(lab.plain)
    sizes: dict[str, int] = {}
    for record in tuner.records:
        for entry in record.verified:
            size = max(sizes.get(entry.request_id, 0), len(entry.tree))
            sizes[entry.request_id] = size
    capped = [sizes.get(i, 0) for i in (o.request_id for o in outputs)]
    assert capped[1] <= cap
    assert max(capped) >= 4
    assert (books(outputs[1]).num_draft_tokens == 0) == (cap is False)


def test_nothing_is_drafted_that_could_not_be_kept(lab: Lab) -> None:
    """The last token of a request is the target's own: no node is verified behind the limit."""
    tuner = Both()
    tuner.names = ["faulty"]
    lab.llm.engine.speculator = lab.speculator(Fault(lab.oracle(1.0)), tuner=tuner)
    params = [
        SamplingParams(temperature=0.0, seed=0, max_tokens=n, ignore_eos=True) for n in (1, 2, 3)
    ]
    lab.llm.generate([PROMPTS[0]] * 3, params, use_tqdm=False)
    depths = [e.tree.depth for record in tuner.records for e in record.verified]
    assert depths
    assert max(depths) == 1


class Once(FixedTuner):
    """Drafts at the first chance only."""

    name = "once"

    def __init__(self) -> None:
        self._plan = None
        self.num_asked = 0

    def plan(self, batch: Candidates) -> list[DraftPlan | None]:
        self.num_asked += 1
        return [PLAN if self.num_asked == 1 else None for _ in batch.requests]


def running(number: int) -> Request:
    params = SamplingParams(max_tokens=20)
    request = Request(str(number), [1, 2], params, seed=number, max_total_len=50)
    request.append_tokens([3])
    request.num_computed = 2
    request.status = RequestStatus.RUNNING
    return request


class Chains:
    """Drafts the same chain for everyone."""

    name, version, tap_layers, wants_hidden = "faulty", 0, (), False

    def propose(self, jobs: Sequence[DraftJob]) -> list[DraftTree]:
        return [DraftTree.chain([1, 2, 3][: job.plan.depth]) for job in jobs]


@pytest.mark.parametrize("way", ["tuner", "fault", "no drafter", "speculation=False"])
def test_nothing_is_left_over_from_the_step_before(way: str) -> None:
    """A step without drafts asks for no rows, whichever way it came to have none."""
    requests = [running(i) for i in range(3)]
    tuner = Once() if way == "tuner" else FixedTuner(PLAN)
    speculator = Speculator([Chains()], tuner, vocab_size=9)  # type: ignore[list-item]
    assert len(speculator.draft(requests, has_prefill=False).trees) == 3
    assert [r.num_tree_nodes for r in requests] == [3, 3, 3]
    if way == "fault":
        speculator._vocab_size = 2
    if way == "no drafter":
        speculator.drafters.clear()
    if way == "speculation=False":
        for request in requests:
            request.params = SamplingParams(max_tokens=20, speculation=False)
    drafts = speculator.draft(requests, has_prefill=False)
    assert not drafts.trees
    assert [r.num_tree_nodes for r in requests] == [0, 0, 0]


def test_the_engine_without_a_drafter_left_verifies_nothing(lab: Lab) -> None:
    """The drafter fails in ``observe``, after a step with trees: the next step must have none."""
    faulty = Fault(lab.oracle(1.0), "observe", RuntimeError("boom"), after=0)
    lab.llm.engine.speculator = lab.speculator(faulty, tuner=FixedTuner(PLAN))
    before = lab.llm.engine.counters.num_draft_tokens
    assert lab.tokens(lab.generate(lab.llm.engine.speculator)) == lab.tokens(lab.plain)
    assert lab.llm.engine.counters.num_draft_tokens == before


# ---- books


def books(output: RequestOutput) -> SpeculationMetrics:
    spec = output.metrics[0].speculative_decoding
    assert spec is not None
    return spec


@pytest.mark.parametrize("acceptance", [0.0, 0.7, 1.0])
def test_the_books_agree(lab: Lab, acceptance: float) -> None:
    tuner = Both()
    tuner.names = ["faulty"]
    counters = lab.llm.engine.counters
    before = {name: getattr(counters, name) for name in counters.__slots__}
    positions = list(counters.num_accepted_per_position)
    outputs = lab.generate(lab.speculator(Fault(lab.oracle(acceptance, Wide)), tuner=tuner))

    def gained(name: str) -> Any:
        return getattr(counters, name) - before[name]

    specs = [books(output) for output in outputs]
    for output, spec in zip(outputs, specs, strict=True):
        histogram = spec.acceptance_histogram
        accepted = sum(i * count for i, count in enumerate(histogram))
        assert sum(histogram) == spec.num_spec_steps == spec.spec_verify_ct
        assert accepted == spec.num_accepted_draft_tokens == spec.spec_num_correct_drafts
        length = len(output.outputs[0].token_ids) / spec.num_spec_steps
        assert spec.mean_acceptance_length == spec.spec_accept_length == pytest.approx(length)
        rate = accepted / max(spec.num_draft_tokens, 1)
        assert spec.draft_acceptance_rate == spec.spec_accept_rate == pytest.approx(rate)
    # of the engine: the sums over requests, and what the tuner was told
    verified = [entry for record in tuner.records for entry in record.verified]
    assert gained("num_drafts") == len(verified)
    num_nodes = sum(len(entry.tree) for entry in verified)
    assert gained("num_draft_tokens") == num_nodes == sum(s.num_draft_tokens for s in specs)
    accepted = sum(spec.num_accepted_draft_tokens for spec in specs)
    assert gained("num_accepted_draft_tokens") == accepted
    assert gained("num_generated_tokens") == NUM_TOKENS * len(PROMPTS)
    assert gained("num_verifications") == sum(spec.num_spec_steps for spec in specs)
    after = list(counters.num_accepted_per_position)
    deltas = [n - (positions[i] if i < len(positions) else 0) for i, n in enumerate(after)]
    assert sum(deltas) == accepted
    assert deltas == sorted(deltas, reverse=True)
    assert sum(r.num_nodes for r in tuner.records) == num_nodes
    assert (accepted > 0) == (acceptance > 0.0)


# ---- rows that cannot be drawn


class Trap:
    """A logits processor that raises where the text ends in given tokens."""

    def __init__(self, tail: Sequence[int]) -> None:
        self.tail = list(tail)
        self.num_raised = 0

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if output_ids[-len(self.tail) :] == self.tail:
            self.num_raised += 1
            raise RuntimeError("trap")
        return logits


def test_a_processor_that_raises_behind_a_rejected_node_harms_nobody(lab: Lab) -> None:
    """The wrong sibling at each level is a text that never comes: what happens there is no one's business."""
    text = lab.tokens(lab.plain)[0]
    wrong = (text[6] + 7) % 300
    assert wrong not in text
    trap = Trap([wrong])
    params = SamplingParams(
        temperature=0.0, seed=0, max_tokens=NUM_TOKENS, ignore_eos=True, logits_processors=[trap]
    )
    lab.llm.engine.speculator = lab.speculator(Fault(lab.oracle(1.0, Wide)), tuner=FixedTuner(PLAN))
    output = lab.llm.generate([PROMPTS[0]], params, use_tqdm=False)[0].outputs[0]
    assert trap.num_raised > 0
    assert (output.token_ids, output.finish_reason) == (text, "length")


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, 8, 11])
def test_a_processor_that_raises_on_the_way_ends_the_request_as_plain(lab: Lab, at: int) -> None:
    """With the tokens before it, also in the middle of an accepted run; neighbours go on."""
    text = lab.tokens(lab.plain)[1]
    found = []
    for speculator in (
        lab.speculator(tuner=FixedTuner(PLAN)),
        lab.speculator(Fault(lab.oracle(1.0, Wide)), tuner=FixedTuner(PLAN)),
        lab.speculator(Fault(lab.oracle(1.0)), tuner=FixedTuner(PLAN)),
    ):
        params = list(lab.params)
        params[1] = SamplingParams(
            temperature=1.0,
            seed=1,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            logits_processors=[Trap(text[:at])],
        )
        lab.llm.engine.speculator = speculator
        outputs = lab.llm.generate(list(PROMPTS), params, use_tqdm=False)
        lab.llm.engine.scheduler.check()
        output = outputs[1].outputs[0]
        found.append((output.token_ids, output.finish_reason, output.stop_reason, output.text))
        for i in (0, 2, 3):
            assert outputs[i].outputs[0].token_ids == lab.tokens(lab.plain)[i]
    assert found[0] == found[1] == found[2]
    assert found[0][:2] == (text[:at], "error")
    assert "trap" in found[0][2]


# ---- weights


def test_load_names_what_runs(lab: Lab) -> None:
    speculator = lab.speculator(Fault(lab.oracle()))
    with pytest.raises(ValueError, match=r"no drafter 'eagle'.*running: faulty"):
        speculator.load("eagle", {}, 1)
    with pytest.raises(ValueError, match="no weights"):
        speculator.load("faulty", {}, 1)
    assert speculator.active
