"""What a replay says: acceptance by depth and by length, and the time that it would save on this machine.

Owns the sums and their definitions. Knows nothing of engines: it reads the log of ``replay``. Invariant: whatever is
called a length counts the bonus token (the one that the target itself draws in every step), whatever is called accepted
or acceptance does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from engine.replay import Pass, Replayed, Turn
from engine.spec.price import DraftPrice, TargetPrice

BUCKETS = (0, 64, 256, 1024, 4096, 16384)
BATCH_SIZES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class AtDepth:
    """Acceptance at one depth of the tree.

    ``conditional``: of the walks that came to depth - 1 and found a proposal there (``trials``), the share that went on.
    ``cumulative``: of all steps that verified a tree, the share that accepted this many tokens or more.
    """

    depth: int
    trials: int
    conditional: float
    cumulative: float


@dataclass(frozen=True, slots=True)
class Tally:
    """Some turns taken together. A turn is one request in one step of decoding."""

    num_turns: int = 0
    num_trees: int = 0  # turns that verified something
    num_tokens: int = 0  # committed, the bonus tokens counted
    num_proposed: int = 0  # draft tokens verified
    num_accepted: int = 0

    @property
    def length(self) -> float:
        """Tokens of a turn, the bonus token counted: 1 without speculation."""
        return self.num_tokens / self.num_turns if self.num_turns else math.nan


@dataclass(frozen=True, slots=True)
class Expected:
    """A step of ``batch_size`` requests, all decoding, at the acceptance that the replay had."""

    batch_size: int
    plain_ms: float
    target_ms: float
    draft_ms: float
    plain_tokens_per_s: float
    tokens_per_s: float
    speed_up: float


@dataclass(frozen=True, slots=True)
class Phase:
    """Steps of a replay in which from ``low`` to ``high`` requests were decoding."""

    low: int
    high: int
    num_steps: int
    seconds: float
    num_tokens: int
    nodes_each: float


def tally(turns: Sequence[Turn]) -> Tally:
    return Tally(
        len(turns),
        sum(len(turn.tree) > 0 for turn in turns),
        sum(turn.gained for turn in turns),
        sum(len(turn.tree) for turn in turns),
        sum(turn.num_accepted for turn in turns),
    )


def by_depth(turns: Sequence[Turn]) -> list[AtDepth]:
    """From depth 1 to the deepest that was tried."""
    hits: list[int] = []
    trials: list[int] = []
    num_trees = 0
    for turn in turns:
        if not len(turn.tree):
            continue
        num_trees += 1
        accepted = turn.num_accepted
        # where the recording ends, what would have come of a deeper proposal is not known
        missed = not turn.finished and turn.node in turn.tree.parents
        while len(trials) < accepted + missed:
            trials.append(0)
            hits.append(0)
        for depth in range(accepted):
            trials[depth] += 1
            hits[depth] += 1
        if missed:
            trials[accepted] += 1
    return [
        AtDepth(depth, tried, hit / tried, hit / num_trees)
        for depth, (tried, hit) in enumerate(zip(trials, hits, strict=True), 1)
    ]


def by_length(turns: Sequence[Turn]) -> dict[str, Tally]:
    """By output tokens that a request had when the step began."""
    found: dict[str, Tally] = {}
    for low, high in zip(BUCKETS, (*BUCKETS[1:], None), strict=True):
        some = [t for t in turns if t.start >= low and (high is None or t.start < high)]
        if some:
            found[f"{_short(low)}-{'' if high is None else _short(high)}"] = tally(some)
    return found


def expected(replayed: Replayed, price: TargetPrice) -> list[Expected]:
    """Time of plain and of speculative steps by batch size.

    Rows and context of a request are the replay's mean, drafting takes what it took at the nearest batch size seen.
    """
    turns = replayed.turns
    total = tally(turns)
    if not total.num_turns:
        return []
    nodes = total.num_proposed / total.num_turns
    context = sum(turn.num_context for turn in turns) / total.num_turns
    drafting = DraftPrice()
    deepest = 0
    for p in replayed.passes:
        if p.drafted[0]:
            drafting.observe(*p.drafted, p.draft_s)
            deepest = max(deepest, p.drafted[1])
    found: list[Expected] = []
    for size in BATCH_SIZES:
        plain_s = price.seconds(size, round(size * context))
        target_s = _seconds(price, size * (1.0 + nodes), size * (1.0 + nodes) * context)
        draft_s = drafting.seconds(size, deepest)
        tokens = size * total.length
        rate, plain_rate = tokens / (target_s + draft_s), size / plain_s
        found.append(
            Expected(
                size,
                1e3 * plain_s,
                1e3 * target_s,
                1e3 * draft_s,
                plain_rate,
                rate,
                rate / plain_rate,
            )
        )
    return found


def phases(passes: Sequence[Pass]) -> list[Phase]:
    """By number of requests that decode, in powers of two; prefill shares the pass of those that decode."""
    groups: dict[int, list[Pass]] = {}
    for p in passes:
        groups.setdefault((p.num_decoding - 1).bit_length() if p.num_decoding else -1, []).append(p)
    found: list[Phase] = []
    for power, some in sorted(groups.items(), reverse=True):
        requests = sum(p.num_decoding for p in some)
        found.append(
            Phase(
                0 if power < 0 else 2 ** (power - 1) + 1 if power else 1,
                0 if power < 0 else 2**power,
                len(some),
                sum(p.target_s + p.draft_s for p in some),
                sum(p.num_tokens for p in some),
                sum(p.num_nodes for p in some) / requests if requests else 0.0,
            )
        )
    return found


def acceptance_text(replayed: Replayed) -> str:
    """Tables for reading."""
    total = tally(replayed.turns)
    lines = [
        f"mean acceptance length {total.length:.3f} tokens a step, the bonus token counted; of {total.num_proposed} "
        f"draft tokens {total.num_accepted} were accepted; {total.num_trees} of {total.num_turns} steps had a draft",
        "",
        f"{'depth':>11} {'tried':>8} {'accepted if reached':>20} {'of all drafts':>14}",
    ]
    lines += [
        f"{d.depth:>11} {d.trials:>8} {d.conditional:>20.3f} {d.cumulative:>14.3f}"
        for d in by_depth(replayed.turns)
    ]
    lines += [
        "",
        f"{'output from':>11} {'steps':>8} {'drafted':>9} {'accepted':>9} {'length':>7}",
    ]
    lines += [
        f"{name:>11} {t.num_turns:>8} {t.num_proposed:>9} {t.num_accepted:>9} {t.length:>7.3f}"
        for name, t in by_length(replayed.turns).items()
    ]
    return "\n".join(lines)


def expected_text(rows: Sequence[Expected]) -> str:
    lines = [
        f"{'batch':>5} {'plain ms':>9} {'target ms':>10} {'draft ms':>9} {'plain tok/s':>12} {'tok/s':>9} "
        f"{'speed-up':>9}"
    ]
    lines += [
        f"{e.batch_size:>5} {e.plain_ms:>9.2f} {e.target_ms:>10.2f} {e.draft_ms:>9.3f} "
        f"{e.plain_tokens_per_s:>12.1f} {e.tokens_per_s:>9.1f} {e.speed_up:>9.2f}"
        for e in rows
    ]
    return "\n".join(lines)


def phases_text(tuned: Replayed, plain: Replayed) -> str:
    """A tuner's rollout beside the plain one."""
    names = ("running", "steps", "nodes each", "tok/s", "plain tok/s", "s", "plain s")
    lines = [" ".join(f"{name:>11}" for name in names)]
    of_plain = {phase.low: phase for phase in phases(plain.passes)}
    for phase in phases(tuned.passes):
        other = of_plain.get(phase.low)
        running = (
            f"{phase.low}-{phase.high}" if phase.high > phase.low else str(phase.high or "prefill")
        )
        cells = [running, f"{phase.num_steps}", f"{phase.nodes_each:.2f}", f"{_rate(phase):.1f}"]
        cells += [f"{_rate(other):.1f}" if other else "-", f"{phase.seconds:.2f}"]
        cells += [f"{other.seconds:.2f}" if other else "-"]
        lines.append(" ".join(f"{cell:>11}" for cell in cells))
    return "\n".join(lines)


def summary(replayed: Replayed, rows: Sequence[Expected]) -> dict[str, object]:
    """The same as plain values, for JSON."""
    total = tally(replayed.turns)
    return {
        "num_samples": replayed.num_samples,
        "num_tokens": replayed.num_tokens,
        "num_different": replayed.num_different,
        "num_draft_tokens": total.num_proposed,
        "num_accepted_draft_tokens": total.num_accepted,
        "acceptance_length": round(total.length, 4) if total.num_turns else None,
        "by_depth": [asdict(d) for d in by_depth(replayed.turns)],
        "by_length": {
            name: asdict(t) | {"length": round(t.length, 4)}
            for name, t in by_length(replayed.turns).items()
        },
        "expected": [asdict(row) for row in rows],
    }


def _seconds(price: TargetPrice, rows: float, context: float) -> float:
    """Between two whole numbers of rows in proportion."""
    low = math.floor(rows)
    share = rows - low
    below, above = price.seconds(low, round(context)), price.seconds(low + 1, round(context))
    return below + share * (above - below)


def _rate(phase: Phase) -> float:
    return phase.num_tokens / phase.seconds if phase.seconds else 0.0


def _short(number: int) -> str:
    return f"{number // 1024}k" if number >= 1024 else str(number)
