"""From the name of a model to its config, weights and tokenizer.

Owns the choice between "smollm2", an HF directory and a GGUF file, and the reading of safetensors. Knows nothing of
how a decoder packs weights. Invariant: files are mapped, never read whole; a file that is missing or damaged is a
ValueError that names it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.config import ModelConfig
from engine.model_config import token_ids
from engine.models.layout import EMBEDDING, HEAD, WeightSource, check
from engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_FETCH = "fetch the model again"
_DAMAGE = (  # what code that trusts its input raises on input that is not to be trusted
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    RecursionError,
    RuntimeError,
    TypeError,
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model as it lies on disk. ``tokenizer`` is None where the directory has none: token ids then work, text not.

    Invariant: ``weights`` has just the tensors that ``config`` asks for.
    """

    path: Path
    config: ModelConfig
    weights: WeightSource
    tokenizer: Tokenizer | None


def open_checkpoint(model: str | os.PathLike[str]) -> Checkpoint:
    """Open "smollm2", an HF directory or a GGUF file.

    Raises:
        ValueError: what is missing, damaged or not supported, the file's name and what to do.
    """
    if model == "smollm2":
        from engine.models.smollm2 import smollm2_directory

        directory = smollm2_directory()
        try:
            return open_directory(directory)
        except ValueError as error:
            raise ValueError(f"{error}; delete {directory} to have it made again") from error
    try:
        path = Path(model).expanduser()
        is_file, is_directory = path.is_file(), path.is_dir()
    except (OSError, ValueError, TypeError, RuntimeError) as error:  # too long, a NUL, ~nobody
        raise ValueError(
            f"model {_short(model)} cannot be looked up ({_short(error, str)}); give 'smollm2', an HF directory or "
            f"a GGUF file"
        ) from error
    if is_file:
        return open_gguf(path)
    if is_directory:
        return open_directory(path)
    raise ValueError(
        f"model {_short(str(model))} is no file or directory; give 'smollm2', an HF directory or a GGUF file "
        f"(models are not downloaded)"
    )


def open_directory(directory: Path) -> Checkpoint:
    """Open an HF directory: ``config.json``, safetensors, and optionally the generation config and tokenizer."""
    config_path, generation_path = directory / "config.json", directory / "generation_config.json"
    raw_config, generation = read_json(config_path), None
    if os.path.lexists(generation_path):
        generation = read_json(generation_path)
        with _named(generation_path):
            token_ids(generation, "eos_token_id")
    with _named(config_path):
        config = ModelConfig.from_hf(raw_config, generation)
    with _named(directory, prefix=False):
        weights = SafetensorsSource(directory)
        config = _settle_head(config, weights)
        check(config, weights)
    tokenizer = None
    if os.path.lexists(directory / "tokenizer.json"):
        with _named(directory, prefix=False):
            tokenizer = Tokenizer.from_directory(directory)
    else:
        logger.warning("%s has no tokenizer.json: prompts must be token ids", directory)
    return Checkpoint(directory, config, weights, tokenizer)


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file."""
    from engine.models.gguf import GgufSource
    from engine.models.gguf_tokenizer import gguf_tokenizer

    with _named(path):
        source = GgufSource(path)
        config = source.config()
        check(config, source)
        tokenizer = gguf_tokenizer(source.metadata)
    return Checkpoint(path, config, source, tokenizer)


@contextmanager
def _named(path: Path, *, prefix: bool = True) -> Iterator[None]:
    """Name the file in what its contents make fail, and make every such failure a ValueError.

    Args:
        path: the file.
        prefix: put its name before the message of a ValueError that lacks it; else that is left as it is.
    """
    try:
        yield
    except ValueError as error:
        if not prefix or str(path) in str(error):
            raise
        raise ValueError(f"{path}: {error}") from error
    except _DAMAGE as error:
        raise ValueError(f"{path} is damaged ({_short(error)}); {_FETCH}") from error


def _short(value: object, spell: Callable[[object], str] = repr) -> str:
    text = spell(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"


def _settle_head(config: ModelConfig, weights: SafetensorsSource) -> ModelConfig:
    """A config that ties the head to the embedding, beside a file in which they differ: the file is right."""
    both = {EMBEDDING, HEAD} <= weights.shapes().keys()
    if config.tied_head and both and not weights.same(EMBEDDING, HEAD):
        logger.warning("config.json ties lm_head to the embedding, but the file's differ: untied")
        return replace(config, tied_head=False)
    return config


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path} does not exist; {_FETCH} or correct the path") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); {_FETCH}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); {_FETCH}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value


class SafetensorsSource:
    """Tensors of a ``model.safetensors`` or of the shards that an index lists, mapped into memory."""

    def __init__(self, directory: Path) -> None:
        self._files: dict[str, Any] = {}
        self._paths: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        if (directory / INDEX).is_file():
            self._open_shards(directory)
        elif (directory / SINGLE).is_file():
            self._open(directory / SINGLE)
        else:
            raise ValueError(
                f"{directory} has neither {SINGLE} nor {INDEX}; {_FETCH} in the safetensors format"
            )

    def _open_shards(self, directory: Path) -> None:
        index = read_json(directory / INDEX).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise ValueError(f"{directory / INDEX} has no weight_map; {_FETCH}")
        for name, shard in index.items():
            if not isinstance(shard, str) or not shard or "\0" in shard:
                raise ValueError(
                    f"{directory / INDEX}: weight_map names no file for tensor {name}, but {_short(shard)}; {_FETCH}"
                )
        for shard in dict.fromkeys(index.values()):
            if not (directory / shard).is_file():
                raise ValueError(
                    f"{directory / shard} does not exist, but {INDEX} lists it; {_FETCH}"
                )
            self._open(directory / shard)
        for name, shard in index.items():
            if name not in self._shapes:
                raise ValueError(
                    f"{directory / shard} lacks tensor {name} that {INDEX} lists; {_FETCH}"
                )

    def _open(self, path: Path) -> None:
        try:
            file = safe_open(str(path), framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is damaged or cut short ({error}); {_FETCH}") from error
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            part = file.get_slice(name)
            if part.get_dtype() not in ("F32", "F16", "BF16", "F64"):
                raise ValueError(
                    f"{path}: tensor {name} is of type {part.get_dtype()}; supported: F32, F16, BF16"
                )
            self._shapes[name] = tuple(part.get_shape())
            self._files[name], self._paths[name] = file, path

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def origin(self, name: str) -> str:
        return str(self._paths.get(name, next(iter(self._paths.values()), "the checkpoint")))

    def read(self, name: str, out: Tensor) -> None:
        out.copy_(self._files[name].get_tensor(name))

    def same(self, name: str, other: str) -> bool:
        """Whether two tensors are equal."""
        return torch.equal(self._files[name].get_tensor(name), self._files[other].get_tensor(other))
