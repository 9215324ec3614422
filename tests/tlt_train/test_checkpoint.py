"""The checkpoint store: exact, whole or absent, and quick for the one who calls it.

Each test names the bug that it would catch.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tlt_train import checkpoint as store_module
from tlt_train.checkpoint import CheckpointStore

STATE = {"rng": [1, 2, 3], "lr": 0.1 + 0.2, "epoch": {"key": 7}, "name": "öö\n"}


def tensors(seed: int = 0) -> dict[str, Tensor]:
    """Of every width, with a scalar, an empty one, a strided one and two that share memory."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(33, 17, generator=generator)
    return {
        "step": torch.tensor(float(seed)),
        "weight": weight,
        "transposed": weight.t(),
        "half": weight.bfloat16(),
        "double": weight.double(),
        "odd": torch.randint(0, 255, (7,), generator=generator).to(torch.uint8),
        "mask": weight > 0,
        "ids": torch.arange(5),
        "none": torch.empty(0, 4),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
    }


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    """Bit by bit, so that NaN equals itself and -0 is not 0."""
    return found.keys() == wanted.keys() and all(
        found[name].dtype == tensor.dtype
        and found[name].shape == tensor.shape
        and found[name].contiguous().numpy(force=True).tobytes() == _bits(tensor)
        if tensor.dtype != torch.bfloat16
        else torch.equal(found[name].view(torch.int16), tensor.view(torch.int16))
        for name, tensor in wanted.items()
    )


def _bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def fill_store(directory: Path, steps: list[int], keep: int = 3) -> None:
    with CheckpointStore(directory, keep=keep) as store:
        for step in steps:
            store.save(step, tensors(step), STATE | {"step": step})
            store.wait()


def test_comes_back_bit_by_bit(tmp_path: Path) -> None:
    fill_store(tmp_path, [12])
    found = CheckpointStore(tmp_path).latest()
    assert found is not None
    assert found.step == 12
    assert found.state == STATE | {"step": 12}
    assert same(found.tensors, tensors(12))
    found.tensors["weight"].zero_()  # private: what is on disk stays
    assert same(CheckpointStore(tmp_path).load(12).tensors, tensors(12))


def test_the_file_is_plain_safetensors(tmp_path: Path) -> None:
    """The head is written by hand; the package's own reader is the judge, and plain JSON of the state."""
    fill_store(tmp_path, [3])
    assert same(load_file(tmp_path / "step-00000003" / "tensors.safetensors"), tensors(3))
    record = json.loads((tmp_path / "step-00000003" / "state.json").read_text())
    assert record["body"]["state"] == STATE | {"step": 3}


def test_training_goes_on_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without staged copies the file gets what the tensors became; with one buffer, what the next save put there."""
    gate = hold_writer(monkeypatch)
    store = CheckpointStore(tmp_path)
    live, state = tensors(1), {"count": [1]}
    store.save(1, live, state)
    state["count"].append(2)
    live["weight"].add_(1.0)
    second = {name: tensor.clone() for name, tensor in live.items()}
    store.save(2, live, state)
    live["weight"].zero_()
    assert (
        CheckpointStore(tmp_path).latest() is None
    )  # nothing is on disk yet: both calls did not wait
    gate.set()
    store.close()
    assert same(store.load(1).tensors, tensors(1))
    assert store.load(1).state == {"count": [1]}
    assert same(store.load(2).tensors, second)


def hold_writer(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writers wait until the event is set."""
    gate = threading.Event()
    write = store_module.write_checkpoint

    def held(*args, **kwargs) -> None:
        assert gate.wait(30)
        write(*args, **kwargs)

    monkeypatch.setattr(store_module, "write_checkpoint", held)
    return gate


def test_a_third_save_waits_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third buffer would grow without bound on a slow disk; a wait that is not counted hides it."""
    gate = hold_writer(monkeypatch)
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        store.save(step, tensors(step), {})
    timer = threading.Timer(0.3, gate.set)
    timer.start()
    store.save(3, tensors(3), {})
    assert gate.is_set()
    assert store.stall_s >= 0.25
    store.close()
    assert [same(store.load(step).tensors, tensors(step)) for step in (1, 2, 3)] == [True] * 3


def test_buffers_are_reused_and_may_shrink_and_grow(tmp_path: Path) -> None:
    """A smaller save in a larger buffer must not write the rest of the larger one."""
    with CheckpointStore(tmp_path) as store:
        store.reserve({"a": torch.zeros(100)})
        before = store._slots[0].buffer
        for step, size in enumerate((100, 3, 1000), 1):
            store.save(step, {"a": torch.full((size,), float(step))}, {})
            store.wait()
            assert (store._slots[0].buffer is before) == (size <= 100)
            assert torch.equal(store.load(step).tensors["a"], torch.full((size,), float(step)))


def test_keeps_the_newest_k(tmp_path: Path) -> None:
    fill_store(tmp_path, [1, 2, 5, 9, 100_000_000], keep=2)
    assert CheckpointStore(tmp_path).steps() == [9, 100_000_000]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".lock",
        "step-00000009",
        "step-100000000",
    ]


def test_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    """A rename onto a directory that exists fails."""
    with CheckpointStore(tmp_path, keep=1) as store:
        for seed in (1, 2):
            store.save(7, tensors(seed), {"seed": seed})
            store.wait()
        assert store.num_saved == 2
        assert same(store.load(7).tensors, tensors(2))
        assert store.steps() == [7]


def test_a_course_that_was_left_is_not_resumed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Resumed at 3 because 4 is damaged, saved 3 again... a later resume must not find a 4 of the former course."""
    fill_store(tmp_path, [2, 3, 4])
    with CheckpointStore(tmp_path, keep=2) as store:
        store.save(3, tensors(30), {})
        store.wait()
        assert store.steps() == [2, 3]
        found = store.latest()
    assert found is not None
    assert same(found.tensors, tensors(30))
    assert "step-00000004 is of a later step" in caplog.text
    assert (tmp_path / "abandoned-1-step-00000004").is_dir()


