"""The layers of docs/design.md as data, and the house rules that a parser can check.

Owns the table of layers and the checker. Knows nothing of what the modules do: it parses, it never imports.
Invariant: every module of the packages stands in the table; one that does not is a failure, so that adding a file
means deciding where it belongs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("engine", "tlt_train", "bench")

# A name ending in ".*" stands for everything below that package; the longest match wins.
LAYERS: dict[str, int] = {
    "engine.config": 0,
    "engine.sampling_params": 0,
    "engine.metrics": 0,
    "engine.machine": 0,
    "engine.option_parser": 0,
    "engine.model_config": 0,
    "engine.request": 1,
    "engine.outputs": 1,
    "engine.kv_cache": 1,
    "engine.scheduler": 1,
    "engine.spec": 1,
    "engine.spec.base": 1,
    "engine.spec.tree": 1,
    "engine.spec.tuner": 1,
    "engine.spec.tuner_cost": 1,
    "engine.spec.tuner_beg": 1,
    "engine.spec.worth": 1,
    "engine.spec.price": 1,
    "engine.spec.arm": 1,
    "engine.spec.saved": 1,
    "engine.spec.survival": 1,
    "engine.spec.alarm": 1,
    "engine.spec.config": 1,
    "engine.spec.oracle": 1,
    "engine.batch": 2,
    "engine.ops": 2,
    "engine.ops.*": 2,
    "engine.tokenizer": 2,
    "engine.grammar": 2,
    "engine.chat_template": 2,
    "engine.prompts": 2,
    "engine.output_text": 2,
    "engine.request_group": 3,
    "engine.graphs": 3,
    "engine.sampler": 3,
    "engine.spec.verify": 3,
    "engine.models": 3,
    "engine.models.*": 3,
    "engine.runner": 4,
    "engine.weights": 4,
    "engine.speculation": 4,
    "engine.step_plan": 4,
    "engine.spec.suffix": 4,
    "engine.spec.eagle": 4,
    "engine.spec.eagle_batch": 4,
    "engine.spec.eagle_cache": 4,
    "engine.spec.eagle_draws": 4,
    "engine.spec.eagle_tree": 1,
    "engine.engine": 5,
    "engine.assembly": 5,
    "engine.spec_assembly": 5,
    "engine.llm": 6,
    "engine.explain": 7,
    "engine.async_engine": 6,
    "engine": 6,  # the package itself re-exports the API
    "engine.server": 7,
    "engine.server.*": 7,
    "bench": 7,
    "bench.*": 7,
    "engine.demo": 8,  # shows bench's workload and ceilings
    "engine.check_lossless": 8,
    "engine.rollout_file": 1,
    "engine.shared_ring": 1,
    "engine.tap_record": 1,
    "engine.feature_tap": 4,
    "engine.tap_socket": 4,
    "engine.replay": 7,
    "engine.replay_report": 7,
    "engine.replay_cli": 8,
    "engine.cli": 8,
    "tlt_train.config": 0,
    "tlt_train": 0,
    "tlt_train.prompts": 1,
    "tlt_train.sequence": 1,
    "tlt_train.shards": 1,
    "tlt_train.collector": 1,
    "tlt_train.buffer": 1,
    "tlt_train.strata": 1,
    "tlt_train.stratified_draw": 1,
    "tlt_train.spill": 1,
    "tlt_train.fixed_data": 1,
    "tlt_train.spot.state": 1,
    "tlt_train.scaling": 1,
    "tlt_train.scaling.*": 1,
    "tlt_train.losses": 3,
    "tlt_train.packing": 3,
    "tlt_train.attention": 3,
    "tlt_train.drafter": 4,
    "tlt_train.objective": 4,
    "tlt_train.checkpoint": 4,
    "tlt_train.checkpoint_file": 4,
    "tlt_train.metrics_log": 4,
    "tlt_train.export": 4,
    "tlt_train.trainer": 5,
    "tlt_train.publish": 5,
    "tlt_train.spot.coordinator": 5,
    "tlt_train.spot.worker": 5,
    "tlt_train.rl": 6,
    "tlt_train.rl.*": 6,
    "tlt_train.adapters": 6,
    "tlt_train.adapters.*": 6,
    "tlt_train.acceptance": 1,
    "tlt_train.new_head": 4,
    "tlt_train.training_run": 6,
    "tlt_train.rollouts": 6,
    "tlt_train.data_report": 7,
    "tlt_train.train_data": 4,
    "tlt_train.fingerprint": 4,
    "tlt_train.train_process": 4,
    "tlt_train.train": 8,
    "tlt_train.live": 8,
    "tlt_train.live_rollout": 7,
    "tlt_train.live_options": 0,
    "tlt_train.live_report": 6,
    "tlt_train.live_state": 7,
    "tlt_train.generate": 7,  # runs an LLM
    "tlt_train.trial_runs": 7,
    "tlt_train.evaluate": 7,
    "tlt_train.train_cli": 9,
    "tlt_train.cli_options": 0,
    "tlt_train.cli": 9,
    "tlt_train.worked_solutions": 1,
    "tlt_train.sft_options": 0,
    "tlt_train.policy_network": 4,
    "tlt_train.sft": 6,
    "tlt_train.sft_cli": 9,
}
TORCH_FREE_BELOW = 2  # layers 0 and 1: the control plane has no tensors

# Third-party or native module -> the only modules that may import it.
CONFINED: dict[str, tuple[str, ...]] = {
    "engine.ops._native": ("engine.ops.native",),
    "engine.spec._suffix": ("engine.spec.suffix",),
    "llguidance": ("engine.grammar",),
    "triton": ("engine.ops.triton_kernels.*",),
    "cuda": ("engine.ops.cuda", "engine.weights"),
    "flashinfer": ("engine.ops.flashinfer",),
    "ray": ("tlt_train.spot.coordinator", "tlt_train.spot.worker", "tlt_train.rl.*"),
    "fastapi": ("engine.server.*",),
    "trl": ("tlt_train.adapters.*",),
    "verl": ("tlt_train.adapters.*",),
    "transformers": ("bench.*", "tlt_train.*"),
    "llama_cpp": ("bench.*",),
}

PRINTS = (
    "engine.cli",
    "engine.check_lossless",
    "engine.demo",
    "engine.explain",
    "engine.replay_cli",
    "bench",
    "bench.*",
    "tlt_train.cli",
    "tlt_train.sft_cli",
    "tlt_train.train_cli",
)
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60  # without its docstring


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether ``name`` is one of ``patterns``, where ``a.b.*`` stands for a.b and all below it."""
    for pattern in patterns:
        base = pattern.removesuffix(".*")
        if name == base or (pattern.endswith(".*") and name.startswith(base + ".")):
            return True
    return False


