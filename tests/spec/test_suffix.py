"""What the suffix drafter promises to the engine and to an RL loop; its proposals are proved in test_suffix_fuzz.py."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from engine.request import Request, RequestStatus
from engine.sampling_params import SamplingParams
from engine.spec.base import Drafter, DraftJob, DraftPlan
from engine.spec.suffix import SuffixDrafter
from engine.spec.tree import DraftTree

PLAN = DraftPlan("suffix", depth=8, num_nodes=8)
PROMPT = (1, 2, 3)


def make(request_id: str, prompt: Sequence[int] = PROMPT, output: Sequence[int] = ()) -> Request:
    params = SamplingParams(max_tokens=10_000)
    request = Request(request_id, prompt, params, seed=0, max_total_len=20_000, group_id="g")
    request.status = RequestStatus.RUNNING
    request.append_tokens(output)
    return request


def propose(drafter: SuffixDrafter, request: Request, plan: DraftPlan = PLAN) -> DraftTree:
    (tree,) = drafter.propose([DraftJob(request, plan)])
    return tree


def test_is_a_drafter_without_weights() -> None:
    drafter: Drafter = SuffixDrafter()
    assert (drafter.name, drafter.version, drafter.tap_layers) == ("suffix", 0, ())
    assert not drafter.wants_hidden
    with pytest.raises(ValueError, match="no weights"):
        drafter.load({}, 1)


@pytest.mark.parametrize(
    "arguments", [{"max_match": 0}, {"max_match": 1025}, {"max_history_tokens": -1}]
)
def test_arguments_are_checked(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        SuffixDrafter(**arguments)


def test_own_text_is_repeated() -> None:
    drafter = SuffixDrafter()
    request = make("r", [10, 11, 12, 13, 14], [20, 10, 11, 12])
    tree = propose(drafter, request)
    assert tree.token_ids[:4] == (13, 14, 20, 10)
    assert tree.chain_len == len(tree) == 8
    assert propose(drafter, make("s", [1, 2, 3], [4])) == DraftTree(), "nothing is known of 4"


def test_a_long_match_is_worth_more_than_a_short_one() -> None:
    drafter = SuffixDrafter()
    text = list(range(100, 140))
    long, short = make("long", [*text, 1], text[:20]), make("short", [*text, 2], [text[19]])
    longer, shorter = propose(drafter, long), propose(drafter, short)
    assert longer.token_ids == shorter.token_ids == tuple(text[20:28])
    assert longer.scores[0] > 0.5 > 0.3 > shorter.scores[0]
    picky = DraftPlan("suffix", depth=8, num_nodes=8, min_score=0.2)
    assert len(propose(drafter, long, picky)) > len(propose(drafter, short, picky))


def test_frequent_branches_come_first_and_equal_ones_by_id() -> None:
    drafter = SuffixDrafter()
    request = make("r", [9, 5, 9, 4, 9, 7, 9, 7, 9])
    tree = propose(drafter, request, DraftPlan("suffix", depth=1, num_nodes=8, width=4))
    assert tree.token_ids == (7, 4, 5)
    assert tree.scores[1] == tree.scores[2] < tree.scores[0]


def test_siblings_are_used_while_they_run_and_after() -> None:
    drafter = SuffixDrafter()
    first, second = make("a", output=[50, 51, 52, 53]), make("b", output=[50])
    drafter.observe([first, second])
    assert propose(drafter, second).token_ids[:3] == (51, 52, 53)
    drafter.forget(first)
    assert propose(drafter, second).token_ids[:3] == (51, 52, 53)
    other = make("c", (7, 8, 9), [50])
    assert len(propose(drafter, other)) == 0, "another prompt has another index"


def test_history_of_a_prompt_serves_later_requests() -> None:
    drafter = SuffixDrafter()
    for request in (make("a", output=[50, 51, 52]), make("b", output=[60, 61])):
        drafter.observe([request])
        drafter.forget(request)
    drafter.reset()
    drafter.add_history(np.array(PROMPT), np.array([70, 71], np.int32))
    for token, following in ((50, 51), (60, 61), (70, 71)):
        assert propose(drafter, make(f"later {token}", output=[token])).token_ids[0] == following
    fresh = propose(drafter, make("fresh"), DraftPlan("suffix", 1, 3, width=3))
    assert fresh.token_ids == (50, 60, 70)


def test_history_is_saved_and_loaded(tmp_path: Path) -> None:
    rng = random.Random(0)
    first = SuffixDrafter()
    prompts = [tuple(rng.choices(range(5), k=5)) for _ in range(4)]
    for _ in range(12):
        first.add_history(rng.choice(prompts), rng.choices(range(5), k=30))
    first.save_history(tmp_path / "history.npz")
    second = SuffixDrafter()
    second.load_history(tmp_path / "history.npz")
    second.check()
    sizes = [drafter.stats()["history_tokens"] for drafter in (first, second)]
    assert sizes == [12 * 30 + 5 * first.stats()["history_prompts"]] * 2
    plan = DraftPlan("suffix", depth=6, num_nodes=12, width=3)
    for number, prompt in enumerate(prompts):
        for token in range(5):
            request = make(f"{number} {token}", prompt, [token])
            trees = [propose(drafter, request, plan) for drafter in (first, second)]
            assert trees[0] == trees[1]
    assert [path.name for path in tmp_path.iterdir()] == ["history.npz"], (
        "no temporary file is left"
    )


def test_the_order_of_eviction_survives_saving(tmp_path: Path) -> None:
    first = SuffixDrafter()
    for prompt in ((1,), (2,), (3,), (1,)):
        first.add_history(prompt, [50, 51])
    first.save_history(tmp_path / "history.npz")
    small = SuffixDrafter(max_history_tokens=8)
    small.load_history(tmp_path / "history.npz")
    known = {p: len(propose(small, make(f"r{p}", (p,), [50]))) > 0 for p in (1, 2, 3)}
    assert known == {1: True, 2: False, 3: True}


def test_an_empty_history_is_a_history(tmp_path: Path) -> None:
    SuffixDrafter().save_history(tmp_path / "empty.npz")
    drafter = SuffixDrafter()
    drafter.load_history(tmp_path / "empty.npz")
    assert drafter.stats()["history_tokens"] == 0


def test_a_damaged_file_is_refused_whole(tmp_path: Path) -> None:
    good = SuffixDrafter()
    for prompt in range(20):
        good.add_history([prompt], list(range(100)))
    good.save_history(tmp_path / "good.npz")
    raw = (tmp_path / "good.npz").read_bytes()
    damaged = [b"", b"text", raw[: len(raw) // 2], raw[:-1]]
    damaged += [raw[:at] + bytes([raw[at] ^ 255]) + raw[at + 1 :] for at in range(0, len(raw), 37)]
    drafter = SuffixDrafter()
    num_refused = 0
    for data in damaged:
        path = tmp_path / "bad.npz"
        path.write_bytes(data)
        with contextlib.suppress(ValueError):  # some bytes mean nothing, such as a time stamp
            drafter.load_history(path)
        if drafter.stats()["history_tokens"]:
            assert drafter.stats() == good.stats()
            drafter = SuffixDrafter()
        else:
            num_refused += 1
    assert num_refused > len(damaged) / 2
    with pytest.raises(OSError):
        drafter.load_history(tmp_path / "absent.npz")


@pytest.mark.parametrize(
    "change",
    [
        {"version": np.int64(2)},
        {"token_ids": np.array([1, 2, 3], np.int32)},
        {"token_ids": np.array([1, 2, -3, 4], np.int32)},
        {"token_ids": np.array([1.0, 2.0, 3.0, 4.0])},
        {"prompt_lens": np.array([4], np.int64)},
        {"prompt_lens": np.array([0], np.int64)},
        {"num_outputs": np.array([2], np.int64)},
        {"num_outputs": np.array([1, 1], np.int64)},
        {"output_lens": np.array([[3]], np.int64)},
        {"output_lens": np.array([2**62], np.int64)},
        {  # lengths whose sum is right modulo 2**64
            "num_outputs": np.array([4], np.int64),
            "output_lens": np.array([2**62, 2**62, 2**62, 2**62 + 3], np.int64),
        },
    ],
)
def test_a_file_that_contradicts_itself_is_refused(tmp_path: Path, change: dict) -> None:
    content = {
        "version": np.int64(1),
        "token_ids": np.array([1, 2, 3, 4], np.int32),
        "prompt_lens": np.array([1], np.int64),
        "num_outputs": np.array([1], np.int64),
        "output_lens": np.array([3], np.int64),
    }
    drafter = SuffixDrafter()
    np.savez(tmp_path / "good.npz", **content)
    drafter.load_history(tmp_path / "good.npz")
    np.savez(tmp_path / "bad.npz", **(content | change))
    with pytest.raises(ValueError, match=r"bad\.npz"):
        drafter.load_history(tmp_path / "bad.npz")


@pytest.mark.parametrize(
    ("prompt", "output"),
    [([], [1]), ([1], [-1]), ([1], [2**31]), ([1], [0.5]), ([[1]], [1]), (["a"], [1])],
)
def test_bad_rollouts_are_refused(prompt: list, output: list) -> None:
    drafter = SuffixDrafter()
    with pytest.raises(ValueError, match="token_ids"):
        drafter.add_history(prompt, output)
    assert drafter.stats()["history_prompts"] == 0


def test_trials_tell_what_propose_would_have_said() -> None:
    rng = random.Random(1)
    drafter = SuffixDrafter()
    requests = [make(f"r{i}", rng.choices(range(4), k=6)) for i in range(3)]
    requests.append(make("sibling", requests[0].prompt_token_ids))
    drafter.observe(requests)
    num_accepted = 0
    for _ in range(100):
        trees = drafter.propose([DraftJob(request, PLAN) for request in requests])
        expected = []
        for request, tree in zip(requests, trees, strict=True):
            token = rng.choice([request.token_ids[-3], rng.randrange(4)])
            request.append_tokens([token])
            if tree:
                expected.append((request.request_id, tree.scores[0], tree.token_ids[0] == token))
        trials = drafter.observe(requests)
        assert trials == expected
        num_accepted += sum(trial.accepted for trial in trials)
    assert 100 < num_accepted < 300
    assert drafter.observe(requests) == [], "nothing is new"


def test_several_tokens_in_a_step_are_tried_one_by_one() -> None:
    one, many = SuffixDrafter(), SuffixDrafter()
    slow, fast = make("r", [1, 2, 3, 4, 1, 2]), make("r", [1, 2, 3, 4, 1, 2])
    for drafter, request in ((one, slow), (many, fast)):
        drafter.observe([request])
    new = [3, 4, 1, 9, 9, 9]
    expected = []
    for token in new:
        slow.append_tokens([token])
        expected += one.observe([slow])
    fast.append_tokens(new)
    assert many.observe([fast]) == expected
    assert [trial.accepted for trial in expected] == [True, True, True, False, True]  # 9 was new


def test_propose_reads_what_observe_has_not() -> None:
    drafter = SuffixDrafter()
    drafter.observe([make("other")])
    request = make("r", [1, 2, 3], [4, 1])
    assert propose(drafter, request).token_ids[0] == 2
    request.append_tokens([2, 3])
    assert propose(drafter, request).token_ids[0] == 4


def test_what_was_cut_off_is_not_in_the_history() -> None:
    drafter = SuffixDrafter()
    request = make("a", output=[50, 51, 52, 53])
    drafter.observe([request])
    request.append_tokens([54])  # never observed
    request.truncate_output(2)
    drafter.forget(request)
    drafter.check()
    assert propose(drafter, make("b", output=[50])).token_ids[0] == 51
    assert len(propose(drafter, make("c", output=[52]))) == 0
    assert drafter.stats()["history_tokens"] == len(PROMPT) + 2


def test_what_came_last_is_in_the_history() -> None:
    drafter = SuffixDrafter()
    request = make("a", output=[50])
    drafter.observe([request])
    request.append_tokens([51, 52])
    drafter.forget(request)
    assert propose(drafter, make("b", output=[51])).token_ids[0] == 52


def test_nothing_of_a_live_request_stays_behind() -> None:
    drafter = SuffixDrafter(max_history_tokens=0)
    for turn in range(3):  # the same ids again
        requests = [make(f"r{i}", (i % 2, 1), [turn, 1, 1]) for i in range(8)]
        drafter.observe(requests)
        assert drafter.stats()["live_requests"] == 8
        for request in requests:
            drafter.forget(request)
        assert not any(drafter.stats().values())
        drafter.observe(requests)
        drafter.reset()
        assert not any(drafter.stats().values())
        drafter.check()
    drafter.forget(make("never seen"))
    done = make("done", output=[1])
    done.finish("abort")
    assert drafter.observe([done]) == []
    assert not any(drafter.stats().values()), "a finished request is not added"


def test_the_least_recently_used_prompt_goes_first() -> None:
    drafter = SuffixDrafter(max_history_tokens=30)
    for prompt in (1, 2, 3):
        drafter.add_history([prompt], [50] * 9)
    request = make("uses 1", (1,), [50])
    drafter.observe([request])
    drafter.forget(request)
    known = [len(propose(drafter, make(f"r{p}", (p,), [50]))) > 0 for p in (1, 2, 3)]
    assert known == [True, False, True]
    assert drafter.stats()["history_tokens"] == 10 + 1 + 10


def test_of_prompts_in_use_the_oldest_outputs_go() -> None:
    drafter = SuffixDrafter(max_history_tokens=12)
    requests = [make(f"r{p}", (p,)) for p in (1, 2)]
    drafter.observe(requests)
    for prompt, token in ((1, 50), (2, 60), (1, 70)):
        drafter.add_history([prompt], [token] * 4)

    def knows(prompt: int, token: int) -> bool:
        return len(propose(drafter, make(f"{prompt} {token}", (prompt,), [token]))) > 0

    assert [knows(1, 50), knows(2, 60), knows(1, 70)] == [False, True, True]
    drafter.add_history([3], [80] * 8)
    assert [knows(2, 60), knows(1, 70), knows(3, 80)] == [False, False, True]
    drafter.check()


def test_the_same_calls_give_the_same_trees() -> None:
    def run() -> list[DraftTree]:
        rng = random.Random(2)
        drafter = SuffixDrafter(max_history_tokens=300)
        trees = []
        for turn in range(30):
            prompt = rng.choices(range(3), k=4)
            request = make(f"r{turn}", prompt, rng.choices(range(3000), k=5) * 4)
            trees.append(propose(drafter, request, DraftPlan("suffix", 8, 20, width=4)))
            drafter.forget(request)
        return trees

    assert run() == run()


def decode(drafter: SuffixDrafter, requests: list[Request], outputs: list[list[int]]) -> float:
    """Replay ``outputs`` as a target would verify the drafts; tokens a step and request."""
    num_steps = 0
    running = list(zip(requests, outputs, strict=True))
    while running:
        drafter.observe([request for request, _ in running])
        trees = drafter.propose([DraftJob(request, PLAN) for request, _ in running])
        for (request, output), tree in zip(running, trees, strict=True):
            left = output[request.num_output_tokens :]
            accepted = 0
            while (
                accepted < min(len(tree), len(left)) and tree.token_ids[accepted] == left[accepted]
            ):
                accepted += 1
            request.append_tokens(left[: accepted + 1])
            num_steps += 1
            if request.num_output_tokens == len(output):
                drafter.forget(request)
        running = [(r, o) for r, o in running if r.num_output_tokens < len(o)]
    return sum(map(len, outputs)) / num_steps


def test_repetition_pays() -> None:
    """Samples made of the same 40 phrases: siblings help, and a second rollout of the prompt gains from the first."""
    rng = random.Random(3)
    phrases = [[rng.randrange(5000) for _ in range(12)] for _ in range(40)]

    def rollout(num_samples: int) -> list[list[int]]:
        return [list(itertools.chain(*rng.choices(phrases, k=20))) for _ in range(num_samples)]

    alone = decode(SuffixDrafter(), [make("r")], rollout(1))
    drafter = SuffixDrafter()
    group = decode(drafter, [make(f"a{i}") for i in range(8)], rollout(8))
    later = decode(drafter, [make(f"b{i}") for i in range(8)], rollout(8))
    assert 1.2 < alone < group < later
    assert later > 4.0
