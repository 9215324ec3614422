"""What an EAGLE drafter remembers: the target's features by KV slot, and its own keys and values by seat.

Owns both memories and who sits where. Knows nothing of the network. Features lie where the keys of their tokens lie,
so cached pages, shared prefixes and accepted tree nodes need no bookkeeping of their own. The drafter's keys are
private to a request: a *seat* is a ring of pages over the last positions, and scratch slots for tree nodes. Both
memories are resident only where they were written.

Invariants: positions ``[computed - window, computed)`` of a seat hold the keys of its request; what a seat never wrote
is never read, and the same goes for features: a request drafts behind tokens that the target has run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.batch import PAGE
from engine.models.workspace import empty_in_huge_pages
from engine.request import Request

SCRATCH_PAGES = 16  # of a seat: most nodes that are expanded for one tree, in pages


class FeatureStore:
    """Features [num_slots, width] of the target, by KV slot.

    Args:
        num_slots: of the KV cache.
        width: floats of one position.
        dtype: of the KV cache.
        gather: ``ops.embedding``, which reads rows as fp32.
        poison: start as NaN, so that a row that was never written shows. For tests.
    """

    def __init__(
        self,
        num_slots: int,
        width: int,
        dtype: torch.dtype,
        gather: Callable[[Tensor, Tensor, Tensor], None],
        *,
        poison: bool = False,
    ) -> None:
        self._rows = empty_in_huge_pages((num_slots, width), dtype)
        self._gather = gather
        if poison:
            self._rows.fill_(float("nan"))

    def write(self, slots: Tensor, features: Tensor) -> None:
        """slots [R] int32, features [R, ...] fp32."""
        rows = features.reshape(features.shape[0], -1).to(self._rows.dtype)
        self._rows.index_copy_(0, slots.long(), rows)

    def move(self, source: Tensor, target: Tensor) -> None:
        """All of ``source`` is read before any of ``target`` is written; both [n] int32."""
        self._rows.index_copy_(0, target.long(), self._rows.index_select(0, source))

    def read(self, slots: Tensor, out: Tensor) -> None:
        """out [R, width] fp32 = rows of slots [R] int32."""
        self._gather(slots, self._rows, out)


class Seat:
    """A request's place among the drafter's keys.

    Attributes:
        computed: positions whose keys are there, as far as the ring reaches back.
        scratch: first slot for tree nodes.
    """

    __slots__ = ("_ring", "_slots", "computed", "request", "scratch")

    def __init__(self, first_page: int, ring_pages: int) -> None:
        self.request: Request | None = None
        self.computed = 0
        self._ring = np.arange(first_page, first_page + ring_pages, dtype=np.int32)
        offsets = np.arange(ring_pages * PAGE, dtype=np.int32)
        self._slots = first_page * PAGE + offsets
        self.scratch = (first_page + ring_pages) * PAGE

    def slots(self, start: int, end: int) -> np.ndarray:
        """Slots of positions ``start : end``."""
        return self._slots[np.arange(start, end) % self._slots.shape[0]]

    def pages(self, start: int, end: int) -> np.ndarray:
        """Pages of positions ``start : end``, in order, from the page of ``start`` on."""
        numbers = np.arange(start // PAGE, (end + PAGE - 1) // PAGE)
        return self._ring[numbers % self._ring.shape[0]]


class Seats:
    """Seats for ``num_seats`` requests; who drafted longest ago gives way.

    Args:
        num_seats: most requests of one call.
        window: positions that a row reads, itself included.
    """

    def __init__(self, num_seats: int, window: int) -> None:
        # the last `window` positions may begin and end within a page
        self.ring_pages = (window + PAGE - 1) // PAGE + 1
        self.num_pages = num_seats * (self.ring_pages + SCRATCH_PAGES)
        stride = self.ring_pages + SCRATCH_PAGES
        self._free = [Seat(i * stride, self.ring_pages) for i in reversed(range(num_seats))]
        self._num_seats = num_seats
        self._taken: OrderedDict[str, Seat] = OrderedDict()  # longest unused first

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, requests: Sequence[Request]) -> list[Seat]:
        """A seat for each, with the keys that it had if it still has one."""
        assert len(requests) <= self._num_seats, (len(requests), self._num_seats)
        for request in requests:
            if request.request_id in self._taken:
                self._taken.move_to_end(request.request_id)
        return [self._seat(request) for request in requests]

    def _seat(self, request: Request) -> Seat:
        seat = self._taken.get(request.request_id)
        if seat is None:
            seat = self._free.pop() if self._free else self._taken.popitem(last=False)[1]
            self._taken[request.request_id] = seat
        if seat.request is not request:  # also where an id is used again
            seat.request, seat.computed = request, 0
        return seat

    def leave(self, request: Request) -> None:
        """The request needs no seat any more."""
        seat = self._taken.pop(request.request_id, None)
        if seat is not None:
            seat.request = None
            self._free.append(seat)

    def clear(self) -> None:
        """Forget all keys."""
        for seat in self._taken.values():
            seat.request = None
            self._free.append(seat)
        self._taken.clear()
