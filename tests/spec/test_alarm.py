"""The acceptance alarm: silent on noise, heard once when acceptance is gone, with what changed."""

from __future__ import annotations

import random

import pytest

from engine.spec.alarm import AcceptanceAlarm, AlarmEvent
from engine.spec.base import DraftPlan
from engine.spec.tree import DraftTree
from engine.spec.tuner import Verified


class Watch:
    """An alarm, fed trees whose first level holds the target's token with a given probability."""

    def __init__(self, seed: int = 0) -> None:
        self.alarm = AcceptanceAlarm()
        self.versions = {"eagle": 0}
        self._rng = random.Random(seed)

    def run(self, num: int, acceptance: float, drafter: str = "eagle") -> list[AlarmEvent]:
        events: list[AlarmEvent] = []
        plan = DraftPlan(drafter, 3, 3)
        for _ in range(num):
            hit = self._rng.random() < acceptance
            tree = DraftTree.chain([1, 2, 3])
            entry = Verified("0", plan, tree, [0] if hit else [])
            events += self.alarm.observe([entry], self.versions)
        return events


@pytest.mark.parametrize("acceptance", [0.05, 0.1, 0.3, 0.5, 0.8, 0.95])
def test_noise_rings_no_alarm(acceptance: float) -> None:
    num_alarms = sum(bool(Watch(seed).run(20_000, acceptance)) for seed in range(4))
    assert num_alarms == 0


@pytest.mark.parametrize("before", [0.35, 0.5, 0.8])
@pytest.mark.parametrize(
    ("change", "cause", "advice"),
    [
        ("draft", "drafter version", "from version 0 to 7"),
        ("target", "target version", "train it on the new target"),
        ("nothing", "unknown", "no weights changed"),
    ],
)
def test_collapse_is_said_once_with_its_cause(
    before: float, change: str, cause: str, advice: str
) -> None:
    watch = Watch()
    assert not watch.run(1000, before)
    if change == "draft":
        watch.versions["eagle"] = 7
    if change == "target":
        watch.alarm.set_target_version(7)
    events = watch.run(3000, 0.02)
    assert len(events) == 1
    event = events[0]
    assert (event.drafter, event.cause) == ("eagle", cause)
    assert event.before == pytest.approx(before, abs=0.1)
    assert event.now < event.before - 0.1
    assert "drafter eagle" in event.message
    assert advice in event.message


def test_it_rings_within_some_hundred_verifications() -> None:
    for seed in range(10):
        watch = Watch(seed)
        watch.run(1000, 0.7)
        assert watch.run(200, 0.0)


def test_it_is_ready_again_after_recovery() -> None:
    watch = Watch()
    watch.run(1000, 0.8)
    assert len(watch.run(1000, 0.1)) == 1
    assert not watch.run(2000, 0.8)
    watch.versions["eagle"] = 3
    events = watch.run(1000, 0.1)
    assert [event.cause for event in events] == ["drafter version"]


def test_new_weights_that_are_better_or_the_same_are_silent() -> None:
    watch = Watch()
    watch.run(1000, 0.5)
    for version, acceptance in enumerate((0.5, 0.7, 0.7, 0.9), 1):
        watch.versions["eagle"] = version
        watch.alarm.set_target_version(version)
        assert not watch.run(1000, acceptance)


def test_an_update_long_ago_is_not_the_cause() -> None:
    watch = Watch()
    watch.run(1000, 0.6)
    watch.versions["eagle"] = 1
    watch.run(1000, 0.6)
    assert [event.cause for event in watch.run(1000, 0.0)] == ["unknown"]


def test_drafters_are_watched_apart() -> None:
    watch = Watch()
    for _ in range(30):
        assert not watch.run(50, 0.8, "eagle")
        assert not watch.run(50, 0.2, "suffix")
    events = []
    for _ in range(30):
        events += watch.run(50, 0.8, "eagle") + watch.run(50, 0.0, "suffix")
    assert {event.drafter for event in events} <= {"suffix"}


def test_too_short_a_history_says_nothing() -> None:
    watch = Watch()
    watch.run(100, 0.9)
    assert not watch.run(60, 0.0)


def test_a_first_level_hit_counts_wherever_it_stands_in_the_tree() -> None:
    """Not only node 0: with several children of the root any may be the target's token."""
    alarm, plan = AcceptanceAlarm(), DraftPlan("eagle", 2, 4, 2)
    tree = DraftTree((1, 2, 3, 4), (-1, -1, 0, 1))
    for _ in range(500):
        alarm.observe([Verified("0", plan, tree, [1, 3])], {})
    events: list[AlarmEvent] = []
    for _ in range(300):
        events += alarm.observe([Verified("0", plan, tree, [])], {})
    assert len(events) == 1
    assert events[0].before > 0.95


@pytest.mark.parametrize(
    ("before", "after", "within"),
    [(0.9, 0.0, 20), (0.2, 0.0, 250), (0.1, 0.0, 500), (0.6, 0.4, 800), (0.4, 0.2, 500)],
)
def test_falls_from_any_height_are_heard(before: float, after: float, within: int) -> None:
    for seed in range(6):
        watch = Watch(seed)
        assert not watch.run(5000, before)
        assert watch.run(within, after), (seed, before, after)


def test_less_promising_proposals_are_no_fall() -> None:
    """As a batch empties, rows become cheap, and a tuner verifies what it would not have looked at before."""
    alarm, rng, plan = AcceptanceAlarm(), random.Random(0), DraftPlan("suffix", 1, 1)

    def run(num: int, score: float, chance: float) -> list[AlarmEvent]:
        events: list[AlarmEvent] = []
        for _ in range(num):
            tree = DraftTree.chain([1], [score])
            accepted = [0] if rng.random() < chance else []
            events += alarm.observe([Verified("0", plan, tree, accepted)], {})
        return events

    assert not run(2000, 0.95, 0.9)
    assert not run(2000, 0.35, 0.3)
    assert len(run(500, 0.95, 0.3)) == 1
