"""Which backend runs each op: a table that can be printed and forced.

Owns the choice and its reasons. Knows backends by name, not how they work. Invariant: an op runs on the backend that
``explain()`` names. A backend that was forced and cannot run raises; "auto" says in the table, and in the log, why
it took what it took.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from engine.batch import ForwardBatch
from engine.machine import num_usable_cpus
from engine.ops.native import cpu_ops, native_unavailable
from engine.ops.reference import ReferenceOps

logger = logging.getLogger(__name__)

OPS: tuple[str, ...] = (
    "linear",
    "embedding",
    "rms_norm",
    "add_rms_norm",
    "silu_mul",
    "rope_store",
    "attention",
    "kv_move",
    "log_sum_exp",
    "sample",
    "coupled_top_k",
)
BACKENDS = ("auto", "native", "reference")
ISA_VARIABLE = "TLT_CPU_ISA"


class OpChoice(NamedTuple):
    """One line of the table."""

    op: str
    backend: str
    reason: str


class Ops:
    """The ops of ``ReferenceOps``, each bound once to the backend that runs it.

    Attributes that are ops are the backend's own functions: a call goes straight there. ``isa`` is the instruction
    set of the native kernels ("none" where no op is native), ``num_threads`` the threads that they use.
    """

    __slots__ = ("_choices", "isa", "num_threads", "pack_linear", *OPS)

    isa: str
    num_threads: int
    pack_linear: Callable[..., Any]
    linear: Callable[[Tensor, Any, Tensor], None]
    embedding: Callable[[Tensor, Tensor, Tensor], None]
    rms_norm: Callable[[Tensor, Tensor, float, Tensor], None]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float, Tensor], None]
    silu_mul: Callable[[Tensor, Tensor], None]
    rope_store: Callable[..., None]  # ten arguments; see ReferenceOps
    attention: Callable[[Tensor, Tensor, Tensor, ForwardBatch, float, int, Tensor], None]
    kv_move: Callable[[Tensor, Tensor, Tensor], None]
    log_sum_exp: Callable[[Tensor, Tensor], None]
    sample: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
    coupled_top_k: Callable[..., None]  # eleven arguments; see ReferenceOps

    def __init__(
        self, choices: list[OpChoice], backends: Mapping[str, Any], isa: str, num_threads: int
    ) -> None:
        self._choices = tuple(choices)
        self.isa = isa
        self.num_threads = num_threads
        for op, backend, _ in choices:
            setattr(self, op, getattr(backends[backend], op))
            if op == "linear":  # the packed weight belongs to the kernel that reads it
                self.pack_linear = backends[backend].pack_linear

    def explain(self) -> list[OpChoice]:
        """(op, backend, reason) of every op."""
        return list(self._choices)

    def __str__(self) -> str:
        """The table of ``explain`` as text."""
        lines = [f"{op:<14}{backend:<11}{reason}" for op, backend, reason in self._choices]
        return "\n".join([f"{'op':<14}{'backend':<11}reason", *lines])


def resolve_ops(
    backend: str | Mapping[str, str] = "auto",
    *,
    device: str = "cpu",
    num_threads: int | None = None,
    isa: str = "auto",
) -> Ops:
    """Choose a backend for every op.

    Args:
        backend: "native" or "reference" forces all ops, a mapping forces the ops that it names, "auto" takes native
            kernels wherever they can run. ``pack_linear`` goes with ``linear``.
        device: where tensors live; "cpu".
        num_threads: of the native kernels; None takes the cores that this process may use.
        isa: instruction set of the native kernels ("scalar", "avx2", "avx512", "avx512bf16"); "auto" takes the
            environment's TLT_CPU_ISA, or the best one that the machine has. All give the same bits, but
            avx512bf16 rounds the activations of a bf16 weight to bf16: force another where bits must not
            depend on the machine.

    Raises:
        ValueError: an unknown op, backend, device or instruction set, or a forced one that cannot run here.
    """
    if device != "cpu":
        raise ValueError(f"resolve_ops: device: expected cpu, got {device!r}")
    forced = _forced(backend)
    if num_threads is None:
        num_threads = num_usable_cpus()
    wants_native = any(wanted != "reference" for wanted in forced.values())
    blocked = native_unavailable() if wants_native else "not asked for"
    backends: dict[str, Any] = {"reference": ReferenceOps()}
    origin = "isa" if isa != "auto" else "default"
    if isa == "auto" and os.environ.get(ISA_VARIABLE, "auto") != "auto":
        isa, origin = os.environ[ISA_VARIABLE], ISA_VARIABLE
    if wants_native and blocked is None:
        backends["native"] = cpu_ops(isa, num_threads)
    choices = [_choose(op, wanted, backends, blocked, origin) for op, wanted in forced.items()]
    _log(choices)
    used = any(choice.backend == "native" for choice in choices)
    return Ops(choices, backends, backends["native"].isa if used else "none", num_threads)


def _forced(backend: str | Mapping[str, str]) -> dict[str, str]:
    """The backend asked for, of every op."""
    if isinstance(backend, str):
        wanted = dict.fromkeys(OPS, backend)
    else:
        if unknown := sorted(set(backend) - set(OPS)):
            raise ValueError(
                f"resolve_ops: backend: expected ops of {', '.join(OPS)}, got {', '.join(unknown)}"
            )
        wanted = {op: backend.get(op, "auto") for op in OPS}
    for op, name in wanted.items():
        if name not in BACKENDS:
            raise ValueError(
                f"resolve_ops: backend of {op}: expected one of {', '.join(BACKENDS)}, got {name!r}"
            )
    return wanted


def _choose(
    op: str, wanted: str, backends: Mapping[str, Any], blocked: str | None, origin: str
) -> OpChoice:
    if wanted == "reference":
        return OpChoice(op, "reference", "forced")
    if blocked is None:
        native, how = backends["native"], "forced" if wanted == "native" else "auto"
        reason = f"{how}, {native.isa} ({origin}), {native.num_threads} threads"
        return OpChoice(op, "native", reason)
    if wanted == "native":
        raise ValueError(
            f"resolve_ops: backend of {op}: native was forced but cannot run: {blocked}"
        )
    return OpChoice(op, "reference", f"auto: {blocked}")


def _log(choices: list[OpChoice]) -> None:
    for op, backend, reason in choices:
        slow = backend == "reference" and reason != "forced"
        logger.log(
            logging.WARNING if slow else logging.DEBUG, "op %s: %s (%s)", op, backend, reason
        )
