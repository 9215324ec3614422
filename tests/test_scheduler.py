"""What a step is made of, and what its outcome does; random lives are in test_scheduler_fuzz."""

import pytest

from engine.kv_cache import KVCache
from engine.request import Request, RequestStatus
from engine.sampling_params import SamplingParams
from engine.scheduler import ScheduledStep, Scheduler

SIZE = 4


def make_scheduler(num_pages=100, max_num_seqs=8, max_num_batched_tokens=32, **kw) -> Scheduler:
    kw.setdefault("max_model_len", 200)
    return Scheduler(
        KVCache(num_pages, SIZE),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        **kw,
    )


def make(request_id: str, prompt_len: int, *, first: int | None = None, **params) -> Request:
    params.setdefault("max_tokens", 40)
    first = hash_of(request_id) if first is None else first
    prompt = [first, *range(prompt_len - 1)]
    return Request(request_id, prompt, SamplingParams(**params), seed=0, max_total_len=200)


def hash_of(request_id: str) -> int:
    return 1000 + int.from_bytes(request_id.encode(), "little")


def add(scheduler: Scheduler, *requests: Request) -> None:
    for request in requests:
        scheduler.add(request)


def shape(step: ScheduledStep) -> list[tuple[str, int, int]]:
    return [(rows.request.request_id, rows.start, rows.num_tokens) for rows in step.rows]


def run(scheduler: Scheduler, token: int = 7) -> list[tuple[str, int, int]]:
    """One step in which every request samples ``token``; returns its shape."""
    step = scheduler.schedule()
    scheduler.check()
    scheduler.commit(step, {r.request.request_id: [token] for r in step.rows if r.samples})
    scheduler.check()
    return shape(step)


def test_decodes_first_then_running_prefill_then_new_ones_within_the_budget():
    scheduler = make_scheduler(max_num_batched_tokens=10)
    add(scheduler, make("a", 4), make("b", 20), make("c", 3))
    assert run(scheduler) == [("a", 0, 4), ("b", 0, 6)]
    assert run(scheduler) == [("a", 4, 1), ("b", 6, 9)]
    step = scheduler.schedule()
    assert shape(step) == [("a", 5, 1), ("b", 15, 5), ("c", 0, 3)]
    assert [rows.samples for rows in step.rows] == [True, True, True]
    assert (step.num_decoding, step.num_admitted, step.num_tokens) == (1, 1, 9)
    scheduler.commit(step, {"a": [7], "b": [7], "c": [7]})
    assert run(scheduler) == [("a", 6, 1), ("b", 20, 1), ("c", 3, 1)]


def test_num_decoding_leaves_out_prefill():
    """Catches a switch of speculation that counts prefilling requests and flaps."""
    scheduler = make_scheduler(max_num_batched_tokens=8)
    add(scheduler, make("a", 4), make("b", 30))
    counts = []
    for _ in range(6):
        step = scheduler.schedule()
        counts.append((step.num_decoding, len(scheduler.decoding), scheduler.num_running))
        scheduler.commit(step, {r.request.request_id: [7] for r in step.rows if r.samples})
    assert counts == [(0, 0, 2), (1, 1, 2), (1, 1, 2), (1, 1, 2), (1, 1, 2), (2, 2, 2)]


def test_max_num_seqs():
    scheduler = make_scheduler(max_num_seqs=2)
    add(scheduler, make("a", 3, max_tokens=2), make("b", 3), make("c", 3))
    assert run(scheduler) == [("a", 0, 3), ("b", 0, 3)]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    assert run(scheduler) == [("a", 3, 1), ("b", 3, 1)]
    assert run(scheduler) == [("b", 4, 1), ("c", 0, 3)], "a is done, its place is taken"


def test_the_group_computes_its_prompt_once():
    scheduler = make_scheduler(max_num_batched_tokens=64)
    group = [make(f"r{i}", 18, first=5) for i in range(4)]
    add(scheduler, *group)
    assert run(scheduler) == [("r0", 0, 18), ("r1", 16, 2), ("r2", 16, 2), ("r3", 16, 2)]
    assert [request.num_cached_tokens for request in group] == [0, 16, 16, 16]
    assert scheduler.kv.num_used_pages == 4 + 4


