"""General chat prompts by the thousand, for measuring drafters: what is asked crossed with what it is about.

Owns the two lists. Knows nothing of models. Invariant: the same arguments give the same file.

    python -m bench.chat_prompts --out prompts.txt --num-prompts 1000
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

FORMS = (
    "Explain {} to a child.",
    "Write a short story about {}.",
    "Give five facts about {}.",
    "What should a beginner know about {}?",
    "Write a friendly letter to a friend about {}.",
    "What are the advantages and disadvantages of {}?",
    "Write a poem about {}.",
    "Summarize the history of {} in a few sentences.",
    "How does {} affect daily life?",
    "Write three questions that a teacher could ask about {}, with answers.",
    "Describe {} without naming it.",
    "Write an introduction for an article about {}.",
    "What are common mistakes people make with {}?",
    "Plan a one-hour lesson about {}.",
    "Compare {} today with {} a hundred years ago.",
    "Write a dialogue between two people who disagree about {}.",
    "List the steps someone would take to learn more about {}.",
    "Why do people care about {}?",
    "Write a short speech in favour of {}.",
    "What is the most surprising thing about {}?",
)
TOPICS = (
    "volcanoes", "the ocean", "bicycles", "bread", "the moon", "music", "gardening", "trains", "chess", "winter",
    "bees", "libraries", "the human heart", "photography", "coffee", "rivers", "computers", "friendship", "maps",
    "dinosaurs", "the stock market", "football", "rain", "languages", "cooking", "mountains", "clocks", "whales",
    "electric cars", "dreams", "the desert", "painting", "vaccines", "bridges", "cats", "recycling", "space travel",
    "money", "forests", "sleep", "the alphabet", "lighthouses", "robots", "honey", "earthquakes", "theatre", "glass",
    "birds", "the post office", "tea",
)  # fmt: skip


def chat_prompts(num_prompts: int, *, seed: int = 0) -> list[str]:
    """Different prompts in random order.

    Raises:
        ValueError: more than there are.
    """
    every = [form.replace("{}", topic) for form in FORMS for topic in TOPICS]
    if not 1 <= num_prompts <= len(every):
        raise ValueError(f"--num-prompts must be 1..{len(every)}, got {num_prompts}")
    return random.Random(seed).sample(every, num_prompts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", required=True)
    parser.add_argument("--num-prompts", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    prompts = chat_prompts(options.num_prompts, seed=options.seed)
    Path(options.out).write_text("\n".join(prompts) + "\n", encoding="utf-8")
    print(f"{len(prompts)} prompts: {options.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
