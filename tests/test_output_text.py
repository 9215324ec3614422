"""Text that grows: stop strings, text held back, and independence of how tokens arrive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.output_text import OutputText
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_llama_dir: Path) -> Tokenizer:
    return Tokenizer.from_directory(tiny_llama_dir)


def feed(tokenizer: Tokenizer, text: str, **params: Any) -> tuple[OutputText, str | None, int]:
    """Push a text byte by byte until a stop: (state, stop string, tokens pushed)."""
    output = OutputText(tokenizer, SamplingParams(**params))
    shown = ""
    for i, token_id in enumerate(tokenizer.encode(text)):
        stop = output.push(token_id)
        assert output.shown.startswith(shown)  # what was shown is never taken back
        shown = output.shown
        if stop is not None:
            assert output.text.startswith(shown)
            return output, stop, i + 1
    output.finish()
    return output, None, i + 1


def test_the_first_stop_wins_and_is_cut(tokenizer: Tokenizer) -> None:
    output, stop, pushed = feed(tokenizer, "abcdefgh", stop=["gh", "de", "cde"])
    assert (output.text, stop, pushed) == ("ab", "cde", 5)


def test_a_stop_may_be_kept(tokenizer: Tokenizer) -> None:
    output, stop, _ = feed(tokenizer, "abcdefgh", stop=["de"], include_stop_str_in_output=True)
    assert (output.text, stop) == ("abcde", "de")


def test_a_stop_of_several_bytes_a_character(tokenizer: Tokenizer) -> None:
    output, stop, _ = feed(tokenizer, "größe 睓 end", stop=["睓"])
    assert (output.text, stop) == ("größe ", "睓")


def test_without_a_stop_everything_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    output, stop, _ = feed(tokenizer, "abcd", stop=["cdx"])
    assert (output.text, output.shown, stop) == ("abcd", "abcd", None)


def test_half_a_character_is_shown_as_a_replacement_at_the_end_only(tokenizer: Tokenizer) -> None:
    output = OutputText(tokenizer, SamplingParams())
    output.push(tokenizer.encode("ö")[0])
    assert output.shown == ""
    output.finish()
    assert output.shown == "\ufffd"


def test_text_before_min_tokens_is_no_part_of_a_stop(tokenizer: Tokenizer) -> None:
    output = OutputText(tokenizer, SamplingParams(stop=["ab"]))
    a, b = tokenizer.encode("ab")
    assert output.push(a, may_stop=False) is None
    assert output.push(b) is None
    assert output.push(a) is None
    assert output.push(b) == "ab"
    assert output.text == "ab"


@given(text=st.text("abö", min_size=1, max_size=30), stop=st.text("abö", min_size=1, max_size=4))
def test_stops_where_find_says(tokenizer: Tokenizer, text: str, stop: str) -> None:
    output, found, _ = feed(tokenizer, text, stop=[stop])
    at = text.find(stop)
    assert (found is None) == (at < 0)
    assert output.text == (text if at < 0 else text[:at])
