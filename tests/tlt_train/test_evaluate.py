"""Evaluation: an exact head is found exact, a random one useless, the bound follows the prices, tokens are compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import LLM
from engine.models.load_threads import one_torch_thread
from engine.spec.tuner import FixedTuner
from tests.spec.exact_head import VOCAB, make_exact
from tlt_train.acceptance import Answer, ChainCounts
from tlt_train.evaluate import EvalOptions, _speed, evaluate, report, step_prices
from tlt_train.sequence import TrainingSequence
from tlt_train.shards import ShardWriter
from tlt_train.trial_runs import DecodeStep, RunLog, SweepTuner, Trial, TrialRuns, _Watched

PROMPT = [(7 * i + i // 5) % VOCAB for i in range(1, 41)]


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_exact(tmp_path_factory.mktemp("exact"))


@pytest.fixture(scope="module")
def data(exact: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four prompts as training data, one of them twice and one cut at its start."""
    out = tmp_path_factory.mktemp("data") / "d"
    with ShardWriter(
        out, tap_layers=(0, 0, 1), hidden_size=64, target=str(exact["target"])
    ) as writer:
        for number, (start, cut) in enumerate([(0, 0), (0, 0), (3, 0), (5, 0), (11, 7), (9, 0)]):
            ids = np.array(PROMPT[start : start + 20], np.int32)
            features = np.zeros((len(ids), 4 * 64), np.uint16)
            writer.add(TrainingSequence(str(number), cut, 12, ids, features, 0))
    return str(out)


def run(exact: dict[str, Path], data: str, kind: str = "eagle3", **given: Any) -> dict[str, Any]:
    options = {"data": data, "max_tokens": 24, "depth": 3, "rounds": 0, "num_timed": 2} | given
    with one_torch_thread():
        return evaluate(
            str(exact["target"]),
            str(exact[kind]),
            EvalOptions(**options),
            dtype="float32",
            num_threads=1,
        )


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_an_exact_head_has_full_acceptance(exact: dict[str, Path], data: str, kind: str) -> None:
    record = run(exact, data, kind, temperatures=(0.0, 4.0))
    assert record["verified"]
    assert not record["held_out"]
    assert record["num_prompts"] == 4
    greedy, coupled, mode = record["results"]
    assert [r["draft_sampling"] for r in record["results"]] == ["greedy", "coupled", "mode"]
    for result in (greedy, coupled):
        assert result["acceptance_length"] == 4.0
        assert result["acceptance_by_position"] == [1.0] * 3
        # 23 tokens behind the first: five full steps and a last one of three, whose chain is shorter
        assert result["num_steps"] == 4 * 6
        assert result["tokens_per_step"] == 4 * 23 / (4 * 6) < 4.0
        assert result["num_tokens"] == 4 * 24
    assert 1.2 < mode["acceptance_length"] < 3.5
    assert all(0.2 < p < 0.9 for p in mode["acceptance_by_position"])


def test_the_speed_up_is_measured_and_bounded(exact: dict[str, Path], data: str) -> None:
    record = run(exact, data, temperatures=(1.0,), draft_sampling=("coupled",), rounds=2)
    (result,) = record["results"]
    assert record["verified"]
    assert set(result["step_ms"]) == {0, 1, 2, 3}
    assert set(result["draft_ms"]) == {1, 2, 3}
    assert all(0 < result["draft_ms"][d] < result["step_ms"][d] for d in (1, 2, 3))
    assert result["timed_acceptance_length"] == 4.0
    assert result["bound_by_depth"][0] == 1.0
    assert result["bound_by_depth"][result["bound_depth"]] == max(result["bound_by_depth"])
    text = report(record)
    assert "prompts of the data, NOT held out" in text
    assert "check: tokens of all runs against plain decoding: identical" in text


