"""From ``speculative_config`` to drafters and a tuner.

Owns which drafters a method means, and nothing afterwards. Invariant: what cannot work for this target is refused
here, before anything runs, with what does not fit.
"""

from __future__ import annotations

from engine.config import ResolvedConfig
from engine.runner import ModelRunner, measure_passes
from engine.spec.alarm import AcceptanceAlarm
from engine.spec.base import Drafter, DraftPlan
from engine.spec.config import SpeculativeConfig
from engine.spec.oracle import OracleDrafter, read_records
from engine.spec.tuner import FixedTuner, OffTuner, Tuner
from engine.spec.tuner_beg import BegTuner, default_arms
from engine.spec.tuner_cost import CostTuner
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
    tuner = _tuner(config, drafters, runner)
    return Speculator(drafters, tuner, vocab_size=vocab_size, alarm=alarm)


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


def _tuner(config: SpeculativeConfig, drafters: list[Drafter], runner: ModelRunner) -> Tuner:
    if config.tuner == "off":
        return OffTuner()
    names = [drafter.name for drafter in drafters]
    depth = config.num_speculative_tokens
    if config.tuner == "fixed":
        return FixedTuner(DraftPlan(names[0], depth, config.max_nodes, config.top_k))
    if config.tuner == "beg":
        arms = [config.arm(text) for text in config.mab_configs or ()]
        return BegTuner(
            names[0],
            arms=arms or default_arms(depth, config.top_k, config.max_nodes),
            thresholds=config.mab_bs_threshold,
            off_from=config.bs_threshold,
            algorithm=config.tune_algorithm,
            seed=config.seed,
        )
    assert config.tuner == "cost", config.tuner
    measured, context_s = measure_passes(runner)
    return CostTuner(
        names,
        max_depth=depth,
        max_nodes=config.max_nodes,
        width=config.top_k,
        measured=measured,
        context_s=context_s,
    )
