"""Exports: every one is read back bit for bit and computes the same, has the published keys, and loses no tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.config import ModelConfig
from engine.models.eagle_checkpoint import open_drafter, save_drafter, write_config
from engine.models.loader import open_checkpoint
from tests.conftest import ModelDirFactory
from tests.models.eagle_oracle import Oracle, tiny_head
from tlt_train.export import FORMATS, export_drafter

NUM_LAYERS = 9

# What published directories have: RedHatAI's speculators (0.2 and 0.3) and SpecForge's and SGLang's EAGLE-3 configs.
# READ is what vLLM, SGLang and speculators look up: a missing one is a crash or, worse, a default.
LAYER_READ = {
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "vocab_size", "rms_norm_eps", "hidden_act"),
    *("rope_theta", "rope_scaling", "max_position_embeddings", "attention_bias", "mlp_bias"),
}
LAYER_KNOWN = LAYER_READ | {
    *("attention_dropout", "initializer_range", "pretraining_tp", "use_cache", "torch_dtype"),
}
SPECULATORS_READ = {
    *("architectures", "speculators_model_type", "speculators_version", "draft_vocab_size"),
    *("target_hidden_size", "norm_before_residual", "eagle_aux_hidden_state_layer_ids"),
    *("transformer_layer_config", "speculators_config", "torch_dtype"),
}
SPECULATORS_KNOWN = SPECULATORS_READ | {
    *("auto_map", "has_no_defaults_at_init", "transformers_version", "tie_word_embeddings"),
    *("norm_before_fc", "fc_norm", "norm_output", "embed_requires_grad"),
}
RAW_READ = LAYER_READ | {
    *("architectures", "draft_vocab_size", "tie_word_embeddings", "torch_dtype"),
    *("eagle_config", "eagle_aux_hidden_state_layer_ids"),
}
RAW_KNOWN = RAW_READ | {
    *("target_hidden_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
    *("bos_token_id", "eos_token_id", "attention_dropout", "initializer_range", "use_cache"),
    *("transformers_version", "max_window_layers", "sliding_window", "use_sliding_window"),
    "pad_token_id",
}
EAGLE_READ = (LAYER_READ - {"head_dim"}) | {"architectures", "torch_dtype", "bias"}


@pytest.fixture(scope="module")
def target(make_model_dir: ModelDirFactory) -> Path:
    return make_model_dir("llama", num_hidden_layers=NUM_LAYERS)


def a_drafter(target: Path, where: Path, kind: str, **changes: Any) -> dict[str, Tensor]:
    model = open_checkpoint(str(target)).config
    size = changes.pop("draft_vocab_size", 100 if kind == "eagle3" else None)
    config, tensors = tiny_head(model, kind, draft_vocab_size=size, **changes)
    save_drafter(where, config, tensors, target=model)
    return tensors


def model_of(target: Path) -> ModelConfig:
    return open_checkpoint(str(target)).config


def logits(directory: Path, target: Path) -> Tensor:
    """Of a plain-torch head over four rows and one more of its own hidden state."""
    found = open_drafter(directory, model_of(target))
    weights = load_file(target / "model.safetensors")
    oracle = Oracle(
        found.config,
        {n: t.float().clone() for n, t in found.tensors.items() if t.is_floating_point()},
        weights["model.embed_tokens.weight"].clone(),
        weights["lm_head.weight"].clone(),
    )
    features = torch.randn(
        4, found.config.feature_width, generator=torch.Generator().manual_seed(1)
    )
    out, hidden = torch.empty(0), torch.empty(0)
    for row in range(4):
        out, hidden = oracle.row(features[row], 3 * row + 5, row, range(row))
    fed_back, _ = oracle.row(hidden, 40, 4, range(4), fed_back=True)
    return torch.cat((out, fed_back))


CASES = [
    ("eagle3", "eagle3", {}),
    ("eagle3", "eagle3", {"draft_vocab_size": 320}),
    ("eagle3", "eagle3", {"fc_norm": True, "norm_output": True}),
    ("eagle3", "eagle3", {"tap_layers": (0, 4, 8)}),
    ("eagle3", "eagle3", {"hidden_size": 32, "num_q_heads": 2, "num_kv_heads": 1}),
    ("eagle3", "speculators", {}),
    ("eagle3", "speculators", {"draft_vocab_size": 320, "norm_before_residual": True}),
    ("eagle3", "speculators", {"fc_norm": True, "norm_output": True, "norm_before_fc": True}),
    ("eagle3", "speculators", {"qkv_bias": True, "o_bias": True, "mlp_bias": True}),
    ("eagle3", "speculators", {"hidden_size": 32, "num_q_heads": 2, "num_kv_heads": 1}),
    ("eagle", "eagle", {}),
    ("eagle", "eagle", {"fc_bias": True}),
]


@pytest.mark.parametrize(("kind", "format", "changes"), CASES, ids=str)
def test_an_export_is_read_back_and_computes_the_same(
    target: Path, tmp_path: Path, kind: str, format: str, changes: dict[str, Any]
) -> None:
    a_drafter(target, tmp_path / "head", kind, **changes)
    made = export_drafter(tmp_path / "head", tmp_path / "out", format=format, target=str(target))
    before, after = (open_drafter(tmp_path / d, model_of(target)) for d in ("head", "out"))
    assert before.config == after.config
    assert before.tensors.keys() == after.tensors.keys()
    for name, tensor in before.tensors.items():
        assert tensor.dtype == after.tensors[name].dtype, name
        assert torch.equal(tensor, after.tensors[name]), name
    assert torch.equal(logits(tmp_path / "head", target), logits(tmp_path / "out", target))
    assert made.num_tensors == len(after.tensors)
    assert made.added == ()
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["head", "out"]


def exported(target: Path, tmp_path: Path, format: str, **options: Any) -> dict[str, Any]:
    export_drafter(
        tmp_path / "head", tmp_path / "out", format=format, target=str(target), **options
    )
    return json.loads((tmp_path / "out" / "config.json").read_text())


def tensor_names(path: Path) -> set[str]:
    with safe_open(str(path / "model.safetensors"), framework="pt") as file:
        return set(file.keys())


def test_speculators_keys(target: Path, tmp_path: Path) -> None:
    a_drafter(target, tmp_path / "head", "eagle3", norm_before_residual=True)
    raw = exported(target, tmp_path, "speculators", verifier="org/model", num_speculative_tokens=3)
    assert SPECULATORS_READ <= raw.keys() <= SPECULATORS_KNOWN
    assert LAYER_READ <= raw["transformer_layer_config"].keys() <= LAYER_KNOWN
    assert raw["architectures"] == ["Eagle3Speculator"]
    assert raw["norm_before_residual"] is True
    assert raw["eagle_aux_hidden_state_layer_ids"] == [2, 4, 6]  # what enters them
    assert raw["draft_vocab_size"] == 100
    assert raw["transformer_layer_config"]["vocab_size"] == 320
    assert raw["speculators_config"] == {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "proposal_type": "greedy",
                "speculative_tokens": 3,
                "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            }
        ],
        "verifier": {"name_or_path": "org/model", "architectures": ["LlamaForCausalLM"]},
    }
    names = tensor_names(tmp_path / "out")
    assert {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"} <= names
    assert {n.split(".")[0] for n in names} == {"fc", "norm", "lm_head", "d2t", "t2d", "layers"}


def test_raw_eagle3_keys(target: Path, tmp_path: Path) -> None:
    a_drafter(target, tmp_path / "head", "eagle3")
    raw = exported(target, tmp_path, "eagle3")
    assert RAW_READ <= raw.keys() <= RAW_KNOWN
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"]
    assert raw["model_type"] == "llama"
    assert raw["tie_word_embeddings"] is False  # SGLang would use the embedding as head
    assert raw["eagle_aux_hidden_state_layer_ids"] == [2, 4, 6]  # vLLM: what enters them
    nested = raw["eagle_config"]  # SGLang: what leaves them
    assert nested == {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    names = tensor_names(tmp_path / "out")
    assert {n.split(".")[0] for n in names} == {"fc", "norm", "lm_head", "d2t", "t2d", "midlayer"}
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    ids = torch.arange(100) + tensors["d2t"]
    assert tensors["t2d"].nonzero().flatten().tolist() == ids.tolist()


def test_raw_eagle_keys(target: Path, tmp_path: Path) -> None:
    a_drafter(target, tmp_path / "head", "eagle", fc_bias=True)
    raw = exported(target, tmp_path, "eagle")
    assert raw.keys() >= EAGLE_READ
    assert raw["architectures"] == [
        "LlamaForCausalLMEagle",
        "EagleLlamaForCausalLM",
    ]  # SGLang, vLLM
    assert raw["bias"] is True
    names = tensor_names(tmp_path / "out")
    assert {n.split(".")[0] for n in names} == {"fc", "layers"}
    assert not any("input_layernorm" in n for n in names)


@pytest.mark.parametrize("format", ["eagle3", "speculators"])
def test_no_tied_tensor_is_lost(
    target: Path, tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One storage under several names, as a model in training has them: a writer may drop all but one."""
    tensors = a_drafter(target, tmp_path / "head", "eagle3", draft_vocab_size=320)
    found = open_drafter(tmp_path / "head", model_of(target))
    table = torch.randn(640, 64)
    found.tensors["lm_head.weight"] = table[:320]
    found.tensors["embed_tokens.weight"] = table[:320]  # tied to the head
    fused = torch.randn(2, 96, 64)
    found.tensors["midlayer.mlp.gate_proj.weight"] = fused[0]  # parts of one tensor
    found.tensors["midlayer.mlp.up_proj.weight"] = fused[1]
    norm = found.tensors["norm.weight"]
    found.tensors["midlayer.hidden_norm.weight"] = norm
    found.tensors["fc.weight"] = torch.randn(192, 64).T  # not contiguous
    monkeypatch.setattr("tlt_train.export.open_drafter", _first(found))
    export_drafter(tmp_path / "head", tmp_path / "out", format=format, target=str(target))
    after = open_drafter(tmp_path / "out", model_of(target)).tensors
    assert after.keys() == found.tensors.keys() == tensors.keys() | {"embed_tokens.weight", "t2d"}
    for name, tensor in found.tensors.items():
        assert torch.equal(after[name], tensor), name
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > table.nbytes


