"""The suffix drafter: what followed the same tokens before, in the request itself, its siblings, and earlier rollouts.

Owns the link between requests and the native index, and the file of the history. Knows nothing of models or prices.
It has no weights and works from the first token. Invariant: what it proposes depends on the texts it has seen, never
on the order of a hash table; the score and the token of a trial are those of the first node it would have proposed.

Texts that share a prompt share an index, so the samples of a group (``Request.group_id``) and the history of their
prompt are found alike. What is counted: let a *text* be a prompt followed by the output of one live or ended request
of that prompt. For a string u of 1 to ``max_match`` tokens, ``n(u, t)`` counts the places where u stands and t stands
behind it, t being a prompt token (counted once, whoever shares the prompt) or an output token of any text.
``N(u) = sum of n(u, t) over t``.

What is proposed behind a text w (with the path drafted so far): let the *levels* be the suffixes of w of at most
``max_match`` tokens with N > 0; of those with equal N only the longest; of these the ``MAX_LEVELS`` longest (this and
the other constants are those of the native module), u1 (the longest), u2, ... A level reads its ``MAX_BRANCHES`` most frequent tokens (lowest id first where counts are
equal), and the score of a token is

    sum over levels i that read it of  rest(i) * n(ui, t) / (N(ui) + d(ui))
    rest(1) = 1,  rest(i + 1) = rest(i) * d(ui) / (N(ui) + d(ui)),  d(u) = DOUBT / sqrt(len(u))

where levels with rest < ``LEAST_WEIGHT`` are not read: a long match is believed after one sighting, a short one needs
many. Children of a node are the plan's ``width`` best scores, lowest id first where equal; nodes are added in the order
of their joint score, then of their parents, then of their ids, while it is at least ``min_score``.

After SuffixDecoding (Oliaro et al., arXiv 2411.04975) and the grouped drafting of Seer (arXiv 2511.14617); the backoff
is Witten and Bell's, with a doubt that depends on the length of the match instead of the number of different tokens.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.request import Request
from engine.spec._suffix import SuffixIndex
from engine.spec.base import DraftJob, Trial
from engine.spec.tree import NO_TREE, DraftTree

FILE_VERSION = 1

TokenIds = Sequence[int] | np.ndarray


class SuffixDrafter:
    """Proposes what followed earlier occurrences of a request's newest tokens.

    The history holds the outputs of ended requests (aborted ones too: what was generated was generated) and what
    ``add_history`` brings. It outlives ``reset`` and is bounded: beyond ``max_history_tokens`` the prompt that was
    used longest ago goes first, with all its outputs, then the oldest outputs of prompts that are in use.

    Args:
        max_match: longest context that is told apart, in tokens.
        max_history_tokens: bound of the history, prompts and outputs counted; about 80 bytes of memory each.

    Raises:
        ValueError: an argument out of its range.
    """

    name = "suffix"
    version = 0
    tap_layers: tuple[int, ...] = ()
    wants_hidden = False

    def __init__(self, *, max_match: int = 32, max_history_tokens: int = 4_000_000) -> None:
        if not 1 <= max_match <= 1024:
            raise ValueError(f"suffix drafter: max_match must be from 1 to 1024, got {max_match}")
        if max_history_tokens < 0:
            raise ValueError(
                f"suffix drafter: max_history_tokens must be 0 (keep none) or more, got {max_history_tokens}"
            )
        self._index = SuffixIndex(max_match, max_history_tokens)
        self._live: dict[str, int] = {}  # request id -> handle in the index

    def propose(self, jobs: Sequence[DraftJob]) -> list[DraftTree]:
        """A tree for each job. Reads tokens that ``observe`` has not seen; those give no trials."""
        self._read([job.request for job in jobs])
        wanted = []
        for job in jobs:
            handle, plan = self._live[job.request.request_id], job.plan
            wanted.append((handle, plan.depth, plan.num_nodes, plan.width, plan.min_score))
        return [
            DraftTree(token_ids, parents, scores) if token_ids else NO_TREE
            for token_ids, parents, scores in self._index.propose(wanted)
        ]

    def observe(self, requests: Sequence[Request]) -> list[Trial]:
        """Read the new tokens. A request seen for the first time is added, prompt and all; a finished one is not."""
        known = [r for r in requests if r.request_id in self._live or not r.is_finished]
        return [
            Trial(known[i].request_id, score, accepted) for i, score, accepted in self._read(known)
        ]

    def _read(self, requests: Sequence[Request]) -> list[tuple[int, float, bool]]:
        live = self._live
        handles = []
        for request in requests:
            handle = live.get(request.request_id)
            if handle is None:
                handle = live[request.request_id] = self._index.add(request.prompt_token_ids)
            handles.append(handle)
        return self._index.extend(handles, [request.token_ids for request in requests])

    def forget(self, request: Request) -> None:
        handle = self._live.pop(request.request_id, None)
        if handle is None:
            return
        self._index.extend([handle], [request.token_ids])  # what came last, or was cut off
        self._index.finish(handle)

    def reset(self) -> None:
        """Every live request is gone, and its output with it; the history stays."""
        self._live.clear()
        self._index.reset()

    def load(self, weights: Mapping[str, Any], version: int) -> None:
        raise ValueError("the suffix drafter has no weights; give it texts with add_history")

    def add_history(self, prompt_token_ids: TokenIds, output_token_ids: TokenIds) -> None:
        """A rollout of this prompt that was made elsewhere. One that this engine made is in the history already.

        Raises:
            ValueError: an empty prompt, or ids that are not integers from 0 to 2**31 - 1.
        """
        prompt = checked_ids("prompt_token_ids", prompt_token_ids)
        output = checked_ids("output_token_ids", output_token_ids)
        if not prompt:
            raise ValueError(
                "add_history: prompt_token_ids is empty; give the prompt of the rollout"
            )
        self._index.add_history(prompt, output)

    def save_history(self, path: str | os.PathLike[str]) -> None:
        """Write the history as an .npz file, at once or not at all."""
        entries = self._index.history()
        outputs = [output for _, of_prompt in entries for output in of_prompt]
        target = Path(path)
        part = target.with_name(target.name + ".part")
        with part.open("wb") as file:
            np.savez_compressed(
                file,
                version=np.int64(FILE_VERSION),
                token_ids=np.frombuffer(b"".join([*(p for p, _ in entries), *outputs]), np.int32),
                prompt_lens=np.array([len(p) // 4 for p, _ in entries], np.int64),
                num_outputs=np.array([len(of_prompt) for _, of_prompt in entries], np.int64),
                output_lens=np.array([len(output) // 4 for output in outputs], np.int64),
            )
        part.replace(target)

    def load_history(self, path: str | os.PathLike[str]) -> None:
        """Add what ``save_history`` wrote, all of it or, where this raises, nothing.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not such a file, or it is damaged.
        """
        for prompt, outputs in read_history(Path(path)):
            for output in outputs:
                self._index.add_history(prompt, output)

    def check(self) -> None:
        """Count everything again; RuntimeError where the index contradicts itself. Slow, for tests."""
        self._index.check()

    def stats(self) -> dict[str, float]:
        """Live requests and their tokens; prompts, texts and tokens of the history; bytes of memory."""
        return {name: float(value) for name, value in self._index.sizes().items()}


def checked_ids(name: str, token_ids: TokenIds) -> list[int]:
    """Token ids as a list of ints; ValueError where they are not."""
    ids = np.asarray(token_ids)
    if ids.size == 0:
        return []
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"{name}: expected integers in one dimension, got {ids.dtype} {ids.shape}")
    if ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
        raise ValueError(f"{name}: ids must be from 0 to 2**31 - 1, got {ids.min()} to {ids.max()}")
    return ids.tolist()


def read_history(path: Path) -> list[tuple[list[int], list[list[int]]]]:
    """Prompts and their outputs, of a file by ``SuffixDrafter.save_history``; ValueError where it is damaged."""
    damaged = f"load_history: {path} is not a history of the suffix drafter, or it is damaged"
    names = ("version", "token_ids", "prompt_lens", "num_outputs", "output_lens")
    raw = path.read_bytes()
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:  # numpy reads headers before checksums
            if (bad := archive.testzip()) is not None:
                raise ValueError(f"checksum of {bad}")
        with np.load(io.BytesIO(raw), allow_pickle=False) as file:
            version, token_ids, prompt_lens, num_outputs, output_lens = (file[n] for n in names)
    except Exception as error:  # numpy's and zipfile's own errors are of many kinds
        raise ValueError(f"{damaged} ({type(error).__name__}: {error})") from error
    if version.shape != () or version != FILE_VERSION:
        raise ValueError(f"{damaged} (version {version}, expected {FILE_VERSION})")
    lens = (prompt_lens, num_outputs, output_lens)
    if any(a.ndim != 1 or a.dtype != np.int64 or (a < 1).any() for a in lens):
        raise ValueError(f"{damaged} (lengths must be 1 or more)")
    if any((a > token_ids.size).any() for a in lens):  # so no sum of them overflows
        raise ValueError(f"{damaged} (lengths beyond its tokens)")
    total = int(prompt_lens.sum() + output_lens.sum())
    if (
        token_ids.dtype != np.int32
        or token_ids.shape != (total,)
        or (token_ids < 0).any()
        or len(num_outputs) != len(prompt_lens)
        or num_outputs.sum() != len(output_lens)
    ):
        raise ValueError(f"{damaged} (its lengths do not fit)")
    ends = np.cumsum(np.concatenate([prompt_lens, output_lens]))[:-1]
    parts = [part.tolist() for part in np.split(token_ids, ends)]
    prompts, outputs = parts[: len(prompt_lens)], iter(parts[len(prompt_lens) :])
    return [
        (prompt, [next(outputs) for _ in range(num)])
        for prompt, num in zip(prompts, num_outputs.tolist(), strict=True)
    ]
