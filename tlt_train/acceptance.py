"""How far drafted chains are accepted, and what that is worth: counts, survival, expected decoding time.

Owns the arithmetic of an evaluation; measures nothing and knows no engine. Position j of a chain is its j-th draft token.
It is *tried* in a step if the chain was that long and positions 1 .. j - 1 were accepted, so a chain that was cut short
(the last step before ``max_tokens``) says nothing of the positions that it did not have: the estimates are of full chains,
however many texts end (Kaplan and Meier 1958; independent of the cut, since lengths do not depend on the drafter).

Acceptance length counts the bonus token: 1 + the sum of the survivals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul


@dataclass(slots=True)
class ChainCounts:
    """Of each position from 1 on, how often it was tried and accepted."""

    trials: list[int] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)

    def add(self, length: int, num_accepted: int) -> None:
        """A chain of ``length`` tokens was verified."""
        assert 0 <= num_accepted <= length, (length, num_accepted)
        while len(self.trials) < length:
            self.trials.append(0)
            self.hits.append(0)
        for place in range(min(length, num_accepted + 1)):
            self.trials[place] += 1
            self.hits[place] += place < num_accepted

    def conditional(self, depth: int) -> list[float]:
        """P(position j is accepted | those before it were), j = 1 .. depth; 0 where nothing was tried."""
        counts = list(zip(self.trials, self.hits, strict=True))[:depth]
        found = [hits / trials if trials else 0.0 for trials, hits in counts]
        return found + [0.0] * (depth - len(found))

    def survival(self, depth: int) -> list[float]:
        """P(the first j positions are accepted), j = 1 .. depth."""
        return list(accumulate(self.conditional(depth), mul))

    def length(self, depth: int) -> float:
        """Expected tokens of a step that verifies a chain of ``depth``, the bonus token included."""
        return 1.0 + sum(self.survival(depth))


@dataclass(frozen=True, slots=True)
class Answer:
    """A text whose decoding is priced: tokens behind the one that its prefill gives, and whether it stopped by itself.

    A text that stops by itself stops wherever its chain is; one that ends at ``max_tokens`` is drafted no further.
    """

    num_tokens: int
    has_stopped: bool


def expected_decode_s(
    answer: Answer, survival: Sequence[float], step_s: Mapping[int, float], depth: int
) -> float:
    """Expected seconds of decoding with chains of ``depth``: steps of each length, times what such a step takes.

    Args:
        answer: the text.
        survival: at least ``depth`` of them.
        step_s: seconds of a step by chain length, 0 .. depth; each whole, drafting included.
        depth: of the chains.
    """
    alive = [1.0, *survival[:depth]]
    expected = [0.0]  # seconds for so many tokens that are left
    for left in range(1, answer.num_tokens + 1):
        length = depth if answer.has_stopped else min(depth, left - 1)
        seconds = step_s[length]
        for accepted in range(length + 1):
            ends_here = alive[accepted] - (alive[accepted + 1] if accepted < length else 0.0)
            seconds += ends_here * expected[max(left - 1 - accepted, 0)]
        expected.append(seconds)
    return expected[-1]


def depth_gains(
    answers: Sequence[Answer], survival: Sequence[float], step_s: Mapping[int, float]
) -> list[float]:
    """What chains of each depth gain over plain decoding at an acceptance, by the prices of steps; [0] is 1.

    The largest is the most that a fixed depth can gain.

    Args:
        answers: the texts.
        survival: by position.
        step_s: seconds of a step by chain length, without a gap from 0 (plain decoding) on; depths end with them.
    """
    plain = sum(answer.num_tokens for answer in answers) * step_s[0]
    gains = []
    for depth in range(min(max(step_s), len(survival)) + 1):
        seconds = sum(expected_decode_s(a, survival, step_s, depth) for a in answers)
        gains.append(plain / seconds if seconds else 1.0)
    return gains
