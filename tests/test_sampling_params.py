"""Bad parameters are refused by name; nothing is silently ignored."""

from __future__ import annotations

from typing import Any

import pytest

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
    ],
)
def test_bad_values_name_the_argument(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


def test_unknown_parameters_are_refused() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]


def test_stop_is_one_string_or_several() -> None:
    assert SamplingParams(stop="a").stop_strings == ("a",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()
