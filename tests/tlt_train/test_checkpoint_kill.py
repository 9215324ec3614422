"""The checkpoint store under processes that end: killed in mid-write at each border, or simply done.

Owns the points at which a writer is killed. Each test names the bug that it would catch.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tlt_train.checkpoint import CheckpointStore

KILLED = """
import os, sys, torch
from tlt_train import checkpoint, checkpoint_file
point, directory = sys.argv[1:]
store = checkpoint.CheckpointStore(directory, keep=1)
die = lambda *_: os.kill(os.getpid(), 9)
step = 1
if point == "tensors":  # in the middle of the file
    checkpoint_file.WRITE_BYTES = 1 << 12
    fsync, checkpoint_file.os.fsync = os.fsync, die
elif point == "state":  # between the two files
    write = checkpoint_file._write_file
    checkpoint_file._write_file = lambda path, parts: write(path, parts) if path.suffix != ".json" else die()
elif point == "rename":  # both are whole, under the temporary name
    checkpoint.CheckpointStore._publish = die
elif point == "replace":  # the former one of this step has stepped aside
    step, rename = 0, checkpoint.Path.rename
    checkpoint.Path.rename = lambda self, to: die() if self.name.startswith(".tmp") else rename(self, to)
elif point == "prune":
    checkpoint.shutil.rmtree = lambda path, **_: die() if "pruned" in str(path) and path.exists() else None
store.save(step, {"a": torch.full((100_000,), 1.0)}, {})
store.wait()
"""


@pytest.mark.parametrize("point", ["tensors", "state", "rename", "replace", "prune"])
def test_a_kill_anywhere_leaves_a_store_that_loads(tmp_path: Path, point: str) -> None:
    """kill -9 at each border of the write: step 0 as it was, or step 1 whole; and nothing is left lying about."""
    with CheckpointStore(tmp_path, keep=1) as store:
        store.save(0, {"a": torch.zeros(100_000)}, {})
    done = subprocess.run([sys.executable, "-c", KILLED, point, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    store = CheckpointStore(tmp_path, keep=1)
    found = store.latest()
    assert found is not None
    assert found.step == (1 if point == "prune" else 0)
    assert torch.equal(found.tensors["a"], torch.full((100_000,), float(found.step)))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".lock", f"step-0000000{found.step}"]
    store.save(2, {"a": torch.ones(3)}, {})
    store.close()
    assert store.steps() == [2]


def test_a_kill_at_a_random_moment_leaves_a_store_that_loads(tmp_path: Path) -> None:
    code = (
        "import sys, torch\nfrom tlt_train.checkpoint import CheckpointStore\n"
        "store = CheckpointStore(sys.argv[1], keep=2)\nprint('ready', flush=True)\n"
        "for step in range(10**6): store.save(step, {'a': torch.full((1_000_000,), float(step))}, {'s': step})\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    deadline_s = time.monotonic() + 60
    while not list(tmp_path.glob("step-*")) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    time.sleep(random.Random().random() * 0.3)
    process.kill()
    process.wait()
    found = CheckpointStore(tmp_path).latest()
    assert found is not None
    assert found.state == {"s": found.step}
    assert bool((found.tensors["a"] == found.step).all())


def test_python_ends_only_when_the_last_save_is_on_disk(tmp_path: Path) -> None:
    """A daemon thread would drop the final checkpoint of a script that forgets to close."""
    code = (
        "import sys, torch\nfrom tlt_train.checkpoint import CheckpointStore\n"
        "CheckpointStore(sys.argv[1]).save(1, {'a': torch.ones(3_000_000)}, {})\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert CheckpointStore(tmp_path).load(1).tensors["a"].sum() == 3_000_000
