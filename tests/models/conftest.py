"""One torch thread for tiny models: with two, a busy machine makes each wait for the other at every op."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.models.load_threads import one_torch_thread


@pytest.fixture(autouse=True)
def single_torch_thread() -> Iterator[None]:
    with one_torch_thread():
        yield
