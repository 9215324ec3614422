"""An export that is not what it should be gets no name; numbers that mean nothing are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.models.eagle_checkpoint import save_drafter
from engine.models.loader import open_checkpoint
from tests.conftest import ModelDirFactory
from tests.models.eagle_oracle import tiny_head
from tlt_train.export import FORMATS, export_drafter


@pytest.fixture(scope="module")
def target(make_model_dir: ModelDirFactory) -> Path:
    return make_model_dir("llama", num_hidden_layers=9)


def a_head(target: Path, where: Path, format: str) -> dict[str, Tensor]:
    model = open_checkpoint(str(target)).config
    kind = "eagle" if format == "eagle" else "eagle3"
    config, tensors = tiny_head(model, kind, draft_vocab_size=None if kind == "eagle" else 100)
    save_drafter(where, config, tensors, target=model)
    return tensors


@pytest.mark.parametrize("format", list(FORMATS))
def test_every_tensor_is_compared(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    """A writer that spoils one bit of one tensor, or a dtype, leaves nothing."""
    names = set(a_head(target, tmp_path / "head", format)) - {"t2d"}
    assert len(names) > 8
    module = "tlt_train.export" if format == "speculators" else "engine.models.eagle_checkpoint"
    for name in sorted(names):
        written = name.replace("midlayer.", "midlayer." if format == "eagle3" else "layers.0.")

        def spoilt(tensors: Any, path: Any, metadata: Any = None, name: str = written) -> None:
            tensor = tensors[name].clone()
            tensor.view(torch.uint8).view(-1)[-8] ^= 1  # the lowest bit of a value
            save_file(tensors | {name: tensor}, path, metadata=metadata)

        monkeypatch.setattr(f"{module}.save_file", spoilt)
        with pytest.raises(ValueError, match=f"{name} is not read back as it was written"):
            export_drafter(tmp_path / "head", tmp_path / "out", format=format, target=str(target))
        assert [p.name for p in tmp_path.iterdir()] == ["head"]


@pytest.mark.parametrize("number", [0, -3])
def test_a_number_of_proposals_below_one_is_refused(
    target: Path, tmp_path: Path, number: int
) -> None:
    a_head(target, tmp_path / "head", "speculators")
    with pytest.raises(
        ValueError, match=f"--num-speculative-tokens must be at least 1, got {number}"
    ):
        export_drafter(
            tmp_path / "head",
            tmp_path / "out",
            format="speculators",
            target=str(target),
            num_speculative_tokens=number,
        )
    assert not (tmp_path / "out").exists()
