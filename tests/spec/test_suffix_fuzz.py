"""The suffix drafter against a search of the texts in plain Python, written from the definition in engine/spec/suffix.py.

Owns the search and a model of which texts are kept. Knows nothing of automata. Invariant: the model holds the texts
alone and counts from nothing for every question.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.request import Request, RequestStatus
from engine.sampling_params import SamplingParams
from engine.spec import _suffix
from engine.spec.base import DraftJob, DraftPlan
from engine.spec.suffix import SuffixDrafter
from engine.spec.tree import DraftTree

Ids = tuple[int, ...]


def make(request_id: str, prompt: Ids) -> Request:
    params = SamplingParams(max_tokens=10_000)
    request = Request(request_id, prompt, params, seed=0, max_total_len=20_000, group_id="g")
    request.status = RequestStatus.RUNNING
    return request


def count(prompt: Ids, outputs: list[Ids], context: Ids) -> Counter[int]:
    """n(context, t): the prompt's own tokens once, those of every output once."""
    size = len(context)
    counts: Counter[int] = Counter()
    for text, start in [(prompt, 0), *((prompt + output, len(prompt)) for output in outputs)]:
        for at in range(max(start, size), len(text)):
            if text[at - size : at] == context:
                counts[text[at]] += 1
    return counts


def guesses(prompt: Ids, outputs: list[Ids], text: Ids, max_match: int) -> list[tuple[float, int]]:
    """(-score, token), best first."""
    scores: dict[int, float] = {}
    rest, above, num_levels = 1.0, 0, 0
    for size in range(min(len(text), max_match), 0, -1):
        counts = count(prompt, outputs, text[len(text) - size :])
        total = counts.total()
        if total <= above:
            continue
        if num_levels == _suffix.MAX_LEVELS or rest < _suffix.LEAST_WEIGHT:
            break
        num_levels, above = num_levels + 1, total
        doubt = _suffix.DOUBT / math.sqrt(size)
        share = rest / (total + doubt)
        by_count = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        for token, times in by_count[: _suffix.MAX_BRANCHES]:
            scores[token] = scores.get(token, 0.0) + share * times
        rest = share * doubt
    return sorted((-score, token) for token, score in scores.items())


def search_tree(
    prompt: Ids, outputs: list[Ids], text: Ids, max_match: int, plan: DraftPlan
) -> DraftTree:
    nodes: list[tuple[int, int, float]] = []
    open_nodes: list[tuple[float, int, int, float, Ids, int]] = []

    def expand(at: Ids, parent: int, depth: int, joint: float) -> None:
        for minus_score, token in guesses(prompt, outputs, at, max_match)[: plan.width]:
            if joint * -minus_score >= plan.min_score:
                entry = (joint * minus_score, parent, token, -minus_score, (*at, token), depth)
                open_nodes.append(entry)

    expand(text, -1, 1, 1.0)
    while open_nodes and len(nodes) < plan.num_nodes:
        best = min(open_nodes)
        open_nodes.remove(best)
        minus_joint, parent, token, score, path, depth = best
        nodes.append((token, parent, score))
        if depth < plan.depth:
            expand(path, len(nodes) - 1, depth + 1, -minus_joint)
    token_ids, parents, scores = zip(*nodes, strict=True) if nodes else ((), (), ())
    return DraftTree(token_ids, parents, scores)


@dataclass
class Texts:
    """What is kept of one prompt."""

    live: dict[str, Request] = field(default_factory=dict)
    ended: list[tuple[int, Ids]] = field(default_factory=list)  # (order of ending, output)
    used: int = 0


PLANS = st.builds(
    DraftPlan,
    drafter=st.just("suffix"),
    depth=st.integers(1, 6),
    num_nodes=st.integers(1, 10),
    width=st.integers(1, 3),
    min_score=st.sampled_from([0.0, 0.05, 0.3]),
)
PROMPTS = [(0,), (0, 1), (1, 0, 1, 0, 2), (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5)]


