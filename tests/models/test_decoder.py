"""The decoder against transformers in fp32: every configuration, whole, in chunks, in a batch and as a tree."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.decoder import Decoder
from engine.models.layout import HEAD, TensorSource, expected_shapes
from engine.models.loader import open_checkpoint
from engine.models.workspace import _MAX_VIEWS
from engine.ops import resolve_ops
from engine.ops.reference import ReferenceOps
from tests.models.paged import PagedSequences
from tests.models.tiny import BASE, CASES, hf_forward, make_model, save

TOLERANCE = 1e-4
LENGTH = 45  # longer than windows, than a page, and than the original contexts of the scalings


def tokens(seed: int, count: int = LENGTH) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(BASE["vocab_size"]) for _ in range(count)]


def load(directory: Path, **options: Any) -> Decoder:
    checkpoint = open_checkpoint(directory)
    return Decoder(checkpoint.config, checkpoint.weights, ReferenceOps(), **options)


def max_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    return (found - expected).abs().max().item()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The plain tiny Llama of transformers and its directory."""
    model = make_model("llama", {})
    return model, save(model, tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    """Whole, in chunks, and beside other sequences, on the same files."""
    model = make_model(*CASES[case])
    decoder = load(save(model, tmp_path))
    ids = tokens(1)
    expected, hidden = hf_forward(model, ids)
    assert expected.std() > 0.3, "logits too small for the tolerance to mean something"

    whole = PagedSequences(decoder, [ids])
    out = whole.run([(0, 0, LENGTH)], tap_layers=(0, 2, 1))
    assert max_difference(out.logits, expected) <= TOLERANCE
    assert out.taps is not None
    assert out.hidden is not None
    for column, layer in enumerate((0, 2, 1)):
        assert max_difference(out.taps[:, column], hidden[layer]) <= TOLERANCE
    assert max_difference(out.hidden, hidden[-1]) <= TOLERANCE

    chunked = PagedSequences(decoder, [ids])
    start = 0
    for size in (7, 1, 16, 1, 20):
        logits = chunked.run([(0, start, start + size)]).logits
        assert max_difference(logits, expected[start : start + size]) <= TOLERANCE
        start += size

    others = [tokens(2, 20), ids, tokens(3, 33)]
    batched = PagedSequences(decoder, others)
    batched.run([(0, 0, 19), (2, 0, 4), (1, 0, 30)], [])
    logits = batched.run([(1, 30, 44), (2, 4, 33), (0, 19, 20)]).logits
    assert max_difference(logits[:14], expected[30:44]) <= TOLERANCE
    assert max_difference(logits[14:43], hf_forward(model, others[2])[0][4:]) <= TOLERANCE
    assert max_difference(logits[43:], hf_forward(model, others[0])[0][19:]) <= TOLERANCE
    logits = batched.run([(1, 44, 45)]).logits
    assert max_difference(logits, expected[44:]) <= TOLERANCE


@pytest.mark.parametrize("case", ["llama-biases", "llama-mqa", "qwen2-window", "qwen3-tied-bias"])
def test_the_backend_that_users_get_equals_transformers(case: str, tmp_path: Path) -> None:
    """Odd widths and head sizes through the packed weights of whatever "auto" chooses here."""
    model = make_model(*CASES[case])
    checkpoint = open_checkpoint(save(model, tmp_path))
    decoder = Decoder(checkpoint.config, checkpoint.weights, resolve_ops("auto", num_threads=1))
    ids = tokens(1)
    pages = PagedSequences(decoder, [ids])
    pages.run([(0, 0, 30)], [], tap_layers=(1,))
    logits = pages.run([(0, 30, LENGTH)], [14, 2]).logits
    assert max_difference(logits, hf_forward(model, ids)[0][[44, 32]]) <= TOLERANCE


@pytest.mark.parametrize("case", ["llama", "llama-mha-tied", "qwen2-window", "qwen3"])
def test_every_configuration_differs_from_its_neighbour(case: str, tmp_path: Path) -> None:
    """The test above can fail: the same files read with one property changed are far off."""
    family, changes = CASES[case]
    model = make_model(family, changes)
    save(model, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    config, ids = checkpoint.config, tokens(1)
    wrong = [
        replace(config, rms_norm_eps=config.rms_norm_eps * 1e5),
        replace(config, rope=replace(config.rope, theta=config.rope.theta * 2)),
    ]
    if any(config.windows):
        wrong.append(replace(config, windows=(0, 0, 0)))
        wrong.append(replace(config, windows=(9, 9, 9)))
        wrong.append(replace(config, windows=(0, 8, 8)))
    for changed in wrong:
        decoder = Decoder(changed, checkpoint.weights, ReferenceOps())
        logits = PagedSequences(decoder, [ids]).run([(0, 0, LENGTH)]).logits
        assert max_difference(logits, hf_forward(model, ids)[0]) > 100 * TOLERANCE


def test_every_tensor_matters(tmp_path: Path) -> None:
    """A weight that is loaded to the wrong place, or not used, would pass unseen if it did not."""
    model = make_model(*CASES["qwen3-tied-bias"])
    save(model, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    ids = tokens(1, 12)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != HEAD}
    assert state.keys() == expected_shapes(checkpoint.config).keys()
    expected, _ = hf_forward(model, ids)
    for name in state:
        if "layers.1" in name or name.endswith("k_proj.bias"):
            continue  # alike in each layer; a bias of k moves all scores of a row by much the same
        changed = state | {name: state[name] * 1.5 + 0.1}
        decoder = Decoder(checkpoint.config, changed, ReferenceOps())
        logits = PagedSequences(decoder, [ids]).run([(0, 0, 12)]).logits
        assert max_difference(logits, expected) > 10 * TOLERANCE, name


def test_tree_rows_see_their_ancestors_only(llama: tuple[Any, Path]) -> None:
    """A node's logits are those of its path as plain text, whatever its siblings hold."""
    model, directory = llama
    decoder = load(directory)
    prefix = tokens(4, 21)
    nodes = [(-1, 5), (0, 9), (0, 77), (1, 3), (2, 3), (-1, 8), (4, 60)]  # (parent, token)
    pages = PagedSequences(decoder, [prefix], room=len(nodes))
    pages.run([(0, 0, len(prefix))], [])

    paths: list[list[int]] = []  # node numbers from the root's child to the node
    for number, (parent, _) in enumerate(nodes):
        paths.append([*(paths[parent] if parent >= 0 else []), number])
    pages.sequences[0] += [token for _, token in nodes]
    batch = pages.batch([(0, len(prefix), len(prefix) + len(nodes))])
    slots = batch.slots.tolist()
    starts = [0]
    for path in paths:
        starts.append(starts[-1] + len(path))
    tree = replace(
        batch,
        positions=torch.tensor([len(prefix) + len(p) - 1 for p in paths], dtype=torch.int32),
        ctx_len=torch.full((len(nodes),), len(prefix), dtype=torch.int32),
        tail_start=torch.tensor(starts, dtype=torch.int32),
        tail_slots=torch.tensor([slots[n] for path in paths for n in path], dtype=torch.int32),
    )
    logits = decoder.forward(tree, pages.kv_cache).logits
    for number, path in enumerate(paths):
        text = prefix + [nodes[n][1] for n in path]
        assert max_difference(logits[number], hf_forward(model, text)[0][-1]) <= TOLERANCE


def test_logit_rows_are_given_in_the_order_asked(llama: tuple[Any, Path]) -> None:
    model, directory = llama
    decoder = load(directory)
    ids = tokens(5, 20)
    expected, hidden = hf_forward(model, ids)
    for rows in ([19], [3, 0, 19, 3], []):
        for want_hidden in (False, True):
            out = PagedSequences(decoder, [ids]).run([(0, 0, 20)], rows, want_hidden=want_hidden)
            assert out.logits.shape == (len(rows), BASE["vocab_size"])
            if rows:
                assert max_difference(out.logits, expected[rows]) <= TOLERANCE
            if want_hidden:
                assert out.hidden is not None
                assert max_difference(out.hidden, hidden[-1]) <= TOLERANCE
            else:
                assert out.hidden is None
            assert out.taps is None


def test_tap_behind_the_last_layer_is_not_normed(llama: tuple[Any, Path]) -> None:
    model, directory = llama
    ids = tokens(6, 9)
    last: list[torch.Tensor] = []
    handle = model.model.layers[-1].register_forward_hook(
        lambda module, inputs, output: last.append(output)
    )
    hf_forward(model, ids)
    handle.remove()
    out = PagedSequences(load(directory), [ids]).run([(0, 0, 9)], tap_layers=(3, 3))
    assert out.taps is not None
    assert max_difference(out.taps[:, 0], last[0][0]) <= TOLERANCE
    assert torch.equal(out.taps[:, 0], out.taps[:, 1])


def test_left_over_buffers_are_not_read(llama: tuple[Any, Path]) -> None:
    """A small step after a large one, and logits that outgrow their buffer, give what a fresh decoder gives."""
    _, directory = llama
    used, ids = load(directory), tokens(7, 40)
    PagedSequences(used, [ids]).run([(0, 0, 40)], tap_layers=(1, 2))
    for buffer in used._workspace._buffers:
        buffer.fill_(float("nan"))
    for count, rows in ((3, [2]), (40, list(range(40))), (1, [0])):
        found = PagedSequences(used, [ids]).run([(0, 0, count)], rows).logits.clone()
        fresh = PagedSequences(load(directory), [ids]).run([(0, 0, count)], rows).logits
        assert torch.equal(found, fresh)


def test_views_are_bounded_and_rows_checked(llama: tuple[Any, Path]) -> None:
    decoder = load(llama[1], max_rows=300)
    for rows in range(1, 300):
        decoder._workspace.rows(rows)
        decoder._workspace.logits(rows)
    assert len(decoder._workspace._views) == _MAX_VIEWS
    assert len(decoder._workspace._logit_views) <= _MAX_VIEWS
    with pytest.raises(AssertionError, match="301 rows, made for 300"):
        decoder._workspace.rows(301)


def test_bf16_is_fp32_of_rounded_weights_up_to_the_cache(tmp_path: Path) -> None:
    """Activations stay fp32: the only other rounding is that of stored keys and values."""
    model = make_model("qwen3", {"head_dim": 16}).bfloat16().float()
    decoder = load(save(model, tmp_path), dtype="bfloat16")
    assert decoder.kv_dtype == torch.bfloat16
    ids = tokens(8, 30)
    logits = PagedSequences(decoder, [ids]).run([(0, 0, 30)]).logits
    assert logits.dtype == torch.float32
    difference = max_difference(logits, hf_forward(model, ids)[0])
    assert TOLERANCE < difference < 0.05


def test_two_caches_interleave(llama: tuple[Any, Path]) -> None:
    decoder, ids = load(llama[1]), tokens(9, 18)
    first, second = PagedSequences(decoder, [ids]), PagedSequences(decoder, [ids[::-1]])
    whole = PagedSequences(decoder, [ids]).run([(0, 0, 18)], [17]).logits.clone()
    first.run([(0, 0, 17)], [])
    second.run([(0, 0, 18)], [])
    assert max_difference(first.run([(0, 17, 18)]).logits, whole) <= TOLERANCE


def test_load_weights_replaces_all_or_nothing(llama: tuple[Any, Path]) -> None:
    _, directory = llama
    decoder, ids = load(directory), tokens(10, 10)

    def logits() -> torch.Tensor:
        return PagedSequences(decoder, [ids]).run([(0, 0, 10)]).logits.clone()

    before = logits()
    other = make_model("llama", {}, seed=1)
    state = other.state_dict()
    broken = dict(state)
    broken["model.norm.weight"] = broken["model.norm.weight"][:-1]
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \[31\]"):
        decoder.load_weights(broken)
    assert torch.equal(logits(), before)

    decoder.load_weights(state.items())
    assert max_difference(logits(), hf_forward(other, ids)[0]) <= TOLERANCE
    with torch.no_grad():  # they were copied: a trainer may go on with its own
        for tensor in state.values():
            tensor.zero_()
    assert logits().abs().max() > 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("model.layers.1.mlp.up_proj.weight"), "1 tensors are missing.*up_proj"),
        (lambda s: s.pop(HEAD), "missing: lm_head.weight"),
        (lambda s: s.update({"model.extra": torch.ones(1)}), "unexpected tensors: model.extra"),
        (
            lambda s: s.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}),
            "unexpected tensors: .*q_proj.bias",
        ),
        (
            lambda s: s.update({"model.embed_tokens.weight": torch.ones(130, 32)}),
            r"embed_tokens.weight has shape \[130, 32\], the config says \[131, 32\]",
        ),
    ],
)
def test_wrong_tensors_are_refused(llama: tuple[Any, Path], change: Any, message: str) -> None:
    model, directory = llama
    state = dict(model.state_dict())
    change(state)
    with pytest.raises(ValueError, match=message):
        Decoder(open_checkpoint(directory).config, TensorSource(state), ReferenceOps())


def test_old_checkpoints_rotary_buffers_are_ignored(llama: tuple[Any, Path]) -> None:
    model, directory = llama
    state = dict(model.state_dict())
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    Decoder(open_checkpoint(directory).config, state, ReferenceOps())
