"""Two trainers in two processes are one trainer with the same global batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing

from tests.tlt_train import group_worker
from tests.tlt_train.heads import same_bits

WORLD = 2


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process found, and last what one trainer alone finds."""
    path = tmp_path_factory.mktemp("group")
    multiprocessing.spawn(group_worker.work, args=(WORLD, str(path)), nprocs=WORLD)  # type: ignore[attr-defined]
    results = [torch.load(path / f"{rank}.pt") for rank in range(WORLD)]
    alone = {name: job(None) for name, job in group_worker.JOBS.items()}
    return [*results, alone]


@pytest.mark.parametrize("job", ["losses", "few_windows"])
def test_losses_are_those_of_one_trainer(found: list[dict[str, Any]], job: str) -> None:
    *group, alone = (results[job] for results in found)
    assert len(set(alone["losses"])) == len(alone["losses"])
    for one in group:
        assert one["losses"] == pytest.approx(alone["losses"], rel=0, abs=1e-5)
        assert one["norms"] == pytest.approx(alone["norms"], rel=1e-4)
        torch.testing.assert_close(one["sums"], alone["sums"], rtol=1e-5, atol=1e-5)
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(one["weights"][name], weight, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("job", ["losses", "few_windows", "not_finite"])
def test_all_hold_the_same_bits(found: list[dict[str, Any]], job: str) -> None:
    one, other = (results[job] for results in found[:WORLD])
    assert same_bits(one["weights"], other["weights"])
    assert str(one["losses"]) == str(other["losses"])


def test_the_batch_is_parted_and_a_trainer_may_have_none_of_it(
    found: list[dict[str, Any]],
) -> None:
    for job in ("losses", "few_windows"):
        *group, alone = (results[job]["num_tokens"] for results in found)
        assert [sum(parts) for parts in zip(*group, strict=True)] == alone
    assert all(0 not in results["losses"]["num_tokens"] for results in found)
    assert all(0 in step for step in zip(*(r["few_windows"]["num_tokens"] for r in found[:WORLD]),
                                         strict=True))  # fmt: skip


def test_what_is_not_finite_in_one_is_skipped_by_all(found: list[dict[str, Any]]) -> None:
    *group, alone = (results["not_finite"]["skipped"] for results in found)
    assert any(alone)
    assert not all(alone)
    assert all(skipped == alone for skipped in group)


def test_they_stop_together_between_two_steps(found: list[dict[str, Any]]) -> None:
    expected = {"num_steps": group_worker.STOP_AFTER, "num_stops": 1}
    assert [results["stopped"] for results in found] == [expected] * 3


def test_the_first_ones_time_ends_them_all(found: list[dict[str, Any]]) -> None:
    one, other = (results["by_time"] for results in found[:WORLD])
    assert one["num_steps"] == other["num_steps"] > 0
    assert same_bits(one["weights"], other["weights"])
