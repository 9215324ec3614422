"""Problems with worked solutions, made here: chain sums, products by parts, linear equations.

Owns the three families, how long their solutions get, and the file of prompts. Knows nothing of models. A solution is a
derivation in fixed words, one small step a line, every number in it copied from above or computed: what a policy writes
after much reinforcement learning looks like this, so a model that has learnt it is sure of nearly every token. Sizes are
long-tailed, as reasoning is: half the solutions are short, a few are five times as long.

Invariants: the same seed gives the same problems; every equation that a solution states is true; a prompt is given once;
a prompt is on the side of the split (``ChatPrompt.is_held_out``) that was asked for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

from tlt_train.prompts import ChatPrompt

_MAX_TERM = 99
_MAX_TOTAL = 200  # of a running total: a chain's steps stay alike however long it is
_TAIL = 0.8  # standard deviation of the logarithm of a size
_MAX_REPEATS = 10_000  # of known prompts in a row, before a stream of problems gives up


@dataclass(frozen=True, slots=True)
class WorkedProblem:
    """A question with its derivation. ``answer`` is exact and stands in the last line of ``solution``."""

    family: str
    prompt: str
    solution: str
    answer: int

    @property
    def chat(self) -> ChatPrompt:
        return ChatPrompt.of(self.prompt, self.family)


def chain_sum(random: Random) -> WorkedProblem:
    """A sum of 2 to 30 terms with its running total, which stays between 0 and 200."""
    total = random.randint(1, _MAX_TERM)
    question, lines = str(total), [f"Start with {total}."]
    for _ in range(_size(random, 1, typical=5.0, high=29)):
        term = random.randint(1, _MAX_TERM)
        add = total < term or (total + term <= _MAX_TOTAL and random.random() < 0.5)
        sign, after = ("+", total + term) if add else ("-", total - term)
        question += f" {sign} {term}"
        lines.append(f"{total} {sign} {term} = {after}.")
        total = after
    return _problem("chain_sum", f"Calculate {question} step by step.", lines, total)


def product(random: Random) -> WorkedProblem:
    """Long multiplication of 2 x 1 up to 4 x 3 digits, written out place by place."""
    num_digits = random.choices(
        ((2, 1), (3, 1), (2, 2), (3, 2), (3, 3), (4, 3)), weights=(20, 20, 30, 20, 8, 2)
    )[0]
    left, right = (random.randint(10 ** (n - 1) + 1, 10**n - 1) for n in num_digits)
    lines, parts = [], []
    if len(_places(right)) > 1:
        lines.append(f"Split {right} into {' + '.join(map(str, _places(right)))}.")
    if len(_places(left)) > 1:
        lines.append(f"Split {left} into {' + '.join(map(str, _places(left)))}.")
    for place in _places(right):
        pieces = [piece * place for piece in _places(left)]
        lines += [
            f"{piece} * {place} = {value}."
            for piece, value in zip(_places(left), pieces, strict=True)
        ]
        lines += _running_sum(pieces)
        parts.append(sum(pieces))
        if len(pieces) > 1 and len(_places(right)) > 1:
            lines.append(f"So {left} * {place} = {parts[-1]}.")
    lines += _running_sum(parts)
    return _problem("product", f"Calculate {left} * {right} by parts.", lines, sum(parts))


def equation(random: Random) -> WorkedProblem:
    """a x + b = c, or up to 8 brackets a (x + b) on the left; solved in whole numbers."""
    answer = random.randint(1, 20)
    num_brackets = _size(random, 0, typical=1.8, high=8)
    if num_brackets == 0:
        factor, constant = random.randint(2, 9), random.randint(1, 30)
        left, lines = f"{factor}x + {constant}", []
    else:
        brackets = [(random.randint(2, 9), random.randint(1, 9)) for _ in range(num_brackets)]
        left = " + ".join(f"{a}(x + {b})" for a, b in brackets)
        lines = [f"{a}(x + {b}) = {a}x + {a * b}." for a, b in brackets]
        lines += _running_sum([a for a, _ in brackets], unit="x")
        lines += _running_sum([a * b for a, b in brackets])
        factor, constant = sum(a for a, _ in brackets), sum(a * b for a, b in brackets)
    right = factor * answer + constant
    if lines:
        lines.append(f"So {factor}x + {constant} = {right}.")
    lines += [
        f"Subtract {constant}: {factor}x = {right} - {constant} = {factor * answer}.",
        f"Divide by {factor}: x = {factor * answer} / {factor} = {answer}.",
    ]
    return _problem("equation", f"Solve {left} = {right} for x.", lines, answer)


FAMILIES: dict[str, Callable[[Random], WorkedProblem]] = {
    "chain_sum": chain_sum,
    "product": product,
    "equation": equation,
}


def worked_problems(
    *, seed: int = 0, held_out: bool | None = None, split_seed: int = 0
) -> Iterator[WorkedProblem]:
    """Different problems of the families in turn, without end for any use (millions).

    Args:
        seed: which ones.
        held_out: the side of the split; None gives both, as they come.
        split_seed: of the split.

    Raises:
        ValueError: the seed is no integer from 0; or, far on, there is nothing new to ask.
    """
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ValueError(f"the seed of problems must be an integer from 0, got {seed!r}")
    random = Random(seed)
    given: set[str] = set()
    repeats = 0
    while True:
        for make in FAMILIES.values():
            problem = make(random)
            if problem.prompt in given:
                repeats += 1
                if repeats >= _MAX_REPEATS:
                    raise ValueError(
                        f"no new problem after {len(given)} of seed {seed}; ask for fewer of them"
                    )
                continue
            repeats = 0
            given.add(problem.prompt)
            if held_out is None or problem.chat.is_held_out(split_seed) == held_out:
                yield problem


def write_prompts(path: str | os.PathLike[str], problems: Sequence[WorkedProblem]) -> None:
    """A JSONL file that ``tlt drafter`` takes as --prompts; the answer is there for whoever checks one."""
    lines = (
        json.dumps({"prompt": p.prompt, "answer": p.answer, "family": p.family}) + "\n"
        for p in problems
    )
    Path(path).write_text("".join(lines), encoding="utf-8")


def take(
    number: int, *, seed: int = 0, held_out: bool | None = None, split_seed: int = 0
) -> list[WorkedProblem]:
    """The first problems of ``worked_problems``."""
    return list(
        islice(worked_problems(seed=seed, held_out=held_out, split_seed=split_seed), number)
    )


def _problem(family: str, prompt: str, lines: Sequence[str], answer: int) -> WorkedProblem:
    return WorkedProblem(family, prompt, "\n".join([*lines, f"The answer is {answer}."]), answer)


def _size(random: Random, low: int, *, typical: float, high: int) -> int:
    """A long-tailed number of steps: ``low`` and a log-normal of median ``typical``, at most ``high``."""
    return min(high, low + int(typical * random.lognormvariate(0.0, _TAIL)))


def _places(number: int) -> list[int]:
    """507 is 500 + 7."""
    digits = str(number)
    return [int(d) * 10 ** (len(digits) - 1 - i) for i, d in enumerate(digits) if d != "0"]


def _running_sum(numbers: Sequence[int], unit: str = "") -> list[str]:
    """A line for each addition; none for a single number."""
    lines, total = [], numbers[0]
    for number in numbers[1:]:
        lines.append(f"{total}{unit} + {number}{unit} = {total + number}{unit}.")
        total += number
    return lines
