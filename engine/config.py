"""How an engine runs: what the user asks for (``EngineConfig``), settled against a model and a machine.

Owns the arguments of ``LLM``, their defaults and their checks. Knows nothing of tensors or files.
Invariant: an instance that exists is valid, a ``ResolvedConfig`` has nothing left open, and each value that was
derived was logged with its reason.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, TypeVar

from engine.machine import available_memory_bytes, num_usable_cpus
from engine.model_config import DTYPE_BYTES, ModelConfig, RopeConfig

__all__ = ["EngineConfig", "ModelConfig", "ResolvedConfig", "RopeConfig"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_AUTO_KV_BYTES = 4 << 30
_PAGE_SLACK = 32  # tokens: a last page that is not full, and one to move
_MAX_NUM_SEQS = 256
_MAX_NUM_BATCHED_TOKENS = 512
_MIN_MODEL_LEN = 2  # tokens: one of prompt and one to generate
_AUTO_KV_SHARE = 0.25  # of the free memory: the engine is a guest in the trainer's process


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """``EngineConfig`` with nothing left open: what runs. ``max_num_seqs`` is at most ``max_num_batched_tokens``."""

    model: ModelConfig
    dtype: str
    device: str
    seed: int
    max_model_len: int
    kv_cache_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool
    num_threads: int
    ops: str | Mapping[str, str]
    logprobs_mode: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the user asks of an engine: the arguments of ``LLM``.

    Args:
        model: ``"smollm2"``, an HF directory or a GGUF file, as text or as a path.
        dtype: of weights and KV cache: "auto" (the checkpoint's), "float32" or "bfloat16", or the torch dtype.
        device: "auto" or "cpu".
        seed: seeds requests that bring none.
        max_model_len: longest sequence in tokens, prompt and output, at least 2; None is the model's.
        kv_cache_bytes: memory of the KV cache; None derives it from what is free.
        max_num_seqs: most requests running at once; None is 256, or max_num_batched_tokens if that is less.
        max_num_batched_tokens: most rows of one forward, at least one for each running request; None is 512, or
            max_num_seqs if that is more.
        enable_prefix_caching: keep and reuse the pages of finished prompts.
        num_threads: threads of the CPU kernels; None is one for each usable core.
        ops: backend of the ops: "auto", "native", "reference", or op -> backend.
        logprobs_mode: "raw_logprobs" (the model's) or "processed_logprobs" (after penalties, temperature, top-k...).

    Raises:
        ValueError: names the argument, what came, and what is accepted.
    """

    model: str | os.PathLike[str]
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    kv_cache_bytes: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool = True
    num_threads: int | None = None
    ops: str | Mapping[str, str] = "auto"
    logprobs_mode: str = "raw_logprobs"

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineConfig:
        """As the constructor, but an unknown name is a ValueError that offers the nearest known one."""
        known = [f.name for f in fields(cls)]
        for name in kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known)}"
                raise ValueError(f"unknown argument {name}={kwargs[name]!r}{hint}")
        return cls(**kwargs)

    def __post_init__(self) -> None:
        model = os.fspath(self.model) if isinstance(self.model, os.PathLike) else self.model
        if not isinstance(model, str) or not model:
            raise ValueError(
                f"model must be 'smollm2', a directory or a GGUF file, got {self.model!r}"
            )
        object.__setattr__(self, "model", model)
        if str(self.dtype).startswith("torch."):
            object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        _check_choice("dtype", self.dtype, ("auto", *DTYPE_BYTES))
        _check_choice("device", self.device, ("auto", "cpu"))
        _check_choice("logprobs_mode", self.logprobs_mode, ("raw_logprobs", "processed_logprobs"))
        _check_bool("enable_prefix_caching", self.enable_prefix_caching)
        _check_int("seed", self.seed, 0, 2**63 - 1)
        _check_int("max_model_len", self.max_model_len, _MIN_MODEL_LEN, 2**31 - 1, optional=True)
        _check_int("kv_cache_bytes", self.kv_cache_bytes, 1, 2**63 - 1, optional=True)
        _check_int("max_num_seqs", self.max_num_seqs, 1, 2**20, optional=True)
        _check_int("max_num_batched_tokens", self.max_num_batched_tokens, 1, 2**20, optional=True)
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if seqs is not None and tokens is not None and tokens < seqs:
            raise ValueError(
                f"max_num_batched_tokens={tokens} is less than max_num_seqs={seqs}, and each running request has a "
                f"row in a forward; raise max_num_batched_tokens or lower max_num_seqs, or leave one of them out"
            )
        _check_int("num_threads", self.num_threads, 1, 1024, optional=True)
        if isinstance(self.ops, str):
            _check_choice("ops", self.ops, ("auto", "native", "reference"))
        elif isinstance(self.ops, Mapping):
            for op, backend in self.ops.items():
                if not isinstance(op, str) or not isinstance(backend, str):
                    raise ValueError(
                        f"ops must map op -> backend, both names, got {op!r}: {backend!r}"
                    )
            object.__setattr__(self, "ops", MappingProxyType(dict(self.ops)))
        else:
            raise ValueError(
                f"ops must be 'auto', 'native', 'reference' or a dict op -> backend, got {self.ops!r}"
            )

    def resolve(
        self,
        model: ModelConfig,
        *,
        available_bytes: int | None = None,
        num_cpus: int | None = None,
    ) -> ResolvedConfig:
        """Settle every open value against a model and a machine, logging each with its reason.

        Args:
            model: the checkpoint's config.
            available_bytes: memory free before the weights are loaded; None asks the machine.
            num_cpus: usable cores; None asks the machine.

        Raises:
            ValueError: the model or the machine cannot give what is asked.
        """
        available = available_memory_bytes() if available_bytes is None else available_bytes
        dtype = self.dtype if self.dtype != "auto" else _auto_dtype(model)
        max_num_seqs, max_num_batched_tokens = self._batch_limits()
        kv_bytes, max_model_len = self._kv_cache(
            model.kv_bytes_per_token(dtype),
            self._max_model_len(model),
            available - model.num_parameters * DTYPE_BYTES[dtype],
            max_num_seqs,
        )
        num_threads = self.num_threads
        if num_threads is None:
            num_threads = num_usable_cpus() if num_cpus is None else num_cpus
            _log_auto("num_threads", num_threads, "one for each usable core")
        if self.device == "auto":
            _log_auto("device", "cpu", "the only device of this build")
        return ResolvedConfig(
            model=model,
            dtype=dtype,
            device="cpu",
            seed=self.seed,
            max_model_len=max_model_len,
            kv_cache_bytes=kv_bytes,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=self.enable_prefix_caching,
            num_threads=num_threads,
            ops=self.ops,
            logprobs_mode=self.logprobs_mode,
        )

    def _batch_limits(self) -> tuple[int, int]:
        """(max_num_seqs, max_num_batched_tokens): what was left open gives way to what was given."""
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if seqs is None:
            seqs, reason = _MAX_NUM_SEQS, "the default"
            if tokens is not None and tokens < seqs:
                seqs, reason = (
                    tokens,
                    "max_num_batched_tokens: a forward has a row for each request",
                )
            _log_auto("max_num_seqs", seqs, reason)
        if tokens is None:
            tokens, reason = _MAX_NUM_BATCHED_TOKENS, "the default"
            if seqs > tokens:
                tokens, reason = seqs, "max_num_seqs: a forward has a row for each request"
            _log_auto("max_num_batched_tokens", tokens, reason)
        return seqs, tokens

    def _max_model_len(self, model: ModelConfig) -> int:
        if self.max_model_len is None:
            reason = "max_position_embeddings of the model"
            return _log_auto("max_model_len", model.max_position_embeddings, reason)
        if self.max_model_len > model.max_context:
            raise ValueError(
                f"max_model_len={self.max_model_len} is above the model's context of {model.max_context} tokens; "
                f"ask for at most that"
            )
        return self.max_model_len

    def _kv_cache(
        self, token_bytes: int, max_model_len: int, available_bytes: int, max_num_seqs: int
    ) -> tuple[int, int]:
        """(bytes of the KV cache, longest sequence): one sequence of full length always fits in it."""
        sequence_bytes = token_bytes * (max_model_len + _PAGE_SLACK)
        kv_bytes = self.kv_cache_bytes
        if kv_bytes is not None and kv_bytes > available_bytes:
            raise ValueError(
                f"kv_cache_bytes={kv_bytes} is more than the memory available, {max(available_bytes, 0)} bytes; "
                f"ask for less"
            )
        limit_bytes = available_bytes if kv_bytes is None else kv_bytes
        if sequence_bytes > limit_bytes:
            fitting_len = limit_bytes // token_bytes - _PAGE_SLACK
            source = f"kv_cache_bytes={kv_bytes}" if kv_bytes else f"{limit_bytes} bytes of memory"
            if self.max_model_len is not None or fitting_len < _MIN_MODEL_LEN:
                raise ValueError(
                    f"{source} holds {max(fitting_len, 0)} tokens of KV, max_model_len={max_model_len} "
                    f"needs {sequence_bytes} bytes; raise kv_cache_bytes or lower max_model_len"
                )
            max_model_len = _log_auto("max_model_len", fitting_len, f"what {source} holds")
            sequence_bytes = token_bytes * (max_model_len + _PAGE_SLACK)
        if kv_bytes is None:
            share = min(int(available_bytes * _AUTO_KV_SHARE), _AUTO_KV_BYTES)
            kv_bytes = max(sequence_bytes, min(share, max_num_seqs * sequence_bytes))
            reason = "a quarter of the free memory, at most 4 GiB, at least one full sequence"
            _log_auto("kv_cache_bytes", kv_bytes, reason)
        return kv_bytes, max_model_len


def _auto_dtype(model: ModelConfig) -> str:
    if model.dtype in DTYPE_BYTES:
        return _log_auto("dtype", model.dtype, "the checkpoint's")
    reason = f"the checkpoint's {model.dtype} is not supported; the 16-bit type that is"
    return _log_auto("dtype", "bfloat16", reason)


def _log_auto(name: str, value: T, reason: str) -> T:
    logger.info("%s = %s (%s)", name, value, reason)
    return value


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def _check_int(name: str, value: object, low: int, high: int, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        none = " or None" if optional else ""
        raise ValueError(f"{name} must be an integer from {low} to {high}{none}, got {value!r}")