def layer_of(name: str) -> int | None:
    """Layer of a module, or None where the table does not place it."""
    if name in LAYERS:
        return LAYERS[name]
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if (layer := LAYERS.get(".".join(parts[:end]) + ".*")) is not None:
            return layer
    return None


def imports(tree: ast.Module, name: str, *, is_package: bool) -> Iterator[tuple[str, int, bool]]:
    """(dotted name, line, at module level) of each import, ``from a import b`` giving ``a.b``."""
    inside_function = {
        id(node)
        for scope in ast.walk(tree)
        if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(scope)
    }
    for node in ast.walk(tree):
        top = id(node) not in inside_function
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, top
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = name.split(".")
                parent = parent[: len(parent) - node.level + is_package]
                base = ".".join([*parent, base] if base else parent)
            for alias in node.names:
                yield f"{base}.{alias.name}", node.lineno, top


def resolve(target: str, modules: Mapping[str, str]) -> str | None:
    """The module of ours that an imported dotted name lives in, or None if it is not ours.

    Extension modules, which no file of ours defines, stand in ``CONFINED``.
    """
    if target.split(".")[0] not in PACKAGES:
        return None
    parts = target.split(".")
    for end in range(len(parts), 0, -1):
        name = ".".join(parts[:end])
        if name in modules or name in CONFINED:
            return name
    return target


