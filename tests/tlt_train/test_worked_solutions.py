"""Worked solutions: every stated equation is true, lengths have a tail, nothing crosses the split."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path
from random import Random

import pytest

from tlt_train.prompts import prompts_of, read_prompts
from tlt_train.worked_solutions import (
    FAMILIES,
    WorkedProblem,
    take,
    worked_problems,
    write_prompts,
)

MANY = 600


def value(text: str, x: int) -> Fraction:
    """An expression of a solution, evaluated in fractions by Python itself."""
    text = re.sub(r"(\d)(?=[x(])", r"\1*", text)
    assert re.fullmatch(r"[\d x()+*/-]+", text), text
    numbers = re.sub(r"\d+", lambda m: f"Fraction({m.group()})", text)
    return eval(numbers, {"Fraction": Fraction, "x": Fraction(x)})


def expected_answer(problem: WorkedProblem) -> None:
    """Checks the answer against the prompt alone."""
    if problem.family == "equation":
        left, right = problem.prompt.removeprefix("Solve ").removesuffix(" for x.").split(" = ")
        assert value(left, problem.answer) == value(right, 0)
        assert value(left, problem.answer) != value(left, problem.answer + 1)
    else:
        found = re.fullmatch(r"Calculate (.*) (?:step by step|by parts)\.", problem.prompt)
        assert found is not None
        assert value(found[1], 0) == problem.answer


@pytest.mark.parametrize("family", FAMILIES)
def test_every_step_is_true(family: str) -> None:
    random = Random(5)
    for _ in range(MANY):
        problem = FAMILIES[family](random)
        expected_answer(problem)
        assert problem.family == family
        *lines, last = problem.solution.split("\n")
        assert last == f"The answer is {problem.answer}."
        num_equations = 0
        for line in lines:
            assert line.endswith(".")
            stated = line[:-1].rsplit(": ", 1)[-1].removeprefix("So ")
            if re.fullmatch(r"Start with \d+", stated):
                continue
            if (split := re.fullmatch(r"Split (\d+) into (.*)", stated)) is not None:
                assert value(split[1], 0) == value(split[2], 0)
                continue
            sides = stated.split(" = ")
            assert len(sides) > 1, line
            num_equations += len(sides) - 1
            assert len({value(side, problem.answer) for side in sides}) == 1, line
        assert num_equations >= 1


def test_lengths_have_a_tail() -> None:
    lengths = sorted(len(p.solution) for p in take(MANY))
    half, most, longest = lengths[MANY // 2], lengths[MANY * 19 // 20], lengths[-1]
    assert lengths[0] < half < most < longest
    assert longest > 4 * half


def test_same_seed_same_problems_and_no_prompt_twice() -> None:
    first = take(MANY, seed=3)
    assert first == take(MANY, seed=3)
    assert len({p.prompt for p in first}) == MANY
    other = {p.prompt for p in take(MANY, seed=4)}
    assert len(other & {p.prompt for p in first}) < MANY // 4
    assert {p.family for p in first[:3]} == set(FAMILIES)


def test_sides_of_the_split_share_nothing() -> None:
    training = take(MANY, held_out=False)
    held_out = take(MANY // 4, seed=9, held_out=True)
    assert not any(p.chat.is_held_out() for p in training)
    assert all(p.chat.is_held_out() for p in held_out)
    assert not {p.prompt for p in training} & {p.prompt for p in held_out}


def test_the_file_is_split_as_the_problems_are(tmp_path: Path) -> None:
    """``tlt drafter train --prompts`` trains on just the prompts that training here may have seen."""
    problems = take(200)
    write_prompts(tmp_path / "p.jsonl", problems)
    assert [p.turns[0][1] for p in read_prompts(tmp_path / "p.jsonl")] == [
        p.prompt for p in problems
    ]
    for side in (True, False):
        found = {p.turns for p in prompts_of(file=tmp_path / "p.jsonl", held_out=side)}
        assert found == {p.chat.turns for p in problems if p.chat.is_held_out() == side}


@pytest.mark.parametrize("seed", [-1, True, 1.5])
def test_bad_seed(seed: int) -> None:
    with pytest.raises(ValueError, match="seed of problems"):
        next(worked_problems(seed=seed))
