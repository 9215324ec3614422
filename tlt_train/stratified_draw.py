"""Which windows a draw takes from a changing pool: strata of length, the step at hand before earlier ones.

Owns the choice. Knows nothing of arrays of features, memory or threads: it sees columns of numbers. The shares of
strata and steps are those of ``strata.wanted_tokens``. Invariant: the choice is a function of its arguments; no
sequence is chosen twice in a draw, and a draw has at most the tokens asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tlt_train.sequence import window_begin
from tlt_train.strata import NUM_STRATA, stratum_of, wanted_tokens

LEAST_CUT = 64  # tokens: a window is not cut shorter than this only to fill a draw up


@dataclass(frozen=True, slots=True)
class DrawRule:
    """How windows are chosen.

    Args:
        seed: of every draw, with its key.
        max_window: tokens of the longest window.
        stratum_power: 1 draws lengths as they come, 0 the same tokens of each stratum.
        max_version_lag: sequences that are staler, in target versions, are not drawn.
        lag_decay: weight of a sequence is lag_decay ** lag.
        previous_step_share: most of a draw that comes from earlier steps while the current one can fill the rest.

    Raises:
        ValueError: names the argument, what came and what is accepted.
    """

    seed: int = 0
    max_window: int = 4096
    stratum_power: float = 0.5
    max_version_lag: int = 4
    lag_decay: float = 0.5
    previous_step_share: float = 0.5

    def __post_init__(self) -> None:
        for name, low, high in (
            ("seed", 0, None),
            ("max_window", 1, None),
            ("stratum_power", 0, 1),
            ("max_version_lag", 0, None),
            ("previous_step_share", 0, 1),
        ):
            value = getattr(self, name)
            if not low <= value or (high is not None and value > high):
                upper = "" if high is None else f" and at most {high}"
                raise ValueError(f"{name} must be at least {low}{upper}, got {value}")
        if not 0 < self.lag_decay <= 1:
            raise ValueError(f"lag_decay must be in (0, 1], got {self.lag_decay}")


@dataclass(frozen=True, slots=True)
class Columns:
    """The pool, one entry a sequence, int64 [sequences]."""

    num_tokens: np.ndarray
    total_lens: np.ndarray
    versions: np.ndarray
    rl_steps: np.ndarray


@dataclass(frozen=True, slots=True)
class Choice:
    """Rows begin..begin + num_tokens of the sequence at ``index``."""

    index: int
    begin: int
    num_tokens: int


def choose(
    columns: Columns, rule: DrawRule, *, rl_step: int, version: int, num_tokens: int, key: int
) -> list[Choice]:
    """Choose windows of at most ``num_tokens`` tokens in all, in random order.

    Strata are served from the longest to the shortest, each with a number of windows rounded at random to its part of
    what is left, so that shares hold on average however coarse long windows are. The draw is filled up by a race among
    the others, whole ones first, then one that is cut.
    """
    lags = np.maximum(version - columns.versions, 0)
    weights = np.where(lags <= rule.max_version_lag, rule.lag_decay**lags, 0.0)
    lengths = np.minimum(columns.num_tokens, min(rule.max_window, num_tokens))
    # Cells: strata of the current step, then those of earlier ones.
    cells = stratum_of(columns.total_lens) + NUM_STRATA * (columns.rl_steps < rl_step)
    wanted = _wanted(columns.num_tokens * weights, lengths * (weights > 0), cells, rule, num_tokens)

    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((rule.seed, key))))
    draws = generator.standard_exponential(len(cells))
    places = generator.random(len(cells))
    roundings = generator.random(2 * NUM_STRATA)
    priority = np.divide(draws, weights, out=np.full(len(cells), np.inf), where=weights > 0)
    cell_rooms = np.bincount(cells, weights * lengths, 2 * NUM_STRATA)
    rates = wanted / np.maximum(cell_rooms, 1e-30)

    left, unserved = num_tokens, wanted.sum()
    chosen: list[int] = []
    is_open = (weights > 0) & (wanted[cells] > 0)
    for cell in sorted(np.unique(cells[is_open]).tolist(), key=lambda c: (-(c % NUM_STRATA), c)):
        members = np.flatnonzero((cells == cell) & is_open)
        mean_len = cell_rooms[cell] / weights[members].sum()
        count = int(wanted[cell] / max(unserved, wanted[cell]) * left / mean_len + roundings[cell])
        unserved -= wanted[cell]
        for i in members[np.argsort(priority[members], kind="stable")][:count].tolist():
            if lengths[i] <= left:
                chosen.append(i)
                left -= int(lengths[i])
    is_open[chosen] = False
    rest = np.flatnonzero(is_open)
    rest = rest[np.argsort(priority[rest] / rates[cells[rest]], kind="stable")]
    while len(fitting := rest[lengths[rest] <= left]):
        chosen.append(int(fitting[0]))
        left -= int(lengths[fitting[0]])
        rest = rest[rest != fitting[0]]
    sizes = lengths[chosen].tolist()
    if len(rest) and left >= min(LEAST_CUT, num_tokens):
        chosen.append(int(rest[0]))
        sizes.append(left)
    found = [
        Choice(i, window_begin(int(columns.num_tokens[i]), size, float(places[i])), size)
        for i, size in zip(chosen, sizes, strict=True)
    ]
    return [found[i] for i in generator.permutation(len(found))]


def _wanted(
    tokens: np.ndarray, rooms: np.ndarray, cells: np.ndarray, rule: DrawRule, num_tokens: int
) -> np.ndarray:
    """[2 * NUM_STRATA] tokens to draw of each cell."""
    there = np.bincount(cells, tokens, 2 * NUM_STRATA)
    room = np.bincount(cells, rooms, 2 * NUM_STRATA)
    return np.concatenate(
        wanted_tokens(
            there[:NUM_STRATA],
            there[NUM_STRATA:],
            room[:NUM_STRATA],
            room[NUM_STRATA:],
            num_tokens=num_tokens,
            power=rule.stratum_power,
            max_earlier_share=rule.previous_step_share,
        )
    )