class SuffixMachine(RuleBasedStateMachine):
    """Requests come, grow, are cut and end; the drafter and the model are asked the same."""

    @initialize(max_match=st.sampled_from([1, 2, 5, 32]), bound=st.sampled_from([0, 30, 150, 9999]))
    def start(self, max_match: int, bound: int) -> None:
        self.max_match, self.bound = max_match, bound
        self.drafter = SuffixDrafter(max_match=max_match, max_history_tokens=bound)
        self.texts: dict[Ids, Texts] = {}
        self.clock = 0

    def touch(self, prompt: Ids) -> Texts:
        self.clock += 1
        texts = self.texts.setdefault(prompt, Texts())
        texts.used = self.clock
        return texts

    def requests(self) -> list[Request]:
        return [r for texts in self.texts.values() for r in texts.live.values()]

    def outputs(self, prompt: Ids) -> list[Ids]:
        texts = self.texts[prompt]
        live = [tuple(request.output_token_ids) for request in texts.live.values()]
        return [output for _, output in texts.ended] + live

    def size(self) -> int:
        return sum(
            len(prompt) + sum(len(output) for _, output in texts.ended)
            for prompt, texts in self.texts.items()
            if texts.ended
        )

    def keep(self, prompt: Ids, output: Ids) -> None:
        texts = self.touch(prompt)
        if output:
            texts.ended.append((self.clock, output))
        for victim in sorted(self.texts.values(), key=lambda t: t.used):
            if self.size() > self.bound and not victim.live and victim is not texts:
                victim.ended.clear()
        while self.size() > self.bound:
            kept = [t for t in self.texts.values() if t.ended]
            min(kept, key=lambda t: t.ended[0][0]).ended.pop(0)

    @rule(prompt=st.sampled_from(PROMPTS), name=st.sampled_from("abcdef"))
    def arrive(self, prompt: Ids, name: str) -> None:
        if any(r.request_id == name for r in self.requests()):
            return
        request = make(name, prompt)
        self.touch(prompt).live[name] = request
        assert self.drafter.observe([request]) == []

    @precondition(lambda self: self.requests())
    @rule(data=st.data(), alphabet=st.sampled_from([1, 3, 40]))
    def grow(self, data: st.DataObject, alphabet: int) -> None:
        requests = self.requests()
        before = {
            r.request_id: self.right_guesses(r.prompt_token_ids, tuple(r.token_ids))[:1]
            for r in requests
        }
        first: dict[str, int] = {}
        for request in requests:
            again = st.integers(1, 8).map(lambda n, ids=tuple(request.token_ids): list(ids[-n:]))
            fresh = st.lists(st.integers(0, alphabet - 1), max_size=4)
            new = data.draw(st.one_of(fresh, again))
            if new:
                first[request.request_id] = new[0]
            request.token_ids += new
        trials = {}
        for trial in self.drafter.observe(requests):
            trials.setdefault(trial.request_id, trial)
        for name, token in first.items():
            if before[name]:
                assert trials[name].score == -before[name][0][0]
                assert trials[name].accepted == (before[name][0][1] == token)

    def right_guesses(self, prompt: Ids, text: Ids) -> list[tuple[float, int]]:
        return guesses(prompt, self.outputs(prompt), text, self.max_match)

    @precondition(lambda self: self.requests())
    @rule(data=st.data(), cut=st.booleans())
    def end(self, data: st.DataObject, cut: bool) -> None:
        request = data.draw(st.sampled_from(self.requests()))
        if cut:
            request.truncate_output(data.draw(st.integers(0, request.num_output_tokens)))
        self.drafter.forget(request)
        prompt = request.prompt_token_ids
        del self.texts[prompt].live[request.request_id]
        self.keep(prompt, tuple(request.output_token_ids))

    @rule(seed=st.integers(0, 999), alphabet=st.sampled_from([2, 15]))
    def feed(self, seed: int, alphabet: int) -> None:
        """Rollouts of several prompts, long enough for wide branches and for evictions."""
        rng = random.Random(seed)
        for _ in range(rng.randrange(1, 6)):
            prompt = rng.choice(PROMPTS)
            output = tuple(rng.choices(range(alphabet), k=rng.choice([0, 5, 20, 80])))
            self.drafter.add_history(prompt, output)
            self.keep(prompt, output)

    @rule()
    def reset(self) -> None:
        self.drafter.reset()
        for texts in self.texts.values():
            texts.live.clear()

    @precondition(lambda self: self.requests())
    @rule(plan=PLANS)
    def propose(self, plan: DraftPlan) -> None:
        requests = self.requests()
        trees = self.drafter.propose([DraftJob(request, plan) for request in requests])
        for request, tree in zip(requests, trees, strict=True):
            prompt = request.prompt_token_ids
            text = tuple(request.token_ids)
            right = search_tree(prompt, self.outputs(prompt), text, self.max_match, plan)
            assert tree == right
            assert len(tree) <= plan.num_nodes
            assert tree.depth <= plan.depth
            assert max(Counter(tree.parents).values(), default=0) <= plan.width

    @invariant()
    def sizes_and_counts_agree(self) -> None:
        self.drafter.check()
        stats = self.drafter.stats()
        assert stats["history_tokens"] == self.size() <= self.bound
        assert stats["history_texts"] == sum(len(t.ended) for t in self.texts.values())
        assert stats["live_requests"] == len(self.requests())


TestSuffixMachine = SuffixMachine.TestCase
TestSuffixMachine.settings = settings(
    max_examples=200,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
