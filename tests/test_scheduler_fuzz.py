"""Random lives of scheduler and cache against a fake model that reads its prefix through the pages.

The fake forward keeps what each slot holds (token, position, weight version, writer), stores the
rows of a step first and then reads, as a real one does, and samples a token that is a function of
the tokens *found in the slots*. So a page that is shared too early, given away too early, or left
over from other weights changes a token or trips an assertion. Every request must end with the
output it has when it runs alone; nothing may leak, hang or be lost.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.kv_cache import KVCache
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduler import Committed, ScheduledRows, ScheduledStep, Scheduler

VOCAB, STOP, EOS = 6, 4, 5
SIZE, MAX_LEN = 4, 40
PROMPTS = [(0,), (1, 2, 3), *(tuple(i % 4 for i in range(n)) for n in (5, 9, 12, 16, 17, 23))]
PARAMS = [
    {"max_tokens": 1},
    {"max_tokens": 6},
    {"max_tokens": 17},
    {"max_tokens": None, "ignore_eos": True},
    {"max_tokens": 20, "stop_token_ids": [STOP], "min_tokens": 3},
    {"max_tokens": 14, "ignore_eos": True, "prompt_logprobs": 0},
]
ANY, LONG = range(len(PARAMS)), (2, 3, 3, 5)


def model(prefix: Sequence[int]) -> int:
    value = zlib.crc32(bytes(prefix))
    return value % 4 if value % 11 else 4 + value // 11 % 2  # STOP and EOS are rare


@cache
def output_alone(prompt: tuple[int, ...], which_params: int) -> tuple[tuple[int, ...], str]:
    """What the request makes by itself; written without the code under test."""
    params = PARAMS[which_params]
    text, output = list(prompt), []
    while True:
        token = model(text)
        text.append(token)
        output.append(token)
        stops = set(params.get("stop_token_ids", ()))
        if not params.get("ignore_eos"):
            stops.add(EOS)
        if token in stops and len(output) >= params.get("min_tokens", 0):
            return tuple(output), "stop"
        if len(output) == params["max_tokens"] or len(text) == MAX_LEN:
            return tuple(output), "length"


@dataclass(frozen=True)
class Cell:
    """What a slot holds."""

    token: int
    position: int
    version: int
    writer: int  # id() of the request


@dataclass
class Life:
    """A request and what the world has seen of it."""

    request: Request
    which_params: int
    admitted_under: int = 0
    received: list[int] = field(default_factory=list)
    cut_at: int | None = None


class World:
    """Scheduler, cache and fake model, with the actions that an engine and its users can take."""

    def __init__(self, num_pages: int, max_num_seqs: int, num_rows: int, caching: bool) -> None:
        self.kv = KVCache(num_pages, SIZE, caching)
        self.scheduler = Scheduler(
            self.kv,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(num_rows, max_num_seqs),
            max_model_len=MAX_LEN,
        )
        self.memory: dict[int, Cell] = {}
        self.lives: list[Life] = []
        self.life_of: dict[int, Life] = {}
        self.num_moved = 0

    # ---- what users do

    def add(self, request_id: str, prompt: tuple[int, ...], which_params: int) -> None:
        request = Request(
            request_id,
            prompt,
            SamplingParams(**PARAMS[which_params]),
            seed=0,
            max_total_len=MAX_LEN,
            eos_token_ids=frozenset({EOS}),
            arrival=len(self.lives),
        )
        if self.scheduler.get(request_id) is not None:
            with pytest.raises(ValueError, match="in use"):
                self.scheduler.add(request)
            return
        if self.kv.num_pages_for(request.max_kv_tokens) > self.kv.num_pages:
            with pytest.raises(ValueError, match="kv_cache_bytes"):
                self.scheduler.add(request)
            return
        self.scheduler.add(request)
        life = Life(request, which_params)
        self.lives.append(life)
        self.life_of[id(request)] = life

    def ask_for_nodes(self, rng: Random) -> None:
        for life in self.lives:
            life.request.num_tree_nodes = rng.choice((0, 0, 1, 3, 7))

    # ---- a step

    def step(self, rng: Random, ending: str = "commit", abort: str | None = None) -> bool:
        oldest = next(iter(self.scheduler._running), None)
        step = self.scheduler.schedule()
        self.scheduler.check()
        num_rows = step.num_tokens + sum(rows.num_tree_nodes for rows in step.rows)
        assert num_rows <= self.scheduler.max_num_batched_tokens
        if not step.rows:
            assert not self.scheduler.has_unfinished, "work, but nothing to run"
            return False
        assert oldest is None or any(r.request is oldest for r in step.rows), "the oldest waits"
        for rows in step.rows[len(step.rows) - step.num_admitted :]:
            self.life_of[id(rows.request)].admitted_under = self.kv.version
            assert rows.start == 0 or rows.request.params.prompt_logprobs is None, rows
        if abort is not None and self.scheduler.abort(abort) and rng.random() < 0.5:
            self.add(abort, rng.choice(PROMPTS), rng.choice(ANY))  # the id is free at once
        if ending == "fail":
            self._spoil(step)
            self.scheduler.fail(step)
        else:
            for committed in self.scheduler.commit(step, self._forward(step, rng)):
                self._receive(committed, rng)
            for rows in step.rows:
                assert rows.request.is_decoding or rows.request.is_finished or not rows.samples
        for request in self.scheduler._running:
            num_pages = self.kv.num_pages_for(request.num_computed)
            assert request.is_finished or len(request.pages) == num_pages, "scratch is kept"
        order = [r.arrival for r in (*self.scheduler._running, *self.scheduler._waiting)]
        assert order == sorted(order), "somebody was overtaken"
        self.scheduler.check()
        return True

    def _receive(self, committed: Committed, rng: Random) -> None:
        life = self.life_of[id(committed.request)]
        life.received += committed.token_ids
        assert life.received == life.request.output_token_ids
        if rng.random() < 0.02:  # the detokeniser finds a stop string in the new tokens
            life.cut_at = len(life.received) - rng.randrange(len(committed.token_ids))
            self.scheduler.finish(life.request, "stop", "##", num_output_tokens=life.cut_at)
            life.received = life.received[: life.cut_at]

    def _forward(self, step: ScheduledStep, rng: Random) -> dict[str, list[int]]:
        trees = [self._draft(rows, rng) for rows in step.rows]
        written: set[int] = set()
        for rows, tree in zip(step.rows, trees, strict=True):  # all rows are stored ...
            request, count = rows.request, rows.num_tokens + len(tree)
            slots = self.kv.slots_for(request, rows.start, count)
            assert not written.intersection(slots), "two rows write one slot"
            written.update(slots)
            cells = list(enumerate(request.token_ids[rows.start : rows.end], rows.start))
            cells += [(rows.end + depth, token) for _, token, depth in tree]
            for slot, (position, token) in zip(slots, cells, strict=True):
                self.memory[slot] = Cell(token, position, step.version, id(request))
        sampled = {}
        for rows, tree in zip(step.rows, trees, strict=True):  # ... before any is read
            prefix = self._read(rows)
            if rows.samples:
                sampled[rows.request.request_id] = self._sample_and_walk(rows, prefix, tree)
        return sampled

    def _draft(self, rows: ScheduledRows, rng: Random) -> list[tuple[int, int, int]]:
        """A random tree of (parent, token, depth), often right; parent -1 is the root."""
        tree: list[tuple[int, int, int]] = []
        for _ in range(rng.randint(0, rows.num_tree_nodes)):
            parent = rng.randrange(-1, len(tree))
            path, node = [], parent
            while node >= 0:
                path.append(tree[node][1])
                node = tree[node][0]
            guess = model([*rows.request.token_ids, *reversed(path)])
            if rng.random() < 0.3 or (parent, guess) in [(p, t) for p, t, _ in tree]:
                guess = (guess + 1) % VOCAB
            tree.append((parent, guess, len(path)))
        return tree

    def _read(self, rows: ScheduledRows) -> list[int]:
        """The tokens that the last row finds through the page table, each one examined."""
        request = rows.request
        life = self.life_of[id(request)]
        found = []
        for position, slot in enumerate(self.kv.slots_for(request, 0, rows.end)):
            cell = self.memory[slot]
            assert cell.position == position, (request, position, cell)
            assert cell.token == request.token_ids[position], (request, position, cell)
            own = cell.writer == id(request)
            assert own or cell.version == life.admitted_under, (request, position, cell)
            found.append(cell.token)
        return found

    def _sample_and_walk(
        self, rows: ScheduledRows, prefix: list[int], tree: list[tuple[int, int, int]]
    ) -> list[int]:
        """Sample at the root and at the nodes reached, then move the accepted cells into place."""
        slots = self.kv.slots_for(rows.request, rows.end, len(tree))
        children = {(parent, token): node for node, (parent, token, _) in enumerate(tree)}
        sampled, path, node = [model(prefix)], [], -1
        while (node := children.get((node, sampled[-1]), -2)) >= 0:
            path.append(node)
            prefix.append(self.memory[slots[node]].token)
            sampled.append(model(prefix))
        for index, node in enumerate(path):
            self.memory[slots[index]] = self.memory[slots[node]]
            self.num_moved += index != node
        return sampled

    def _spoil(self, step: ScheduledStep) -> None:
        """A forward that raised has left anything at all where it was to write."""
        for rows in step.rows:
            count = rows.num_tokens + rows.num_tree_nodes
            for slot in self.kv.slots_for(rows.request, rows.start, count):
                self.memory[slot] = Cell(-1, -1, -1, -1)

    # ---- the end

    def drain(self, rng: Random) -> None:
        """Run what is left without accidents. No livelock stays under the generous bound."""
        budget = iter(range(50 + 80 * len(self.lives)))
        while self.step(rng):
            assert next(budget, None) is not None, "livelock"
        assert self.kv.num_used_pages == 0
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        for life in self.lives:
            request = life.request
            output, reason = output_alone(request.prompt_token_ids, life.which_params)
            assert request.is_finished, request
            assert list(life.received) == request.output_token_ids
            if request.finish_reason == "abort":
                output = output[: len(life.received)]
            elif life.cut_at is not None:
                output, reason = output[: life.cut_at], "stop"
            assert tuple(life.received) == output, request
            assert request.finish_reason in (reason, "abort"), request
        assert self.kv.reset_prefix_cache()
        assert sorted(self.kv._blank) == list(range(self.kv.num_pages))


def random_life(seed: int) -> World:
    """One world: some requests, some accidents, then quiet until all have finished."""
    rng = Random(seed)
    crowded = rng.random() < 0.5  # long outputs side by side in a small cache
    world = World(
        num_pages=rng.choice((10, 12, 15) if crowded else (5, 8, 20, 40)),
        max_num_seqs=9 if crowded else rng.choice((1, 2, 4, 9)),
        num_rows=rng.choice((1, 5, 8, 16, 40)),
        caching=rng.random() < 0.85,
    )
    accidents = rng.choice((0.0, 0.1, 0.4))
    for _ in range(rng.randint(5, 40)):
        action = rng.random()
        if action < 0.3:
            prompt, which_params = rng.choice(PROMPTS), rng.choice(LONG if crowded else ANY)
            for _ in range(rng.choice((1, 1, 3))):
                world.add(f"r{rng.randrange(12)}", prompt, which_params)
        elif action < 0.4:
            world.ask_for_nodes(rng)
        elif rng.random() < accidents:
            accident = rng.randrange(5)
            if accident == 0:
                world.scheduler.abort(f"r{rng.randrange(12)}")
            elif accident == 1:
                world.kv.set_version(rng.choice((0, 1, rng.randrange(50))))
            elif accident == 2:
                assert world.kv.reset_prefix_cache()
            elif accident == 3:
                world.step(rng, ending="fail", abort=rng.choice((None, f"r{rng.randrange(12)}")))
            else:
                world.step(rng, abort=f"r{rng.randrange(12)}")
        else:
            world.step(rng)
    world.drain(rng)
    return world


@pytest.mark.parametrize("block", range(8))
def test_random_lives(block):
    reached = dict.fromkeys(("hits", "preemptions", "evictions", "moves", "spans"), 0)
    for seed in range(block * 250, block * 250 + 250):
        try:
            world = random_life(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        reached["hits"] += world.kv.num_hit_tokens
        reached["preemptions"] += world.scheduler.num_preemptions
        reached["evictions"] += world.kv.num_evictions
        reached["moves"] += world.num_moved
        reached["spans"] += sum(len(life.request.version_spans) > 1 for life in world.lives)
    # A fuzz that does not reach what it is for proves nothing.
    assert min(reached.values()) > 30, reached


def test_same_calls_same_pages():
    """Catches an order taken from a set or from object identity."""
    for seed in range(20):
        one, two = random_life(seed), random_life(seed)
        assert one.kv._page_of == two.kv._page_of
        assert one.kv._blank == two.kv._blank
        assert [one.memory[s].token for s in two.memory] == [c.token for c in two.memory.values()]


class SchedulerMachine(RuleBasedStateMachine):
    """The same world, with hypothesis choosing and shrinking the life."""

    seeds = st.integers(0, 2**16)
    ids = st.sampled_from([f"r{i}" for i in range(6)])

    @initialize(
        num_pages=st.sampled_from((5, 7, 12, 30)),
        max_num_seqs=st.sampled_from((1, 3, 6)),
        num_rows=st.sampled_from((1, 6, 17, 40)),
        caching=st.booleans(),
    )
    def begin(self, num_pages, max_num_seqs, num_rows, caching):
        self.world = World(num_pages, max_num_seqs, num_rows, caching)

    @rule(
        request_id=ids,
        prompt=st.sampled_from(PROMPTS),
        which_params=st.integers(0, len(PARAMS) - 1),
        num_samples=st.sampled_from((1, 1, 3)),
    )
    def add(self, request_id, prompt, which_params, num_samples):
        for index in range(num_samples):
            self.world.add(f"{request_id}{'+' * index}", prompt, which_params)

    @rule(seed=seeds)
    def ask_for_nodes(self, seed):
        self.world.ask_for_nodes(Random(seed))

    @rule(seed=seeds, num_steps=st.integers(1, 4))
    def steps(self, seed, num_steps):
        rng = Random(seed)
        for _ in range(num_steps):
            self.world.step(rng)

    @rule(seed=seeds, ending=st.sampled_from(("commit", "fail")), abort=st.none() | ids)
    def accident(self, seed, ending, abort):
        self.world.step(Random(seed), ending=ending, abort=abort)

    @rule(request_id=ids)
    def abort(self, request_id):
        self.world.scheduler.abort(request_id)

    @rule(version=st.integers(0, 3))
    def new_weights(self, version):
        self.world.kv.set_version(version)

    @rule()
    def reset(self):
        assert self.world.kv.reset_prefix_cache()

    @invariant()
    def sound(self):
        if hasattr(self, "world"):
            self.world.scheduler.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.drain(Random(0))


SchedulerMachine.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=30,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestSchedulerMachine = SchedulerMachine.TestCase