def _first(found: Any) -> Any:
    """``open_drafter`` that gives ``found`` the first time it is called."""
    left = [found]
    return lambda *a: left.pop() if left else open_drafter(*a)


@pytest.mark.parametrize("format", ["eagle3", "speculators"])
def test_a_head_that_uses_the_targets_lm_head_gets_it(
    target: Path, tmp_path: Path, format: str
) -> None:
    """Loaders would run with a random lm_head."""
    a_drafter(target, tmp_path / "head", "eagle3", draft_vocab_size=320, own_head=False)
    made = export_drafter(tmp_path / "head", tmp_path / "out", format=format, target=str(target))
    assert made.added == ("lm_head.weight",)
    weights = load_file(target / "model.safetensors")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], weights["lm_head.weight"])
    assert torch.equal(logits(tmp_path / "head", target), logits(tmp_path / "out", target))


def test_an_eagle_head_gets_no_lm_head(target: Path, tmp_path: Path) -> None:
    a_drafter(target, tmp_path / "head", "eagle")
    made = export_drafter(tmp_path / "head", tmp_path / "out", format="eagle", target=str(target))
    assert made.added == ()
    assert "lm_head.weight" not in tensor_names(tmp_path / "out")


def test_a_tie_that_loaders_read_in_different_ways_is_refused(target: Path, tmp_path: Path) -> None:
    tensors = a_drafter(target, tmp_path / "head", "eagle3", draft_vocab_size=320, own_head=False)
    tensors = tensors | {"embed_tokens.weight": torch.randn(320, 64)}
    save_file(tensors, tmp_path / "head" / "model.safetensors")
    path = tmp_path / "head" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    with pytest.raises(ValueError, match=r"store the embedding as lm_head\.weight"):
        export_drafter(tmp_path / "head", tmp_path / "out", format="eagle3", target=str(target))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", list(FORMATS))
