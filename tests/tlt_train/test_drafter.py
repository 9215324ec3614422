"""The head with gradients against plain torch, row by row, and against the engine's own network; leaks; alignment."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.batch import PAGE, ForwardBatch
from engine.models.eagle import EagleNetwork
from tests.models.eagle_oracle import CASES as HEADS
from tests.models.eagle_oracle import Oracle, ints, one_sequence, tiny_target
from tests.tlt_train.heads import (
    HIDDEN,
    TAPS,
    embedding_and_head,
    make_batch,
    make_head,
    make_network,
    make_sequence,
)
from tlt_train.attention import ActiveRun
from tlt_train.drafter import DrafterNetwork, UnrollStep
from tlt_train.packing import PackedBatch

DEPTH = 5
CASES = HEADS | {"eagle-own-head": ("eagle", {"own_head": True})}


def feature_rows(network: DrafterNetwork, batch: PackedBatch) -> Tensor:
    return (batch.hidden if network.config.kind == "eagle" else batch.taps).float()


def expected_rows(
    network: DrafterNetwork,
    tensors: dict[str, Tensor],
    batch: PackedBatch,
    run: ActiveRun,
    last: int,
) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
    """(depth, row of the batch) -> (logits, what the next depth reads), by the oracle; ``last`` of the document."""
    window, features = network.window, feature_rows(network, batch)
    oracle = Oracle(network.config, tensors, *embedding_and_head())
    tokens, positions = batch.token_ids.tolist(), batch.positions.tolist()
    found: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def in_window(here: int, others: list[tuple[int, int]]) -> list[int]:
        return [index for index, there in others if not window or here - there < window]

    past: list[tuple[int, int]] = []  # (index in the oracle, position)
    for row in range(run.first, last):
        at = positions[row]
        found[0, row] = oracle.row(features[row], tokens[row + 1], at, in_window(at, past))
        past.append((row - run.first, at))
    for row in range(run.begin, run.end):
        seen = past[: row - run.first + 1]
        for depth in range(1, DEPTH):
            if row + depth >= last:
                break
            at = positions[row] + depth
            fed = found[depth - 1, row][1]
            found[depth, row] = oracle.row(
                fed, tokens[row + depth + 1], at, in_window(at, seen), fed_back=True
            )
            seen = [*seen, (len(oracle.keys) - 1, at)]
    return found


def runs_of(batch: PackedBatch, begins: tuple[int, ...]) -> tuple[ActiveRun, ...]:
    ends = zip(batch.doc_starts, batch.doc_starts[1:], begins, strict=False)
    return tuple(ActiveRun(first, first + begin, end - 1) for first, end, begin in ends)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("window", [0, 6])
@torch.no_grad()
def test_every_row_of_every_step_is_that_of_plain_torch(case: str, window: int) -> None:
    kind, changes = CASES[case]
    _, tensors = make_head(kind, **changes)
    network = make_network(kind, window=window, **changes)
    batch = make_batch(
        make_sequence("a", 9), make_sequence("b", 2), make_sequence("c", 11, start=37)
    )
    runs = runs_of(batch, (2, 0, 0))
    expected = [
        expected_rows(network, tensors, batch, run, end - 1)
        for run, end in zip(runs, batch.doc_starts[1:], strict=True)
    ]
    num_compared = 0
    for step in network.unroll(batch, runs, DEPTH):
        active = [r for run in runs for r in range(run.begin, run.end)]
        rows = [active[i] for i in step.rows.tolist()]
        wanted = [r for run in runs for r in range(run.begin, run.end) if r + step.depth < run.end]
        assert rows == wanted
        assert step.teacher_rows.tolist() == [r + 1 + step.depth for r in rows]
        for i, row in enumerate(rows):
            logits = next(e for e in expected if (step.depth, row) in e)[step.depth, row][0]
            torch.testing.assert_close(step.logits[i], logits, rtol=1e-4, atol=3e-5)
            num_compared += 1
    assert num_compared == sum(max(n - u, 0) for n in (6, 1, 10) for u in range(DEPTH))


def test_an_embedding_of_its_own_is_read() -> None:
    config, tensors = make_head("eagle3")
    own = torch.randn(320, HIDDEN, generator=torch.Generator().manual_seed(8))
    batch = make_batch(make_sequence("a", 6))
    runs = runs_of(batch, (0,))
    network = DrafterNetwork(
        config, tensors | {"embed_tokens.weight": own}, embedding_and_head()[0], window=0
    )
    expected = expected_rows(network, tensors | {"embed_tokens.weight": own}, batch, runs[0], 5)
    steps = list(network.unroll(batch, runs, 2))
    for step in steps:
        for i, row in enumerate(step.rows.tolist()):
            torch.testing.assert_close(
                step.logits[i], expected[step.depth, row][0], rtol=1e-4, atol=3e-5
            )
    assert torch.equal(network.tensors()["embed_tokens.weight"], own)
    assert "embed_tokens.weight" not in network.parameters


class EngineRows:
    """The engine's network over one document: rows of the past, then all chains a level at a time."""

    def __init__(self, network: DrafterNetwork, tensors: dict[str, Tensor]) -> None:
        target = tiny_target(num_hidden_layers=7)
        self.window = network.window
        self.engine = EagleNetwork(network.config, tensors, target, max_rows=64)
        config = network.config
        cache = torch.full((2, 8, PAGE, config.num_kv_heads, config.head_dim), float("nan"))
        self.engine.attach_kv_cache(cache[0], cache[1])

    def first(self, features: Tensor, tokens: list[int]) -> tuple[Tensor, Tensor]:
        batch = one_sequence(tokens, 0)
        self.engine.store(batch, features)
        return self._attend(batch, len(tokens))

    def deeper(
        self, fed: Tensor, tokens: list[int], rows: list[int], depth: int
    ) -> tuple[Tensor, Tensor]:
        tails = [[2 * PAGE + row * DEPTH + d for d in range(depth)] for row in rows]
        batch: ForwardBatch = one_sequence(tokens, 0, tails)
        batch.positions.copy_(ints([row + depth for row in rows]))
        batch.ctx_len.copy_(ints([row + 1 for row in rows]))
        self.engine.store(batch, fed, fed_back=True)
        return self._attend(batch, len(rows))

    def _attend(self, batch: ForwardBatch, count: int) -> tuple[Tensor, Tensor]:
        views = self.engine.workspace.rows(count)
        logits, hidden = self.engine.attend(batch, views.q, views.x, self.window)
        return logits.clone(), hidden.clone()


