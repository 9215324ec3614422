"""HF directories: whole and sharded, with and without their side files, and every way in which they are damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.decoder import Decoder
from engine.models.layout import HEAD, TensorSource
from engine.models.loader import open_checkpoint
from engine.ops.reference import ReferenceOps
from tests.models.paged import PagedSequences
from tests.models.tiny import hf_forward, make_model, save

IDS = list(range(3, 23))


@pytest.fixture(scope="module")
def sharded_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("qwen2", {}), tmp_path_factory.mktemp("sharded"), max_shard_size="30KB")


@pytest.fixture
def sharded(sharded_dir: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(sharded_dir, tmp_path / "model")


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return save(make_model("llama", {"tie_word_embeddings": True}), tmp_path / "model")


def logits_of(directory: Path) -> torch.Tensor:
    checkpoint = open_checkpoint(directory)
    decoder = Decoder(checkpoint.config, checkpoint.weights, ReferenceOps())
    return PagedSequences(decoder, [IDS]).run([(0, 0, len(IDS))]).logits


def test_shards_equal_transformers(sharded_dir: Path) -> None:
    assert len(list(sharded_dir.glob("*.safetensors"))) > 3
    expected, _ = hf_forward(make_model("qwen2", {}), IDS)
    assert (logits_of(sharded_dir) - expected).abs().max() <= 1e-4


def test_generation_config_and_absent_tokenizer(single: Path) -> None:
    (single / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    checkpoint = open_checkpoint(str(single))
    assert checkpoint.config.eos_token_ids == (5, 6, 2)
    assert checkpoint.tokenizer is None
    (single / "generation_config.json").unlink()
    assert open_checkpoint(single).config.eos_token_ids == (2,)


def test_tied_head_follows_the_file(single: Path, caplog: pytest.LogCaptureFixture) -> None:
    """transformers unties a head that differs from the embedding it is said to be tied to; so do we."""
    weights = load_file(single / "model.safetensors")
    plain = logits_of(single).clone()
    save_file(
        weights | {HEAD: weights["model.embed_tokens.weight"].clone()}, single / "model.safetensors"
    )
    assert open_checkpoint(single).config.tied_head
    assert torch.equal(logits_of(single), plain)
    save_file(
        weights | {HEAD: 2 * weights["model.embed_tokens.weight"]}, single / "model.safetensors"
    )
    assert not open_checkpoint(single).config.tied_head
    assert "untied" in caplog.text
    torch.testing.assert_close(logits_of(single), 2 * plain)


def test_a_file_that_is_overwritten_later_changes_nothing(single: Path) -> None:
    """A trainer saves over the checkpoint it gave us; mapped weights would change under our feet."""
    checkpoint = open_checkpoint(single)
    decoder = Decoder(checkpoint.config, checkpoint.weights, ReferenceOps())
    before = PagedSequences(decoder, [IDS]).run([(0, 0, len(IDS))]).logits.clone()
    path = single / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 3)
        file.write(b"\x41" * (path.stat().st_size // 3))
    after = PagedSequences(decoder, [IDS]).run([(0, 0, len(IDS))]).logits
    assert torch.equal(before, after)


def cut(name: str, share: float) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        path = next(directory.glob(name))
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * share)])

    return damage


def write(name: str, text: str) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        (directory / name).write_text(text)

    return damage


def remove(name: str) -> Callable[[Path], None]:
    return lambda directory: next(directory.glob(name)).unlink()


def edit_json(name: str, change: Callable[[dict], object]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        value = json.loads((directory / name).read_text())
        change(value)
        (directory / name).write_text(json.dumps(value))

    return damage


def directory_at(name: str) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        (directory / name).mkdir()

    return damage


def edit_shard(shard: object) -> Callable[[Path], None]:
    def change(index: dict) -> None:
        index["weight_map"]["model.norm.weight"] = shard

    return edit_json("model.safetensors.index.json", change)


def add_ghost(index: dict) -> None:
    index["weight_map"]["model.ghost"] = next(iter(index["weight_map"].values()))


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove("config.json"), "config.json does not exist"),
        (cut("config.json", 0.5), "config.json is not valid JSON"),
        (write("config.json", "[1]"), "config.json holds a list"),
        (write("config.json", "\x80"), "config.json"),
        (cut("model-00002*", 0.6), "model-00002.*safetensors is damaged or cut short"),
        (cut("model-00002*", 0.0), "model-00002.*safetensors is damaged or cut short"),
        (write("model-00001-of-00001.safetensors", "x"), ""),
        (remove("model-00003*"), "model-00003.* does not exist, but .*index.json lists it"),
        (cut(INDEX, 0.5), "index.json is not valid JSON"),
        (write(INDEX, "{}"), "index.json has no weight_map"),
        (remove(INDEX), "has neither model.safetensors nor"),
        (edit_json(INDEX, add_ghost), "lacks tensor model.ghost that .*index.json lists"),
        (edit_json("config.json", lambda v: v.update(hidden_size=64)), "tensor model.embed_tokens"),
        (edit_json("config.json", lambda v: v.update(num_hidden_layers=4, layer_types=None)), "tensors are missing: model.layers.3"),
        (edit_json("config.json", lambda v: v.update(num_hidden_layers=2, layer_types=None)), "unexpected tensors: model.layers.2"),
        (edit_json("config.json", lambda v: v.update(architectures=["GPT2LMHeadModel"])), "config.json: architecture GPT2LMHeadModel"),
        (write("generation_config.json", "{"), "generation_config.json is not valid JSON"),
        (write("tokenizer.json", "{}"), "tokenizer.json is damaged"),
        (directory_at("config.json"), "config.json cannot be read"),
        (directory_at("generation_config.json"), "generation_config.json cannot be read"),
        (directory_at("tokenizer.json"), "tokenizer.json is damaged"),
        (write("config.json", "[" * 100_000), "config.json is not valid JSON"),
        (write("generation_config.json", "[]"), "generation_config.json holds a list"),
        (write("generation_config.json", '{"eos_token_id": "2"}'), "generation_config.json: eos_token_id must be"),
        (edit_shard(None), "index.json: weight_map names no file for tensor model.norm.weight, but None"),
        (edit_shard(5), "weight_map names no file for tensor model.norm.weight, but 5"),
        (edit_shard(["a"]), "weight_map names no file for tensor model.norm.weight"),
        (edit_shard("x" * 5000), "is damaged .*name too long"),
        (edit_json("config.json", lambda v: v.update(num_hidden_layers=10**12, layer_types=None)), "config.json: num_hidden_layers"),
        (edit_json("config.json", lambda v: v.update(num_hidden_layers=9999, layer_types=None)), "config says 9999 layers, but there are .. tensors"),
    ],
)  # fmt: skip
def test_damage_is_named(sharded: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(sharded)
    if not message:  # a file that nothing refers to
        open_checkpoint(sharded)
        return
    with pytest.raises(ValueError, match=message) as caught:
        open_checkpoint(sharded)
    assert str(sharded) in str(caught.value), "the message names the file"


def test_quantised_tensors_are_refused(single: Path) -> None:
    weights = load_file(single / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.int8)
    save_file(weights, single / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight is of type I8; supported: F32"):
        open_checkpoint(single)


def test_unknown_names_say_what_is_possible(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'no/such' is no file or directory; give 'smollm2'"):
        open_checkpoint("no/such")
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        open_checkpoint(tmp_path)
    for name in ("x" * 100_000, "a\0b", "~nobody-of-that-name/model"):
        with pytest.raises(ValueError, match="give 'smollm2', an HF directory or a GGUF") as caught:
            open_checkpoint(name)
        assert len(str(caught.value)) < 1000


def test_tensors_that_are_none_are_refused() -> None:
    for weights, message in (
        ({"a": 5}, "weights must map names to tensors, got 'a': int"),
        ({5: torch.ones(1)}, "weights must map names to tensors, got 5: Tensor"),
        ([1, 2], "weights must be a dict name -> tensor or pairs"),
        ({"a": torch.ones(1, dtype=torch.int8)}, "tensor a is of torch.int8; give floating"),
        ({"a": torch.ones(1, device="meta")}, "tensor a has no data"),
    ):
        with pytest.raises(ValueError, match=message):
            TensorSource(weights)  # type: ignore[arg-type]
