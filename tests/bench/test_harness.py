"""What every number of a bench goes through: rounds, medians, tables, the JSON line."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from bench.harness import Samples, agreement, interleave, json_line, table


def test_rounds_rotate_so_that_no_variant_is_always_first() -> None:
    order: list[str] = []
    variants = {name: (lambda name=name: order.append(name) or len(order)) for name in "abc"}
    results = interleave(variants, 3)
    assert "".join(order) == "abcbcacab"
    assert results == {"a": [1, 6, 8], "b": [2, 4, 9], "c": [3, 5, 7]}


def test_samples() -> None:
    samples = Samples((4.0, 1.0, 2.0))
    assert samples.median == 2.0
    assert samples.spread == 1.5


def test_agreement_stops_at_the_first_difference_of_each_sequence() -> None:
    assert agreement([[1, 2, 3], [4, 5]], [[1, 9, 3], [4, 5]]) == (3, 5)


def test_json_line_is_one_line_of_plain_values() -> None:
    @dataclass(frozen=True)
    class Record:
        rate: float

    line = json_line({"a": 1 / 3, "b": Samples((1.0, 3.0)), "c": [Record(2.0)], "d": None})
    assert "\n" not in line
    assert json.loads(line) == {
        "a": 0.333333,
        "b": {"median": 2.0, "values": [1.0, 3.0]},
        "c": [{"rate": 2.0}],
        "d": None,
    }


def test_table_aligns_and_marks_what_is_absent() -> None:
    lines = table(("who", "ms"), [("a", 1.234), ("longer", None)]).splitlines()
    assert lines[2].split() == ["a", "1.23"]
    assert lines[3].split() == ["longer", "-"]
    assert len({len(line) for line in lines}) == 1


def test_interleave_needs_no_results() -> None:
    assert interleave({"a": lambda: None}, 2) == {"a": [None, None]}
    with pytest.raises(ZeroDivisionError):
        interleave({"a": lambda: 1 / 0}, 1)
