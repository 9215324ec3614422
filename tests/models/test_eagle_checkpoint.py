"""EAGLE heads on disk: every layout of the field is read, what is written is read back, what does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.cli import main
from engine.config import ModelConfig
from engine.models import eagle_checkpoint as module
from engine.models.eagle_checkpoint import open_drafter, save_drafter, write_config
from engine.models.eagle_init import drafter_config, random_drafter
from engine.models.eagle_layout import default_taps
from tests.conftest import ModelDirFactory, tiny_config
from tests.models.eagle_oracle import tiny_head


def target_config(**overrides: Any) -> ModelConfig:
    return ModelConfig.from_hf(tiny_config("llama", num_hidden_layers=9, **overrides))


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"fc_bias": True, "qkv_bias": True, "o_bias": True, "mlp_bias": True, "num_kv_heads": 1}],
)
def test_what_is_written_is_read_back(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    target = target_config()
    config, tensors = tiny_head(
        target, kind, draft_vocab_size=100 if kind == "eagle3" else None, **changes
    )
    save_drafter(tmp_path / "head", config, tensors, target=target)
    found = open_drafter(tmp_path / "head", target)
    assert found.config == config
    flags = found.tensors.pop("t2d", None)
    assert same(found.tensors, tensors)
    if kind == "eagle3":
        assert flags is not None
        ids = torch.arange(100) + tensors["d2t"]
        assert flags.nonzero().flatten().tolist() == ids.tolist()


@pytest.mark.parametrize(
    "flag", ["norm_before_fc", "fc_norm", "norm_before_residual", "norm_output"]
)
def test_flags_are_read_back(tmp_path: Path, flag: str) -> None:
    target = target_config()
    config, tensors = tiny_head(target, "eagle3", tap_layers=(0, 5, 9), **{flag: True})
    save_drafter(tmp_path, config, tensors)
    assert open_drafter(tmp_path, target).config == config


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 16.0,
            "truncate": False,
        },
    ],
)
def test_rope_scalings_are_read_back(tmp_path: Path, rope: dict[str, Any]) -> None:
    target = target_config(rope_scaling=rope, rope_theta=500.0)
    config = drafter_config(target)
    save_drafter(tmp_path, config, random_drafter(config))
    assert open_drafter(tmp_path, target).config == config


def test_speculators_directories_are_read(tmp_path: Path) -> None:
    """Their layer has a config of its own, their ids are as vLLM's, their files carry the verifier's tensors."""
    target = target_config()
    config, tensors = tiny_head(
        target, "eagle3", draft_vocab_size=100, norm_before_residual=True, tap_layers=(1, 4, 6)
    )
    raw = write_config(config)
    own = ("draft_vocab_size", "target_hidden_size", "eagle_config", "architectures")
    own += ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")
    outer = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.2.0",
        "draft_vocab_size": 100,
        "target_hidden_size": None,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [1, 4, 6],
        "transformer_layer_config": {k: v for k, v in raw.items() if k not in own},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "x", "architectures": ["LlamaForCausalLM"]},
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(outer))
    renamed = {n.replace("midlayer.", "layers.0."): t for n, t in tensors.items()}
    renamed["verifier_norm.weight"] = torch.ones(64)
    save_file(renamed, tmp_path / "model.safetensors")
    found = open_drafter(tmp_path, target)
    assert found.config == config
    assert same(found.tensors, tensors)
    outer["speculators_model_type"] = "eagle"
    (tmp_path / "config.json").write_text(json.dumps(outer))
    with pytest.raises(ValueError, match="speculators_model_type 'eagle' is not supported"):
        open_drafter(tmp_path, target)


def test_shards_are_read(tmp_path: Path) -> None:
    target = target_config()
    config, tensors = tiny_head(target, "eagle3")
    names = sorted(tensors)
    files = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: tensors[n] for n in names if files[n] == file}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    (tmp_path / "config.json").write_text(json.dumps(write_config(config)))
    assert same(open_drafter(tmp_path, target).tensors, tensors)
    index.write_text(json.dumps({"weight_map": files | {"lost.weight": "model-0.safetensors"}}))
    with pytest.raises(ValueError, match=r"lists tensors that its files lack: lost.weight"):
        open_drafter(tmp_path, target)
    (tmp_path / "model-1.safetensors").write_bytes(b"\1" * 40)
    with pytest.raises(ValueError, match=r"model-1.safetensors is damaged"):
        open_drafter(tmp_path, target)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-1.safetensors does not exist"):
        open_drafter(tmp_path, target)


def test_tapped_layers_are_read_in_both_conventions(tmp_path: Path) -> None:
    """At the top level id i enters layer i; inside eagle_config it leaves layer i. One off halves acceptance."""
    target = target_config()
    config, tensors = tiny_head(target, "eagle3")
    save_drafter(tmp_path, config, tensors)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    assert (raw["eagle_aux_hidden_state_layer_ids"], default_taps(9)) == ([2, 4, 6], (2, 4, 6))
    assert raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    del raw["eagle_aux_hidden_state_layer_ids"]
    path.write_text(json.dumps(raw))
    assert open_drafter(tmp_path, target).config.tap_layers == (2, 4, 6)
    del raw["eagle_config"]
    path.write_text(json.dumps(raw))
    assert open_drafter(tmp_path, target).config.tap_layers == (2, 4, 6)
    raw["eagle_aux_hidden_state_layer_ids"] = [1, 4, 10]
    path.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"reads the inputs of layers .* which \[10\] are not"):
        open_drafter(tmp_path, target)


def test_eagle1_is_known_by_its_tensors_where_the_config_names_the_target(tmp_path: Path) -> None:
    target = target_config()
    for kind in ("eagle", "eagle3"):
        config, tensors = tiny_head(target, kind)
        save_drafter(tmp_path, config, tensors)
        path = tmp_path / "config.json"
        raw = json.loads(path.read_text())
        path.write_text(json.dumps(raw | {"architectures": ["LlamaForCausalLM"]}))
        assert open_drafter(tmp_path, target).config == config


@pytest.mark.parametrize("num_layers", range(1, 40))
def test_default_taps_lie_within_the_target(num_layers: int) -> None:
    taps = default_taps(num_layers)
    assert all(0 <= tap <= num_layers for tap in taps)
    assert list(taps) == sorted(taps)
    if num_layers >= 2:
        assert len(set(taps)) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers must be 1 for a drafter, got 2"),
        ({"vocab_size": 400}, "its vocab_size is 400, the target's is 320"),
        ({"target_hidden_size": 128}, "its target_hidden_size is 128, the target's is 64"),
        ({"hidden_size": 32}, "tensor fc.weight has shape .64, 192., expected .32, 96."),
        ({"norm_output": "yes"}, "norm_output must be true or false"),
        ({"eagle_aux_hidden_state_layer_ids": "2,4"}, "must be a list of layer numbers"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"fc_norm": True}, "3 tensors of an eagle3 head are missing: fc_norm.0.weight"),
        (
            {"architectures": ["LlamaForCausalLMEagle"]},
            "shape .64, 192., expected .64, 128. for an eagle",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    target = target_config()
    config, tensors = tiny_head(target, "eagle3")
    if change.get("hidden_size"):
        change = change | {"target_hidden_size": 32}
        target = target_config(hidden_size=32, head_dim=16)
    save_drafter(tmp_path, config, tensors)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message) as caught:
        open_drafter(tmp_path, target)
    assert str(tmp_path) in str(caught.value)


def test_no_drafter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no directory"):
        open_drafter(tmp_path / "none", target_config())
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama")))
    save_file({"model.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"this is no EAGLE head: there is no fc.weight"):
        open_drafter(tmp_path, target_config())


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_init_makes_a_head_for_any_target(
    make_model_dir: ModelDirFactory,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    family: str,
) -> None:
    directory = make_model_dir(family)
    arguments = ["drafter", "init", "--target", str(directory), "--kind", kind, "--seed", "3"]
    arguments += ["--output", str(tmp_path / "head")]
    if kind == "eagle3":
        arguments += ["--draft-vocab-size", "50"]
    assert main(arguments) == 0
    assert f"{kind} head of" in capsys.readouterr().out
    target = ModelConfig.from_hf(json.loads((directory / "config.json").read_text()))
    found = open_drafter(tmp_path / "head", target)
    assert found.config == drafter_config(
        target, kind, draft_vocab_size=50 if kind == "eagle3" else None
    )
    assert found.tensors["fc.weight"].dtype == torch.bfloat16
    assert main(arguments) == 2
    assert "exists and is not an empty directory" in capsys.readouterr().err


def test_init_refuses_what_cannot_be(
    tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["drafter", "init", "--target", str(tiny_llama_dir), "--output", str(tmp_path / "x")]
    assert main([*base, "--draft-vocab-size", "400"]) == 2
    assert "draft_vocab_size must be 1..320 for kind eagle3, got 400" in capsys.readouterr().err
    assert main([*base, "--kind", "eagle", "--draft-vocab-size", "50"]) == 2
    assert "draft_vocab_size must be 320 for kind eagle, got 50" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("at", ["save_file", "write_config", "fsync", "replace"])
def test_a_head_that_was_not_written_to_its_end_is_no_head(
    tmp_path: Path, at: str, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it ends, the directory has no config without whole tensors, and the next try writes it."""
    target = target_config()
    config, tensors = tiny_head(target, "eagle3")
    path = tmp_path / "head"
    if is_there:
        (path / "log").mkdir(parents=True)
    plain = module.os.replace
    count = 0

    def die(*given: object, **_: object) -> None:
        nonlocal count
        count += 1
        if at == "save_file":
            Path(str(given[1])).write_bytes(b"half")
        if at == "replace" and count == 1:
            plain(*given)  # type: ignore[arg-type]
            return
        raise KeyboardInterrupt

    owner = module.os if at in ("fsync", "replace") else module
    with monkeypatch.context() as patch:
        patch.setattr(owner, at, die)
        if at == "replace" and not is_there:
            patch.setattr(Path, "rename", lambda self, other: die_now())
        with pytest.raises(KeyboardInterrupt):
            save_drafter(path, config, tensors)
    assert path.exists() == is_there
    assert not (path / "config.json").exists()
    save_drafter(path, config, tensors)
    assert same(
        {n: t for n, t in open_drafter(path, target).tensors.items() if n != "t2d"}, tensors
    )
    assert {p.name for p in path.iterdir()} <= {"log", "config.json", "model.safetensors"}
    assert [p.name for p in tmp_path.iterdir()] == ["head"]


def die_now() -> None:
    raise KeyboardInterrupt


def test_what_a_killed_writer_left_is_no_hindrance(tmp_path: Path) -> None:
    config, tensors = tiny_head(target_config(), "eagle3")
    for place in (tmp_path / ".head.tmp", tmp_path / "other" / ".other.tmp"):
        place.mkdir(parents=True)
        (place / "model.safetensors").write_bytes(b"half")
    for name in ("head", "other"):
        save_drafter(tmp_path / name, config, tensors)
        assert {p.name for p in (tmp_path / name).iterdir()} == {"config.json", "model.safetensors"}