def test_prompt_logprobs_run_every_row():
    scheduler = make_scheduler(max_num_batched_tokens=64)
    a, b = make("a", 18, first=5), make("b", 18, first=5, prompt_logprobs=0)
    add(scheduler, a, b)
    assert run(scheduler) == [("a", 0, 18), ("b", 0, 18)]
    assert not set(a.pages) & set(b.pages)


def test_preemption_takes_the_latest_keeps_its_tokens_and_recomputes():
    scheduler = make_scheduler(num_pages=7)
    first, last = make("first", 8, max_tokens=18), make("last", 8, max_tokens=18)
    add(scheduler, first, last)
    order = [run(scheduler)]
    assert order[0] == [("first", 0, 8), ("last", 0, 8)]
    while not last.num_preemptions:
        order.append(run(scheduler))
    assert order[-2:] == [[("first", 11, 1), ("last", 11, 1)], [("first", 12, 1)]], "page 7 of 7"
    assert last.status is RequestStatus.WAITING
    assert last.output_token_ids == [7] * 5
    assert (last.num_computed, last.pages) == (0, [])
    while first.status is not RequestStatus.FINISHED:
        assert all(name == "first" for name, _, _ in run(scheduler))
    assert run(scheduler)[0][0] == "last"
    assert last.num_output_tokens == 6
    while scheduler.has_unfinished:
        run(scheduler)
    assert last.output_token_ids == first.output_token_ids == [7] * 18
    assert scheduler.kv.num_used_pages == 0
    assert scheduler.num_preemptions == 1


def test_a_preempted_request_finds_its_own_pages_again():
    scheduler = make_scheduler(num_pages=20)
    request = make("r", 14)
    add(scheduler, request)
    run(scheduler)
    scheduler._running.remove(request)  # as _make_room does
    request.num_preemptions += 1
    scheduler._to_waiting(request)
    assert run(scheduler) == [("r", 12, 3)]
    assert request.num_cached_tokens == 0, "hits of the first admission only"
    assert request.num_output_tokens == 2


