"""Bad parameters are refused by name; nothing is silently ignored."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from engine.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", True),
        ("n", 1.5),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("seed", -1),
        ("seed", 2**63),
        ("logprobs", -1),
        ("logprobs", 101),
        ("prompt_logprobs", -1),
        ("presence_penalty", 2.5),
        ("frequency_penalty", float("inf")),
        ("repetition_penalty", 0.0),
        ("stop", [""]),
        ("stop", [3]),
        ("bad_words", "word"),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {1: 101.0}),
        ("stop_token_ids", [-5]),
        ("allowed_token_ids", []),
        ("logits_processors", [3]),
        ("logits_processors", len),
        ("stop", 5),
        ("stop_token_ids", 5),
        ("allowed_token_ids", "abc"),
        ("logit_bias", [1]),
        ("temperature", 10**400),
        ("ignore_eos", "no"),
        ("skip_special_tokens", None),
    ],
)
def test_bad_values_name_the_argument(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


def test_unknown_parameters_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="best_of=2"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="did you mean temperature"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]


def test_stop_is_one_string_or_several() -> None:
    assert SamplingParams(stop="a").stop_strings == ("a",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()


def test_nones_and_numbers_of_other_libraries_are_welcome() -> None:
    params = SamplingParams(
        n=np.int64(2),  # type: ignore[arg-type]
        temperature=torch.tensor(0.5),  # type: ignore[arg-type]
        stop=None,
        bad_words=None,
        stop_token_ids=None,
        logits_processors=None,
        allowed_token_ids=torch.tensor([3, 4]),  # type: ignore[arg-type]
    )
    assert (params.n, params.temperature, params.allowed_token_ids) == (2, 0.5, (3, 4))
    assert type(params.n) is int
    assert params.bad_words == params.logits_processors == ()


def test_a_generator_is_kept_not_used_up_by_the_check() -> None:
    """Catches rules that are checked once and then never applied."""
    params = SamplingParams(bad_words=(w for w in ["x"]), stop_token_ids=(i for i in (1, 2)))  # type: ignore[arg-type]
    assert params.bad_words == ("x",)
    assert params.stop_token_ids == (1, 2)


def test_changing_the_callers_list_changes_nothing() -> None:
    ids, biases = [1], {1: 2.0}
    params = SamplingParams(stop_token_ids=ids, logit_bias=biases)
    ids.append(2)
    biases[3] = 1.0
    assert (params.stop_token_ids, params.logit_bias) == ((1,), {1: 2.0})


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    assert SamplingParams(temperature=1e-40).temperature == 0.0
    assert SamplingParams(temperature=1e-4).temperature == 1e-4


def test_it_travels_to_other_processes() -> None:
    params = SamplingParams(n=2, logit_bias={1: 1.0}, stop=["a"])
    assert pickle.loads(pickle.dumps(params)) == params
    assert dataclasses.replace(params, n=3).n == 3
