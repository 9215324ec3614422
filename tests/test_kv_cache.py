"""Pages: who owns them, what may be reused, what is thrown away first."""

import pytest

from engine.kv_cache import KVCache
from engine.request import Request
from engine.sampling_params import SamplingParams

SIZE = 4


def make(tokens: list[int], request_id: str = "r", **params) -> Request:
    params.setdefault("max_tokens", 40)
    return Request(request_id, tokens, SamplingParams(**params), seed=0, max_total_len=200)


def admit(kv: KVCache, request: Request, *, commit: bool = True) -> Request:
    """Admit with all rows at once, as a step that runs."""
    assert kv.allocate(request, len(request.token_ids))
    kv.register(request, len(request.token_ids))
    if commit:
        kv.commit_step()
        request.num_computed = len(request.token_ids)
    return request


def test_a_prefix_is_found_and_one_row_is_left_to_compute():
    kv = KVCache(20, SIZE)
    first = admit(kv, make(list(range(12))))
    for length, num_pages in ((3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3), (20, 3)):
        assert kv.match_prefix(list(range(length))) == first.pages[:num_pages], length
    assert kv.match_prefix([7, *range(1, 12)]) == []
    assert kv.match_prefix([*range(4), 9, *range(5, 13)]) == first.pages[:1], "chain, not content"


def test_same_content_behind_another_prefix_is_another_page():
    kv = KVCache(20, SIZE)
    admit(kv, make([1, 2, 3, 4, 5, 6, 7, 8]))
    assert kv.match_prefix([5, 6, 7, 8, 9]) == []


def test_samples_admitted_in_one_step_share_pages_at_once():
    kv = KVCache(20, SIZE)
    prompt = list(range(9))
    group = [admit(kv, make(prompt, f"r{i}"), commit=False) for i in range(3)]
    assert [r.num_computed for r in group] == [0, 8, 8]
    assert group[0].pages[:2] == group[1].pages[:2] == group[2].pages[:2]
    assert len({r.pages[2] for r in group}) == 3
    assert kv.num_used_pages == 5
    kv.check(group)
    assert (kv.num_query_tokens, kv.num_hit_tokens) == (27, 16)


def test_a_failed_step_leaves_nothing_matchable_that_was_not_written():
    kv = KVCache(20, SIZE)
    owner = make(list(range(12)))
    kv.allocate(owner, 5)
    kv.register(owner, 5)
    kv.commit_step()
    owner.num_computed = 5
    kv.grow(owner, 12)
    kv.register(owner, 12)
    assert len(kv.match_prefix(list(range(20)))) == 3
    kv.unregister_step()
    kv.trim(owner, 5)
    assert kv.match_prefix(list(range(20))) == owner.pages[:1]
    kv.check([owner])
    kv.grow(owner, 12)
    kv.register(owner, 12)
    kv.commit_step()
    owner.num_computed = 12
    assert kv.match_prefix(list(range(20))) == owner.pages
    kv.check([owner])


def test_only_full_scheduled_pages_are_matchable():
    kv = KVCache(20, SIZE)
    request = make(list(range(12)))
    kv.allocate(request, 7)
    kv.register(request, 7)
    assert kv.match_prefix(list(range(12))) == request.pages[:1]


def test_blank_pages_go_before_cached_ones_then_the_least_recent_then_the_tail():
    kv = KVCache(6, SIZE)
    old, new = admit(kv, make(list(range(8)))), admit(kv, make(list(range(50, 58))))
    old_pages, new_pages = list(old.pages), list(new.pages)
    kv.free(old)
    kv.free(new)
    assert (kv.num_free_pages, kv.num_matchable_pages) == (6, 4)
    third = make(list(range(90, 98)))
    kv.grow(third, 2 * SIZE)
    assert kv.num_evictions == 0
    kv.grow(third, 3 * SIZE)
    assert third.pages[2] == old_pages[1], "the tail of the older prefix"
    assert kv.match_prefix(list(range(9))) == old_pages[:1]
    kv.grow(third, 4 * SIZE)
    assert kv.match_prefix(list(range(9))) == []
    assert kv.match_prefix(list(range(50, 59))) == new_pages
    assert kv.num_evictions == 2


