"""A drafter that knows the answer: it replays a recorded rollout and spoils each token with a given probability.

For benches and tests: any acceptance can be had on the real verification path without a trained head. Owns the
records, by prompt and seed (the tokens of a request are a pure function of both). What is spoilt is decided by the
request and the position alone, so it does not depend on how the run is scheduled. It gives no scores: a tuner has to
find out what it is worth.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from engine.request import Request
from engine.spec.base import DraftJob, Trial
from engine.spec.tree import NO_TREE, DraftTree


@dataclass(frozen=True, slots=True)
class Recorded:
    """One sample of a rollout."""

    prompt_token_ids: tuple[int, ...]
    seed: int
    output_token_ids: tuple[int, ...]


class OracleDrafter:
    """Proposes what was recorded.

    Args:
        records: of the rollout that will be repeated; requests that are not in it get no draft.
        acceptance: probability that a token is not spoilt, independently at each position.
        vocab_size: of the target; a spoilt token is the one after it, modulo this.

    Raises:
        ValueError: ``acceptance`` is no probability, or a record has ids outside the vocabulary; it is named.
    """

    name = "oracle"
    version = 0
    tap_layers: tuple[int, ...] = ()
    wants_hidden = False

    def __init__(self, records: Sequence[Recorded], *, acceptance: float, vocab_size: int) -> None:
        if not 0.0 <= acceptance <= 1.0:
            raise ValueError(f"acceptance must be from 0 to 1, got {acceptance}")
        for number, record in enumerate(records, 1):
            most = max((*record.prompt_token_ids, *record.output_token_ids), default=0)
            if most >= vocab_size:
                raise ValueError(
                    f"trace: sample {number} has token id {most}, the target's vocabulary is 0..{vocab_size - 1}; "
                    f"give a rollout of the same model"
                )
        self.acceptance = acceptance
        self._vocab_size = vocab_size
        self._outputs = {(r.prompt_token_ids, r.seed): r.output_token_ids for r in records}
        self._spoilt: dict[str, tuple[int, ...]] = {}  # what it would propose for each live request

    def propose(self, jobs: Sequence[DraftJob]) -> list[DraftTree]:
        return [self._propose(job) for job in jobs]

    def _propose(self, job: DraftJob) -> DraftTree:
        request = job.request
        line = self._spoilt.get(request.request_id)
        if line is None:
            line = self._spoilt[request.request_id] = self._spoil(request)
        start = request.num_output_tokens
        token_ids = line[start : start + min(job.plan.depth, job.plan.num_nodes)]
        return DraftTree.chain(token_ids) if token_ids else NO_TREE

    def _spoil(self, request: Request) -> tuple[int, ...]:
        recorded = self._outputs.get((request.prompt_token_ids, request.seed), ())
        return tuple(
            token if self._is_kept(request, at) else (token + 1) % self._vocab_size
            for at, token in enumerate(recorded)
        )

    def _is_kept(self, request: Request, at: int) -> bool:
        name = f"{request.seed} {request.prompt_len} {at}".encode()
        draw = int.from_bytes(blake2b(name, digest_size=8).digest(), "little") / 2**64
        return draw < self.acceptance

    def observe(self, requests: Sequence[Request]) -> Sequence[Trial]:
        return ()

    def forget(self, request: Request) -> None:
        self._spoilt.pop(request.request_id, None)

    def reset(self) -> None:
        self._spoilt.clear()

    def load(self, weights: Mapping[str, Any], version: int) -> None:
        raise ValueError("the oracle drafter has no weights; only a model drafter can be updated")

    def stats(self) -> dict[str, float]:
        return {"num_records": float(len(self._outputs)), "acceptance": self.acceptance}


def write_records(path: str | Path, records: Sequence[Recorded]) -> None:
    """Write a rollout as ``read_records`` reads it."""
    lines = (
        json.dumps(
            {
                "prompt_token_ids": list(r.prompt_token_ids),
                "seed": r.seed,
                "token_ids": list(r.output_token_ids),
            }
        )
        for r in records
    )
    Path(path).write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def read_records(path: str | Path) -> list[Recorded]:
    """A rollout as ``tlt replay record`` writes it: a JSON object a line with prompt_token_ids, seed, token_ids.

    Raises:
        ValueError: the file is missing, or a line is not such an object; it is named.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"trace: {str(path)!r} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise ValueError(f"trace: cannot read {str(path)!r}: {error.strerror or error}") from error
    records: list[Recorded] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            records.append(
                Recorded(
                    _integers("prompt_token_ids", entry["prompt_token_ids"]),
                    _integers("seed", [entry["seed"]])[0],
                    _integers("token_ids", entry["token_ids"]),
                )
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"trace: line {number} of {str(path)!r} must be an object with prompt_token_ids, seed and "
                f"token_ids: {error!r}"
            ) from error
    if not records:
        raise ValueError(f"trace: {str(path)!r} holds no samples")
    return records


def _integers(name: str, values: Any) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise ValueError(f"{name} must be a list of token ids, got {values!r}")
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{name} must be integers from 0, got {value!r}")
    return tuple(values)
