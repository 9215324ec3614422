"""A buffer whose files on disk go away under it."""

from __future__ import annotations

from pathlib import Path

from tests.tlt_train.sequences import make
from tests.tlt_train.test_buffer import ROW_BYTES, filled


def test_a_draw_that_chose_only_lost_files_is_made_again(tmp_path: Path) -> None:
    """A spill directory that has vanished: a small draw often chooses nothing but what was in it."""
    sequences = [make(f"{i:02d}", 10) for i in range(12)]
    buffer = filled(*sequences, max_bytes=20 * ROW_BYTES, spill_dir=tmp_path)
    for path in tmp_path.glob("*/*.bin"):
        path.unlink()
    (window,) = buffer.draw(10, 0)
    assert window.sequence.key in ("10", "11")
    assert 0 < buffer.stats().num_lost_files <= 10
    for key in range(20):
        assert buffer.draw(10, key)
    empty = filled(make("a", 10), max_bytes=0, spill_dir=tmp_path)
    next(iter(tmp_path.glob("*/*.bin"))).unlink()
    assert empty.draw(10, 0) == []