def test_use_refreshes():
    kv = KVCache(4, SIZE)
    first = admit(kv, make(list(range(5)), max_tokens=1))
    second = admit(kv, make(list(range(50, 55)), max_tokens=1))
    kv.free(first)
    kv.free(second)
    again = admit(kv, make([*range(4), 9], max_tokens=1))
    kv.free(again)
    kv.grow(again, 3 * SIZE)
    assert kv.match_prefix(list(range(5))), "used last, evicted last"
    assert not kv.match_prefix(list(range(50, 55)))


def test_a_parent_evicted_and_computed_again_makes_its_child_reachable():
    kv = KVCache(8, SIZE)
    prompt = list(range(9))
    first = admit(kv, make(prompt))
    kv.free(first)
    parent, child = kv.match_prefix(prompt)
    del kv._cached[parent]  # as if the parent alone had been evicted
    kv._forget(parent)
    kv._blank.append(parent)
    assert kv.match_prefix(prompt) == []
    second = admit(kv, make(prompt))
    assert kv.match_prefix(prompt) == [second.pages[0], child]
    kv.check([second])


def test_a_twin_is_not_registered_twice():
    kv = KVCache(20, SIZE)
    one = make(list(range(9)), "one", prompt_logprobs=0)
    two = make(list(range(9)), "two", prompt_logprobs=0)
    admit(kv, one)
    admit(kv, two)
    assert two.num_computed == 9
    assert not set(one.pages) & set(two.pages)
    kv.check([one, two])
    kv.free(one)
    kv.check([two])
    assert kv.num_hit_tokens == kv.num_query_tokens == 0


def test_new_weights_make_old_pages_unreachable_and_nothing_mixed_is_registered():
    kv = KVCache(20, SIZE)
    request = admit(kv, make(list(range(8))))
    waiting = make(list(range(9)))
    assert kv.match_prefix(waiting.token_ids)
    kv.set_version(1)
    assert kv.match_prefix(waiting.token_ids) == []
    request.token_ids += range(8, 16)
    kv.grow(request, 16)
    kv.register(request, 16)
    assert kv.match_prefix(list(range(17))) == []
    kv.set_version(0)  # a rollback of the weights
    assert len(kv.match_prefix(list(range(17)))) == 2, "written under version 0"
    kv.register(request, 16)
    assert len(kv.match_prefix(list(range(17)))) == 2, "pages 2 and 3 were written under 1"
    kv.check([request])
    kv.free(request)
    kv.check([])


def test_the_hash_chain_of_a_waiting_request_follows_the_version():
    """Catches a chain kept from a failed admission under the old weights."""
    kv = KVCache(4, SIZE)
    holder = admit(kv, make(list(range(9))))
    waiting = make(list(range(12)), "waiting")
    assert kv.allocate(waiting, 12, reserve_pages=4) == 0
    assert kv.allocate(waiting, 12) == 0
    kv.set_version(1)
    kv.free(holder)
    assert kv.allocate(waiting, 12) == 12
    kv.register(waiting, 12)
    assert kv.match_prefix(list(range(13))) == waiting.pages
    kv.check([waiting])


def test_pages_of_past_weights_are_reclaimed_first():
    kv = KVCache(6, SIZE)
    old = admit(kv, make(list(range(8))))
    kv.set_version(1)
    new = admit(kv, make(list(range(50, 58))))
    kv.free(new)
    kv.free(old)
    admit(kv, make(list(range(70, 85)), max_tokens=1))
    assert kv.match_prefix(list(range(50, 59))), "still useful"
    assert kv.num_evictions == 0


def test_weights_do_not_change_under_a_running_step():
    kv = KVCache(6, SIZE)
    admit(kv, make(list(range(8))), commit=False)
    with pytest.raises(AssertionError, match="while a step was running"):
        kv.set_version(1)
    assert kv.reset_prefix_cache() is False
    assert len(kv.match_prefix(list(range(9)))) == 2, "refused means unchanged"


