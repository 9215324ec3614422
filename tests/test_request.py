"""A request's own rules: what ends it, in the middle of a run of tokens too, who made its tokens."""

import pytest

from engine.request import Request, RequestStatus, VersionSpan
from engine.sampling_params import SamplingParams

EOS, STOP = 1, 2


def make(
    prompt_len: int = 3, max_total_len: int = 100, max_tokens: int | None = 8, **params
) -> Request:
    return Request(
        "r",
        list(range(10, 10 + prompt_len)),
        SamplingParams(max_tokens=max_tokens, **params),
        seed=0,
        max_total_len=max_total_len,
        eos_token_ids=frozenset({EOS}),
    )


@pytest.mark.parametrize(
    ("params", "tokens", "kept", "reason", "stop_reason"),
    [
        ({}, [5, 6, 7], 3, None, None),
        ({}, [5, EOS, 7], 2, "stop", None),
        ({"ignore_eos": True}, [5, EOS, 7], 3, None, None),
        ({"stop_token_ids": [STOP]}, [5, STOP, EOS], 2, "stop", STOP),
        ({"ignore_eos": True, "stop_token_ids": [EOS]}, [5, EOS, 7], 2, "stop", EOS),
        ({"max_tokens": 2}, [5, 6, 7], 2, "length", None),
        # Catches a limit in the middle of an accepted run that hides the stop before it.
        ({"max_tokens": 3}, [5, EOS, 7, 8], 2, "stop", None),
        ({"max_tokens": 2}, [5, EOS, 7], 2, "stop", None),
        ({"max_tokens": 2}, [5, 6, EOS], 2, "length", None),
        ({"min_tokens": 3}, [EOS, EOS, EOS, 9], 3, "stop", None),
        ({"min_tokens": 3, "max_tokens": 3}, [EOS, EOS, 5, 9], 3, "length", None),
    ],
)
def test_end_in_the_middle_of_a_run(params, tokens, kept, reason, stop_reason):
    request = make(**params)
    assert request.append_tokens(tokens) == kept
    assert request.output_token_ids == tokens[:kept]
    assert (request.finish_reason, request.stop_reason) == (reason, stop_reason)
    assert request.is_finished == (reason is not None)


@pytest.mark.parametrize("cut", range(1, 7))
def test_one_by_one_or_together_is_the_same(cut: int):
    """Catches state that is only right for one token a step."""
    tokens = [5, 6, EOS, 7, STOP, 8, 9, 10]
    variants: list[dict] = [
        {"max_tokens": 4, "ignore_eos": True},
        {"min_tokens": 4, "stop_token_ids": [STOP]},
        {"max_tokens": None},
    ]
    for params in variants:
        outcomes = []
        for size in (1, cut, len(tokens)):
            request = make(max_total_len=9, **params)
            for start in range(0, len(tokens), size):
                if not request.is_finished:
                    request.append_tokens(tokens[start : start + size])
            outcomes.append((request.token_ids, request.finish_reason, request.stop_reason))
        assert outcomes[0] == outcomes[1] == outcomes[2]


def test_context_length_bounds_the_output():
    request = make(prompt_len=3, max_total_len=6, max_tokens=None)
    assert (request.max_output_tokens, request.max_kv_tokens) == (3, 5)
    assert request.append_tokens([5, 6, 7, 8]) == 3
    assert request.finish_reason == "length"
    assert make(prompt_len=3, max_total_len=6, max_tokens=2).max_output_tokens == 2


def test_a_stop_string_found_later_replaces_the_limit_behind_it():
    request = make(max_tokens=4)
    request.append_tokens([5, 6, 7, 8])
    assert request.finish_reason == "length"
    request.truncate_output(2)
    request.finish("stop", "###")
    assert request.output_token_ids == [5, 6]
    assert (request.finish_reason, request.stop_reason) == ("stop", "###")


def test_the_first_other_reason_stays():
    request = make()
    request.finish("abort")
    for later in ("stop", "length", "error"):
        request.finish(later, "x")
    assert (request.finish_reason, request.stop_reason) == ("abort", None)
    assert request.status is RequestStatus.FINISHED
    with pytest.raises(AssertionError, match="abort"):
        request.append_tokens([5])


def test_version_spans_cover_the_output():
    request = make(max_tokens=None)
    assert request.version_spans == []
    for tokens, version in (([5, 6], 3), ([7], 3), ([8, 9, 10], 4), ([], 5), ([11], 6)):
        request.append_tokens(tokens, version)
    assert request.version_spans == [
        VersionSpan(0, 3, 3),
        VersionSpan(3, 6, 4),
        VersionSpan(6, 7, 6),
    ]
    request.truncate_output(4)
    assert request.version_spans == [VersionSpan(0, 3, 3), VersionSpan(3, 4, 4)]
    request.truncate_output(3)
    assert request.version_spans == [VersionSpan(0, 3, 3)]
    request.truncate_output(0)
    assert request.version_spans == []


def test_version_spans_leave_out_what_was_cut_by_a_stop():
    request = make()
    request.append_tokens([5], 1)
    request.append_tokens([6, EOS, 7, 8], 2)
    assert request.version_spans == [VersionSpan(0, 1, 1), VersionSpan(1, 3, 2)]


def test_is_decoding_means_one_row_left_after_the_prefill():
    request = make()
    request.status = RequestStatus.RUNNING
    request.num_computed = 2
    assert not request.is_decoding, "one prompt row left is prefill"
    request.append_tokens([5])
    request.num_computed = 3
    assert request.is_decoding
    request.num_computed = 0
    assert not request.is_decoding, "recompute after preemption is prefill"


def test_refusals_name_the_fix():
    with pytest.raises(ValueError, match="prompt is empty"):
        make(prompt_len=0)
    with pytest.raises(ValueError, match="max_model_len"):
        make(prompt_len=6, max_total_len=6)
    assert make(prompt_len=5, max_total_len=6).max_output_tokens == 1


def test_prompt_logprobs_must_compute_every_prompt_row():
    assert make().reads_prefix_cache
    assert not make(prompt_logprobs=0).reads_prefix_cache