def import_errors(
    name: str, tree: ast.Module, modules: Mapping[str, str], *, is_package: bool
) -> Iterator[str]:
    layer = layer_of(name)
    if layer is None:
        yield f"{name}: not in the table of layers"
        return
    for target, line, _ in imports(tree, name, is_package=is_package):
        where = f"{name}:{line}"
        for confined, allowed in CONFINED.items():
            if matches(target, (confined + ".*",)) and not matches(name, allowed):
                yield f"{where}: {confined} may be imported only in {', '.join(allowed)}"
        if layer < TORCH_FREE_BELOW and matches(target, ("torch.*",)):
            yield f"{where}: layer {layer} imports no torch"
        ours = resolve(target, modules)
        if ours is None:
            continue
        if name.startswith("engine") and ours.startswith("tlt_train"):
            yield f"{where}: engine never imports tlt_train"
        target_layer = layer_of(ours)
        if target_layer is not None and target_layer > layer:
            yield f"{where}: layer {layer} imports {ours} of layer {target_layer}"


def shape_errors(name: str, source: str, tree: ast.Module) -> Iterator[str]:
    num_lines = source.count("\n")
    if num_lines > MAX_FILE_LINES:
        yield f"{name}: {num_lines} lines, at most {MAX_FILE_LINES}"
    if not (ast.get_docstring(tree) or "").strip():
        yield f"{name}: has no header (module docstring)"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                length -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{name}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "print"
            and not matches(name, PRINTS)
        ):
            yield f"{name}:{node.lineno}: print is for the command line; use logging"


def cycle_errors(graph: Mapping[str, set[str]]) -> Iterator[str]:
    """One message for each import cycle found by a depth-first walk."""
    done: set[str] = set()

    def walk(node: str, path: list[str]) -> Iterator[str]:
        if node in path:
            yield "import cycle: " + " -> ".join([*path[path.index(node) :], node])
            return
        if node in done:
            return
        for target in sorted(graph.get(node, ())):
            yield from walk(target, [*path, node])
        done.add(node)

    for start in sorted(graph):
        yield from walk(start, [])


def violations(modules: Mapping[str, str], packages: frozenset[str] = frozenset()) -> list[str]:
    """Every broken rule of a set of modules (dotted name -> source); ``packages`` names the ``__init__`` files."""
    errors: list[str] = []
    graph: dict[str, set[str]] = {}
    for name, source in modules.items():
        tree = ast.parse(source, filename=name)
        is_package = name in packages
        errors += import_errors(name, tree, modules, is_package=is_package)
        errors += shape_errors(name, source, tree)
        graph[name] = {
            ours
            for target, _, top in imports(tree, name, is_package=is_package)
            if top and (ours := resolve(target, modules)) is not None and ours != name
        }
    return errors + list(cycle_errors(graph))


def project_modules() -> tuple[dict[str, str], frozenset[str]]:
    modules: dict[str, str] = {}
    packages: set[str] = set()
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if parts[-1] == "__init__":
                parts = parts[:-1]
                packages.add(".".join(parts))
            modules[".".join(parts)] = path.read_text(encoding="utf-8")
    return modules, frozenset(packages)


def native_violations(sources: Mapping[str, str]) -> list[str]:
    """Broken rules of C++ sources (path below csrc -> text): a header, a size, and kernels that know no framework."""
    errors = []
    for path, source in sources.items():
        if not source.startswith("// "):
            errors.append(f"{path}: has no header (a comment that says what it owns)")
        if source.count("\n") > MAX_FILE_LINES:
            errors.append(f"{path}: {source.count(chr(10))} lines, at most {MAX_FILE_LINES}")
        for include in re.findall(r'^#include\s+[<"]([^>"]+)', source, flags=re.M):
            if path.startswith("cpu/") and include.startswith(
                ("nanobind", "torch", "ATen", "Python.h", "bindings/", "common/tensor.h")
            ):
                errors.append(f"{path}: kernels do not include {include}")
    return errors


def test_native_sources_keep_the_rules() -> None:
    paths = [p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".h", ".cpp", ".cu", ".cuh")]
    assert paths
    sources = {str(p.relative_to(ROOT / "csrc")): p.read_text(encoding="utf-8") for p in paths}
    assert not native_violations(sources)


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("cpu/a.cpp", "#pragma once\n", "has no header"),
        ("cpu/a.cpp", "// A.\n" * 401, "401 lines"),
        ("cpu/a.cpp", "// A.\n#include <nanobind/nanobind.h>\n", "do not include nanobind"),
        ("cpu/a.h", '// A.\n#include "bindings/batch.h"\n', "do not include bindings"),
    ],
)
def test_each_native_rule_bites(path: str, source: str, expected: str) -> None:
    errors = native_violations({path: source})
    assert len(errors) == 1
    assert expected in errors[0]
    assert not native_violations({"bindings/a.cpp": "// A.\n#include <nanobind/nanobind.h>\n"})


