"""The oracle drafter: the recorded text, spoilt at the asked rate, whatever the schedule; its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.spec.base import DraftJob, DraftPlan
from engine.spec.oracle import OracleDrafter, Recorded, read_records, write_records

OUTPUT = tuple(range(100, 300))


def make_request(seed: int = 1, prompt: tuple[int, ...] = (7, 8), name: str = "r") -> Request:
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    return Request(name, prompt, params, seed=seed, max_total_len=500)


def oracle(acceptance: float, seeds: range = range(1, 2)) -> OracleDrafter:
    records = [Recorded((7, 8), seed, OUTPUT) for seed in seeds]
    return OracleDrafter(records, acceptance=acceptance, vocab_size=1000)


def proposal(drafter: OracleDrafter, request: Request, depth: int = 4, nodes: int = 9) -> list[int]:
    tree = drafter.propose([DraftJob(request, DraftPlan("oracle", depth, nodes))])[0]
    assert tree.chain_len == len(tree)
    assert not tree.scores
    return list(tree.token_ids)


def test_it_proposes_what_follows_within_the_plan() -> None:
    drafter, request = oracle(1.0), make_request()
    assert proposal(drafter, request) == [100, 101, 102, 103]
    request.append_tokens([100, 101, 102])
    assert proposal(drafter, request) == [103, 104, 105, 106]
    assert proposal(drafter, request, depth=6, nodes=2) == [103, 104]
    request.append_tokens(OUTPUT[3:199])
    assert proposal(drafter, request) == [299]
    request.append_tokens([299])
    assert proposal(drafter, request) == []


def test_requests_that_were_not_recorded_get_nothing() -> None:
    drafter = oracle(1.0)
    assert proposal(drafter, make_request(seed=2)) == []
    assert proposal(drafter, make_request(prompt=(7,))) == []


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.8, 1.0])
def test_tokens_are_spoilt_at_the_asked_rate(acceptance: float) -> None:
    drafter = oracle(acceptance, range(40))
    kept = sum(
        found == true
        for seed in range(40)
        for found, true in zip(
            proposal(drafter, make_request(seed, name=str(seed)), 200, 200), OUTPUT, strict=True
        )
    )
    assert kept / 8000 == pytest.approx(acceptance, abs=0.02)


def test_what_is_spoilt_depends_on_request_and_position_alone() -> None:
    """However the run was scheduled, and whatever the request is called."""
    whole = proposal(oracle(0.5), make_request(), 200, 200)
    drafter, request, pieces = oracle(0.5), make_request(name="other"), []
    for at in range(0, 200, 5):
        if at == 100:
            drafter.reset()
        pieces += proposal(drafter, request, 5)
        request.append_tokens(OUTPUT[at : at + 5])
    assert pieces == whole
    assert whole != proposal(oracle(0.5, range(2, 3)), make_request(2), 200, 200)


def test_spoilt_tokens_stay_in_the_vocabulary() -> None:
    drafter = OracleDrafter([Recorded((3, 4), 1, (4, 4))], acceptance=0.0, vocab_size=5)
    assert proposal(drafter, make_request(prompt=(3, 4))) == [0, 0]


@pytest.mark.parametrize("bad", [Recorded((7, 9), 2, (1,)), Recorded((7,), 2, (1, 9, 2))])
def test_a_rollout_of_another_vocabulary_is_refused(bad: Recorded) -> None:
    with pytest.raises(
        ValueError, match=r"trace: sample 2 has token id 9, .* vocabulary is 0\.\.8"
    ):
        OracleDrafter([Recorded((7, 8), 1, (8,)), bad], acceptance=1.0, vocab_size=9)


def test_an_id_may_be_used_again() -> None:
    """What it holds of an ended request is gone with it."""
    drafter = OracleDrafter(
        [Recorded((7, 8), 1, (1, 2)), Recorded((7, 8), 2, (3, 4))], acceptance=1.0, vocab_size=9
    )
    first = make_request(1, name="same")
    assert proposal(drafter, first) == [1, 2]
    drafter.forget(first)
    drafter.forget(first)
    assert proposal(drafter, make_request(2, name="same")) == [3, 4]


@pytest.mark.parametrize("acceptance", [-0.1, 1.1, float("nan")])
def test_bad_acceptance(acceptance: float) -> None:
    with pytest.raises(ValueError, match="acceptance must be from 0 to 1"):
        OracleDrafter([], acceptance=acceptance, vocab_size=9)


def test_it_has_no_weights() -> None:
    with pytest.raises(ValueError, match="no weights"):
        oracle(1.0).load({}, 1)


def test_records_survive_their_file(tmp_path: Path) -> None:
    records = [Recorded((1, 2), 3, (4,)), Recorded((5,), 2**63 - 1, ())]
    path = tmp_path / "trace.jsonl"
    write_records(path, records)
    assert read_records(path) == records
    path.write_text(path.read_text() + "\n\n")
    assert read_records(str(path)) == records


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "3",
        json.dumps({"seed": 1, "token_ids": []}),
        json.dumps({"prompt_token_ids": [1], "seed": None, "token_ids": []}),
        json.dumps({"prompt_token_ids": 1, "seed": 1, "token_ids": []}),
        json.dumps({"prompt_token_ids": ["x"], "seed": 1, "token_ids": []}),
        json.dumps({"prompt_token_ids": "12", "seed": 1, "token_ids": [1]}),
        json.dumps({"prompt_token_ids": [1], "seed": 1, "token_ids": "12"}),
        json.dumps({"prompt_token_ids": [1], "seed": 1, "token_ids": [1.7, 2.2]}),
        json.dumps({"prompt_token_ids": [1], "seed": 1, "token_ids": [-5]}),
        json.dumps({"prompt_token_ids": [True], "seed": 1, "token_ids": [1]}),
        '{"prompt_token_ids": [1], "seed": 1e999, "token_ids": [1]}',
        '{"prompt_token_ids": [1], "seed": 1.0, "token_ids": [1]}',
        '{"prompt_token_ids": [1], "seed": -1, "token_ids": [1]}',
        "[" * 100_000,
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    write_records(path, [Recorded((1,), 1, (2,))])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match=r"trace: line 2 of .*trace\.jsonl.* must be an object"):
        read_records(path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\xff\xfe\x00bad")
    with pytest.raises(ValueError, match=r"trace: .*trace\.jsonl.* is not UTF-8 text"):
        read_records(path)


@pytest.mark.parametrize("content", [None, "", "\n \n"])
def test_missing_and_empty_files(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "trace.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=r"trace: .*(cannot read|holds no samples)"):
        read_records(path)
