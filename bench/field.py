"""The field of one bench: this engine, the peers that were asked for, and the machine's ceilings, sampled together.

Owns making contestants from options, and the rounds. Invariant: every round samples the ceilings and runs every
contestant once, in an order that rotates; a contestant's result is compared with the ceilings of its own round.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from bench.contestant import Contestant
from bench.harness import agreement, interleave
from bench.machine import Ceilings, Probe, Rates
from bench.ours import OurEngine
from bench.workloads import uniform_jobs
from engine.models.loader import open_checkpoint

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rounds(Generic[T]):
    """Results of each contestant by name, and the ceilings of each round."""

    rates: list[Rates]
    results: dict[str, list[T]]


class Field:
    """Contestants and ceilings, made from the command line's options.

    Args:
        options: of ``bench.main``.
        max_len: longest sequence of the bench, in tokens; None is the model's.
    """

    def __init__(self, options: argparse.Namespace, *, max_len: int | None) -> None:
        self.ours = OurEngine(
            options.model,
            dtype=options.dtype,
            num_threads=options.num_threads,
            ops=options.ops,
            max_model_len=max_len,
        )
        threads = self.ours.llm.config.num_threads
        self.peers = [make_peer(name, options.model, threads) for name in options.peer]
        self.probe = Probe(self.ours.ops.isa, threads, bf16_weights=options.dtype == "bfloat16")
        self.contestants: list[Contestant] = [self.ours, *self.peers]
        self.num_rounds: int = options.rounds
        self._rates: list[Rates] = []

    def prepare(self, *, num_seqs: int, max_len: int) -> None:
        for contestant in self.contestants:
            contestant.prepare(num_seqs=num_seqs, max_len=max_len)

    def rounds(self, run: Callable[[Contestant], T]) -> Rounds[T]:
        """``run`` every contestant in every round; what it returns is kept."""
        rates: list[Rates] = []
        variants: dict[str, Callable[[], T | None]] = {
            c.name: (lambda c=c: run(c)) for c in self.contestants
        }
        variants["ceilings"] = lambda: rates.append(self.probe.sample())
        results = interleave(variants, self.num_rounds)
        del results["ceilings"]
        self._rates += rates
        return Rounds(rates, results)  # type: ignore[arg-type]

    def check_peers(self) -> dict[str, dict[str, int]]:
        """Print and record how much of each peer's greedy text is the engine's.

        In fp32 everything should agree; types that round activations part at near-ties.
        """
        if not self.peers:
            return {}
        tokenizer = self.ours.encoder
        jobs = uniform_jobs(tokenizer, num_seqs=4, prompt_len=24, num_tokens=24)
        self.prepare(num_seqs=len(jobs), max_len=64)
        expected = self.ours.generate(jobs, 0.0).token_ids
        found = {}
        for peer in self.peers:
            same, total = agreement(expected, peer.generate(jobs, 0.0).token_ids)
            print(f"check: {peer.name} agrees with greedy prefixes of {same} of {total} tokens")
            found[peer.name] = {"agreeing_tokens": same, "tokens": total}
        return found

    def ceilings(self) -> Ceilings:
        """Medians over all rounds so far."""
        return self.probe.ceilings(self._rates or [self.probe.sample()])

    def record(
        self, verified: bool, agreements: dict[str, Any], results: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """What every bench ends in: its results beside how they were got."""
        return {
            "verified": verified,
            "machine": self.ceilings(),
            "settings": {c.name: c.settings for c in self.contestants},
            "agreement": agreements,
            "results": results,
        }


def make_peer(spec: str, model: str, num_threads: int) -> Contestant:
    """A peer from ``--peer``'s value, on the same weights as the engine.

    Raises:
        ValueError: an unknown peer or type, a peer that is not installed, or a model that it cannot take.
    """
    name, _, kind = spec.partition(":")
    if name == "transformers":
        _need("transformers", "transformers")
        from bench.peer_transformers import TransformersPeer

        return TransformersPeer(_hf_directory(model), kind or "bfloat16", num_threads)
    if name == "llama.cpp":
        _need("llama_cpp", "llama-cpp-python")
        from bench.peer_gguf import gguf_in_format
        from bench.peer_llamacpp import LlamaCppPeer

        kind = kind or "bf16"
        return LlamaCppPeer(gguf_in_format(model, kind), kind, num_threads)
    raise ValueError(f"--peer must be transformers or llama.cpp, got {name!r}")


def _need(module: str, package: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"--peer: {package} is not installed; run `make bench-peers`")


def _hf_directory(model: str) -> Path:
    path = open_checkpoint(model).path
    if not path.is_dir():
        raise ValueError(f"--peer transformers needs smollm2 or an HF directory, got {model!r}")
    return path
