"""The EAGLE drafter in the engine: an exact head is never refused, whatever the engine does between two drafts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.models.load_threads import one_torch_thread
from engine.prompts import TokenPrompt
from engine.request import Request
from engine.spec import eagle as eagle_module
from engine.spec.base import DraftJob, DraftPlan
from engine.spec.eagle import EagleDrafter
from engine.spec.tree import DraftTree
from engine.spec.tuner import OffTuner
from tests.conftest import ModelDirFactory
from tests.spec.eagle_trees import oracle_tree
from tests.spec.exact_head import VOCAB, WINDOW, make_exact

PROMPT = [(7 * i + i // 5) % VOCAB for i in range(1, 41)]


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    assert all(a != b for a, b in zip(PROMPT, PROMPT[1:], strict=False))
    return make_exact(tmp_path_factory.mktemp("exact"))


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every memory of the drafter starts as NaN: reading what was never written shows. One torch thread: all is tiny."""
    monkeypatch.setattr(
        eagle_module, "EagleDrafter", lambda *a, **k: EagleDrafter(*a, **k, poison=True)
    )
    with one_torch_thread():
        yield


def engine(exact: dict[str, Path], speculate: bool = True, **options: Any) -> LLM:
    kind = options.pop("kind", "eagle3")
    config = {
        "method": kind,
        "model": str(exact[kind]),
        "tuner": "fixed",
        "num_speculative_tokens": options.pop("depth", 4),
        "top_k": options.pop("top_k", 1),
        "window": WINDOW,
    }
    if "num_nodes" in options:
        config["num_nodes"] = options.pop("num_nodes")
    options = {"max_model_len": 512, "num_threads": 1, "kv_cache_bytes": 1 << 22} | options
    return LLM(
        str(exact["target"]),
        dtype="float32",
        speculative_config=config if speculate else None,
        **options,
    )


def params(n: int = 1, **options: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 60, "ignore_eos": True, "seed": 5, "n": n} | options))


def outputs(llm: LLM, prompts: list[list[int]], sampling: Any) -> list[list[int]]:
    found = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling)
    return [list(o.token_ids) for result in found for o in result.outputs]