@pytest.mark.parametrize("case", ["eagle", "eagle-biases", "eagle3", "eagle3-norm-output"])
@pytest.mark.parametrize("window", [0, 6])
@torch.no_grad()
def test_training_and_inference_are_one_function(case: str, window: int) -> None:
    kind, changes = CASES[case]
    _, tensors = make_head(kind, **changes)
    network = make_network(kind, window=window, **changes)
    batch = make_batch(make_sequence("a", 13))
    engine = EngineRows(network, tensors)
    tokens, last = batch.token_ids.tolist(), 12
    logits, fed = engine.first(feature_rows(network, batch)[:last], tokens[1:])
    for step in network.unroll(batch, runs_of(batch, (0,)), DEPTH):
        rows = step.rows.tolist()
        if step.depth:
            nexts = [tokens[row + step.depth + 1] for row in rows]
            logits, fed = engine.deeper(fed[: len(rows)], nexts, rows, step.depth)
        torch.testing.assert_close(step.logits, logits[: len(rows)], rtol=1e-4, atol=3e-5)


def logits_of(network: DrafterNetwork, batch: PackedBatch) -> list[UnrollStep]:
    return list(network.unroll(batch, runs_of(batch, (0,) * batch.num_docs), DEPTH))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_no_document_reads_another(kind: str) -> None:
    """Not even the row behind a document's last, and not even NaN."""
    network = make_network(kind)
    a, c = make_sequence("a", 8), make_sequence("c", 6)
    found = []
    for b in (make_sequence("b", 7), make_sequence("d", 7)):
        if found:
            b.features[:] = 0x7FC0  # NaN
        batch = make_batch(a, b, c)
        for step in logits_of(network, batch):
            rows = torch.cat([torch.arange(0, 7), torch.arange(13, 18)])
            kept = torch.isin(step.rows, rows)
            found.append(step.logits[kept])
    for one, other in zip(found[:DEPTH], found[DEPTH:], strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, other)


@torch.no_grad()
def test_a_row_reads_no_later_feature_and_no_token_but_the_next() -> None:
    network = make_network()
    one, other = make_sequence("a", 10), make_sequence("a", 10)
    other.token_ids[6:] = (other.token_ids[6:] + 1) % 320
    other.features[5:] = make_sequence("z", 5).features
    before, after = (logits_of(network, make_batch(s))[0].logits for s in (one, other))
    assert torch.equal(before[:5], after[:5])  # rows up to 4: features up to 4, tokens up to 5
    assert not torch.isclose(before[5:], after[5:]).all(dim=1).any()


