"""Packing: rows of several documents side by side, without padding, each at its true position."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tlt_train.sequences import WIDTH, features_of, make, names, tokens_of, whole
from tlt_train.packing import pack, padded_tokens, split
from tlt_train.sequence import TrainingSequence, TrainingWindow


def test_rows_are_those_of_their_documents() -> None:
    """Row by row, from the definition. Bugs: taps shifted against tokens, positions counted through the batch, prompt
    rows taken for the answer, columns of the final state among the taps."""
    a, b = make("a", 9, start=0, prompt_len=5), make("b", 30, start=100, prompt_len=103)
    windows = [TrainingWindow(a, 2, 8), TrainingWindow(b, 0, 10), whole(a)]
    batch = pack(windows, num_taps=2, hidden_size=2)
    assert batch.doc_starts == (0, 6, 16, 25)
    assert (batch.num_tokens, batch.num_docs) == (25, 3)
    assert (batch.taps.dtype, batch.hidden.dtype) == (torch.bfloat16, torch.bfloat16)
    assert batch.taps.shape == (25, 4)
    assert batch.hidden.shape == (25, 2)
    assert batch.token_ids.dtype == batch.positions.dtype == torch.int64
    row = 0
    for window in windows:
        for i in range(window.begin, window.end):
            at = window.sequence.start + i
            key = window.sequence.key
            assert batch.positions[row] == at
            assert batch.token_ids[row] == tokens_of(key, at, at + 1)[0]
            bits = features_of(key, at, at + 1)[0].astype(np.int16)
            expected = torch.tensor(bits.tolist(), dtype=torch.int16)
            assert torch.equal(batch.taps[row].view(torch.int16), expected[:4])
            assert torch.equal(batch.hidden[row].view(torch.int16), expected[4:])
            assert batch.in_response[row] == (at >= window.sequence.prompt_len)
            row += 1


def test_bits_are_bf16_without_rounding() -> None:
    values = torch.tensor([[1.0, -2.5, 3e38, 1e-30]], dtype=torch.bfloat16)
    bits = values.view(torch.int16).numpy().view(np.uint16)
    sequence = TrainingSequence("a", 0, 0, np.array([1], np.int32), bits, 0)
    batch = pack([whole(sequence)], num_taps=1, hidden_size=2)
    assert torch.equal(torch.cat([batch.taps, batch.hidden], 1), values)


def test_read_only_maps_are_neither_written_nor_warned_about(tmp_path: Path) -> None:
    """Bug: torch.from_numpy of a read-only map warns, and writing into the tensor ends the process."""
    source = make("a", 40)
    source.features.tofile(tmp_path / "f.bin")
    mapped = np.memmap(tmp_path / "f.bin", np.uint16, mode="r").reshape(40, WIDTH)
    sequence = TrainingSequence("a", 0, 3, source.token_ids, mapped, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = pack([TrainingWindow(sequence, 0, 40)], num_taps=2, hidden_size=2)
    batch.taps.add_(1)
    batch.hidden.zero_()
    batch.token_ids.zero_()
    np.testing.assert_array_equal(
        np.fromfile(tmp_path / "f.bin", np.uint16), source.features.ravel()
    )
    np.testing.assert_array_equal(source.token_ids, tokens_of("a", 0, 40))


def test_pack_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="windows is empty"):
        pack([], num_taps=2, hidden_size=2)
    with pytest.raises(ValueError, match=r"'b' have width 4, expected 6 = \(num_taps=2 \+ 1\)"):
        pack([whole(make("a", 5)), whole(make("b", 5, width=4))], num_taps=2, hidden_size=2)


@pytest.mark.parametrize("seed", range(5))
def test_split_keeps_each_window_once_and_the_limit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.lognormal(4, 1.2, 120).astype(int) + 1, 700)
    windows = [whole(make(str(i), int(n))) for i, n in enumerate(lengths)]
    batches = split(windows, 512)
    assert sorted(n for batch in batches for n in names(batch)) == sorted(names(windows))
    sizes = [sum(w.num_tokens for w in batch) for batch in batches]
    for batch, size in zip(batches, sizes, strict=True):
        assert size <= 512 or len(batch) == 1
    # First fit: any two micro-batches together would be above the limit.
    least = sorted(sizes)[:2]
    assert sum(least) > 512
    assert len(batches) <= 11 / 9 * np.ceil(np.minimum(lengths, 512).sum() / 512) + 1
    assert [names(b) for b in split(windows, 512)] == [names(b) for b in batches]


def test_split_edges() -> None:
    assert split([], 10) == []
    big = [whole(make("a", 50)), whole(make("b", 3)), whole(make("c", 10))]
    assert [[n[0] for n in names(b)] for b in split(big, 10)] == [["a"], ["c"], ["b"]]
    with pytest.raises(ValueError, match="max_tokens"):
        split(big, 0)


def test_padded_tokens_by_hand() -> None:
    """Limit 20 and longest 10: two rows a micro-batch, (10, 2) (3, 1) (4) -> 2*10 + 2*3 + 4."""
    windows = [whole(make(str(i), n)) for i, n in enumerate([10, 2, 3, 1, 4])]
    assert padded_tokens(windows, 20) == 30
    assert padded_tokens(windows, 5) == 20  # one row each: nothing to pad
    assert padded_tokens([], 20) == 0
