"""The network of EAGLE heads against plain torch, and what its weights may and may not be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.batch import PAGE
from engine.models.decoder import Decoder
from engine.models.eagle import EagleNetwork
from engine.models.eagle_layout import EagleConfig
from tests.conftest import tiny_config, tiny_weights
from tests.models.eagle_oracle import CASES, Oracle, one_sequence, tiny_head, tiny_target


def make(kind: str, changes: dict[str, Any], **more: Any) -> tuple[Any, ...]:
    """(target, config, tensors, network) with a KV cache of its own."""
    target = tiny_target(num_hidden_layers=7)
    size = None if kind == "eagle" or changes.get("own_head") is False else 200
    config, tensors = tiny_head(target.config, kind, draft_vocab_size=size, **changes)
    network = EagleNetwork(config, tensors, target, max_rows=64, **more)
    shape = (2, 8, PAGE, config.num_kv_heads, config.head_dim)
    cache = torch.full(shape, float("nan"))
    network.attach_kv_cache(cache[0], cache[1])
    return target, config, tensors, network


def oracle_of(target: Decoder, config: EagleConfig, tensors: dict[str, Tensor]) -> Oracle:
    raw = tiny_weights(tiny_config("llama", num_hidden_layers=7), 0)
    return Oracle(config, tensors, raw["model.embed_tokens.weight"], raw["lm_head.weight"])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("window", [0, 7])
def test_a_pass_and_two_levels_match_plain_torch(case: str, window: int) -> None:
    """Rows of the past, then two rows fed back one behind the other, over all positions and over a window."""
    target, config, tensors, network = make(*CASES[case])
    generator = torch.Generator().manual_seed(1)
    count, depth = 20, 2
    features = torch.randn(count, config.feature_width, generator=generator)
    tokens = torch.randint(config.vocab_size, (count + depth,), generator=generator).tolist()
    expected = oracle_of(target, config, tensors)

    def visible(row: int) -> range:
        return range(max(0, row + 1 - window) if window else 0, row)

    found = [expected.row(features[r], tokens[r], r, visible(r)) for r in range(count)]
    batch = one_sequence(tokens[:count], 0)
    network.store(batch, features)
    views = network.workspace.rows(count)
    logits, hidden = network.attend(batch, views.q, views.x, window)
    torch.testing.assert_close(logits, torch.stack([f[0] for f in found]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden, torch.stack([f[1] for f in found]), rtol=1e-5, atol=1e-5)

    fed, tail = hidden[-1:].clone(), []
    last = found[-1][1]
    for level in range(depth):
        row = count + level
        logit, last = expected.row(last, tokens[row], row, visible(row), fed_back=True)
        tail.append(5 * PAGE + level)
        batch = one_sequence([tokens[row]], count, [tail])
        batch.positions.fill_(row)
        network.store(batch, fed, fed_back=True)
        views = network.workspace.rows(1)
        logits, hidden = network.attend(batch, views.q, views.x, window)
        torch.testing.assert_close(logits[0], logit, rtol=2e-5, atol=2e-5)
        fed = hidden.clone()


def run(network: EagleNetwork, start: int = 0) -> Tensor:
    """Logits behind five fixed rows."""
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(5, network.config.feature_width, generator=generator)
    batch = one_sequence([3, 1, 4, 1, 5], 0)
    batch.positions.add_(start)
    network.store(batch, features)
    views = network.workspace.rows(5)
    return network.attend(batch, views.q, views.x, 0)[0].clone()


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_every_prefix_of_the_field_is_read(kind: str) -> None:
    _, _, tensors, network = make(kind, {})
    expected = run(network)
    for prefix in ("layers.0.", "model.layers.0.", "model.midlayer."):
        renamed = {name.replace("midlayer.", prefix): t for name, t in tensors.items()}
        renamed["model.fc.weight"] = renamed.pop("fc.weight")
        renamed[prefix + "self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        network.flip(network.stage(renamed))
        assert torch.equal(run(network), expected)
    both = tensors | {n.replace("midlayer.", "layers.0."): t for n, t in tensors.items()}
    with pytest.raises(ValueError, match="another name are both midlayer"):
        network.stage(both)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_an_update_of_the_target_reaches_what_is_shared(kind: str) -> None:
    """The old embedding or head in the drafter would halve its acceptance, and nothing would say so."""
    target, config, tensors, network = make(kind, {})
    before = run(network)
    new = tiny_weights(tiny_config("llama", num_hidden_layers=7), 77)
    target.load_weights(new)
    after = run(network)
    assert not torch.equal(before, after)
    fresh = EagleNetwork(config, tensors, target, max_rows=64)
    cache = torch.zeros(2, 8, PAGE, config.num_kv_heads, config.head_dim)
    fresh.attach_kv_cache(cache[0], cache[1])
    assert torch.equal(after, run(fresh))


def test_an_embedding_is_kept_only_where_it_differs() -> None:
    target, _, tensors, network = make("eagle3", {})
    shared = target.weights.embedding
    network.flip(network.stage(tensors | {"embed_tokens.weight": shared.clone()}))
    assert network.weights.embedding is None
    before = run(network)
    other = shared + 0.5
    network.flip(network.stage(tensors | {"embed_tokens.weight": other}))
    changed = run(network)
    assert not torch.equal(before, changed)
    other.zero_()  # tensors are copied
    assert torch.equal(run(network), changed)
    network.flip(network.stage(tensors))  # an update without one keeps the one in use
    assert torch.equal(run(network), changed)


def test_an_update_may_leave_out_the_vocabulary() -> None:
    _, _, tensors, network = make("eagle3", {})
    kept = network.weights.target_ids
    assert kept is not None
    network.flip(network.stage({n: t for n, t in tensors.items() if n != "d2t"}))
    assert network.weights.target_ids is kept


def test_it_runs_far_beyond_what_it_was_trained_for() -> None:
    """A rotary table as short as the head's own context is an assert in one mode and garbage in the other."""
    target, config, tensors, network = make(
        "eagle3", {"max_position_embeddings": 64}, max_positions=4096
    )
    oracle = oracle_of(target, config, tensors)
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(5, config.feature_width, generator=generator)
    for row, token in enumerate([3, 1, 4, 1, 5]):
        expected = oracle.row(features[row], token, 4090 + row, range(row))[0]
    found = run(network, 4090)[-1]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


