"""Data that does not change while it is trained on: epochs over a list of sequences, and what is held out of it.

Owns the order of an epoch, its cuts into steps, and the split by prompt. Knows nothing of files or of live rollouts.
Invariant: an epoch sees each window once; a draw is a function of the sequences, the seed, the number of tokens and
the step's number alone, so a run goes on from a number as if it had never stopped.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tlt_train.sequence import TrainingSequence, TrainingWindow, share_of_rank
from tlt_train.strata import stratum_of


@dataclass(slots=True)
class _Plan:
    """Windows for steps of one size, and the epochs that have been laid out so far."""

    windows: list[TrainingWindow]
    lengths: np.ndarray  # int64 [windows]
    strata: np.ndarray  # int64 [windows]
    first_steps: list[int] = field(default_factory=lambda: [0])  # of epoch e; the last is open
    epoch: int = -1  # the one that ``order`` and ``cuts`` are of
    order: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    cuts: list[int] = field(default_factory=list)  # into order


class FixedData:
    """A source of steps for offline training.

    A sequence longer than ``max_window`` (or than a step) is cut into windows of about equal length, the same in every
    epoch. Within an epoch each stratum of length (log2 of the whole sample) is in random order and evenly spread, so
    that every stretch of steps has long ones and short ones in the mix of the data. An epoch is cut into the fewest
    steps of at most ``num_tokens`` tokens, as even as its order allows; no step lies in two epochs.

    Args:
        sequences: all of them; they are kept as they are, memory-mapped or not.
        seed: of the order.
        max_window: tokens of the longest window.

    Raises:
        ValueError: no sequences, or max_window is not positive.
    """

    def __init__(
        self, sequences: Sequence[TrainingSequence], *, seed: int = 0, max_window: int = 4096
    ) -> None:
        if not sequences:
            raise ValueError("sequences is empty; there is nothing to train on")
        if max_window < 1:
            raise ValueError(f"max_window must be at least 1, got {max_window}")
        self.sequences = tuple(sequences)
        self.num_tokens = sum(sequence.num_tokens for sequence in self.sequences)
        self._seed = seed
        self._max_window = max_window
        self._plans: dict[int, _Plan] = {}

    def draw(
        self, num_tokens: int, key: int, *, rank: int = 0, world: int = 1
    ) -> list[TrainingWindow]:
        """The windows of step ``key`` (0, 1, ...), at most ``num_tokens`` tokens over all ranks.

        Raises:
            ValueError: num_tokens is not positive, key is negative, or the rank is none of the world's.
        """
        plan, epoch = self._locate(num_tokens, key)
        step = key - plan.first_steps[epoch]
        chosen = plan.order[plan.cuts[step] : plan.cuts[step + 1]].tolist()
        return share_of_rank([plan.windows[i] for i in chosen], rank, world)

    def epoch_of(self, num_tokens: int, key: int) -> int:
        """The epoch, from 0, that step ``key`` is in."""
        return self._locate(num_tokens, key)[1]

    def steps_in_epochs(self, num_tokens: int, num_epochs: int) -> int:
        """Steps of the first ``num_epochs`` epochs: ``total_steps`` of a run of that many."""
        plan = self._plan(num_tokens)
        while len(plan.first_steps) <= num_epochs:
            self._lay_out(plan, len(plan.first_steps) - 1, num_tokens)
        return plan.first_steps[num_epochs]

    def _locate(self, num_tokens: int, key: int) -> tuple[_Plan, int]:
        """The plan with the epoch of ``key`` laid out."""
        if key < 0:
            raise ValueError(f"key is the number of a step, at least 0, got {key}")
        plan = self._plan(num_tokens)
        while plan.first_steps[-1] <= key:
            self._lay_out(plan, len(plan.first_steps) - 1, num_tokens)
        epoch = bisect_right(plan.first_steps, key) - 1
        if plan.epoch != epoch:
            self._lay_out(plan, epoch, num_tokens)
        return plan, epoch

    def _plan(self, num_tokens: int) -> _Plan:
        if num_tokens < 1:
            raise ValueError(f"num_tokens must be at least 1, got {num_tokens}")
        plan = self._plans.get(num_tokens)
        if plan is None:
            longest = min(self._max_window, num_tokens)
            windows = [w for sequence in self.sequences for w in _cut(sequence, longest)]
            lengths = np.array([window.num_tokens for window in windows])
            totals = np.array([window.sequence.total_len for window in windows])
            plan = self._plans[num_tokens] = _Plan(windows, lengths, stratum_of(totals))
        return plan

    def _lay_out(self, plan: _Plan, epoch: int, num_tokens: int) -> None:
        plan.order = _mixed_order(plan.strata, _generator(self._seed, epoch))
        plan.cuts = _even_cuts(np.cumsum(plan.lengths[plan.order]), num_tokens)
        plan.epoch = epoch
        if epoch == len(plan.first_steps) - 1:
            plan.first_steps.append(plan.first_steps[epoch] + len(plan.cuts) - 1)


def split_held_out(
    sequences: Sequence[TrainingSequence], share: float, seed: int = 0
) -> tuple[list[TrainingSequence], list[TrainingSequence]]:
    """(to train on, held out): about ``share`` of the prompts, all samples of a prompt on the same side.

    Sequences belong together if they have the same ``group`` or, where the whole prompt is in them, the same prompt; a
    sequence without a group is its own. Which prompts are held out is a hash of the prompt's group and the seed, so
    it does not change when more data is added, unless the data joins two groups. With two or more prompts
    and a share above 0, each side has at least one.

    Raises:
        ValueError: share is not in [0, 1).
    """
    if not 0 <= share < 1:
        raise ValueError(f"share must be in [0, 1), got {share}")
    groups = _prompt_groups(sequences)
    ranks = {group: _hash_unit(seed, group) for group in groups}
    by_hash = sorted(ranks, key=lambda group: (ranks[group], group))
    held_out = {group for group in by_hash if ranks[group] < share}
    if share > 0 and len(by_hash) > 1:
        held_out = (held_out | {by_hash[0]}) - {by_hash[-1]}
    kept = [s for s, group in zip(sequences, groups, strict=True) if group not in held_out]
    return kept, [s for s, group in zip(sequences, groups, strict=True) if group in held_out]


def _prompt_groups(sequences: Sequence[TrainingSequence]) -> list[str]:
    """The group of each sequence; groups that share a prompt are one, under the first of their names."""
    parents: dict[str, str] = {}

    def find(name: str) -> str:
        while parents.setdefault(name, name) != name:
            name = parents[name]
        return name

    names = [f"group {s.group}" if s.group else f"key {s.key}" for s in sequences]
    by_prompt: dict[bytes, str] = {}
    for name, sequence in zip(names, sequences, strict=True):
        find(name)
        if sequence.start == 0 and 0 < sequence.prompt_len <= sequence.num_tokens:
            prompt = sequence.token_ids[: sequence.prompt_len].tobytes()
            a, b = sorted((find(by_prompt.setdefault(prompt, name)), find(name)))
            parents[b] = a
    return [find(name) for name in names]


def _hash_unit(seed: int, name: str) -> float:
    """In [0, 1)."""
    text = f"{seed} {name}".encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def _generator(seed: int, epoch: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, epoch))))


def _cut(sequence: TrainingSequence, longest: int) -> list[TrainingWindow]:
    num_parts = math.ceil(sequence.num_tokens / longest)
    cuts = [sequence.num_tokens * i // num_parts for i in range(num_parts + 1)]
    return [TrainingWindow(sequence, a, b) for a, b in zip(cuts, cuts[1:], strict=False)]


def _mixed_order(strata: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """A random permutation in which each stratum is evenly spread: its j-th of n stands at (j + u) / n."""
    places = np.empty(len(strata))
    for stratum in np.unique(strata):
        members = generator.permutation(np.flatnonzero(strata == stratum))
        places[members] = (np.arange(len(members)) + generator.random()) / len(members)
    return np.argsort(places, kind="stable")


def _greedy_cuts(ends: list[int], limit: int) -> list[int]:
    cuts, done = [0], 0
    while cuts[-1] < len(ends):
        cuts.append(bisect_right(ends, done + limit))
        done = ends[cuts[-1] - 1]
    return cuts


def _even_cuts(ends: np.ndarray, limit: int) -> list[int]:
    """Cuts of a row of windows (``ends`` sums up their tokens) into the fewest steps of at most ``limit`` tokens.

    Greedy filling gives the fewest; the least limit that still gives as few makes them even (the linear partition
    problem, by bisection), so that the last step of an epoch is not a handful of tokens.
    """
    sums = [int(end) for end in ends]
    best = _greedy_cuts(sums, limit)
    longest = int(np.diff(ends, prepend=0).max())
    low, high = max(longest, -(-sums[-1] // (len(best) - 1))), limit
    while low < high:
        middle = (low + high) // 2
        cuts = _greedy_cuts(sums, middle)
        if len(cuts) > len(best):
            low = middle + 1
        else:
            best, high = cuts, middle
    return best if high == limit else _greedy_cuts(sums, high)
