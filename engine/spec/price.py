"""What a pass costs: seconds of the target by rows and context, and of each drafter by requests and depth.

Owns the estimates, learnt from the steps themselves. Seconds of a target pass are ``unit * (shape(rows) + context)``:
the shape, how much more many rows cost than one, belongs to the model and the machine and changes slowly; the unit, how
fast the machine is at the moment, is tracked quickly and cancels out of a decision. Where all steps have about the same
rows, the two cannot be told apart by those steps: a plain step among them is the yardstick (``compare``). Invariant: the
shape never falls with rows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from engine.spec.saved import MOST, within

KNOTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 512)
_MAX_ROWS = KNOTS[-1]
_PRIOR_SLOPE = 0.1  # of a pass, for each further row, where nothing has been measured
_MEASURED_WEIGHT = 5.0  # steps that a measurement made beforehand is worth
_SLOWEST_RATE = 0.04  # of a knot: looks back over some 25 steps at that row count
_LEVEL_STEPS = 9
_MOST_SURPRISE = 0.25  # of what was expected: how far one step can pull, twice as far if the last one pulled there too
_SETTLE_EVERY = 16  # steps at the latest, also where nobody plans
_YARDSTICK_RATE = 0.2  # of a comparison, once there have been some
_NEWS_RATE = 0.5  # of one that surprises
NEWS = 0.15  # log of a price over the expected one: a surprise
_DRAFT_RATE = 0.1
_FIRST_SAMPLES = 4
# Of what is read back: a price over that of one row, and seconds
_PRICES = (1e-9, 1e9)
_SECONDS = (1e-15, 1e9)

# Of each row count: the knot at or below it, and how far on the way to the next one it is
_BELOW: list[int] = []
_SHARE: list[float] = []
for _rows in range(_MAX_ROWS + 1):
    _k = max(i for i, knot in enumerate(KNOTS) if knot <= max(_rows, 1))
    _k = min(_k, len(KNOTS) - 2)
    _BELOW.append(_k)
    _SHARE.append((max(_rows, 1) - KNOTS[_k]) / (KNOTS[_k + 1] - KNOTS[_k]))


class TargetPrice:
    """Seconds of one target pass.

    Args:
        measured: rows -> seconds, measured beforehand at a short context; empty assumes a plain slope.
        context_s: seconds that a row takes for each token that it attends, measured beforehand.
    """

    def __init__(
        self, measured: Mapping[int, float] | None = None, *, context_s: float = 0.0
    ) -> None:
        points = sorted((rows, s) for rows, s in (measured or {}).items() if s > 0.0)
        raw = _interpolate(points) if points else [1.0 + _PRIOR_SLOPE * (k - 1) for k in KNOTS]
        self._unit_s = raw[0]
        self._raw = [value / self._unit_s for value in raw]
        self._weights = [_MEASURED_WEIGHT if points else 0.5] * len(KNOTS)
        self._context_s = max(context_s, 0.0)
        self._context = self._context_s / self._unit_s
        self._units: deque[float] = deque(maxlen=_LEVEL_STEPS)
        self._steps: deque[tuple[int, int, float]] = deque(maxlen=_LEVEL_STEPS)
        self._surprises = [0] * (
            len(KNOTS) + 1
        )  # of each knot, and of the yardstick: in a row, signed
        self._num_compared = 0
        self._num_unsettled = 0
        self.shape = _rising(self._raw, self._weights)

    def relative(self, rows: int) -> float:
        """Price of a pass over that of one row, at no context."""
        if rows > _MAX_ROWS:
            last, before = self.shape[-1], self.shape[-2]
            return last + (last - before) * (rows - _MAX_ROWS) / (KNOTS[-1] - KNOTS[-2])
        k = _BELOW[rows]
        low = self.shape[k]
        return low + _SHARE[rows] * (self.shape[k + 1] - low)

    def context(self, num_attended: int) -> float:
        """What so many attended tokens, over all rows, add to ``relative``: several rows of one sequence each read it."""
        return self._context * num_attended

    @property
    def unit_s(self) -> float:
        """Seconds of a pass of one row at no context, lately."""
        return self._unit_s

    def seconds(self, rows: int, num_attended: int) -> float:
        return (self.relative(rows) + self.context(num_attended)) * self._unit_s

    def observe(self, rows: int, num_attended: int, seconds: float, *, is_mixed: bool) -> None:
        """A pass took so long. ``is_mixed``: prefill shared it, which says something of the shape only."""
        rows = min(rows, _MAX_ROWS)
        expected = self.relative(rows)
        context = self.context(num_attended)
        if not is_mixed:
            # a median: a step that the machine was taken away from says nothing
            self._units.append(seconds / (expected + context))
            self._unit_s = sorted(self._units)[len(self._units) // 2]
            self._steps.append((rows, num_attended, seconds))
        low = _BELOW[rows]
        seen = (seconds / self._unit_s - context) / expected
        if 2 * sum(n < rows for n, _, _ in self._steps) >= len(self._steps):
            off = self._pull(low, seen) * expected
        else:  # its like have set the unit: a slower machine looks the same, and ``compare`` will tell them apart
            off = max(-_MOST_SURPRISE, min(seen - 1.0, _MOST_SURPRISE)) * expected
        for knot, share in ((low, 1.0 - _SHARE[rows]), (low + 1, _SHARE[rows])):
            if share > 0.0 and knot > 0:  # the first knot is the unit
                self._weights[knot] = min(self._weights[knot] + share, 1.0 / _SLOWEST_RATE)
                moved = self._raw[knot] + share * off / self._weights[knot]
                self._raw[knot] = max(moved, 0.1 * self._raw[knot])
        self._num_unsettled += 1
        if self._num_unsettled >= _SETTLE_EVERY:
            self.settle()

    def compare(self, rows: int, num_attended: int, seconds: float) -> float:
        """A plain pass after passes with more rows, of which ``observe`` has heard: what does their rows' price look
        like beside it? Returns the surprise, the log of seen over expected."""
        unit_s = seconds / (self.relative(rows) + self.context(num_attended))
        more = [step for step in self._steps if step[0] > rows]
        if 2 * len(more) < len(self._steps) or not more or seconds <= 0.0:
            return 0.0  # most were plain: it is they that have set the unit
        seen = sorted(
            (took / unit_s - self.context(context)) / self.relative(n) for n, context, took in more
        )[len(more) // 2]
        surprise = math.log(max(seen, 1e-3))
        self._num_compared += 1
        pulled = 1.0 + self._pull(len(KNOTS), seen)
        if seen < 1.0 - _MOST_SURPRISE and self._surprises[-1] == -1:
            return surprise  # a plain step that the machine was taken away from looks the same: once is not enough
        rate = max(_YARDSTICK_RATE, 1.0 / (1 + self._num_compared))
        factor = pulled ** (_NEWS_RATE if abs(surprise) > NEWS else rate)
        # what was called a slow machine was dear rows: theirs, and until it is known better those of more rows
        first = max(_BELOW[min(n for n, _, _ in more)], _BELOW[min(rows, _MAX_ROWS)] + 1)
        self._rescale(first, factor)
        self.settle()
        return surprise

    def _rescale(self, first: int, factor: float) -> None:
        """Knots from ``first`` on are dearer by ``factor``, and the unit cheaper."""
        self._raw[first:] = [value * factor for value in self._raw[first:]]
        self._unit_s /= factor
        self._units = deque((unit / factor for unit in self._units), maxlen=_LEVEL_STEPS)

    def _pull(self, place: int, seen: float) -> float:
        """How far, in shares of what was expected, an observation may pull: surprises in a row ever further."""
        most = _MOST_SURPRISE * 2.0 ** min(max(abs(self._surprises[place]) - 1, 0), 6)
        off = seen - 1.0
        if abs(off) <= _MOST_SURPRISE:
            self._surprises[place] = 0
        else:
            sign = 1 if off > 0 else -1
            before = self._surprises[place]
            self._surprises[place] = sign if before * sign < 0 else before + sign
            most = max(most, _MOST_SURPRISE * 2.0 ** min(abs(self._surprises[place]) - 1, 6))
        return max(-most, -0.9, min(off, most))

    def settle(self) -> None:
        """Let the shape follow what was observed since the last call."""
        self.shape = _rising(self._raw, self._weights)
        self._num_unsettled = 0

    def state_dict(self) -> dict[str, Any]:
        self.settle()
        return {
            "raw": list(self._raw),
            "weights": list(self._weights),
            "unit_s": self._unit_s,
            "units": list(self._units),
            "steps": [list(step) for step in self._steps],
            "surprises": list(self._surprises),
            "num_compared": self._num_compared,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As saved. Raises KeyError, TypeError or ValueError where the state is malformed; nothing has changed then."""
        raw = [within("raw", value, *_PRICES) for value in state["raw"]]
        weights = [within("weights", w, 1e-3, 1.0 / _SLOWEST_RATE) for w in state["weights"]]
        unit_s = within("unit_s", state["unit_s"], *_SECONDS)
        units = [within("units", value, *_SECONDS) for value in state["units"]]
        steps = [
            (
                within("rows", rows, 0, _MAX_ROWS),
                within("context", context, 0, MOST),
                within("seconds", took, *_SECONDS),
            )
            for rows, context, took in state["steps"]
        ]
        surprises = [within("surprises", count, -MOST, MOST) for count in state["surprises"]]
        num_compared = within("num_compared", state["num_compared"], 0, MOST)
        if not len(raw) == len(weights) == len(surprises) - 1 == len(KNOTS):
            raise ValueError(f"prices must be {len(KNOTS)} numbers, got {len(raw)}")
        within("raw of one row", raw[0], 1.0 - 1e-6, 1.0 + 1e-6)  # it is the unit, and never learnt
        self._context = self._context_s / unit_s
        self._raw, self._weights, self._unit_s = raw, weights, unit_s
        self._units = deque(units, maxlen=_LEVEL_STEPS)
        self._num_compared = num_compared
        self._surprises, self._steps = surprises, deque(steps, maxlen=_LEVEL_STEPS)
        self.settle()