REFUSED: dict[str, tuple[Any, str]] = {
    "missing": (lambda t: t.pop("fc.weight"), "1 tensors of an eagle3 head are missing: fc.weight"),
    "shape": (
        lambda t: t.update({"norm.weight": torch.ones(3)}),
        r"norm.weight has shape \[3\], expected \[64\]",
    ),
    "extra": (lambda t: t.update({"layers.1.x": torch.ones(1)}), "do not belong .*layers.1.x"),
    "nan": (
        lambda t: t["midlayer.mlp.up_proj.weight"].view(-1)[3].fill_(float("nan")),
        "midlayer.mlp.up_proj.weight holds values that are not finite",
    ),
    "finite-in-float64": (
        lambda t: t.update(
            {"fc.weight": torch.full_like(t["fc.weight"], 1e39, dtype=torch.double)}
        ),
        "fc.weight holds values that are not finite in torch.float32",
    ),
    "norm-finite-in-float64": (
        lambda t: t.update({"norm.weight": torch.full((64,), -1e39, dtype=torch.double)}),
        "norm.weight holds values that are not finite in torch.float32",
    ),
    "sparse": (
        lambda t: t.update({"fc.weight": t["fc.weight"].to_sparse()}),
        "fc.weight must be a dense tensor, got torch.sparse_coo",
    ),
    "sparse-map": (
        lambda t: t.update({"d2t": t["d2t"].to_sparse()}),
        "d2t must be a dense tensor, got torch.sparse_coo",
    ),
    "kind": (lambda t: t.update({"fc.weight": [1.0]}), "fc.weight must be a tensor"),
    "integers": (
        lambda t: t.update({"fc.weight": t["fc.weight"].long()}),
        "fc.weight must be floating point, got torch.int64",
    ),
    "map": (lambda t: t["d2t"][-1].fill_(320), r"d2t .* leads to ids \d+\.\.519, the target's"),
    "map-twice": (
        lambda t: t["d2t"].copy_(-torch.arange(200)),
        "d2t maps two draft ids to one target id",
    ),
    "map-floats": (lambda t: t.update({"d2t": t["d2t"].float()}), "d2t must hold integers"),
    "flags": (
        lambda t: t.update({"t2d": torch.zeros(320, dtype=torch.bool)}),
        "t2d does not flag the target ids",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_and_changes_nothing(case: str) -> None:
    _, _, tensors, network = make("eagle3", {})
    before = run(network)
    spoil, message = REFUSED[case]
    bad = {name: tensor.clone() for name, tensor in tensors.items()}
    spoil(bad)
    with pytest.raises(ValueError, match=message):
        network.stage(bad)
    assert torch.equal(run(network), before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 400}, "its vocab_size is 400, the target's is 320"),
        ({"target_hidden_size": 32}, "its target_hidden_size is 32, the target's is 64"),
        ({"tap_layers": (1, 4, 8)}, r"layers \[1, 4, 8\], of which \[8\] are not among .*0\.\.7"),
        ({"draft_vocab_size": 321}, "draft_vocab_size 321 is more than the vocabulary of 320"),
        ({"own_head": False, "draft_vocab_size": 200}, "has no lm_head, and the target's does not"),
    ],
)
def test_a_head_of_another_target_is_refused(changes: dict[str, Any], message: str) -> None:
    target = tiny_target(num_hidden_layers=7)
    config, tensors = tiny_head(target.config, "eagle3")
    with pytest.raises(ValueError, match=message):
        EagleNetwork(replace(config, **changes), tensors, target)


def test_a_narrow_head_needs_an_embedding() -> None:
    target = tiny_target(num_hidden_layers=7)
    config, tensors = tiny_head(target.config, "eagle3", hidden_size=32)
    del tensors["embed_tokens.weight"]
    with pytest.raises(ValueError, match=r"embed_tokens.weight is missing, and the target's does"):
        EagleNetwork(config, tensors, target)
