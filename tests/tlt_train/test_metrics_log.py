"""The metrics log: what is logged is read back, by our reader and by TensorBoard's own, also after kills and resumes.

Each test names the bug that it would catch.
"""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
from pathlib import Path

import pytest

from tlt_train.metrics_log import FILE, MetricsLog, read_rows


def steps_of(directory: Path) -> list[int]:
    return [row["step"] for row in read_rows(directory / FILE)]


def scalars(directory: Path, tag: str) -> list[tuple[int, float]]:
    """(step, value) of a tag as TensorBoard shows it."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_values_come_back_bit_by_bit(tmp_path: Path) -> None:
    """A format with fewer digits would make two loss curves equal that are not."""
    values = {"loss": 0.1 + 0.2, "tokens_per_s": 1e300, "tiny": 5e-324}
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.log(3, values)
    (row,) = read_rows(tmp_path / FILE)
    assert row["unix_s"] > 0
    assert {name: row[name] for name in values} == values
    assert row["step"] == 3


def test_what_json_lacks_is_a_string_in_strict_json(tmp_path: Path) -> None:
    """Python's bare NaN is no JSON: other readers fail on the very line that one looks for."""
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.log(1, {"a": math.nan, "b": math.inf, "c": -math.inf})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    raw = json.loads((tmp_path / FILE).read_text(), parse_constant=refuse)
    assert (raw["a"], raw["b"], raw["c"]) == ("nan", "inf", "-inf")
    (row,) = read_rows(tmp_path / FILE)
    assert math.isnan(row["a"])
    assert (row["b"], row["c"]) == (math.inf, -math.inf)


def test_a_line_is_out_when_log_returns(tmp_path: Path) -> None:
    """A buffer in the process, or a queue of a thread, would lose the last lines and events with it."""
    pytest.importorskip("tensorboard")
    code = (
        "import os, sys\nfrom tlt_train.metrics_log import MetricsLog\n"
        "log = MetricsLog(sys.argv[1])\n"
        "for step in range(20): log.log(step, {'loss': 2.0})\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -9
    assert steps_of(tmp_path) == list(range(20))
    assert [step for step, _ in scalars(tmp_path, "loss")] == list(range(20))


def test_resume_drops_later_lines_and_a_torn_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the cut a resumed run has each redone step twice; a torn line would swallow the next one."""
    with MetricsLog(tmp_path, tensorboard=False) as log:
        for step in range(6):
            log.log(step, {"loss": float(step)})
    with open(tmp_path / FILE, "ab") as file:
        file.write(b'{"step": 6, "lo')
    with MetricsLog(tmp_path, tensorboard=False, resume_step=3) as log:
        assert steps_of(tmp_path) == [0, 1, 2, 3]
        log.log(4, {"loss": 40.0})
    assert "cut off" in caplog.text
    assert [row["loss"] for row in read_rows(tmp_path / FILE)] == [0.0, 1.0, 2.0, 3.0, 40.0]
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_a_whole_last_line_without_its_newline_is_dropped(tmp_path: Path) -> None:
    """It parses, so a cut that looks only at the JSON keeps it, and the next line is glued to it."""
    (tmp_path / FILE).write_bytes(b'{"step": 1, "unix_s": 1.0}\n{"step": 2, "unix_s": 1.0}')
    with MetricsLog(tmp_path, tensorboard=False, resume_step=5) as log:
        log.log(6, {"loss": 1.0})
    assert steps_of(tmp_path) == [1, 6]


def test_a_resume_that_fails_leaves_the_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cutting in place would lose all lines when the machine stops in between."""
    with MetricsLog(tmp_path, tensorboard=False) as log:
        for step in range(4):
            log.log(step, {})

    def fail(*_: object) -> None:
        raise OSError("stopped")

    monkeypatch.setattr("tlt_train.metrics_log.os.fsync", fail)
    with pytest.raises(OSError, match="stopped"):
        MetricsLog(tmp_path, tensorboard=False, resume_step=1)
    assert steps_of(tmp_path) == [0, 1, 2, 3]


def test_a_failed_write_is_counted_and_spoils_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk must not end the run, nor glue the next line to half of one."""
    log = MetricsLog(tmp_path, tensorboard=False)
    log.log(1, {"loss": 1.0})
    whole = log._file

    class Full:
        def write(self, line: bytes) -> int:
            return whole.write(line[:7]) or 0

    monkeypatch.setattr(log, "_file", Full())
    log.log(2, {"loss": 2.0})
    log.log(3, {"loss": 3.0})
    monkeypatch.setattr(log, "_file", whole)
    log.log(4, {"loss": 4.0})
    log.close()
    assert log.num_failed == 2
    assert sum("not written" in record.message for record in caplog.records) == 1
    assert steps_of(tmp_path) == [1, 4]


def test_bad_input_is_refused(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, tensorboard=False)
    log.log(5, {"loss": 1.0})
    log.log(5, {"accuracy": 1.0})
    with pytest.raises(ValueError, match="step is 4"):
        log.log(4, {})
    with pytest.raises(ValueError, match="'step'"):
        log.log(6, {"step": 1.0})
    log.close()
    with pytest.raises(ValueError, match="another run"):
        MetricsLog(tmp_path, tensorboard=False)


def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with MetricsLog(tmp_path) as log:
        assert log.has_tensorboard
        for step in range(1, 4):
            log.log(step, {"loss": 1.0 / step, "accuracy/position_1": 0.25 * step})
        # before close: what is in a queue would be lost with the process
        assert [step for step, _ in scalars(tmp_path, "loss")] == [1, 2, 3]
    assert scalars(tmp_path, "loss") == [(step, pytest.approx(1.0 / step)) for step in (1, 2, 3)]
    assert scalars(tmp_path, "accuracy/position_1")[-1] == (3, 0.75)


def test_tensorboard_forgets_the_steps_that_are_done_again(tmp_path: Path) -> None:
    """Without purge_step the redone steps show twice, as a zigzag."""
    pytest.importorskip("tensorboard")
    with MetricsLog(tmp_path) as log:
        for step in range(6):
            log.log(step, {"loss": float(step)})
    with MetricsLog(tmp_path, resume_step=2) as log:
        for step in range(3, 5):
            log.log(step, {"loss": 10.0 * step})
    assert scalars(tmp_path, "loss") == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]


def test_without_tensorboard_one_warning_and_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with caplog.at_level(logging.WARNING), MetricsLog(tmp_path) as log:
        log.log(1, {"loss": 1.0})
        log.log(2, {"loss": 1.0})
        assert not log.has_tensorboard
    assert [("tlt-engine[train]" in record.getMessage()) for record in caplog.records] == [True]
    assert steps_of(tmp_path) == [1, 2]
    assert not (tmp_path / "tensorboard").exists()
