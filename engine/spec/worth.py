"""What draft nodes are worth in one step: expected tokens per second against plain decoding.

Owns the arithmetic of a choice, given prices and chances; learns nothing and remembers nothing. Prices are in units
of a pass of one row (``TargetPrice.relative``), so the speed of the machine at the moment cancels out.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from engine.spec.price import TargetPrice
from engine.spec.tuner import Candidates

MIN_GAIN = 1.01  # over plain decoding: what is believed is not known better than this
_PATIENCE = 10  # nodes to look ahead where prices have steps (a vector unit's rows, a tile)
_SURE = 0.95
_PREFILL_ROWS = 192  # what a pass shared with prefill is taken to have, besides


class Node(NamedTuple):
    """A token that might be drafted."""

    survival: float  # P(the walk reaches it)
    request: int
    place: int  # in its request's chain, from 0


class Choice(NamedTuple):
    """How many of the likeliest nodes to verify, and tokens per second over those of plain decoding."""

    count: int
    gain: float


class Worth:
    """The worth of nodes in the step of ``batch``, at ``prices``."""

    def __init__(self, prices: TargetPrice, batch: Candidates) -> None:
        self._relative = prices.relative
        self._num = batch.num_decoding
        self._num_eligible = len(batch.requests)
        self._row_context = prices.context(batch.num_context) / batch.num_decoding
        self._has_prefill = batch.has_prefill
        self._base = self._num + (_PREFILL_ROWS if batch.has_prefill else 0)
        self._plain_rate = self._num / (self._relative(self._num) + self._num * self._row_context)

    def choose(self, survivals: Sequence[float], draft_price: float = 0.0) -> Choice:
        """The best number of nodes, likeliest first, where drafting them costs ``draft_price``."""
        if self._has_prefill:
            return self._choose_beside_prefill(survivals, draft_price)
        relative, base, row_context = self._relative, self._base, self._row_context
        fixed = base * row_context + draft_price
        tokens = float(self._num)
        best, best_rate = 0, self._plain_rate
        for count, survival in enumerate(survivals, 1):
            tokens += survival
            rate = tokens / (relative(base + count) + count * row_context + fixed)
            if rate > best_rate:
                best, best_rate = count, rate
            elif count - best > _PATIENCE:
                break
        return Choice(best, best_rate / self._plain_rate)

    def _choose_beside_prefill(self, survivals: Sequence[float], draft_price: float) -> Choice:
        """Prefill has to be done anyway: nodes pay if the rows that they add cost less than their tokens are worth."""
        gain, best, best_net = 0.0, 0, 0.0
        row_price = self._row_price_beside_prefill()
        for count, survival in enumerate(survivals, 1):
            gain += survival
            net = gain - self._plain_rate * (count * row_price + draft_price)
            if net > best_net:
                best, best_net = count, net
        return Choice(best, 1.0 + best_net / self._num)

    def _row_price_beside_prefill(self) -> float:
        """Of one more row among many: its share of such a pass at least, as where arithmetic is the limit."""
        share = self._relative(self._base) / self._base
        return max(self._slope_ahead(), share) + self._row_context

    def _slope_ahead(self) -> float:
        """Price of a row over the next few, steps evened out."""
        return (self._relative(self._base + _PATIENCE) - self._relative(self._base)) / _PATIENCE

    def most_nodes(self, max_nodes: int) -> int:
        """Nodes beyond which not even near-certain acceptance would pay; ``max_nodes`` of each request."""
        most = min(self._num_eligible * max_nodes, 4 * self._num + 64)
        if self._has_prefill:
            return most
        relative, base, row_context = self._relative, self._base, self._row_context
        best, best_rate = 0, MIN_GAIN * self._plain_rate
        for count in range(1, most + 1):
            rate = (self._num + _SURE * count) / (
                relative(base + count) + (base + count) * row_context
            )
            if rate > best_rate:
                best, best_rate = count, rate
            elif count - best > 4 * _PATIENCE:
                break
        return best

    def least_survival(self) -> float:
        """Survival below which no node pays: what its row costs, at the rate of plain decoding."""
        if self._has_prefill:
            return self._row_price_beside_prefill() * self._plain_rate
        relative, base = self._relative, self._base
        step = min(relative(base + 1) - relative(base), self._slope_ahead())
        return (step + self._row_context) * self._plain_rate


def likeliest(chains: Sequence[Sequence[float]], limit: int) -> list[Node]:
    """The likeliest nodes of all chains, at most ``limit``; a token never before the one it follows."""
    heap = [(-chain[0], request, 0) for request, chain in enumerate(chains) if chain]
    heapq.heapify(heap)
    order: list[Node] = []
    while heap and len(order) < limit:
        negative, request, place = heap[0]
        order.append(Node(-negative, request, place))
        if place + 1 < len(chains[request]):
            heapq.heapreplace(heap, (-chains[request][place + 1], request, place + 1))
        else:
            heapq.heappop(heap)
    return order


def choices(prices: TargetPrice, chain: Sequence[float]) -> dict[int, dict[str, float]]:
    """What would be chosen, by number of requests that are all worth ``chain``: tokens for each, and the gain."""
    found: dict[int, dict[str, float]] = {}
    for num in (1, 2, 4, 8, 16, 32):
        survivals = [node.survival for node in likeliest([chain] * num, 4 * num + 64)]
        choice = Worth(prices, Candidates((), (), num)).choose(survivals)
        found[num] = {"tokens_each": round(choice.count / num, 2), "gain": round(choice.gain, 3)}
    return found
