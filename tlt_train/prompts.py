"""Where prompts come from: a file, or reasoning-gym tasks by name; and which of them are kept for evaluation.

Owns the forms of a prompt file, the naming of tasks and the split. Knows nothing of models: a tokenizer is handed in.

The split is a hash of what a prompt says, so the same text is on the same side in every run, whatever it was drawn from,
in whatever number or order: nothing that was trained on can be evaluated on. Tasks draw each side from its own seeds as
well, far apart: reasoning-gym seeds question i of a data set with seed + i, so data sets of neighbouring seeds share
nearly all of their questions.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

HELD_OUT_ONE_IN = 8
"""Of so many different prompts, one is held out."""

_CHUNK = 64  # questions drawn at a time
_SEED_STRIDE = 2**18  # questions of a task between two seeds
_HELD_OUT_SEEDS = 2**30
_MOST_SEEDS = _HELD_OUT_SEEDS // _SEED_STRIDE
_ROLES = ("system", "user", "assistant")


class ChatEncoder(Protocol):
    """What prompts need of a tokenizer."""

    chat_template: str | None

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]: ...

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation that waits for an answer. ``turns``: (role, content) each; ``source``: a task or a file."""

    turns: tuple[tuple[str, str], ...]
    source: str

    @classmethod
    def of(cls, question: str, source: str) -> ChatPrompt:
        return cls((("user", question),), source)

    def is_held_out(self, split_seed: int = 0) -> bool:
        """Whether it is for evaluation: its text and the seed decide, nothing else."""
        text = json.dumps([split_seed, self.turns], ensure_ascii=False)
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0

    def token_ids(self, tokenizer: ChatEncoder) -> list[int]:
        """Through the model's chat template; a model that has none reads the bare text."""
        if tokenizer.chat_template is None:
            return tokenizer.encode("\n\n".join(content for _, content in self.turns))
        return tokenizer.chat([{"role": role, "content": content} for role, content in self.turns])


def prompts_of(
    *,
    tasks: Sequence[str] = (),
    file: str | os.PathLike[str] | None = None,
    held_out: bool,
    seed: int = 0,
    split_seed: int = 0,
) -> Iterator[ChatPrompt]:
    """Different prompts of one side of the split, from tasks in turn or from a file in its order.

    Tasks give as many as there are, so usually without end; ``seed`` chooses which.

    Raises:
        ValueError: neither or both sources; as ``task_questions`` and ``read_prompts``; none is on this side.
    """
    if bool(tasks) == (file is not None):
        raise ValueError(
            "prompts come from --tasks or from --prompts: give one of them"
            + (", not both" if tasks else "")
        )
    if file is None:
        found = _task_prompts(tasks, held_out=held_out, seed=seed)
    else:
        found = iter(dict.fromkeys(read_prompts(file)))
    kept = (prompt for prompt in found if prompt.is_held_out(split_seed) == held_out)
    first = next(kept, None)
    if first is None:
        side = "held out for evaluation" if held_out else "for training"
        raise ValueError(
            f"no prompt of {file or ', '.join(tasks)} is {side} (one in {HELD_OUT_ONE_IN} is held out, by a hash of "
            f"its text); give more prompts or another --split-seed"
        )
    return _with_first(first, kept)


def _with_first(first: ChatPrompt, others: Iterator[ChatPrompt]) -> Iterator[ChatPrompt]:
    yield first
    yield from others