@torch.no_grad()
def test_chains_read_the_tokens_of_the_text() -> None:
    """Row p at depth u: tokens p + 1 .. p + 1 + u, and of features those up to p alone."""
    network = make_network()
    one, other = make_sequence("a", 10), make_sequence("a", 10)
    other.token_ids[7] = (other.token_ids[7] + 1) % 320
    for before, after in zip(
        logits_of(network, make_batch(one)), logits_of(network, make_batch(other)), strict=True
    ):
        reads = torch.tensor([row + before.depth + 1 >= 7 for row in before.rows.tolist()])
        assert torch.equal(before.logits[~reads], after.logits[~reads])
        assert not torch.isclose(before.logits[reads], after.logits[reads]).all(dim=1).any()


def test_depth_changes_nothing_before_it() -> None:
    network, batch = make_network(), make_batch(make_sequence("a", 9))
    runs = runs_of(batch, (0,))
    for short, long in zip(
        network.unroll(batch, runs, 2), network.unroll(batch, runs, 5), strict=False
    ):
        assert torch.equal(short.logits, long.logits)


def test_what_trains_and_what_does_not() -> None:
    config, tensors = make_head("eagle3")
    for train_head in (True, False):
        network = DrafterNetwork(config, tensors, *embedding_and_head(), train_head=train_head)
        assert ("lm_head.weight" in network.parameters) == train_head
        assert "d2t" not in network.parameters
        assert network.tensors().keys() == tensors.keys()
        batch = make_batch(make_sequence("a", 6))
        loss = sum(s.logits.square().sum() for s in logits_of(network, batch))
        assert isinstance(loss, Tensor)
        found = torch.autograd.grad(loss, list(network.parameters.values()))
        assert all(bool(g.any()) for g in found)
    ids = torch.arange(200) + tensors["d2t"]
    assert torch.equal(network.target_ids, ids)


def test_the_masters_are_copies_in_fp32() -> None:
    config, tensors = make_head("eagle3")
    rounded = {n: t.bfloat16() if t.is_floating_point() else t for n, t in tensors.items()}
    network = DrafterNetwork(config, rounded, *embedding_and_head(), dtype="bfloat16")
    assert {p.dtype for p in network.parameters.values()} == {torch.float32}
    rounded["fc.weight"].zero_()
    assert bool(network.parameters["fc.weight"].any())
    batch = make_batch(make_sequence("a", 6))
    exact = DrafterNetwork(config, tensors, *embedding_and_head())
    for found, expected in zip(logits_of(network, batch), logits_of(exact, batch), strict=True):
        assert found.logits.dtype is torch.bfloat16
        scale = expected.logits.std().item()
        torch.testing.assert_close(found.logits.float(), expected.logits, rtol=0, atol=0.2 * scale)


@pytest.mark.parametrize(
    ("spoil", "more", "message"),
    [
        ({"fc.weight": None}, {}, "fc.weight"),
        ({"d2t": None}, {}, "d2t is missing"),
        ({}, {"dtype": "float16"}, "dtype must be one of"),
    ],
)
def test_bad_heads_are_refused(spoil: dict[str, None], more: dict[str, Any], message: str) -> None:
    config, tensors = make_head("eagle3")
    kept = {n: t for n, t in tensors.items() if n not in spoil}
    with pytest.raises(ValueError, match=message):
        DrafterNetwork(config, kept, *embedding_and_head(), **more)


def test_what_the_target_must_give_is_asked_for() -> None:
    config, tensors = make_head("eagle")
    with pytest.raises(ValueError, match="head is missing"):
        DrafterNetwork(config, tensors, embedding_and_head()[0])
    config, tensors = make_head("eagle3", hidden_size=32)
    del tensors["embed_tokens.weight"]
    with pytest.raises(ValueError, match="the target's does not fit"):
        DrafterNetwork(config, tensors, *embedding_and_head())


def test_a_chain_longer_than_the_window_is_refused() -> None:
    network, batch = make_network(window=3), make_batch(make_sequence("a", 9))
    assert len(list(network.unroll(batch, runs_of(batch, (0,)), 4))) == 4
    with pytest.raises(ValueError, match="depth must be at most"):
        list(network.unroll(batch, runs_of(batch, (0,)), 5))


def test_points_stand_around_every_attention_and_before_every_head() -> None:
    network, batch = make_network(), make_batch(make_sequence("a", 9))
    seen: list[tuple[int, ...]] = []

    def point(x: Tensor) -> Tensor:
        seen.append(tuple(x.shape))
        return x

    list(network.unroll(batch, runs_of(batch, (0,)), 3, point=point))
    assert seen == [(8, HIDDEN)] * 9
    assert batch.taps.shape[1] == TAPS * HIDDEN
