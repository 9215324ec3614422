"""Data are of a target by its weights: not by its path, and not of what lay there before."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from engine.models.load_threads import one_torch_thread
from engine.models.loader import open_checkpoint
from tests.conftest import ModelDirFactory
from tlt_train.evaluate import EvalOptions, evaluate
from tlt_train.fingerprint import check_data, fingerprint
from tlt_train.generate import DataOptions, generate_data
from tlt_train.sequence import TrainingSequence
from tlt_train.shards import ShardReader, ShardWriter
from tlt_train.train_data import read_sequences


@pytest.fixture
def target(make_model_dir: ModelDirFactory, tmp_path: Path) -> Path:
    """A directory of the test's own."""
    return Path(shutil.copytree(make_model_dir("llama", num_hidden_layers=4), tmp_path / "m"))


def change(target: Path, name: str) -> None:
    """A step of training: every number of a tensor a little other."""
    tensors = load_file(target / "model.safetensors")
    tensors[name] = tensors[name] * 1.001
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def of(target: Path | str) -> str:
    return fingerprint(open_checkpoint(str(target)))


@pytest.mark.parametrize(
    "name",
    [
        *("model.norm.weight", "model.layers.0.input_layernorm.weight"),
        *("model.layers.0.self_attn.v_proj.weight", "model.layers.2.self_attn.k_proj.weight"),
        *("model.layers.3.mlp.down_proj.weight", "model.layers.3.self_attn.q_proj.weight"),
    ],
)
def test_other_weights_have_another_fingerprint(target: Path, name: str) -> None:
    before = of(target)
    assert before == of(target)
    assert len(before) == 32
    change(target, name)
    assert of(target) != before


def test_another_config_has_another_fingerprint(
    target: Path, make_model_dir: ModelDirFactory
) -> None:
    """The same weights that turn positions in another way; where a text ends does not matter."""
    other = make_model_dir("llama", num_hidden_layers=4, rope_theta=5000.0)
    assert of(other) != of(target)
    before = of(target)
    (target / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert of(target) == before


def test_data_follow_the_weights_and_not_the_path(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "p.txt").write_text("\n".join(f"Q{i}" for i in range(12)))
    data, wanted = tmp_path / "data", DataOptions(prompts=str(tmp_path / "p.txt"), max_tokens=16)
    monkeypatch.chdir(tmp_path)
    with one_torch_thread():
        generate_data("m", data, wanted, show_progress=False, num_threads=1)
    assert ShardReader(data).meta.target_fingerprint == of(target)
    for same in ("m", "./m", str(target)):
        assert read_sequences([str(data)], same)[0]
    moved = tmp_path / "n"
    os.rename(target, moved)
    assert read_sequences([str(data)], "n")[0]
    os.rename(moved, target)
    change(target, "model.layers.1.self_attn.v_proj.weight")
    with pytest.raises(ValueError, match="data is of other weights than the target 'm' has now"):
        read_sequences([str(data)], "m")


def written(out: Path, target: Path, tokens: list[int], mark: str) -> ShardReader:
    with ShardWriter(
        out, tap_layers=(0, 1, 2), hidden_size=64, target=str(target), target_fingerprint=mark
    ) as writer:
        for number in range(2):
            ids = np.array(tokens if number else [1, 2, 3, 4], np.int32)
            features = np.zeros((len(ids), 4 * 64), np.uint16)
            writer.add(TrainingSequence(f"s{number}", 0, 2, ids, features, 0))
    return ShardReader(out)


@pytest.mark.parametrize("token", [-1, 10**6])
def test_a_token_outside_the_vocabulary_is_refused(
    target: Path, tmp_path: Path, token: int
) -> None:
    for mark in ("", of(target)):
        reader = written(tmp_path / f"d{len(mark)}", target, [5, token, 6], mark)
        with pytest.raises(ValueError, match=f"sequence 's1' has the token {token}, the target"):
            check_data(reader, str(target))
        with pytest.raises(ValueError, match="'s1'"):
            read_sequences([str(reader.directory)], str(target))


def test_data_without_a_fingerprint_go_by_the_name(target: Path, tmp_path: Path) -> None:
    reader = written(tmp_path / "d", target, [5, 6, 7], "")
    check_data(reader, str(target))
    shutil.copytree(target, tmp_path / "n")
    with pytest.raises(ValueError, match=f"is of the target '{target}', not of '{tmp_path / 'n'}'"):
        check_data(reader, str(tmp_path / "n"))


def test_an_evaluation_on_data_of_other_weights_is_refused(
    target: Path, tmp_path: Path, make_model_dir: ModelDirFactory
) -> None:
    from engine.models.eagle_checkpoint import save_drafter
    from engine.models.eagle_init import drafter_config, random_drafter

    model = open_checkpoint(str(target)).config
    config = drafter_config(model, "eagle")
    save_drafter(tmp_path / "head", config, random_drafter(config), target=model)
    options: dict[str, Any] = {"temperatures": (0.0,), "rounds": 0, "max_tokens": 4, "depth": 1}
    for name, ids, mark, message in (
        ("stale", [5, 6, 7], "0" * 32, "is of other weights than the target"),
        ("wild", [5, 6, 10**6], of(target), "sequence 's1' has the token 1000000"),
    ):
        written(tmp_path / name, target, ids, mark)
        wanted = EvalOptions(data=str(tmp_path / name), **options)
        with pytest.raises(ValueError, match=message):
            evaluate(str(target), str(tmp_path / "head"), wanted, num_threads=1)