@pytest.mark.parametrize("tied", [False, True])
def test_the_targets_embedding_comes_along(
    make_model_dir: ModelDirFactory, tmp_path: Path, format: str, tied: bool
) -> None:
    target = make_model_dir("llama", num_hidden_layers=NUM_LAYERS, tie_word_embeddings=tied)
    kind = "eagle" if format == "eagle" else "eagle3"
    own = {} if kind == "eagle" else {"draft_vocab_size": 320, "own_head": False}
    a_drafter(target, tmp_path / "head", kind, **own)
    made = export_drafter(
        tmp_path / "head", tmp_path / "out", format=format, target=str(target), with_embedding=True
    )
    weights = load_file(target / "model.safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert made.added[-1] == "embed_tokens.weight"
    assert torch.equal(found["embed_tokens.weight"], weights["model.embed_tokens.weight"])
    if tied and kind == "eagle3":
        assert torch.equal(found["lm_head.weight"], weights["model.embed_tokens.weight"])


@pytest.mark.parametrize("format", ["eagle3", "speculators"])
def test_dtypes(target: Path, tmp_path: Path, format: str) -> None:
    tensors = a_drafter(target, tmp_path / "head", "eagle3")
    raw = exported(target, tmp_path, format, dtype="bfloat16")
    assert raw["torch_dtype"] == "bfloat16"
    after = open_drafter(tmp_path / "out", model_of(target)).tensors
    for name, tensor in tensors.items():
        expected = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert torch.equal(after[name], expected), name


def test_what_a_dtype_cannot_hold_is_refused(target: Path, tmp_path: Path) -> None:
    model = model_of(target)
    config, tensors = tiny_head(model, "eagle3")
    tensors["fc.weight"][0, 0] = 1e6
    save_drafter(tmp_path / "head", config, tensors)
    with pytest.raises(ValueError, match=r"float16: fc\.weight has values beyond its range"):
        export_drafter(
            tmp_path / "head",
            tmp_path / "out",
            format="eagle3",
            target=str(target),
            dtype="float16",
        )


@pytest.mark.parametrize(
    ("kind", "format", "changes", "message"),
    [
        ("eagle", "eagle3", {}, "holds an eagle head; use --format eagle"),
        ("eagle", "speculators", {}, "holds an eagle head; use --format eagle"),
        ("eagle3", "eagle", {}, "holds an eagle3 head; use --format eagle3 or speculators"),
        ("eagle3", "eagle3", {"norm_before_residual": True}, "use --format speculators"),
        ("eagle3", "eagle3", {"norm_before_fc": True}, "use --format speculators"),
        ("eagle3", "eagle3", {"mlp_bias": True}, "its MLP bias would be dropped"),
        ("eagle3", "eagle3", {"fc_bias": True}, "its fc bias would be dropped"),
        ("eagle3", "speculators", {"fc_bias": True}, "its fc bias would be dropped"),
        ("eagle3", "speculators", {"qkv_bias": True}, "its q, k and v bias would be dropped"),
        ("eagle3", "speculators", {"qk_norm": True}, "its q and k norms have no place"),
        ("eagle3", "eagle3", {"tap_layers": (2, 5)}, "it reads 2 layers"),
        ("eagle3", "speculators", {"tap_layers": (2, 5, 9)}, "the output of the last layer"),
        ("eagle", "eagle", {"qkv_bias": True}, "its q, k and v bias would be dropped"),
        ("eagle", "eagle", {"own_head": True}, "an lm_head of its own"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(
    target: Path, tmp_path: Path, kind: str, format: str, changes: dict[str, Any], message: str
) -> None:
    a_drafter(target, tmp_path / "head", kind, **changes)
    with pytest.raises(ValueError, match=message):
        export_drafter(tmp_path / "head", tmp_path / "out", format=format, target=str(target))
    assert [p.name for p in tmp_path.iterdir()] == ["head"]


def test_biases_of_a_qwen2_layer_belong_to_its_eagle_head(
    make_model_dir: ModelDirFactory, tmp_path: Path
) -> None:
    target = make_model_dir("qwen2", num_hidden_layers=NUM_LAYERS)
    a_drafter(target, tmp_path / "head", "eagle")
    export_drafter(tmp_path / "head", tmp_path / "out", format="eagle", target=str(target))
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["architectures"][0] == "Qwen2ForCausalLMEagle"
    assert "layers.0.self_attn.q_proj.bias" in tensor_names(tmp_path / "out")


def test_bad_arguments_leave_nothing(target: Path, tmp_path: Path) -> None:
    a_drafter(target, tmp_path / "head", "eagle3")
    head, out = tmp_path / "head", tmp_path / "out"
    with pytest.raises(ValueError, match="format must be one of eagle3"):
        export_drafter(head, out, format="gguf", target=str(target))
    with pytest.raises(ValueError, match="dtype must be one of bfloat16"):
        export_drafter(head, out, format="eagle3", target=str(target), dtype="int8")
    with pytest.raises(ValueError, match="is no directory"):
        export_drafter(tmp_path / "none", out, format="eagle3", target=str(target))
    with pytest.raises(ValueError, match="exists and is not an empty directory"):
        export_drafter(head, head, format="eagle3", target=str(target))
    assert not out.exists()
    out.mkdir()
    export_drafter(head, out, format="eagle3", target=str(target))
    assert write_config(open_drafter(out, model_of(target)).config)


@pytest.mark.parametrize("format", ["eagle3", "speculators"])
def test_flags_of_the_draft_vocabulary_are_made_where_they_are_missing(
    target: Path, tmp_path: Path, format: str
) -> None:
    a_drafter(target, tmp_path / "head", "eagle3")
    file = tmp_path / "head" / "model.safetensors"
    tensors = load_file(file)
    flags = tensors.pop("t2d")
    save_file(tensors, file)
    exported(target, tmp_path, format)
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["t2d"], flags)


def test_what_cannot_be_read_back_is_not_left_behind(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_drafter(target, tmp_path / "head", "eagle3")
    found = [open_drafter(tmp_path / "head", model_of(target))]

    def fails(*_: Any) -> Any:
        if found:
            return found.pop()
        raise ValueError("damaged")

    monkeypatch.setattr("tlt_train.export.open_drafter", fails)
    with pytest.raises(ValueError, match="damaged"):
        export_drafter(tmp_path / "head", tmp_path / "out", format="eagle3", target=str(target))
    assert [p.name for p in tmp_path.iterdir()] == ["head"]