def damage_truncate(path: Path, rng: random.Random) -> None:
    size = path.stat().st_size
    os.truncate(path, rng.randrange(size))


def damage_flip(path: Path, rng: random.Random) -> None:
    raw = bytearray(path.read_bytes())
    raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    path.write_bytes(raw)


def damage_append(path: Path, rng: random.Random) -> None:
    with open(path, "ab") as file:
        file.write(rng.randbytes(1 + rng.randrange(9)))


def damage_delete(path: Path, rng: random.Random) -> None:
    path.unlink()


def test_the_newest_whole_one_is_found_whatever_happened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every kind of damage, in every file, at random places: never wrong values, never an exception."""
    whole = tmp_path / "whole"
    fill_store(whole, [1, 2, 3])
    rng = random.Random(4)
    kinds: list[Callable[[Path, random.Random], None]] = [
        damage_truncate,
        damage_flip,
        damage_append,
        damage_delete,
    ]
    for round_index in range(120):
        directory = tmp_path / "round"
        shutil.copytree(whole, directory)
        num_damaged = rng.randrange(4)
        damaged = []
        for step in (3, 2, 1)[:num_damaged]:
            file = rng.choice(("tensors.safetensors", "state.json"))
            damaged.append(directory / f"step-0000000{step}" / file)
            kinds[round_index % len(kinds)](damaged[-1], rng)
        caplog.clear()
        found = CheckpointStore(directory).latest()
        assert len(caplog.records) == num_damaged
        for path, record in zip(damaged, caplog.records, strict=True):
            assert str(path) in record.getMessage()
            if kinds[round_index % len(kinds)] is damage_truncate and path.suffix != ".json":
                assert "were written" in record.getMessage()  # says that it is cut off
        if num_damaged == 3:
            assert found is None
        else:
            assert found is not None
            assert found.step == 3 - num_damaged
            assert same(found.tensors, tensors(found.step))
        shutil.rmtree(directory)


def test_one_that_was_renamed_is_damaged(tmp_path: Path) -> None:
    fill_store(tmp_path, [1])
    (tmp_path / "step-00000001").rename(tmp_path / "step-00000009")
    with pytest.raises(ValueError, match="step 1"):
        CheckpointStore(tmp_path).load(9)


def test_a_failed_write_is_counted_raised_and_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk: training and the former checkpoint stay, the caller learns of it, the next save works."""
    fill_store(tmp_path, [1])
    store = CheckpointStore(tmp_path)

    def full(path: Path, *_: object) -> None:
        (path / "tensors.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(store_module, "write_checkpoint", full)
        store.save(2, tensors(2), {})
        with pytest.raises(OSError, match="No space left"):
            store.wait()
        store.wait()  # said once
        store.save(3, tensors(3), {})
        with pytest.raises(OSError, match="No space left"):
            store.close()
    assert (store.num_failed, store.num_saved) == (2, 0)
    assert sum("was not written" in record.getMessage() for record in caplog.records) == 2
    assert store.steps() == [1]
    assert not list(tmp_path.glob(".tmp-*"))
    store.save(4, tensors(4), {})
    store.close()
    assert store.steps() == [1, 4]


def test_a_failed_replacement_leaves_the_former(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The former one has stepped aside when the new one's rename fails: with keep 1 nothing would be left."""
    fill_store(tmp_path, [1], keep=1)
    store = CheckpointStore(tmp_path, keep=1)
    rename = Path.rename

    def fails(self: Path, target: Path) -> Path:
        if self.name.startswith(".tmp-step"):
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails)
    store.save(1, tensors(5), {})
    with pytest.raises(OSError, match="no"):
        store.close()
    assert same(store.load(1).tensors, tensors(1))


def test_what_a_living_writer_writes_is_not_cleaned_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second process that opens the store to evaluate must not remove the trainer's half-written files."""
    gate = hold_writer(monkeypatch)
    store = CheckpointStore(tmp_path)
    store.save(1, tensors(1), {})
    while not list(tmp_path.glob(".tmp-*")):
        time.sleep(0.001)
    reader = CheckpointStore(tmp_path)
    assert reader.latest() is None
    assert list(tmp_path.glob(".tmp-*"))
    monkeypatch.setattr(store_module, "LOCK_WAIT_S", 0.05)
    with pytest.raises(OSError, match="another process"):
        reader.save(2, tensors(2), {})
    gate.set()
    store.close()
    assert store.steps() == [1]
    reader.save(2, tensors(2), {})  # the other has closed
    reader.close()
    assert store.steps() == [1, 2]


def test_bad_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep is 0"):
        CheckpointStore(tmp_path, keep=0)
    store = CheckpointStore(tmp_path)
    with pytest.raises(ValueError, match="step is -1"):
        store.save(-1, {}, {})
    with pytest.raises(ValueError, match="JSON"):
        store.save(1, {}, {"a": torch.ones(1)})
    with pytest.raises(ValueError, match=r"'z' is torch\.complex64"):
        store.save(1, {"z": torch.ones(1, dtype=torch.complex64)}, {})
    with pytest.raises(ValueError, match="cannot be read"):
        store.load(1)
    assert store.latest() is None
