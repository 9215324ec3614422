"""Settings of a training run: what is refused and how, presets, the learning rate by hand, the round trip."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tlt_train.config import PRESETS, TrainConfig
from tlt_train.losses import LOSS_NAMES


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss": "mse"}, "loss must be one of kl, reverse_kl, tv, lk, lk_hybrid, got 'mse'"),
        ({"dtype": "float16"}, "dtype must be one of bfloat16, float32"),
        ({"unroll_depth": 0}, "unroll_depth must be an integer of at least 1, got 0"),
        ({"unroll_depth": 2.0}, "unroll_depth must be an integer"),
        ({"warmup_steps": -1}, "warmup_steps must be an integer of at least 0"),
        ({"total_steps": True}, "total_steps must be an integer of at least 1, got True"),
        ({"tokens_per_step": 1}, "tokens_per_step must be an integer of at least 2"),
        ({"tokens_per_micro_batch": 1}, "tokens_per_micro_batch must be an integer"),
        ({"window": -1}, "window must be an integer of at least 0"),
        ({"window": 5, "unroll_depth": 5}, r"window must be 0 or more than unroll_depth \(5\)"),
        ({"seed": -1}, "seed must be an integer of at least 0"),
        ({"step_decay": 1.1}, "step_decay must be a number from 0 to 1, got 1.1"),
        ({"loss_weight": -0.1}, "loss_weight must be a number from 0 to inf"),
        ({"regression_weight": math.inf}, "regression_weight must be a number"),
        ({"hybrid_eta": math.nan}, "hybrid_eta must be a number"),
        ({"learning_rate": "1e-3"}, "learning_rate must be a number"),
        ({"learning_rate": -1.0}, "learning_rate must be a number"),
        ({"min_learning_rate_share": 2}, "min_learning_rate_share must be a number from 0 to 1"),
        ({"weight_decay": None}, "weight_decay must be a number"),
        ({"max_grad_norm": -1}, "max_grad_norm must be a number"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\)"),
        ({"betas": (0.9,)}, "betas must be two numbers"),
        ({"betas": 0.9}, "betas must be two numbers"),
        ({"betas": ("a", "b")}, "betas must be two numbers"),
        ({"loss_weight": 0.0}, "loss_weight must be above 0 where regression_weight is 0"),
        ({"learn_prompts": "no"}, "learn_prompts must be True or False"),
        ({"train_head": None}, "train_head must be True or False"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**given)


def test_presets_are_valid_and_take_changes() -> None:
    for name in PRESETS:
        config = TrainConfig.of(name, seed=4)
        assert config.seed == 4
        assert (config.regression_weight > 0) == (name != "eagle3")
    assert TrainConfig.of("eagle1").unroll_depth == 1
    assert TrainConfig.of("hass").unroll_depth > 1
    assert TrainConfig.of("hass", unroll_depth=2).unroll_depth == 2
    with pytest.raises(ValueError, match="objective must be one of eagle1, hass, eagle3, got 'x'"):
        TrainConfig.of("x")


@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_every_loss_can_be_chosen(loss: str) -> None:
    assert TrainConfig(loss=loss).loss == loss


def test_the_rate_by_hand() -> None:
    config = TrainConfig(learning_rate=2.0, min_learning_rate_share=0.1, warmup_steps=4)
    assert [config.learning_rate_at(s, 24) for s in range(4)] == [0.5, 1.0, 1.5, 2.0]
    assert config.learning_rate_at(4, 24) == 2.0
    assert config.learning_rate_at(14, 24) == pytest.approx(2 * 0.55)
    assert config.learning_rate_at(9, 24) == pytest.approx(2 * (0.1 + 0.45 * (1 + 2**-0.5)))
    assert config.learning_rate_at(24, 24) == config.learning_rate_at(90, 24) == pytest.approx(0.2)
    rates = [config.learning_rate_at(s, 24) for s in range(4, 24)]
    assert rates == sorted(rates, reverse=True)
    assert TrainConfig(learning_rate=2.0, warmup_steps=0).learning_rate_at(0, 1) == 2.0
    assert config.learning_rate_at(7, 3) == pytest.approx(0.2)  # fewer steps than the warm-up


def test_a_config_goes_through_json() -> None:
    config = TrainConfig.of("hass", betas=(0.5, 0.75), seed=9)
    found = TrainConfig.from_dict(json.loads(json.dumps(config.as_dict())))
    assert found == config
    assert found.betas == (0.5, 0.75)
    with pytest.raises(ValueError, match="unknown settings of a training run: depth, size"):
        TrainConfig.from_dict({"size": 1, "depth": 2})
