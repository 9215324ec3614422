"""``speculative_config``: how the engine speculates, as the user asks for it.

Owns the keys, their defaults and their checks, under the names that vLLM, SGLang and TLT users know. Knows nothing of
drafters or tuners. Invariant: an instance that exists is valid.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

METHODS = ("auto", "suffix", "eagle", "eagle3", "oracle")
TUNERS = ("cost", "beg", "fixed", "off")
BEG_ALGORITHMS = ("BEG", "EG", "UCB1", "PREDEFINED")
DRAFT_SAMPLING = ("coupled", "mode")

MAX_DEPTH = 64
MAX_NODES = 256

_BANDIT = ("tune_algorithm", "mab_configs", "mab_bs_threshold", "bs_threshold")

# Names of other engines -> ours
_ALIASES = {
    "num_steps": "num_speculative_tokens",
    "eagle_topk": "top_k",
    "num_draft_tokens": "num_nodes",
    "draft_model_path": "model",
    "spec_model_path": "model",
    "spec_steps": "num_speculative_tokens",
    "spec_topk": "top_k",
    "spec_verify_tokens": "num_nodes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """What drafts, and who decides how much.

    Args:
        method: "suffix" (no weights), "eagle" or "eagle3" (a trained head in ``model``), "oracle" (a recorded rollout,
            for measurements), or "auto": the suffix drafter, and the head as well where ``model`` is given.
        model: directory of the head.
        tuner: "cost" (measured prices, the default), "beg" (TLT's bandit), "fixed" or "off".
        num_speculative_tokens: longest chain: depth of the tree. A limit for "cost".
        top_k: most children of a node; 1 drafts chains.
        num_nodes: most nodes of a request's tree; None is num_speculative_tokens x top_k.
        window: sliding window of the head's attention, tokens.
        draft_sampling: what a head proposes: "coupled" (default) guesses the sample, with the noise that the sampler
            will draw with; "mode" its likeliest tokens whatever the temperature, as other engines do. For measurements:
            the tokens are the same, coupled proposals are accepted more often above temperature 0.
        trace: JSONL of a recorded rollout, for "oracle".
        acceptance: probability that the oracle does not spoil a token, 0 to 1.
        tune_algorithm, mab_configs, mab_bs_threshold, bs_threshold: of TLT's bandit ("beg"): BEG, EG, UCB1 or
            PREDEFINED; arms "steps_topk_nodes"; batch sizes where a new bucket begins; batch size from which it is
            off.
        max_history_tokens: earlier rollouts that the suffix drafter keeps, tokens.
        on_acceptance_drop: "warn" (log and count) or "ignore".
        seed: of the tuner's own draws.

    A key that would have no effect is refused where it differs from its default: whoever gives it expects one.

    Raises:
        ValueError: names the key, what came, and what is accepted.
    """

    method: str = "auto"
    model: str | None = None
    tuner: str = "cost"
    num_speculative_tokens: int = 5
    top_k: int = 1
    num_nodes: int | None = None
    window: int = 512
    draft_sampling: str = "coupled"
    trace: str | None = None
    acceptance: float = 1.0
    tune_algorithm: str = "BEG"
    mab_configs: tuple[str, ...] | None = None
    mab_bs_threshold: tuple[int, ...] = (1, 2, 5, 21)
    bs_threshold: int = 32
    max_history_tokens: int = 4_000_000
    on_acceptance_drop: str = "warn"
    seed: int = 0

    @classmethod
    def of(cls, config: SpeculativeConfig | Mapping[str, Any] | None) -> SpeculativeConfig | None:
        """Read what the user gave: None, a mapping, or an instance."""
        if config is None or isinstance(config, cls):
            return config
        if not isinstance(config, Mapping):
            raise ValueError(f"speculative_config must be a dict or None, got {config!r}")
        known = [f.name for f in fields(cls)]
        given: dict[str, Any] = {}
        for key, value in config.items():
            bare = str(key).removeprefix("speculative_")
            name = _ALIASES.get(bare, bare)
            if name not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
                raise ValueError(f"speculative_config: unknown key {key!r}={value!r}; {hint}")
            if name in given:
                raise ValueError(f"speculative_config: {key!r} gives {name} a second time")
            given[name] = value
        return cls(**given)

    def __post_init__(self) -> None:
        self._choice("method", METHODS)
        self._choice("tuner", TUNERS)
        self._choice("tune_algorithm", BEG_ALGORITHMS)
        self._choice("on_acceptance_drop", ("warn", "ignore"))
        self._choice("draft_sampling", DRAFT_SAMPLING)
        self._integer("num_speculative_tokens", 1, MAX_DEPTH)
        self._integer("top_k", 1, MAX_DEPTH)
        if self.num_nodes is not None:
            self._integer("num_nodes", 1, MAX_NODES)
        self._integer("window", 16, 2**20)
        self._integer("bs_threshold", 1, 2**20)
        self._integer("max_history_tokens", 0, 2**40)
        self._integer("seed", 0, 2**63 - 1)
        for name in ("model", "trace"):
            value = getattr(self, name)
            if isinstance(value, os.PathLike):
                object.__setattr__(self, name, os.fspath(value))
            elif value is not None and (not isinstance(value, str) or not value):
                raise self._error(name, "a path", value)
        value = self.acceptance
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0.0 <= value <= 1.0:
            raise self._error("acceptance", "a number from 0 to 1", value)
        self._bandit()
        self._sources()
        self._effects()

    def _sources(self) -> None:
        if self.method in ("eagle", "eagle3") and self.model is None:
            raise self._error("model", f"the drafter's directory for method {self.method!r}", None)
        if self.method in ("suffix", "oracle") and self.model is not None:
            raise ValueError(
                f"speculative_config: method {self.method!r} has no model, got model={self.model!r}; "
                f"use 'auto' for both, or 'eagle3'"
            )
        if self.method == "oracle" and self.trace is None:
            raise self._error("trace", "the JSONL of a recorded rollout for method 'oracle'", None)

    def _effects(self) -> None:
        """Refuse what nothing would read."""
        for names, has_reader, reader in (
            (("trace", "acceptance"), self.method == "oracle", "method 'oracle'"),
            (_BANDIT, self.tuner == "beg", "tuner 'beg'"),
            (("window", "draft_sampling"), self.model is not None, "a head (model)"),
        ):
            for name in names:
                value = getattr(self, name)
                if not has_reader and value != _DEFAULTS[name]:
                    raise ValueError(
                        f"speculative_config: {name}={value!r} has no effect with method {self.method!r}, "
                        f"tuner {self.tuner!r}, model={self.model!r}: it is for {reader}; leave it out"
                    )

    def _bandit(self) -> None:
        thresholds = self.mab_bs_threshold
        if (
            not isinstance(thresholds, (list, tuple))
            or not thresholds
            or any(not isinstance(t, int) or isinstance(t, bool) or t < 1 for t in thresholds)
            or list(thresholds) != sorted(set(thresholds))
        ):
            raise self._error("mab_bs_threshold", "ascending batch sizes from 1", thresholds)
        object.__setattr__(self, "mab_bs_threshold", tuple(thresholds))
        if self.mab_configs is None:
            return
        configs = self.mab_configs
        if isinstance(configs, str):
            configs = tuple(configs.split(","))
        if not isinstance(configs, (list, tuple)) or not configs:
            raise self._error("mab_configs", "a list of 'steps_topk_nodes'", self.mab_configs)
        for text in configs:
            self.arm(text)
        object.__setattr__(self, "mab_configs", tuple(configs))

    @staticmethod
    def arm(text: str) -> tuple[int, int, int]:
        """(steps, top-k, nodes) of one of ``mab_configs``, such as "8_4_48"."""
        parts = text.split("_") if isinstance(text, str) else []
        if len(parts) != 3 or not all(part.isdecimal() and int(part) >= 1 for part in parts):
            raise ValueError(
                f"speculative_config: mab_configs: expected 'steps_topk_nodes' such as '8_4_48', got {text!r}"
            )
        steps, top_k, nodes = (int(part) for part in parts)
        if steps > MAX_DEPTH or top_k > MAX_DEPTH or nodes > MAX_NODES:
            raise ValueError(
                f"speculative_config: mab_configs: at most {MAX_DEPTH} steps, {MAX_DEPTH} children and "
                f"{MAX_NODES} nodes, got {text!r}"
            )
        return steps, top_k, nodes

    @property
    def max_nodes(self) -> int:
        """Most nodes of one request's tree."""
        if self.num_nodes is not None:
            return self.num_nodes
        return min(self.num_speculative_tokens * self.top_k, MAX_NODES)

    def _choice(self, name: str, choices: tuple[str, ...]) -> None:
        if getattr(self, name) not in choices:
            raise self._error(name, f"one of {', '.join(choices)}", getattr(self, name))

    def _integer(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self._error(name, f"an integer from {low} to {high}", value)

    @staticmethod
    def _error(name: str, expected: str, got: object) -> ValueError:
        return ValueError(f"speculative_config: {name} must be {expected}, got {got!r}")


_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(SpeculativeConfig)}