class DraftPrice:
    """Seconds that a drafter takes for each unit of depth, by requests (in powers of two).

    The first proposals are dearer than those that follow: memory is cold, and a model drafter catches up with the
    text. So at first the least of the samples counts, and later ones that are far off pull no further than others.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._num_samples: dict[int, int] = {}

    @property
    def is_young(self) -> bool:
        """Whether there are too few samples to believe."""
        return sum(self._num_samples.values()) < _FIRST_SAMPLES

    def seconds(self, num_requests: int, depth: int) -> float:
        if not self._seconds or not num_requests:
            return 0.0
        bucket = num_requests.bit_length()
        per_depth = self._seconds.get(bucket)
        if per_depth is None:
            nearest = min(self._seconds, key=lambda b: (abs(b - bucket), b))
            per_depth = self._seconds[nearest]
        return per_depth * depth

    def observe(self, num_requests: int, depth: int, seconds: float) -> None:
        bucket, per_depth = num_requests.bit_length(), seconds / max(depth, 1)
        known = self._seconds.get(bucket, per_depth)
        count = self._num_samples.get(bucket, 0)
        self._num_samples[bucket] = min(count + 1, _FIRST_SAMPLES)
        if count < _FIRST_SAMPLES:
            self._seconds[bucket] = min(known, per_depth)
        else:
            per_depth = min(per_depth, 2.0 * known)
            self._seconds[bucket] = known + _DRAFT_RATE * (per_depth - known)

    def state_dict(self) -> dict[str, float]:
        return {str(bucket): seconds for bucket, seconds in self._seconds.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        seconds = [float(value) for value in state.values()]
        if not all(0.0 <= value < math.inf for value in seconds):
            raise ValueError(f"prices of drafting must be at least 0, got {seconds}")
        self._seconds = dict(zip(map(int, state), seconds, strict=True))
        self._num_samples = dict.fromkeys(self._seconds, _FIRST_SAMPLES)


def _interpolate(points: Sequence[tuple[int, float]]) -> list[float]:
    """Seconds at every knot from those at some row counts; past the last in proportion to its slope."""
    values: list[float] = []
    for knot in KNOTS:
        after = next((i for i, (rows, _) in enumerate(points) if rows >= knot), len(points))
        if after == 0:
            values.append(points[0][1])
            continue
        if after == len(points):
            if len(points) == 1:
                values.append(points[0][1] * (1.0 + _PRIOR_SLOPE * (knot - points[0][0])))
                continue
            after -= 1
        (x0, y0), (x1, y1) = points[after - 1], points[after]
        values.append(max(y0, y0 + (y1 - y0) * (knot - x0) / (x1 - x0)))
    return values


def _rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The values, made never to fall by pooling neighbours that do (isotonic regression, by pool of neighbours)."""
    pools: list[tuple[float, float, int]] = []  # weighted sum, weight, count
    for value, weight in zip(values, weights, strict=True):
        total, mass, count = value * weight, weight, 1
        while pools and pools[-1][0] * mass > total * pools[-1][1]:
            before = pools.pop()
            total, mass, count = total + before[0], mass + before[1], count + before[2]
        pools.append((total, mass, count))
    return [total / mass for total, mass, count in pools for _ in range(count)]