def test_reset_forgets_everything_and_keeps_running_requests():
    kv = KVCache(10, SIZE)
    request, gone = admit(kv, make(list(range(8)))), admit(kv, make(list(range(50, 58))))
    kv.free(gone)
    assert kv.reset_prefix_cache() is True
    assert kv.num_matchable_pages == 0
    request.token_ids += range(8, 12)
    kv.grow(request, 12)
    kv.register(request, 12)
    assert kv.num_matchable_pages == 0, "mixed content"
    kv.check([request])
    kv.free(request)
    kv.check([])
    admit(kv, make(list(range(8))))
    assert kv.num_matchable_pages == 2


def test_prefix_caching_off():
    kv = KVCache(10, SIZE, enable_prefix_caching=False)
    admit(kv, make(list(range(8))))
    assert kv.match_prefix(list(range(9))) == []
    assert (kv.num_matchable_pages, kv.num_query_tokens) == (0, 0)


def test_allocate_takes_all_or_nothing():
    kv = KVCache(4, SIZE)
    other = make([1, 2, 3, 4, 5])
    kv.grow(other, 5)
    request = make(list(range(9)))
    assert kv.pages_wanted(request) == 4, "nine tokens and a page of growth"
    assert kv.allocate(request, 3) == 0
    assert (request.pages, kv.num_free_pages) == ([], 2)
    kv.free(other)
    assert kv.allocate(request, 3, reserve_pages=1) == 0
    assert kv.allocate(request, 3) == 3
    assert len(request.pages) == 1


def test_a_prefix_that_is_free_counts_once():
    """Catches free pages counted both as the hit and as room for the rest."""
    kv = KVCache(3, SIZE)
    kv.free(admit(kv, make(list(range(8)), max_tokens=1)))
    blocker = make([99])
    kv.grow(blocker, 1)
    request = make([*range(8), 70], max_tokens=1)
    assert len(kv.match_prefix(request.token_ids)) == 2
    assert kv.allocate(request, 9) == 0
    kv.check([blocker])
    kv.free(blocker)
    assert kv.allocate(request, 9) == 1
    kv.check([request])


def test_scratch_slots_lie_behind_the_tokens_and_are_given_back():
    kv = KVCache(10, SIZE)
    request = admit(kv, make(list(range(6))))
    assert kv.grow(request, 7 + 6)
    slots = kv.slots_for(request, 7, 6)
    page, after, last = request.pages[1:]
    assert slots == [page * SIZE + 3, *(after * SIZE + i for i in range(4)), last * SIZE]
    kv.trim(request, 8)
    assert len(request.pages) == 2
    assert kv.num_used_pages == 2
    kv.check([request])


def test_grow_takes_nothing_when_it_cannot_take_all():
    kv = KVCache(3, SIZE)
    request = make([1])
    assert kv.capacity(request) == 12
    assert not kv.grow(request, 13)
    assert kv.num_free_pages == 3
    assert kv.grow(request, 12)
    assert kv.capacity(request) == 12


@pytest.mark.parametrize("damage", ["ref", "leak", "double", "digest", "writer"])
def test_check_notices(damage):
    kv = KVCache(10, SIZE)
    one, two = admit(kv, make(list(range(9)), "one")), admit(kv, make(list(range(9)), "two"))
    kv.check([one, two])
    if damage == "ref":
        kv._ref[one.pages[0]] -= 1
    elif damage == "leak":
        one.pages.pop()
    elif damage == "double":
        kv._blank.append(one.pages[2])
    elif damage == "digest":
        one.token_ids[1] = 77
    else:
        two.pages[2], kv._ref[one.pages[2]] = one.pages[2], 2
        two.num_computed = 8
        one.num_computed = 8
    with pytest.raises(AssertionError):
        kv.check([one, two])


def test_a_cache_of_nothing_is_refused():
    with pytest.raises(ValueError, match="kv_cache_bytes"):
        KVCache(0)
