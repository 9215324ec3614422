"""Pictures of rollouts: who is running, tokens per second, and what the tuner chose, over time.

Owns the drawing; matplotlib is imported when it is needed. Knows nothing of engines.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.speculative import RolloutLog

_SMOOTH_S = 0.5


def checked_path(name: str, output: str) -> Path:
    """Where a picture goes; whatever would fail after a long run fails before it.

    Raises:
        ValueError: names the option, and what is wrong with it.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("the timeline needs matplotlib: pip install 'tlt-engine[demo]'")
    path = Path(output).resolve()
    if path.suffix not in (".png", ".svg", ".pdf") or path.is_dir():
        raise ValueError(f"{name} must be a .png, .svg or .pdf file, got {output!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"{name}: cannot write into {path.parent}")
    return path


def draw_rollouts(logs: Mapping[str, RolloutLog], path: Path) -> None:
    """One line a variant in three panels over the same seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (running, rate, nodes) = pyplot.subplots(3, 1, sharex=True, figsize=(9, 7.5))
    for name, log in logs.items():
        ends = _ends(log)
        running.step(ends, [step.num_decoding for step in log.steps], where="pre", label=name)
        rate.plot(ends, _rates(log, ends), label=name)
        nodes.plot(ends, _smoothed(_nodes_each(log), ends), label=name)
    running.set_ylabel("decoding samples")
    running.set_title("A rollout: the long tail, and what speculation does about it")
    running.legend(fontsize=8)
    rate.set_ylabel("tokens/s")
    nodes.set_ylabel("draft tokens\nof a sample and step")
    nodes.set_xlabel("seconds")
    for axis in (running, rate, nodes):
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _ends(log: RolloutLog) -> list[float]:
    ends, now = [], 0.0
    for step in log.steps:
        now += step.seconds
        ends.append(now)
    return ends


def _nodes_each(log: RolloutLog) -> list[float]:
    return [step.num_nodes / max(step.num_decoding, 1) for step in log.steps]


def _rates(log: RolloutLog, ends: Sequence[float]) -> list[float]:
    """Tokens per second after each step, over the last half second."""
    rates, first, tokens = [], 0, 0
    for last, step in enumerate(log.steps):
        tokens += step.num_tokens
        while first < last and ends[first] < ends[last] - _SMOOTH_S:
            tokens -= log.steps[first].num_tokens
            first += 1
        start = ends[first] - log.steps[first].seconds
        rates.append(tokens / max(ends[last] - start, 1e-9))
    return rates


def _smoothed(values: Sequence[float], ends: Sequence[float]) -> list[float]:
    """Mean of each value and those of the half second before it."""
    smooth, first, total = [], 0, 0.0
    for last, value in enumerate(values):
        total += value
        while first < last and ends[first] < ends[last] - _SMOOTH_S:
            total -= values[first]
            first += 1
        smooth.append(total / (last - first + 1))
    return smooth