def test_other_tokens_are_seen(
    exact: dict[str, Path], data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter cannot change a token; if one did, no speed-up would be believed."""
    keep = TrialRuns._keep

    def spoilt(self: Any, group: Any, log: RunLog) -> None:
        keep(self, group, log)
        if self._llm.engine.speculator.drafters:
            log.token_ids[-1] = (*log.token_ids[-1][:-1], 0, 0)

    monkeypatch.setattr(TrialRuns, "_keep", spoilt)
    record = run(exact, data, temperatures=(1.0,), draft_sampling=("mode",))
    assert not record["verified"]
    assert "NOT identical" in report(record)


def test_other_tokens_of_timed_runs_are_seen(
    exact: dict[str, Path], data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = TrialRuns.alone

    def spoilt(self: Any, speculator: Any, *rest: Any) -> RunLog:
        log = alone(self, speculator, *rest)
        if speculator.tuner.name == "cost":
            log.token_ids[0] = (0, *log.token_ids[0][1:])
        return log

    monkeypatch.setattr(TrialRuns, "alone", spoilt)
    given: dict[str, Any] = {"temperatures": (0.0,), "max_tokens": 8, "depth": 2}
    assert run(exact, data, **given)["verified"]
    assert not run(exact, data, rounds=1, **given)["verified"]


def test_a_drafter_that_fails_is_seen(
    exact: dict[str, Path], data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.spec.eagle import EagleDrafter

    propose = EagleDrafter.propose

    def fails(self: Any, jobs: Any) -> Any:
        if jobs[0].request.request_id:  # not while it warms up
            raise RuntimeError("broken")
        return propose(self, jobs)

    monkeypatch.setattr(EagleDrafter, "propose", fails)
    record = run(exact, data, temperatures=(0.0,))
    assert not record["verified"]
    assert "broken" in record["failures"]["eagle"]
    assert "failed: eagle" in report(record)


def test_prompts_of_data_are_whole_and_different(exact: dict[str, Path], data: str) -> None:
    assert run(exact, data, temperatures=(0.0,), num_prompts=2)["num_prompts"] == 2
    with pytest.raises(ValueError, match="no prompt leaves room for 2000 tokens"):
        run(exact, data, max_tokens=2000)


class _Entry:
    def __init__(self, token_ids: tuple[int, ...], num_accepted: int) -> None:
        from engine.spec.tree import DraftTree

        self.tree = DraftTree(token_ids, tuple(range(-1, len(token_ids) - 1)))
        self.accepted = range(num_accepted)


class _Record:
    def __init__(self, *verified: _Entry) -> None:
        self.verified = verified
        self.draft_s = {"eagle": 0.25, "other": 0.5}


def test_what_follows_the_end_of_a_text_is_not_counted() -> None:
    class Heard(FixedTuner):
        num_heard = 0

        def observe(self, record: Any) -> None:
            self.num_heard += 1

    tuner = Heard(None)  # type: ignore[arg-type]
    watched = _Watched(tuner, frozenset({9}))
    watched.observe(_Record(_Entry((4, 9, 5, 6), 3)))  # type: ignore[arg-type]
    assert (watched.log.counts.trials, watched.log.counts.hits) == ([1, 1], [1, 1])
    watched.observe(_Record(_Entry((4, 5, 9, 6), 1)))  # type: ignore[arg-type]
    assert (watched.log.counts.trials[:2], watched.log.counts.hits[:2]) == ([2, 2], [2, 1])
    assert watched.log.counts.trials[2:] == [0, 0]
    assert watched.draft_s == 0.75
    assert tuner.num_heard == 2


def test_a_sweep_runs_every_depth_equally_often() -> None:
    from engine.spec.tuner import Candidates

    tuner = SweepTuner("eagle", 4)
    batch = Candidates([None], [9], 1)  # type: ignore[list-item]
    depths = [plan.depth if plan else 0 for _ in range(40) for plan in tuner.plan(batch)]
    assert {d: depths.count(d) for d in range(5)} == dict.fromkeys(range(5), 8)
    assert depths[:5] != depths[5:10]
    tuner.remove("eagle")
    assert tuner.plan(batch) == [None]


def steps(nodes: int, *seconds: float) -> list[DecodeStep]:
    return [DecodeStep(nodes, 1, 0.0, s) for s in seconds]


def test_the_speed_up_and_its_bound_are_taken_within_the_rounds() -> None:
    """The second round runs on a machine of half the speed: neither figure moves."""

    plain: list[RunLog] = []
    own: dict[str, list[RunLog]] = {"fixed": [], "cost": [], "sweep": []}
    for slow, n in (
        (1.0, 5),
        (2.0, 50),
    ):  # prices of both rounds together would be those of the slow one
        counts, answers = ChainCounts([100, 80], [80, 40]), [Answer(200, True)]
        plain.append(RunLog(answers=answers, steps=steps(0, *[slow] * 200), seconds=210 * slow))
        own["fixed"].append(RunLog(counts=counts, steps=steps(2, *[1.5 * slow] * 100)))
        own["cost"].append(RunLog(steps=steps(1, *[1.25 * slow] * 100), seconds=135 * slow))
        sweep = [*steps(1, *[1.2 * slow] * n), *steps(2, *[1.4 * slow] * n)]
        own["sweep"].append(RunLog(steps=sweep))
        own["fixed"][-1].seconds = 160 * slow
    found = _speed(plain, own, 2)
    assert found["timed_acceptance_length"] == pytest.approx(2.2)
    assert found["bound"] == pytest.approx(2.2 / 1.4, rel=0.01)
    assert found["bound_depth"] == 2
    assert found["fixed_speedup"] == pytest.approx(200 / 150)
    assert found["cost_speedup"] == pytest.approx(200 / 125)
    assert found["cost_speedup_with_prefill"] == pytest.approx(210 / 135)
    assert found["fixed_of_bound"] == pytest.approx(200 / 150 / found["bound"])


def test_positions_that_were_never_tried_are_not_shown_as_refused() -> None:
    tried = {"temperature": 0.0, "draft_sampling": "greedy", "acceptance_length": 1.0}
    tried |= {"acceptance_by_position": [0.0, 0.0], "trials_by_position": [9, 0]}
    record = {"depth": 2, "held_out": True, "num_prompts": 1, "max_tokens": 2, "rounds": 0}
    record |= {"verified": True, "failures": {}, "results": [tried]}
    row = next(line for line in report(record).splitlines() if "greedy" in line)
    assert row.split()[-2:] == ["0.00", "-"]


def test_prices_are_medians_and_end_where_steps_are_few() -> None:
    plain = [RunLog(steps=steps(0, 1.0, 2.0, 90.0))]
    sweep = [RunLog(steps=[*steps(0, 7.0, 7.0, 7.0), *steps(1, 3.0, 4.0, 5.0)])]
    sweep += [RunLog(steps=[*steps(2, 8.0, 8.0), *steps(3, 9.0, 9.0, 9.0)])]
    assert step_prices(plain, sweep, 3) == {0: 2.0, 1: 4.0}


def test_runs_leave_the_engine_as_it_was(exact: dict[str, Path]) -> None:
    with one_torch_thread():
        llm = LLM(str(exact["target"]), dtype="float32", num_threads=1, max_model_len=128)
        runs = TrialRuns(llm, head="eagle3", drafter=str(exact["eagle3"]), depth=2, max_tokens=9)
        before, fixed = llm.engine.speculator, runs.speculator("fixed", "coupled")
        tuner = fixed.tuner
        log = runs.alone(fixed, [Trial(tuple(PROMPT[:9]), 1), Trial(tuple(PROMPT), 2)], 1.0)
        assert llm.engine.speculator is before
        assert fixed.tuner is tuner
        assert log.answers == [Answer(8, False)] * 2
        together = runs.together(fixed, [Trial(tuple(PROMPT[:9]), 1), Trial(tuple(PROMPT), 2)], 1.0)
        assert together.token_ids == log.token_ids
        assert together.counts == log.counts
        assert not together.steps


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"depth": 0}, "--depth must be from 1"),
        ({"rounds": -1}, "--rounds must be at least 0"),
        ({"max_tokens": 1}, "--max-tokens must be at least 2"),
        ({"temperatures": ()}, "--temperatures must be"),
        ({"temperatures": (-1.0,)}, "--temperatures must be"),
        ({"draft_sampling": ()}, "--draft-sampling must be of coupled, mode"),
        (
            {"draft_sampling": ("greedy",)},
            "--draft-sampling must be of coupled, mode, got 'greedy'",
        ),
        ({"tasks": ("a",)}, "give one of them"),
        ({"prompts": None}, "give one of them"),
    ],
)
def test_bad_options_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EvalOptions(**dict[str, Any]({"prompts": "x"}, **given))


def test_the_record_is_plain_values(exact: dict[str, Path], data: str) -> None:
    from bench.harness import json_line

    record = run(exact, data, temperatures=(0.0,), rounds=1)
    assert json.loads(json_line(record))["results"][0]["step_ms"]["0"] > 0
