"""What the benches run: prompts of a given length, and the shapes of requests.

Owns texts and lengths only. Invariant: the same arguments give the same requests.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.spec.oracle import read_records
from tlt_train.prompts import task_questions

PROMPTS = (
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Explain how a bicycle stays upright while it is moving, in simple words.",
    "A farmer has 17 sheep and buys 5 more each month. How many sheep after a year? Think step by step.",
    "Describe the water cycle to a child who loves drawing clouds.",
    "Give three reasons why people learn to play a musical instrument.",
    "What is the capital of France, and what is it known for?",
    "Write a polite letter that asks a neighbour to keep the noise down at night.",
    "List the steps to bake a loaf of bread, with a reason for each step.",
)

# The long tail: (number of sequences, tokens each). 32 sequences are 8 prompts x 4 samples.
LONG_TAIL = ((16, 32), (8, 64), (4, 128), (3, 256), (1, 768))


class TextEncoder(Protocol):
    """What a workload needs of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...


class ChatEncoder(Protocol):
    """What a workload of conversations needs of a tokenizer."""

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence to generate: its prompt, exactly how many tokens, and the seed of its sampler."""

    prompt_ids: tuple[int, ...]
    num_tokens: int
    seed: int


def prompt_ids(tokenizer: TextEncoder, index: int, length: int) -> tuple[int, ...]:
    """``length`` token ids of English text; prompts of different indices differ from the start."""
    ids: list[int] = []
    turn = index
    while len(ids) < length:
        ids += tokenizer.encode(f"{index}.{turn}: {PROMPTS[turn % len(PROMPTS)]} ")
        turn += 1
    return tuple(ids[:length])


def uniform_jobs(
    tokenizer: TextEncoder, *, num_seqs: int, prompt_len: int, num_tokens: int
) -> list[Job]:
    """``num_seqs`` different prompts of one length, all generating the same number of tokens."""
    return [Job(prompt_ids(tokenizer, i, prompt_len), num_tokens, seed=i) for i in range(num_seqs)]


def lean_engine_jobs(tokenizer: TextEncoder, *, num_seqs: int, scale: float) -> list[Job]:
    """The shape that lean engines are compared on: 256 sequences of 100 to 1024 tokens in and out, scaled down."""
    rng = random.Random(0)
    low, high = max(1, round(100 * scale)), max(2, round(1024 * scale))
    return [
        Job(prompt_ids(tokenizer, i, rng.randint(low, high)), rng.randint(low, high), seed=i)
        for i in range(num_seqs)
    ]


def long_tail_jobs(tokenizer: TextEncoder, scale: float = 1.0) -> list[Job]:
    """32 sequences, 8 prompts x 4, of which one generates 24 times as much as half of the others.

    Prompts are dealt in turn, so that every length class but the longest mixes prompts. ``scale`` shortens all lengths.
    """
    lengths = [num for count, num in LONG_TAIL for _ in range(count)]
    return [
        Job(
            tuple(tokenizer.encode(PROMPTS[i % len(PROMPTS)])),
            max(1, round(num * scale)),
            seed=1000 + i,
        )
        for i, num in enumerate(lengths)
    ]


def trace_jobs(path: str) -> list[Job]:
    """The requests of a rollout that ``tlt replay record`` wrote: its prompts, seeds and lengths.

    Raises:
        ValueError: the file is missing or malformed.
    """
    return [
        Job(record.prompt_token_ids, len(record.output_token_ids), record.seed)
        for record in read_records(path)
        if record.output_token_ids
    ]


def reasoning_jobs(
    tokenizer: ChatEncoder | None, tasks: Sequence[str], *, num_samples: int, num_tokens: int
) -> list[Job]:
    """Samples of procedural reasoning tasks, as an RL step would ask for them: four prompts of each task.

    Lengths double from a quarter of ``num_tokens`` to four times as much over the samples of a prompt.

    Raises:
        ValueError: reasoning-gym is not installed, or there is no such task.
    """
    if tokenizer is None:
        raise ValueError("the tasks are text, but the model has no tokenizer")
    jobs: list[Job] = []
    for task in tasks:
        questions = task_questions(task, size=4, seed=1)
        for number, question in enumerate(questions):
            ids = tuple(tokenizer.chat([{"role": "user", "content": question}]))
            for sample in range(num_samples):
                length = max(
                    2, round(num_tokens * 2.0 ** ((number * num_samples + sample) % 5 - 2))
                )
                jobs.append(Job(ids, length, seed=len(jobs) + 1))
    return jobs
