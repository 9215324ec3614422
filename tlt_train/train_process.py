"""A process that trains, among others: the group that torchrun started, and signals that end a run in good order.

Owns both, and what is to be undone of them. Knows nothing of training. Invariant: group and signal handlers are as they were
when what was opened here is closed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist


@contextlib.contextmanager
def trainer_group() -> Iterator[Any]:
    """The trainers that torchrun started, or None for one."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        yield None
        return
    dist.init_process_group("gloo")  # the trainer's tensors are on the CPU
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def wait_for(group: Any) -> None:
    """Until all of the group are here."""
    if group is not None:
        dist.barrier(group)


def stopped_together(stop: threading.Event, group: Any) -> bool:
    """Whether the first of the group is to stop, which all of them wait to hear."""
    said = [stop.is_set()]
    if group is not None:
        dist.broadcast_object_list(said, src=0, group=group)
    return said[0]


@contextlib.contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """An event that Ctrl-C or SIGTERM sets; a second one acts as it always does."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    former = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

    def handle(number: int, frame: Any) -> None:
        stop.set()
        signal.signal(number, former[signal.Signals(number)])

    for number in former:
        signal.signal(number, handle)
    try:
        yield stop
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
