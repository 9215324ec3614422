"""Build the native modules with CMake. Everything else about the package is in pyproject.toml.

Owns: how setuptools finds the result. Does not know: what is compiled (CMakeLists.txt). Invariant: torch is not
needed to build. ``TLT_CMAKE_ARGS`` adds arguments to the configure step.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import nanobind
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


class CMakeExtension(Extension):
    """A module that CMake builds; ``name`` ends in the name of the CMake target."""

    def __init__(self, name: str) -> None:
        super().__init__(name, sources=[])


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        if not isinstance(ext, CMakeExtension):
            return super().build_extension(ext)
        ninja = shutil.which("ninja")
        if ninja is None:
            raise RuntimeError(
                "ninja was not found; install the build requirements in pyproject.toml"
            )
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        # one directory per Python, kept: a second build compiles only what changed
        build = ROOT / "build" / f"native-{sys.implementation.cache_tag}"
        configure = [
            *("cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(build)),
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DCMAKE_MAKE_PROGRAM={ninja}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dnanobind_DIR={nanobind.cmake_dir()}",
            *shlex.split(os.environ.get("TLT_CMAKE_ARGS", "")),
        ]
        subprocess.run(configure, check=True)
        name = ext.name.rpartition(".")[2]
        subprocess.run(["cmake", "--build", str(build), "--target", name], check=True)
        shutil.copy2(build / target.name, target)


setup(
    ext_modules=[CMakeExtension("engine.ops._native"), CMakeExtension("engine.spec._suffix")],
    cmdclass={"build_ext": CMakeBuild},
)
