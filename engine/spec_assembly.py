"""From ``speculative_config`` to drafters and a tuner.

Owns which drafters a method means, and nothing afterwards. Invariant: what cannot work for this target is refused
here, before anything runs, with what does not fit.
"""

from __future__ import annotations

from engine.config import ResolvedConfig
from engine.runner import ModelRunner
from engine.spec.alarm import AcceptanceAlarm
from engine.spec.base import Drafter, DraftPlan
from engine.spec.config import SpeculativeConfig
from engine.spec.oracle import OracleDrafter, read_records
from engine.spec.tuner import FixedTuner, OffTuner, Tuner
from engine.speculation import Speculator


def build_speculator(
    config: SpeculativeConfig | None, target: ResolvedConfig, runner: ModelRunner
) -> Speculator:
    """The drafters and the tuner of a config; None is plain decoding.

    Raises:
        ValueError: the drafter's checkpoint or trace is bad or does not fit the target.
    """
    vocab_size = target.model.vocab_size
    if config is None:
        return Speculator([], OffTuner(), vocab_size=vocab_size)
    drafters = _drafters(config, target, runner)
    alarm = AcceptanceAlarm() if config.on_acceptance_drop == "warn" else None
    return Speculator(
        drafters, _tuner(config, drafters, target), vocab_size=vocab_size, alarm=alarm
    )


def _drafters(
    config: SpeculativeConfig, target: ResolvedConfig, runner: ModelRunner
) -> list[Drafter]:
    if config.method == "oracle":
        assert config.trace is not None
        records = read_records(config.trace)
        vocab_size = target.model.vocab_size
        return [OracleDrafter(records, acceptance=config.acceptance, vocab_size=vocab_size)]
    drafters: list[Drafter] = []
    if config.model is not None:
        from engine.spec.eagle import open_eagle

        drafters.append(open_eagle(config, target, runner))
    if config.method in ("auto", "suffix"):
        from engine.spec.suffix import SuffixDrafter

        drafters.append(SuffixDrafter(max_history_tokens=config.max_history_tokens))
    return drafters


def _tuner(config: SpeculativeConfig, drafters: list[Drafter], target: ResolvedConfig) -> Tuner:
    if config.tuner == "off":
        return OffTuner()
    name = drafters[0].name
    if config.tuner == "fixed":
        depth = config.num_speculative_tokens
        return FixedTuner(DraftPlan(name, depth, config.max_nodes, config.top_k))
    raise ValueError(f"speculative_config: tuner {config.tuner!r} is not there yet")