def assert_exact(llm: LLM, *, least: int = 20) -> None:
    """Every token that was drafted was accepted."""
    stats = llm.stats()
    assert not llm.engine.speculator.failures
    assert stats["num_draft_tokens"] >= least
    assert stats["num_accepted_draft_tokens"] == stats["num_draft_tokens"]


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.7},
        {"temperature": 0.8, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 1.0, "top_k": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_an_exact_head_is_never_refused(
    exact: dict[str, Path], kind: str, sampling: dict[str, Any]
) -> None:
    """Features, positions, noise and filters are those of the target; the tokens are those without speculation."""
    prompts = [PROMPT, PROMPT[:9], PROMPT[5:7]]
    llm = engine(exact, kind=kind)
    found = outputs(llm, prompts, params(2, **sampling))
    assert found == outputs(engine(exact, speculate=False), prompts, params(2, **sampling))
    assert_exact(llm)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_chunked_prefill_and_decode_in_one_step(exact: dict[str, Path], kind: str) -> None:
    llm = engine(
        exact, kind=kind, max_num_batched_tokens=24, max_num_seqs=3, enable_prefix_caching=False
    )
    prompts = [PROMPT, PROMPT[3:], PROMPT[10:14] * 9, PROMPT[1:30]]
    outputs(llm, prompts, params(max_tokens=33))
    assert_exact(llm)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_cached_prefixes_bring_their_features(exact: dict[str, Path], kind: str) -> None:
    """The drafter of another engine read pages that were never written for it."""
    llm = engine(exact, kind=kind)
    outputs(llm, [PROMPT], params())
    before = llm.stats()["num_cached_prompt_tokens"]
    outputs(llm, [PROMPT, [*PROMPT, 3, 4]], params(2))
    assert llm.stats()["num_cached_prompt_tokens"] >= before + 3 * 32
    assert_exact(llm)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_preempted_requests_go_on_as_before(exact: dict[str, Path], kind: str) -> None:
    token_bytes = 2 * 64 * 4
    llm = engine(
        exact, kind=kind, max_model_len=128, kv_cache_bytes=token_bytes * 16 * 20, max_num_seqs=6
    )
    prompts = [PROMPT[i : i + 20] for i in range(8)]
    outputs(llm, prompts, params(max_tokens=80))
    assert llm.stats()["num_preemptions"] > 0
    assert_exact(llm)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_trees_hold_the_chain(exact: dict[str, Path], kind: str) -> None:
    """Accepted nodes rarely lie in their places: their keys and features move. The tree accepts its full depth."""
    options = params(max_tokens=1 + 4 * 20, temperature=3.0)  # a prompt's token, then 4 a step
    llm = engine(exact, kind=kind, depth=3, top_k=4, num_nodes=40)
    found = outputs(llm, [PROMPT, PROMPT[:9]], options)
    assert found == outputs(engine(exact, speculate=False), [PROMPT, PROMPT[:9]], options)
    stats = llm.stats()
    assert not llm.engine.speculator.failures
    assert stats["num_accepted_draft_tokens"] == 3 * stats["num_drafts"]
    assert stats["num_draft_tokens"] > 4 * stats["num_accepted_draft_tokens"]


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_switched_off_for_long_and_on_again(exact: dict[str, Path], kind: str) -> None:
    """Acceptance is back with the first draft, for one short pass: no prefill, however long it was off."""
    llm = engine(exact, kind=kind)
    speculator = llm.engine.speculator
    on, drafter = speculator.tuner, speculator.drafters["eagle"]
    llm.engine.add("a", TokenPrompt(None, PROMPT), params(max_tokens=300, temperature=1.0))
    steps = 0
    while llm.engine.has_unfinished:
        steps += 1
        speculator.tuner = OffTuner() if steps % 100 < 90 else on
        before = drafter.stats()
        llm.engine.step()
        after = drafter.stats()
        rows = after["num_catch_up_rows"] - before["num_catch_up_rows"]
        assert rows == (0 if speculator.tuner is not on else rows)
        assert rows <= WINDOW
    assert_exact(llm)


def test_more_requests_than_seats_take_turns(exact: dict[str, Path]) -> None:
    """Preempted and waiting requests may hold seats that others need: the longest unused gives way."""
    llm = engine(exact)
    drafter = llm.engine.speculator.drafters["eagle"]
    assert isinstance(drafter, EagleDrafter)
    drafter._seats = type(drafter._seats)(2, WINDOW)
    drafter._max_seqs = 2
    outputs(llm, [PROMPT[i:] for i in range(5)], params(max_tokens=30))
    assert_exact(llm)
    assert drafter.stats()["num_seats"] == 0.0


def test_ended_and_recovered_requests_leave_their_seats(exact: dict[str, Path]) -> None:
    llm = engine(exact)
    drafter = llm.engine.speculator.drafters["eagle"]
    group = llm.engine.add("a", TokenPrompt(None, PROMPT), params())
    for _ in range(5):
        llm.engine.step()
    assert drafter.stats()["num_seats"] == 1.0
    llm.engine.abort(group)
    assert drafter.stats()["num_seats"] == 0.0
    llm.engine.add("a", TokenPrompt(None, PROMPT[::-1]), params())  # the id is used again
    for _ in range(5):
        llm.engine.step()
    llm.engine.recover()
    assert drafter.stats()["num_seats"] == 0.0
    outputs(llm, [PROMPT], params())
    assert_exact(llm)


def test_new_weights_take_effect_at_once(exact: dict[str, Path]) -> None:
    """Spoilt weights lose their acceptance; the right ones have it back, in the middle of a request."""
    from engine.models.eagle_checkpoint import open_drafter

    llm = engine(exact)
    drafter = llm.engine.speculator.drafters["eagle"]
    good = open_drafter(exact["eagle3"], llm.config.model).tensors
    bad = good | {"fc.weight": -good["fc.weight"]}
    llm.engine.add("a", TokenPrompt(None, PROMPT), params(max_tokens=300, temperature=1.0))

    def accepted(steps: int) -> int:
        before = llm.stats()["num_accepted_draft_tokens"]
        for _ in range(steps):
            llm.engine.step()
        return llm.stats()["num_accepted_draft_tokens"] - before

    assert accepted(6) == 20  # the first step is the prompt
    drafter.load(bad, 1)
    assert accepted(5) < 10
    with pytest.raises(ValueError, match="are missing"):
        drafter.load({"fc.weight": good["fc.weight"]}, 2)
    assert drafter.version == 1
    drafter.load(good, 2)
    assert drafter.version == 2
    assert accepted(5) == 20


def test_a_method_that_is_not_the_heads_is_refused(exact: dict[str, Path]) -> None:
    config = {"method": "eagle", "model": str(exact["eagle3"])}
    with pytest.raises(ValueError, match="holds an eagle3 head; set method to 'eagle3'"):
        LLM(str(exact["target"]), dtype="float32", speculative_config=config)


# ---- a random head, by hand


def a_request(length: int, pages: list[int], **options: Any) -> Request:
    request = Request(
        "r", [1 + i % 7 for i in range(length - 1)], params(**options), seed=3, max_total_len=4000
    )
    request.append_tokens([2])
    request.pages = pages
    return request


def a_drafter(directory: Path, kind: str, window: int, **options: Any) -> EagleDrafter:
    from engine.models.eagle import EagleNetwork
    from tests.models.eagle_oracle import tiny_head, tiny_target

    target = tiny_target(num_hidden_layers=7)
    size = 100 if kind == "eagle3" else None
    config, tensors = tiny_head(target.config, kind, draft_vocab_size=size)
    network = EagleNetwork(config, tensors, target, max_rows=options.pop("max_rows", 32))
    return EagleDrafter(network, num_pages=20, max_seqs=4, window=window, poison=True)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize(("window", "max_rows"), [(1, 64), (9, 4), (16, 64), (40, 4), (200, 64)])
def test_drafts_are_those_of_full_attention_over_the_window(
    kind: str, window: int, max_rows: int
) -> None:
    """Against plain torch: growing text, a first draft deep in a text, trees, rows in one pass and in many."""
    drafter = a_drafter(Path(), kind, window, max_rows=max_rows)
    plan = DraftPlan("eagle", depth=3, num_nodes=1000, width=2)
    generator = torch.Generator().manual_seed(4)
    width = drafter.network.config.feature_width
    features = torch.randn(300, width, generator=generator)
    pages = list(range(19, -1, -1))
    request = a_request(70, pages, temperature=0.0, max_tokens=500)
    slots = torch.tensor([pages[p // 16] * 16 + p % 16 for p in range(300)], dtype=torch.int32)
    written = 0
    for gained in (0, 1, 3, 60, 2):
        request.append_tokens([(11 * i) % 300 for i in range(gained)])
        n = len(request.token_ids)
        rows = features[written : n - 1]
        taps = rows.view(rows.shape[0], -1, 64) if kind == "eagle3" else None
        drafter.store_features(slots[written : n - 1], taps, None if kind == "eagle3" else rows)
        written = n - 1
        (tree,) = drafter.propose([DraftJob(request, plan)])
        expected = oracle_tree(drafter, request, features, plan)
        assert len(tree) == len(expected)
        by_path = {}
        for i, (joint, _, _, _) in enumerate(expected):
            line, at = [], i
            while at >= 0:
                line.insert(0, expected[at][1])
                at = expected[at][2]
            by_path[tuple(line)] = joint
        joint = [1.0] * len(tree)
        for node in range(len(tree)):
            parent = tree.parents[node]
            joint[node] = tree.scores[node] * (1.0 if parent < 0 else joint[parent])
            assert joint[node] == pytest.approx(by_path[tree.path(node)], rel=1e-3)
        assert joint == sorted(joint, reverse=True)


def test_proposals_do_not_depend_on_the_batch() -> None:
    """Rows of several requests, of different lengths and plans, in one pass: each gets what it gets alone."""
    drafter = a_drafter(Path(), "eagle3", 16, max_rows=32)
    generator = torch.Generator().manual_seed(4)
    jobs = []
    for i, length in enumerate((5, 33, 20)):
        pages = list(range(5 * i, 5 * i + 5))
        request = a_request(length, pages, temperature=1.0 if i else 0.0)
        request.request_id = f"r{i}"
        slots = torch.tensor([pages[p // 16] * 16 + p % 16 for p in range(length - 1)])
        taps = torch.randn(length - 1, 3, 64, generator=generator)
        drafter.store_features(slots.int(), taps, None)
        jobs.append(DraftJob(request, DraftPlan("eagle", 2 + i, 3 * i + 2, 1 + i % 2)))
    together = drafter.propose(jobs)
    drafter.reset()
    assert [drafter.propose([job])[0] for job in jobs] == together
    assert all(len(tree) for tree in together)
    again = drafter.propose(jobs[::-1])  # nothing gained: the last rows alone are run again
    assert again[::-1] == together
    nothing = DraftJob(jobs[0].request, DraftPlan("eagle", 0, 0))
    assert drafter.propose([nothing, jobs[1]]) == [DraftTree(), together[1]]
    assert drafter.propose([]) == []


def test_new_weights_drop_the_old_keys() -> None:
    """Keys that the old weights made would be read beside those of the new ones."""
    drafter, fresh = (a_drafter(Path(), "eagle3", 16) for _ in range(2))
    request = a_request(30, [0, 1], temperature=0.0)
    job = DraftJob(request, DraftPlan("eagle", 3, 8, 2))
    taps = torch.randn(29, 3, 64, generator=torch.Generator().manual_seed(4))
    for each in (drafter, fresh):
        each.store_features(torch.arange(29).int(), taps, None)
    before = drafter.propose([job])
    from tests.models.eagle_oracle import tiny_head

    _, tensors = tiny_head(drafter.network.decoder.config, "eagle3", draft_vocab_size=100)
    changed = tensors | {
        "midlayer.self_attn.v_proj.weight": -2 * tensors["midlayer.self_attn.v_proj.weight"],
        "midlayer.self_attn.k_proj.weight": 3 * tensors["midlayer.self_attn.k_proj.weight"],
    }
    drafter.load(changed, 1)
    fresh.load(changed, 1)
    assert drafter.propose([job]) == fresh.propose([job]) != before


@pytest.mark.parametrize("version", [3, 2, -1, "4", None, 4.0, True])
def test_a_version_that_is_not_a_later_one_is_refused(version: Any) -> None:
    """Versions are how a rollout knows which weights drafted it: one that came twice would name two."""
    from tests.models.eagle_oracle import tiny_head

    drafter = a_drafter(Path(), "eagle3", 16)
    _, tensors = tiny_head(drafter.network.decoder.config, "eagle3", draft_vocab_size=100)
    drafter.load(tensors, 3)
    before = drafter.network.weights
    with pytest.raises(ValueError, match=r"version must be an integer above the one in use, 3"):
        drafter.load(tensors, version)
    assert drafter.version == 3
    assert drafter.network.weights is before


def test_a_window_beyond_the_longest_sequence_takes_no_more_memory(exact: dict[str, Path]) -> None:
    """Seats of the largest window that the config allows would not fit any machine."""
    config = {"method": "eagle3", "model": str(exact["eagle3"]), "window": 2**20, "tuner": "fixed"}
    options = {"dtype": "float32", "max_model_len": 96, "num_threads": 1, "kv_cache_bytes": 1 << 20}
    llm = LLM(str(exact["target"]), speculative_config=config, **options)
    assert llm.engine.speculator.drafters["eagle"]._window == 96  # pyright: ignore[reportAttributeAccessIssue]
    outputs(llm, [PROMPT[:20]], params(max_tokens=20))
    assert not llm.engine.speculator.failures


def test_a_top_k_of_one_is_greedy_with_alternatives() -> None:
    drafter = a_drafter(Path(), "eagle3", 16)
    plan = DraftPlan("eagle", 2, 6, 2)
    greedy, filtered = (
        a_request(9, [0], **options) for options in ({"temperature": 0.0}, {"top_k": 1})
    )
    drafter.store_features(torch.arange(8).int(), torch.randn(8, 3, 64), None)
    (expected,) = drafter.propose([DraftJob(greedy, plan)])
    assert len(expected) == 6
    assert drafter.propose([DraftJob(filtered, plan)]) == [expected]


def test_features_move_with_accepted_nodes() -> None:
    drafter = a_drafter(Path(), "eagle3", 16)
    taps = torch.randn(3, 3, 64)
    drafter.store_features(torch.tensor([4, 5, 9]).int(), taps, None)
    drafter.move_features(torch.tensor([9, 4]).int(), torch.tensor([4, 7]).int())
    out = torch.empty(3, 192)
    drafter._features.read(torch.tensor([4, 7, 5]).int(), out)
    assert torch.equal(out, taps.flatten(1)[[2, 0, 1]])


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_random_head_in_the_engine_changes_no_token(
    make_model_dir: ModelDirFactory, tmp_path: Path, kind: str
) -> None:
    from engine.cli import main

    target = str(make_model_dir("llama", num_hidden_layers=7))
    head = str(tmp_path / "head")
    assert main(["drafter", "init", "--target", target, "--kind", kind, "--output", head]) == 0
    prompts = [list(range(3, 40)), list(range(50, 55))]
    sampling = params(2, max_tokens=30, temperature=1.0)
    options = {"dtype": "float32", "num_threads": 1, "max_model_len": 128}
    plain = LLM(target, **options)
    llm = LLM(
        target,
        speculative_config={
            "method": kind,
            "model": head,
            "tuner": "fixed",
            "top_k": 2,
            "num_nodes": 7,
            "window": 16,
        },
        **options,
    )
    assert outputs(llm, prompts, sampling) == outputs(plain, prompts, sampling)
    assert not llm.engine.speculator.failures
    assert llm.stats()["num_draft_tokens"] > 100