def test_nobody_is_let_in_only_to_be_preempted():
    scheduler = make_scheduler(num_pages=8)
    add(scheduler, make("a", 14, max_tokens=18), make("b", 6, max_tokens=18))
    run(scheduler)
    # a wants a page of growth; 8 - 4 - 1 pages are free for b, which wants 2 and one of growth
    assert scheduler.num_running == 2
    scheduler = make_scheduler(num_pages=7)
    add(scheduler, make("a", 14, max_tokens=15), make("b", 6, max_tokens=18))
    run(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    while scheduler.has_unfinished:
        run(scheduler)
    assert scheduler.num_preemptions == 0


def test_several_tokens_a_step_and_a_stop_among_them():
    scheduler = make_scheduler()
    request = make("r", 5, max_tokens=20, stop_token_ids=[2])
    request.num_tree_nodes = 6
    add(scheduler, request)
    step = scheduler.schedule()
    assert step.rows[0].num_tree_nodes == 0, "no tree before there is a decode row"
    scheduler.commit(step, {"r": [7]})
    step = scheduler.schedule()
    assert (shape(step), step.rows[0].num_tree_nodes) == ([("r", 5, 1)], 6)
    assert len(request.pages) == 3
    scheduler.check()
    [outcome] = scheduler.commit(step, {"r": [8, 9, 10]})
    scheduler.check()
    assert outcome.token_ids == [8, 9, 10]
    assert (request.num_computed, len(request.pages)) == (8, 2)
    step = scheduler.schedule()
    assert shape(step) == [("r", 8, 1)]
    [outcome] = scheduler.commit(step, {"r": [11, 2, 12, 13]})
    assert outcome.token_ids == [11, 2]
    assert (request.finish_reason, request.stop_reason) == ("stop", 2)
    assert request.output_token_ids == [7, 8, 9, 10, 11, 2]
    assert not scheduler.has_unfinished
    assert scheduler.kv.num_used_pages == 0


def test_more_tokens_than_the_tree_can_give_are_an_error_that_changes_nothing():
    scheduler = make_scheduler()
    request = make("r", 5)
    add(scheduler, request)
    step = scheduler.schedule()
    with pytest.raises(AssertionError):
        scheduler.commit(step, {"r": [7, 8]})
    with pytest.raises(KeyError):
        scheduler.commit(step, {})
    assert request.num_output_tokens == 0
    scheduler.commit(step, {"r": [7]})
    with pytest.raises(AssertionError, match="not in flight"):
        scheduler.commit(step, {"r": [7]})


def test_tree_nodes_shrink_before_anyone_is_preempted():
    scheduler = make_scheduler(num_pages=8, max_num_batched_tokens=64)
    requests = [make("a", 7, max_tokens=9), make("b", 7, max_tokens=9)]
    add(scheduler, *requests)
    run(scheduler)
    for request in requests:
        request.num_tree_nodes = 16
    step = scheduler.schedule()
    assert [rows.num_tree_nodes for rows in step.rows] == [16, 0]
    assert scheduler.kv.num_free_pages == 0
    scheduler.commit(step, {"a": [7] * 3, "b": [7]})
    assert [len(r.pages) for r in requests] == [3, 2]
    while scheduler.has_unfinished:
        run(scheduler)
    assert scheduler.num_preemptions == 0


def test_tree_nodes_keep_to_the_budget_and_leave_half_to_prefill():
    scheduler = make_scheduler(max_num_batched_tokens=20)
    a = make("a", 4)
    a.num_tree_nodes = 30
    add(scheduler, a)
    run(scheduler)
    step = scheduler.schedule()
    assert step.rows[0].num_tree_nodes == 19
    scheduler.commit(step, {"a": [7]})
    add(scheduler, make("b", 40))
    step = scheduler.schedule()
    assert shape(step) == [("a", 5, 1), ("b", 0, 10)]
    assert step.rows[0].num_tree_nodes == 9
    scheduler.commit(step, {"a": [7]})
    a.num_tree_nodes = 3
    step = scheduler.schedule()
    assert shape(step) == [("a", 6, 1), ("b", 10, 16)]
    assert step.rows[0].num_tree_nodes == 3


def test_no_tree_for_the_last_token():
    scheduler = make_scheduler()
    request = make("r", 4, max_tokens=3)
    request.num_tree_nodes = 5
    add(scheduler, request)
    run(scheduler)
    nodes = []
    while scheduler.has_unfinished:
        step = scheduler.schedule()
        nodes.append(step.rows[0].num_tree_nodes)
        scheduler.commit(step, {"r": [7]})
    assert nodes == [5, 0]


def test_a_failed_step_loses_nothing():
    scheduler = make_scheduler(max_num_batched_tokens=24)
    add(scheduler, make("a", 4), make("b", 30, first=5), make("c", 30, first=5))
    run(scheduler)
    before = [("a", 4, 1), ("b", 20, 10), ("c", 28, 2)]
    for _ in range(3):
        step = scheduler.schedule()
        assert shape(step) == before, "c reads pages that b writes in this very step"
        scheduler.fail(step)
        scheduler.check()
        with pytest.raises(AssertionError, match="not in flight"):
            scheduler.fail(step)
    step = scheduler.schedule()
    assert shape(step) == before
    scheduler.commit(step, {r.request.request_id: [7] for r in step.rows if r.samples})
    while scheduler.has_unfinished:
        run(scheduler)
    assert scheduler.kv.num_used_pages == 0


def test_a_failed_admission_puts_the_group_back_in_order_and_unwritten_pages_match_nothing():
    scheduler = make_scheduler(max_num_batched_tokens=64)
    group = [make(f"r{i}", 18, first=5) for i in range(3)]
    add(scheduler, *group)
    step = scheduler.schedule()
    assert step.num_admitted == 3
    scheduler.fail(step)
    scheduler.check()
    assert scheduler.kv.num_matchable_pages == 0
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 3)
    assert scheduler.kv.num_used_pages == 0
    assert run(scheduler) == [("r0", 0, 18), ("r1", 16, 2), ("r2", 16, 2)]


