"""Prompts: every form of a file, the split that nothing crosses, tasks whose two sides share no question."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tlt_train import prompts as module
from tlt_train.prompts import (
    HELD_OUT_ONE_IN,
    ChatPrompt,
    prompts_of,
    read_prompts,
    task_questions,
)


class Letters:
    """A tokenizer whose template shows roles."""

    def __init__(self, chat_template: str | None = "x") -> None:
        self.chat_template = chat_template

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages) + "<answer>")

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


def text(token_ids: list[int]) -> str:
    return "".join(map(chr, token_ids))


def test_text_files_have_one_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text('What is 1 + 1?\n\n  {"prompt": "not json here"}\u2028same line \n')
    found = read_prompts(path)
    assert [p.turns for p in found] == [
        (("user", "What is 1 + 1?"),),
        (("user", '{"prompt": "not json here"}\u2028same line'),),
    ]
    assert {p.source for p in found} == {"p.txt"}


def test_json_lines_of_every_form(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "what the model is to write"},
    ]
    records = [
        {"prompt": "one", "answer": 3},
        {"question": "two"},
        "three",
        {"messages": conversation},
    ]
    path.write_text("\n".join(json.dumps(r) for r in records) + "\n")
    shown = [text(p.token_ids(Letters())) for p in read_prompts(path)]
    assert shown == [
        "<user>one<answer>",
        "<user>two<answer>",
        "<user>three<answer>",
        "<system>Be brief.<user>a<assistant>b<user>c<answer>",
    ]
    bare = [text(p.token_ids(Letters(None))) for p in read_prompts(path)]
    assert bare[0] == "one"
    assert bare[3] == "Be brief.\n\na\n\nb\n\nc"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: "),
        ("3", "expected an object or a string, got int"),
        ('{"text": "x"}', r"got the keys \['text'\]"),
        ('{"prompt": ""}', "prompt must be text, got ''"),
        (r'{"prompt": "a \ud83d b"}', r"half of a surrogate pair, '\\ud83d' at character 2"),
        ('{"question": 5}', "question must be text, got 5"),
        ('{"messages": {}}', "messages must be a list"),
        ('{"messages": [{"role": "tool", "content": "x"}]}', "got 'tool'"),
        ('{"messages": [{"role": "user"}]}', "content must be text, got None"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "must have a user's turn"),
        ('{"messages": [{"role": "system", "content": "x"}]}', "must have a user's turn"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(ValueError, match=message) as caught:
        read_prompts(path)
    assert "line 2" in str(caught.value)


@pytest.mark.parametrize("name", ["p.txt", "p.jsonl"])
def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path: Path, name: str) -> None:
    line = "What?" if name == "p.txt" else '{"prompt": "What?"}'
    (tmp_path / name).write_text(line, encoding="utf-8-sig")
    assert [p.turns for p in read_prompts(tmp_path / name)] == [(("user", "What?"),)]


def test_files_without_prompts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        read_prompts(tmp_path / "none.txt")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="cannot be read"):
        read_prompts(tmp_path / "bytes.txt")
    (tmp_path / "empty.txt").write_text(" \n\n")
    with pytest.raises(ValueError, match="has no prompt"):
        read_prompts(tmp_path / "empty.txt")


def a_file(path: Path, numbers: range) -> Path:
    path.write_text("\n".join(f"Question {i}" for i in numbers))
    return path


def test_the_split_is_of_texts_whatever_file_they_stand_in(tmp_path: Path) -> None:
    """A split by position would move a prompt to the other side when the file is sorted or grows."""
    one = a_file(tmp_path / "one.txt", range(400))
    two = a_file(tmp_path / "two.txt", range(500, -1, -1))
    train = {p.turns for p in prompts_of(file=one, held_out=False)}
    held_out = {p.turns for p in prompts_of(file=two, held_out=True)}
    assert not train & held_out
    assert len(train) + len(list(prompts_of(file=one, held_out=True))) == 400
    assert 0.5 < len(held_out) * HELD_OUT_ONE_IN / 501 < 1.6
    other = {p.turns for p in prompts_of(file=two, held_out=True, split_seed=1)}
    assert other != held_out


def test_a_prompt_is_given_once(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("same\n" * 5 + "\n".join(f"other {i}" for i in range(40)))
    found = [p for side in (True, False) for p in prompts_of(file=path, held_out=side)]
    assert len(found) == len(set(found)) == 41


def test_a_side_without_prompts_says_so(tmp_path: Path) -> None:
    path = a_file(tmp_path / "p.txt", range(1))
    side = not ChatPrompt.of("Question 0", "p.txt").is_held_out()
    with pytest.raises(ValueError, match="give more prompts or another --split-seed"):
        prompts_of(file=path, held_out=side)


@pytest.mark.parametrize("given", [{}, {"tasks": ["gcd"], "file": "x"}])
def test_one_source_is_needed(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="--tasks or from --prompts: give one of them"):
        prompts_of(held_out=True, **given)


def test_without_the_extra_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'tlt-engine\[tasks\]'"):
        prompts_of(tasks=["gcd"], held_out=False)


class FakeGym:
    """As reasoning-gym: question i of a data set is made from seed + i."""

    def __init__(self, num_questions: int) -> None:
        self.num_questions = num_questions
        self.seeds: list[int] = []

    def create_dataset(self, task: str, *, size: int, seed: int) -> list[dict[str, str]]:
        if task == "none":
            raise ValueError("Dataset 'none' not registered")
        self.seeds += range(seed, seed + size)
        return [{"question": f"{task} {(seed + i) % self.num_questions}"} for i in range(size)]


def fake_gym(monkeypatch: pytest.MonkeyPatch, num_questions: int) -> FakeGym:
    gym = FakeGym(num_questions)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(module.importlib, "import_module", lambda name: gym)
    return gym


def test_tasks_take_turns_and_their_sides_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With only 300 questions both sides draw the same ones: the text decides who keeps it."""
    gym = fake_gym(monkeypatch, 300)
    train = list(prompts_of(tasks=["a", "b"], held_out=False))
    asked = set(gym.seeds)
    gym.seeds.clear()
    held_out = list(prompts_of(tasks=["a", "b"], held_out=True))
    assert not asked & set(gym.seeds)
    assert not {p.turns for p in train} & {p.turns for p in held_out}
    assert len(train) + len(held_out) == 600
    assert {p.source for p in train[:2]} == {"a", "b"} == {p.source for p in held_out}
    gym.seeds.clear()
    next(prompts_of(tasks=["a"], held_out=False, seed=1))
    assert not asked & set(gym.seeds)


