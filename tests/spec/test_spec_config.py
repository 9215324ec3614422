"""``speculative_config``: every key, the names that users of other engines bring, and every refusal."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from engine.spec.config import MAX_DEPTH, MAX_NODES, SpeculativeConfig

GOOD: dict[str, tuple[Any, ...]] = {
    "method": ("auto", "suffix"),
    "model": (None, "/m"),
    "tuner": ("cost", "beg", "fixed", "off"),
    "num_speculative_tokens": (1, 5, MAX_DEPTH),
    "top_k": (1, 8, MAX_DEPTH),
    "num_nodes": (None, 1, MAX_NODES),
    "window": (16, 512),
    "draft_sampling": ("coupled", "mode"),
    "trace": (None, "/t.jsonl"),
    "acceptance": (0, 0.5, 1.0, 1),
    "tune_algorithm": ("BEG", "EG", "UCB1", "PREDEFINED"),
    "mab_configs": (None, ["8_4_48"], ("1_1_1", "2_1_2")),
    "mab_bs_threshold": ([1], (1, 2, 5, 21)),
    "bs_threshold": (1, 32),
    "max_history_tokens": (0, 10**9),
    "on_acceptance_drop": ("warn", "ignore"),
    "seed": (0, 2**63 - 1),
}
BAD: dict[str, tuple[Any, ...]] = {
    "method": ("medusa", None, 3),
    "model": ("", 3, b"x"),
    "tuner": ("costs", None),
    "num_speculative_tokens": (0, -1, MAX_DEPTH + 1, 2.0, "5", None, True),
    "top_k": (0, MAX_DEPTH + 1, 1.5, None, True),
    "num_nodes": (0, MAX_NODES + 1, 2.0, "8", True),
    "window": (0, 15, 2**20 + 1, None, 512.0),
    "draft_sampling": ("greedy", "Mode", None, True),
    "trace": ("", 7),
    "acceptance": (-0.1, 1.1, float("nan"), "0.5", None, True),
    "tune_algorithm": ("beg", None),
    "mab_configs": (
        [],
        ["8_4"],
        ["8_4_0"],
        ["a_b_c"],
        [8],
        ["8_4_48_1"],
        5,
        ["-1_1_1"],
        ["65_1_1"],
    ),
    "mab_bs_threshold": ([], [2, 1], [1, 1], [0, 1], [1.0], None, "1,2", [True]),
    "bs_threshold": (0, None, 1.0),
    "max_history_tokens": (-1, 2.0, None),
    "on_acceptance_drop": ("stop", None),
    "seed": (-1, 2**63, 0.0, None),
}


NEEDED: dict[str, dict[str, Any]] = {  # for a key to have an effect
    "window": {"model": "/m"},
    "draft_sampling": {"model": "/m"},
    "trace": {"method": "oracle"},
    "acceptance": {"method": "oracle", "trace": "/t.jsonl"},
    "tune_algorithm": {"tuner": "beg"},
    "mab_configs": {"tuner": "beg"},
    "mab_bs_threshold": {"tuner": "beg"},
    "bs_threshold": {"tuner": "beg"},
}


def test_the_tables_have_every_key() -> None:
    assert set(GOOD) == set(BAD) == {f.name for f in fields(SpeculativeConfig)}


@pytest.mark.parametrize(("key", "value"), [(k, v) for k, values in GOOD.items() for v in values])
def test_good_values(key: str, value: Any) -> None:
    needed = {} if value is None else NEEDED.get(key, {})
    config = SpeculativeConfig.of(needed | {key: value})
    assert config is not None
    found = getattr(config, key)
    assert found == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize(("key", "value"), [(k, v) for k, values in BAD.items() for v in values])
def test_bad_values_are_named(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"speculative_config.*{key}"):
        SpeculativeConfig.of({key: value})


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("num_steps", "num_speculative_tokens"),
        ("speculative_num_steps", "num_speculative_tokens"),
        ("spec_steps", "num_speculative_tokens"),
        ("eagle_topk", "top_k"),
        ("speculative_eagle_topk", "top_k"),
        ("spec_topk", "top_k"),
        ("num_draft_tokens", "num_nodes"),
        ("speculative_num_draft_tokens", "num_nodes"),
        ("spec_verify_tokens", "num_nodes"),
    ],
)
def test_the_names_of_other_engines(given: str, name: str) -> None:
    config = SpeculativeConfig.of({given: 7})
    assert getattr(config, name) == 7


@pytest.mark.parametrize(
    "given", ["draft_model_path", "speculative_draft_model_path", "spec_model_path"]
)
def test_the_head_by_other_names(given: str, tmp_path: Path) -> None:
    config = SpeculativeConfig.of({"method": "eagle3", given: tmp_path})
    assert config is not None
    assert config.model == str(tmp_path)


@pytest.mark.parametrize(
    "given", ["speculative_method", "speculative_top_k", "speculative_num_speculative_tokens"]
)
def test_our_names_with_the_prefix(given: str) -> None:
    name = given.removeprefix("speculative_")
    value = GOOD[name][1]
    assert getattr(SpeculativeConfig.of({given: value}), name) == value


def test_a_key_twice_under_two_names() -> None:
    with pytest.raises(ValueError, match=r"'eagle_topk' gives top_k a second time"):
        SpeculativeConfig.of({"top_k": 2, "eagle_topk": 2})


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("num_speculative_token", "did you mean num_speculative_tokens"),
        ("topk", "did you mean top_k"),
        ("methode", "did you mean method"),
        ("xyzzy", "known: method, model, tuner"),
        (3, "known: "),
    ],
)
def test_unknown_keys_get_a_hint(key: Any, hint: str) -> None:
    with pytest.raises(ValueError, match=rf"unknown key .*{hint}"):
        SpeculativeConfig.of({key: 1})


@pytest.mark.parametrize("value", ["auto", 5, ["method"], True])
def test_what_is_no_mapping_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="must be a dict or None"):
        SpeculativeConfig.of(value)


def test_none_and_instances_pass() -> None:
    config = SpeculativeConfig(method="suffix")
    assert SpeculativeConfig.of(None) is None
    assert SpeculativeConfig.of(config) is config
    assert SpeculativeConfig.of({}) == SpeculativeConfig()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "eagle"}, "model must be the drafter's directory for method 'eagle', got None"),
        ({"method": "eagle3"}, "model must be the drafter's directory for method 'eagle3'"),
        ({"method": "suffix", "model": "/m"}, "method 'suffix' has no model.*use 'auto' for both"),
        ({"method": "oracle", "model": "/m", "trace": "/t"}, "method 'oracle' has no model"),
        ({"method": "oracle"}, "trace must be the JSONL of a recorded rollout"),
    ],
)
def test_what_a_method_needs(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig.of(given)


@pytest.mark.parametrize("key", NEEDED)
def test_a_key_without_effect_is_refused(key: str) -> None:
    default = getattr(SpeculativeConfig(), key)
    value = next(v for v in reversed(GOOD[key]) if v not in (default, None))
    if key == "window":
        value = 16
    if key == "acceptance":
        value = 0.5
    others = (
        {"method": "suffix"},
        {"method": "auto", "tuner": "fixed"},
        {"method": "suffix", "tuner": "off"},
    )
    for given in others:
        with pytest.raises(ValueError, match=rf"speculative_config: {key}=.* has no effect with"):
            SpeculativeConfig.of(given | {key: value})
        SpeculativeConfig.of(given | {key: default})  # what a tool writes out in full still works


def test_most_nodes() -> None:
    assert SpeculativeConfig(num_speculative_tokens=5).max_nodes == 5
    assert SpeculativeConfig(num_speculative_tokens=5, top_k=4).max_nodes == 20
    assert SpeculativeConfig(num_speculative_tokens=64, top_k=64).max_nodes == MAX_NODES
    assert SpeculativeConfig(num_nodes=3).max_nodes == 3


def test_arms_of_the_bandit() -> None:
    assert SpeculativeConfig.arm("8_4_48") == (8, 4, 48)
    config = SpeculativeConfig.of({"tuner": "beg", "mab_configs": "8_4_48,2_1_2"})
    assert config is not None
    assert config.mab_configs == ("8_4_48", "2_1_2")
