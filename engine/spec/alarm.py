"""The acceptance alarm: a drafter whose proposals stop being accepted is said aloud, with the likely cause.

Outputs stay right whatever a drafter proposes, so a dead one shows nowhere but in its acceptance. Owns, for each drafter, a
long discounted average (its own history) over the first proposal of each verified tree, which is there whatever the
depth, and Page's cumulative sum (Page 1954, "Continuous inspection schemes"): the evidence, as a log-likelihood ratio,
that acceptance has fallen to a share of its history. So a fall from 15% to nothing is heard as well as one from 90%.
Where proposals bring scores, each is compared with those of its own score: a tuner that verifies less promising ones,
because fewer requests run and rows have become cheap, is no fall. Knows nothing of how drafting works.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.spec.tree import ROOT
from engine.spec.tuner import Verified

_LONG, _SHORT = 2000.0, 100.0  # verifications that the averages look back over
_MIN_HISTORY = 200.0
_FALL = 0.55  # of the history: what is listened for
_EVIDENCE = 14.0  # log-likelihood ratio at which it rings
_RECOVERED = 0.8  # of the history: ready again, after so many verifications
_MIN_RECOVERY = 60.0
_LEAST, _MOST = 0.02, 0.98  # a history is never that sure
_NUM_SCORES = 10
_MIN_OF_SCORE = 40.0  # verifications of about that score before they are a history of their own
_RECENT = 600  # verifications after a change of weights in which a fall is laid to it

_CAUSES = ("drafter version", "target version")


@dataclass(frozen=True, slots=True)
class AlarmEvent:
    """Acceptance of a drafter has fallen off its own history.

    Attributes:
        drafter: its name.
        before, now: share of verified trees whose first level held the target's token, then and lately.
        cause: "drafter version", "target version", "unknown": what changed since the history was made.
    """

    drafter: str
    before: float
    now: float
    cause: str
    message: str


@dataclass(slots=True)
class _Average:
    """Discounted share of hits."""

    span: float
    weight: float = 0.0
    hits: float = 0.0

    def add(self, hit: float) -> None:
        keep = 1.0 - 1.0 / self.span
        self.weight = self.weight * keep + 1.0
        self.hits = self.hits * keep + hit

    @property
    def share(self) -> float:
        return self.hits / self.weight if self.weight else 0.0


class _History:
    def __init__(self) -> None:
        self.long, self.short = _Average(_LONG), _Average(_SHORT)
        self.usual = _Average(_SHORT)  # what proposals like those in ``short`` have been worth
        self.by_score = [_Average(_LONG) for _ in range(_NUM_SCORES)]
        self.ringing = False
        self.evidence = 0.0
        self.num_seen = 0
        self.versions: tuple[int, int] | None = None  # drafter, target: now
        self.changes: dict[str, tuple[int, int, int]] = {}  # cause -> from, to, num_seen then

    def add(self, hit: bool, score: float | None) -> None:
        """A verified tree: whether its first level held the target's token, and the best score there."""
        self.num_seen += 1
        if self.evidence == 0.0 and not self.ringing:  # from where a fall may begin
            self.short, self.usual = _Average(_SHORT), _Average(_SHORT)
        alike = self.long if score is None else self.by_score[int(score * (_NUM_SCORES - 1e-6))]
        usual = alike.share
        if score is not None and alike.weight < _MIN_OF_SCORE:
            usual = min(score, self.long.share)
        usual = min(max(usual, _LEAST), _MOST)
        self.short.add(hit)
        self.usual.add(usual)
        if self.ringing:
            return
        if self.long.weight >= _MIN_HISTORY:
            fallen = _FALL * usual
            ratio = fallen / usual if hit else (1.0 - fallen) / (1.0 - usual)
            self.evidence = max(0.0, self.evidence + math.log(ratio))
        self.long.add(hit)
        if score is not None:
            alike.add(hit)

    def note(self, versions: tuple[int, int]) -> None:
        """The weights that made the trees just taken in. A fall shows only some time after the change."""
        before = self.versions or versions
        for cause, old, new in zip(_CAUSES, before, versions, strict=True):
            if old != new:
                self.changes[cause] = old, new, self.num_seen
        self.versions = versions


class AcceptanceAlarm:
    """Watches every drafter; rings once a fall, and is ready again when acceptance has recovered."""

    def __init__(self) -> None:
        self._histories: dict[str, _History] = {}
        self._target_version = 0

    def set_target_version(self, version: int) -> None:
        self._target_version = version

    def observe(
        self, verified: Sequence[Verified], draft_versions: Mapping[str, int]
    ) -> list[AlarmEvent]:
        """Take in the trees of a step; the alarms that they raise."""
        for entry in verified:
            name = entry.plan.drafter
            history = self._histories.setdefault(name, _History())
            hit = bool(entry.accepted) and entry.tree.parents[entry.accepted[0]] == ROOT
            scores = [
                score
                for score, parent in zip(entry.tree.scores, entry.tree.parents, strict=False)
                if parent == ROOT
            ]
            history.add(hit, max(scores, default=None))
        events: list[AlarmEvent] = []
        for name in dict.fromkeys(entry.plan.drafter for entry in verified):
            history = self._histories[name]
            history.note((draft_versions.get(name, 0), self._target_version))
            if (event := self._judge(name, history)) is not None:
                events.append(event)
        return events

    def _judge(self, name: str, history: _History) -> AlarmEvent | None:
        before, now = history.usual.share, history.short.share
        if history.ringing:
            known = history.short.weight >= _MIN_RECOVERY
            history.ringing = not known or now < _RECOVERED * before
            return None
        if history.evidence < _EVIDENCE:
            return None
        history.ringing, history.evidence = True, 0.0
        cause, detail = _cause(history)
        return AlarmEvent(
            name,
            before,
            now,
            cause,
            f"drafter {name}: the first proposal was right in {before:.0%} of the steps, lately in {now:.0%}; "
            f"likely cause: {detail}",
        )


def _cause(history: _History) -> tuple[str, str]:
    drafter, target = _CAUSES
    recent = {
        cause: (old, new)
        for cause, (old, new, num_seen) in history.changes.items()
        if history.num_seen - num_seen <= _RECENT
    }
    if drafter in recent:
        old, new = recent[drafter]
        return (
            drafter,
            f"the drafter's weights changed from version {old} to {new}; load the old ones again",
        )
    if target in recent:
        old, new = recent[target]
        return (
            target,
            f"the target's weights changed from version {old} to {new} and the drafter's did not; "
            f"train it on the new target",
        )
    return (
        "unknown",
        "no weights changed; other text, other sampling, or features that do not arrive",
    )