def test_tasks_are_drawn_as_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    gym = fake_gym(monkeypatch, 10**9)
    stream = prompts_of(tasks=["a", "b"], held_out=False)
    assert len(set(islice(stream, 200))) == 200
    assert len(gym.seeds) < 600


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tasks": ["none"]}, "reasoning-gym has no task 'none'"),
        ({"tasks": ["a", "a"]}, "names a task twice"),
        ({"tasks": ["a"], "seed": -1}, "seed of tasks must be an integer from 0"),
        ({"tasks": ["a"], "seed": 2**20}, "seed of tasks must be an integer from 0"),
    ],
)
def test_bad_tasks_are_refused(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], message: str
) -> None:
    fake_gym(monkeypatch, 10)
    with pytest.raises(ValueError, match=message):
        prompts_of(held_out=False, **given)


def test_real_tasks() -> None:
    pytest.importorskip("reasoning_gym", reason="the extra 'tasks' is not installed")
    assert task_questions("gcd", size=4, seed=1)[1:] == task_questions("gcd", size=3, seed=2)
    train = list(islice(prompts_of(tasks=["chain_sum", "gcd"], held_out=False), 60))
    held_out = list(islice(prompts_of(tasks=["chain_sum", "gcd"], held_out=True), 20))
    assert not {p.turns for p in train} & {p.turns for p in held_out}
    assert train == list(islice(prompts_of(tasks=["chain_sum", "gcd"], held_out=False), 60))
