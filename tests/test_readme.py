"""The README's Python runs as it stands, and names only commands and options that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from bench.main import BENCHES
from engine.config import EngineConfig
from engine.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, flags=re.M | re.S)


@pytest.mark.smollm2
@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_block_runs(block: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", block], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_options_are_those_of_the_code() -> None:
    table = README[README.index("| `LLM(...)`") : README.index("`SamplingParams` takes")]
    named = set(re.findall(r"^\| `(\w+)` \|", table, flags=re.M))
    assert named - {"speculative_config"} == {f.name for f in fields(EngineConfig)} - {"device"}
    taken = README[README.index("`SamplingParams` takes") : README.index("A parameter that is not")]
    listed = set(re.findall(r"\b[a-z]\w*\b", taken)) - {"takes", "and"}
    assert listed == {f.name for f in fields(SamplingParams) if f.init}


def test_make_targets_and_benches_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    texts = README + (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for target in set(re.findall(r"(?:^    |`)make ([\w-]+)", texts, flags=re.M)):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target
    for name in set(re.findall(r"tlt bench (\w+)", texts)):
        assert name in BENCHES