def read_prompts(path: str | os.PathLike[str]) -> list[ChatPrompt]:
    """The prompts of a text file, one a line, or of a JSONL file.

    A JSON line is an object with ``messages``, ``prompt`` or ``question``, or a string; other keys are not read. Answers
    at the end of ``messages`` are left out: they are what the model is to write. Blank lines are skipped, and so is a byte
    order mark.

    Raises:
        ValueError: the file cannot be read or has no prompt; a line is malformed, with its number.
    """
    path = Path(path).expanduser()
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompts {str(path)!r} cannot be read: {error}") from error
    is_json = path.suffix in (".jsonl", ".json", ".ndjson")
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if not is_json:
            prompts.append(ChatPrompt.of(line.strip(), path.name))
            continue
        try:
            prompts.append(ChatPrompt(_turns(json.loads(line)), path.name))
        except ValueError as error:
            raise ValueError(f"--prompts {str(path)!r}, line {number}: {error}") from error
    if not prompts:
        raise ValueError(f"--prompts {str(path)!r} has no prompt: one a line is expected")
    return prompts


def _turns(record: Any) -> tuple[tuple[str, str], ...]:
    if isinstance(record, str):
        record = {"prompt": record}
    if not isinstance(record, Mapping):
        raise ValueError(f"expected an object or a string, got {type(record).__name__}")
    if "messages" not in record:
        for key in ("prompt", "question"):
            if key in record:
                return (("user", _text(record[key], key)),)
        raise ValueError(f"expected messages, prompt or question, got the keys {list(record)}")
    messages = record["messages"]
    if not isinstance(messages, list) or not all(isinstance(m, Mapping) for m in messages):
        raise ValueError("messages must be a list of objects with role and content")
    turns = []
    for message in messages:
        role = message.get("role")
        if role not in _ROLES:
            raise ValueError(f"a message's role must be one of {', '.join(_ROLES)}, got {role!r}")
        turns.append((role, _text(message.get("content"), "content")))
    while turns and turns[-1][0] == "assistant":
        turns.pop()
    if not turns or turns[-1][0] != "user":
        raise ValueError("messages must have a user's turn for the model to answer")
    return tuple(turns)


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{key} must be text, got {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{key} has half of a surrogate pair, {value[error.start]!r} at character {error.start}, which no tokenizer "
            f"reads; write the whole pair or leave it out"
        ) from error
    return value


def task_questions(task: str, *, size: int, seed: int) -> list[str]:
    """Questions of a reasoning-gym task; question i is a function of the task and seed + i.

    Raises:
        ValueError: reasoning-gym is not installed, or there is no such task.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ValueError("--tasks needs reasoning-gym: pip install 'tlt-engine[tasks]'")
    reasoning_gym = importlib.import_module("reasoning_gym")
    try:
        dataset = reasoning_gym.create_dataset(task, size=size, seed=seed)
    except (KeyError, ValueError) as error:
        raise ValueError(f"--tasks: reasoning-gym has no task {task!r}: {error}") from error
    return [dataset[i]["question"] for i in range(size)]


def _task_prompts(tasks: Sequence[str], *, held_out: bool, seed: int) -> Iterator[ChatPrompt]:
    """Different prompts of the tasks in turn, until a task has nothing new to ask, and then of the others."""
    if not isinstance(seed, int) or not 0 <= seed < _MOST_SEEDS:
        raise ValueError(
            f"the seed of tasks must be an integer from 0 to {_MOST_SEEDS - 1}, got {seed!r}"
        )
    if len(set(tasks)) != len(tasks):
        raise ValueError(f"--tasks names a task twice: {', '.join(tasks)}")
    first = seed * _SEED_STRIDE + (_HELD_OUT_SEEDS if held_out else 0)
    streams = [_questions(task, first) for task in tasks]
    while streams:
        for stream in list(streams):
            prompt = next(stream, None)
            if prompt is None:
                streams.remove(stream)
            else:
                yield prompt


def _questions(task: str, first_seed: int) -> Iterator[ChatPrompt]:
    given: set[str] = set()
    for start in range(0, _SEED_STRIDE, _CHUNK):
        before = len(given)
        for question in task_questions(task, size=_CHUNK, seed=first_seed + start):
            if question not in given:
                given.add(question)
                yield ChatPrompt.of(question, task)
        if len(given) == before:
            return
