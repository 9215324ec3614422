"""Shards: what was written comes back, memory-mapped; a directory is whole or not there; damage is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.tlt_train.sequences import WIDTH, assert_true, make, whole
from tlt_train.sequence import TrainingSequence
from tlt_train.shards import ShardMeta, ShardReader, ShardWriter

SEQUENCES = [
    make(f"k{i}", 10 + 7 * i, start=i, version=i, rl_step=i // 2, is_finished=i != 2, group=f"é{i}")
    for i in range(5)
]


def write(directory: Path, sequences: list[TrainingSequence] = SEQUENCES, **more: int) -> Path:
    with ShardWriter(
        directory,
        tap_layers=(1, 3),
        hidden_size=WIDTH // 3,
        target="smollm2",
        target_fingerprint="abc",
        sampling={"temperature": 0.5},
        tasks=("sums",),
        **more,
    ) as writer:
        for sequence in sequences:
            writer.add(sequence)
    return directory


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write(tmp_path / "data")


@pytest.mark.parametrize("max_shard_bytes", [1, 300, 1 << 30])
def test_round_trip(tmp_path: Path, max_shard_bytes: int) -> None:
    reader = ShardReader(write(tmp_path / "data", max_shard_bytes=max_shard_bytes), verify=True)
    num_shards = len(list((tmp_path / "data").glob("shard-*.bin")))
    assert num_shards == {1: 5, 300: 3, 1 << 30: 1}[max_shard_bytes]
    num_tokens = sum(s.num_tokens for s in SEQUENCES)
    assert reader.meta == ShardMeta(
        (1, 3), 2, "smollm2", "abc", {"temperature": 0.5}, ("sums",), 5, num_tokens
    )
    assert len(reader) == 5
    for found, sequence in zip(reader, SEQUENCES, strict=True):
        assert_true(whole(found))
        for name in TrainingSequence.__slots__:
            if name not in ("token_ids", "features"):
                assert getattr(found, name) == getattr(sequence, name), name
        assert found.features.base is not None
        for array in (found.features, found.token_ids):
            assert not array.flags.writeable
    assert reader[2].key == "k2"
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_features_are_mapped_not_read(data: Path) -> None:
    """What is written into the file later shows in what was loaded before."""
    sequence = ShardReader(data)[0]
    with (data / "shard-00000.bin").open("r+b") as file:
        file.write(np.array([12345], "<u2").tobytes())
    assert sequence.features[0, 0] == 12345


def test_nothing_of_the_name_exists_before_close(tmp_path: Path) -> None:
    """Bug: a killed run leaves half a directory that is read as data."""
    directory = tmp_path / "a" / "data"
    writer = ShardWriter(directory, tap_layers=(1, 3), hidden_size=2, target="t")
    writer.add(SEQUENCES[0])
    assert not directory.exists()
    writer.close()
    assert len(ShardReader(directory)) == 1
    with pytest.raises(ValueError, match="closed"):
        writer.add(SEQUENCES[1])


def test_a_failed_block_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with ShardWriter(tmp_path / "data", tap_layers=(1, 3), hidden_size=2, target="t") as writer:
            writer.add(SEQUENCES[0])
            raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        fail()
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="no sequence was added"):
        write(tmp_path / "data", [])
    assert not list(tmp_path.iterdir())


def test_existing_data_is_not_overwritten(data: Path) -> None:
    before = (data / "meta.json").read_bytes()
    with pytest.raises(ValueError, match="exists already"):
        write(data)
    assert (data / "meta.json").read_bytes() == before
    late = ShardWriter(data.parent / "late", tap_layers=(1, 3), hidden_size=2, target="t")
    late.add(SEQUENCES[0])
    shutil.copytree(data, data.parent / "late")
    with pytest.raises(ValueError, match="exists already"):
        late.close()
    assert len(ShardReader(data.parent / "late")) == 5


def test_what_does_not_belong_is_refused(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "data", tap_layers=(1, 3), hidden_size=2, target="t")
    writer.add(SEQUENCES[0])
    with pytest.raises(ValueError, match=r"width 4.*holds 6"):
        writer.add(make("other", 5, width=4))
    with pytest.raises(ValueError, match="'k0' was added"):
        writer.add(SEQUENCES[0])
    writer.close()
    assert len(ShardReader(tmp_path / "data", verify=True)) == 1


@pytest.mark.parametrize("name", ["shard-00000.bin", "tokens.bin", "index.json", "meta.json"])
@pytest.mark.parametrize("by", [-1, -40, 1])
def test_a_wrong_size_is_refused_by_name(data: Path, name: str, by: int) -> None:
    content = (data / name).read_bytes()
    (data / name).write_bytes(content[:by] if by < 0 else content + b"}")
    with pytest.raises(ValueError, match=name):
        ShardReader(data)


@pytest.mark.parametrize("name", ["shard-00000.bin", "tokens.bin", "index.json", "meta.json"])
def test_a_missing_file_is_refused_by_name(data: Path, name: str) -> None:
    (data / name).unlink()
    with pytest.raises(ValueError, match=name):
        ShardReader(data)


@pytest.mark.parametrize("name", ["tokens.bin", "index.json", "shard-00000.bin"])
def test_damage_is_found(data: Path, name: str) -> None:
    content = bytearray((data / name).read_bytes())
    content[len(content) // 2] ^= 1
    (data / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        ShardReader(data, verify=name.startswith("shard"))


def test_another_format_is_refused(data: Path) -> None:
    meta = json.loads((data / "meta.json").read_text())
    for change, message in (
        ({"format_version": 2}, "format_version is 2, this program reads 1"),
        ({"tap_layers": None}, "not a description"),
        ({"num_tokens": 3}, "meta.json says"),
        ({"files": {}}, "names no index.json"),
    ):
        (data / "meta.json").write_text(json.dumps(meta | change))
        with pytest.raises(ValueError, match=message):
            ShardReader(data)
    (data / "meta.json").write_text("[]")
    with pytest.raises(ValueError, match="format_version is None"):
        ShardReader(data)
