"""The acceptance alarm: a drafter whose proposals stop being accepted is said aloud, with the likely cause.

Outputs stay right whatever a drafter proposes, so a dead one shows nowhere but in its acceptance. Owns two discounted
averages for each drafter, a long one (its own history) and a short one, over the first proposal of each verified
tree, which is there whatever the depth. Knows nothing of how drafting works.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.spec.tree import ROOT
from engine.spec.tuner import Verified

_LONG, _SHORT = 2000.0, 100.0  # verifications that the averages look back over
_MIN_HISTORY = 200.0
_MIN_FALL = 0.1  # absolute: smaller changes are a change of text
_SIGMAS = 5.0


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

    def add(self, hit: bool) -> None:
        keep = 1.0 - 1.0 / self.span
        self.weight = self.weight * keep + 1.0
        self.hits = self.hits * keep + hit

    @property
    def share(self) -> float:
        return self.hits / self.weight if self.weight else 0.0


class _History:
    def __init__(self) -> None:
        self.long, self.short = _Average(_LONG), _Average(_SHORT)
        self.ringing = False
        self.versions: tuple[int, int] | None = None  # drafter, target: when the history was made


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
            history.short.add(hit)
            if not history.ringing:
                history.long.add(hit)
        events: list[AlarmEvent] = []
        for name in {entry.plan.drafter for entry in verified}:
            version = draft_versions.get(name, 0)
            if (event := self._judge(name, self._histories[name], version)) is not None:
                events.append(event)
        return events

    def _judge(self, name: str, history: _History, draft_version: int) -> AlarmEvent | None:
        versions = (draft_version, self._target_version)
        before, now = history.long.share, history.short.share
        noise = math.sqrt(max(before * (1.0 - before), 0.01) / _SHORT)
        fallen = before - now > max(_MIN_FALL, _SIGMAS * noise)
        if history.ringing:
            history.ringing = before - now > _MIN_FALL / 2
            return None
        if history.long.weight < _MIN_HISTORY:
            history.versions = versions
            return None
        if not fallen:
            if before - now < _MIN_FALL / 2:
                history.versions = versions
            return None
        history.ringing = True
        cause, detail = _cause(history.versions or versions, versions)
        return AlarmEvent(
            name,
            before,
            now,
            cause,
            f"drafter {name}: the first proposal was right in {before:.0%} of the steps, lately in {now:.0%}; "
            f"likely cause: {detail}",
        )


def _cause(then: tuple[int, int], now: tuple[int, int]) -> tuple[str, str]:
    if then[0] != now[0]:
        return (
            "drafter version",
            f"the drafter's weights changed from version {then[0]} to {now[0]}; load the old ones again",
        )
    if then[1] != now[1]:
        return (
            "target version",
            f"the target's weights changed from version {then[1]} to {now[1]} and the drafter's did not; "
            f"train it on the new target",
        )
    return (
        "unknown",
        "no weights changed; other text, other sampling, or features that do not arrive",
    )