@pytest.mark.parametrize("outcome", ["commit", "fail"])
def test_abort_in_flight_keeps_pages_until_the_step_ends_and_frees_the_id_at_once(outcome):
    """Catches pages given away under a running forward, and a reused id that gets its tokens."""
    scheduler = make_scheduler(max_num_batched_tokens=64)
    owner, sharer = make("r", 18, first=5), make("s", 18, first=5)
    add(scheduler, owner, sharer)
    step = scheduler.schedule()
    assert scheduler.abort("r")
    assert len(owner.pages) == 5, "its rows run: the other reads its pages"
    again = make("r", 3)
    scheduler.add(again)
    scheduler.check()
    if outcome == "commit":
        gained = scheduler.commit(step, {"r": [7], "s": [8]})
        assert [(c.request, c.token_ids) for c in gained] == [(sharer, [8])]
        expected = [("s", 18, 1), ("r", 0, 3)]
    else:
        scheduler.fail(step)
        expected = [("s", 0, 18), ("r", 0, 3)]
    scheduler.check()
    assert (owner.finish_reason, owner.output_token_ids, owner.pages) == ("abort", [], [])
    assert again.output_token_ids == []
    assert run(scheduler) == expected
    assert scheduler.get("r") is again


def test_abort_waiting_running_unknown():
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, make("a", 5), make("b", 5))
    run(scheduler)
    assert scheduler.abort("b")
    assert scheduler.num_waiting == 0
    assert scheduler.abort("a")
    assert not scheduler.abort("a")
    assert not scheduler.abort("never seen")
    assert not scheduler.has_unfinished
    assert scheduler.kv.num_used_pages == 0
    step = scheduler.schedule()
    assert step.rows == ()
    assert scheduler.commit(step, {}) == []
    scheduler.fail(step)


def test_a_stop_string_ends_a_request_also_behind_a_limit():
    scheduler = make_scheduler()
    running, ended = make("a", 5), make("b", 5, max_tokens=3)
    add(scheduler, running, ended)
    for _ in range(3):
        run(scheduler)
    assert ended.finish_reason == "length"
    for request in (running, ended):
        scheduler.finish(request, "stop", "##", num_output_tokens=1)
        assert (request.finish_reason, request.stop_reason) == ("stop", "##")
        assert request.output_token_ids == [7]
    scheduler.check()
    assert not scheduler.has_unfinished
    assert scheduler.kv.num_used_pages == 0


def test_a_request_finished_directly_is_dropped_at_the_next_step():
    scheduler = make_scheduler()
    request = make("a", 5)
    add(scheduler, request)
    run(scheduler)
    request.finish("stop", "##")
    assert not scheduler.has_unfinished
    assert scheduler.schedule().rows == ()
    assert scheduler.get("a") is None
    assert scheduler.kv.num_used_pages == 0


def test_tokens_know_the_weights_that_made_them():
    scheduler = make_scheduler()
    request = make("r", 5, max_tokens=4)
    add(scheduler, request)
    run(scheduler)
    run(scheduler)
    scheduler.kv.set_version(9)
    run(scheduler)
    run(scheduler)
    assert [(s.start, s.end, s.version) for s in request.version_spans] == [(0, 2, 0), (2, 4, 9)]


def test_refusals_name_the_fix():
    scheduler = make_scheduler(num_pages=10, max_model_len=200)
    scheduler.add(make("r", 5, max_tokens=36))
    with pytest.raises(ValueError, match="in use"):
        scheduler.add(make("r", 5, max_tokens=2))
    with pytest.raises(ValueError, match=r"kv_cache_bytes.*factor of 1\.10"):
        scheduler.add(make("s", 5, max_tokens=37))
    with pytest.raises(ValueError, match="kv_cache_bytes"):
        scheduler.add(make("s", 41, max_tokens=1))
    scheduler.add(make("s", 40, max_tokens=1))
    with pytest.raises(ValueError, match="max_model_len"):
        make_scheduler(max_model_len=100).add(make("t", 5))
    done = make("t", 5)
    done.finish("abort")
    with pytest.raises(ValueError, match="has run already"):
        scheduler.add(done)
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        make_scheduler(max_num_seqs=8, max_num_batched_tokens=7)
    with pytest.raises(ValueError, match="max_num_seqs"):
        make_scheduler(max_num_seqs=0)
    while scheduler.has_unfinished:
        run(scheduler)