def test_project_keeps_the_rules() -> None:
    modules, packages = project_modules()
    assert "engine.batch" in modules
    broken = violations(modules, packages)
    assert not broken, "\n" + "\n".join(broken)


HEADER = '"""A header."""\n'
LONG_FUNCTION = "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES


@pytest.mark.parametrize(
    ("name", "body", "expected"),
    [
        ("engine.helpers", "", "not in the table"),
        ("engine.spec.unheard_of", "", "not in the table"),
        ("engine.kv_cache", "from engine.runner import ModelRunner", "imports engine.runner"),
        ("engine.kv_cache", "def f():\n    import engine.runner", "imports engine.runner"),
        ("engine.ops.native", "from ..runner import ModelRunner", "imports engine.runner"),
        ("engine.batch", "from . import runner", "imports engine.runner"),
        ("engine.scheduler", "import torch", "imports no torch"),
        ("engine.config", "from torch.nn import Module", "imports no torch"),
        ("engine.runner", "from engine.ops import _native", "engine.ops._native may be imported"),
        ("engine.runner", "import engine.ops._native", "engine.ops._native may be imported"),
        ("engine.ops.native", "import triton.language as tl", "triton may be imported only"),
        ("engine.runner", "from cuda.core import Device", "cuda may be imported only"),
        ("engine.ops.native", "import flashinfer", "flashinfer may be imported only"),
        ("engine.engine", "import ray", "ray may be imported only"),
        ("engine.llm", "from fastapi import FastAPI", "fastapi may be imported only"),
        ("engine.llm", "import trl", "trl may be imported only"),
        ("engine.llm", "from verl.workers import rollout", "verl may be imported only"),
        ("engine.tokenizer", "from transformers import AutoTokenizer", "transformers may be"),
        ("engine.llm", "from tlt_train.rl import grpo", "engine never imports tlt_train"),
        ("engine.llm", "def f():\n    import bench", "imports bench of layer 7"),
        ("engine.llm", "print(1)", "print is for the command line"),
        ("engine.llm", "x = 1\n" * (MAX_FILE_LINES + 1), "lines, at most 400"),
        ("engine.llm", LONG_FUNCTION, "f has 61 lines"),
    ],
)
def test_each_rule_bites(name: str, body: str, expected: str) -> None:
    modules = {
        name: HEADER + body,
        "engine.runner": HEADER,
        "bench": HEADER,
        "tlt_train.rl": HEADER,
    }
    if name == "engine.runner":
        modules[name] = HEADER + body
    errors = violations(modules)
    assert any(expected in error for error in errors), errors


def test_header_and_cycles_bite() -> None:
    assert violations({"engine.llm": "x = 1\n"}) == ["engine.llm: has no header (module docstring)"]
    ring = {
        "engine.request": HEADER + "import engine.scheduler",
        "engine.scheduler": HEADER + "from engine import request",
    }
    assert violations(ring) == [
        "import cycle: engine.request -> engine.scheduler -> engine.request"
    ]


def test_what_is_allowed_passes() -> None:
    """A checker that cries at everything would pass the tests above."""
    modules = {
        "engine.ops": HEADER + "from engine.ops.registry import resolve_ops",
        "engine.ops.registry": HEADER + "def f():\n    from engine.ops.native import NativeOps",
        "engine.ops.native": HEADER + "import torch\nfrom engine.ops import _native\n",
        "engine.scheduler": HEADER + "import logging\nfrom engine.request import Request",
        "engine.request": HEADER + "from engine.sampling_params import SamplingParams",
        "engine.sampling_params": HEADER,
        "engine.cli": HEADER + "def main():\n    import bench\n    print(bench)",
        "bench": HEADER + "from engine import LLM",
        "engine": HEADER + "from engine.llm import LLM",
        "engine.llm": HEADER + "def f():\n    '''Doc.\n\n    More.'''\n" + "    x = 1\n" * 59,
    }
    assert violations(modules, frozenset({"engine", "engine.ops"})) == []
