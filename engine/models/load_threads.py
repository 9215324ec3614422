"""One torch thread while a model is loaded.

A load is hundreds of short copies, bound by memory. A second thread gains little, and at each of them it spins for the
core that another process may have: on a busy machine that made loading ten times slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Run with one intra-op thread; the count, which torch keeps per thread, is put back."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
