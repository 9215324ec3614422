"""The text of one sample as it grows: detokenised token by token, cut at the first stop string.

Owns the text and the choice of what may be shown already. Knows nothing of requests or steps. Invariant: text
that was shown is never taken back, and the text does not depend on how many tokens come at once.
"""

from __future__ import annotations

from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer


class OutputText:
    """Feeds on tokens; says when a stop string has appeared."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens)
        self._stops = params.stop_strings
        self._include_stop = params.include_stop_str_in_output
        self._longest_stop = max(map(len, self._stops), default=0)
        self._text = ""
        self._search_from = 0
        self._done = False

    def push(self, token_id: int, *, may_stop: bool = True) -> str | None:
        """Add a token. The stop string that it completed, or None; the text is cut at it then.

        ``may_stop`` False (before min_tokens): its text ends nothing, nor is part of what ends later.
        """
        before = len(self._text)
        self._text += self._detokenizer.push(token_id)
        if not may_stop:
            self._search_from = len(self._text)
        if not self._stops or len(self._text) == before or not may_stop:
            return None
        return self._cut_at_stop(max(self._search_from, before - self._longest_stop + 1))

    def finish(self) -> None:
        """No token will follow: whatever was held back, half a character included, is shown."""
        if not self._done:
            self._text += self._detokenizer.finish()
            self._done = True

    @property
    def text(self) -> str:
        return self._text

    @property
    def shown(self) -> str:
        """The part of the text that no later token can take back."""
        held = 0 if self._done or self._include_stop else max(self._longest_stop - 1, 0)
        return self._text[: max(len(self._text) - held, 0)]

    def _cut_at_stop(self, start: int) -> str | None:
        found = [(self._text.find(stop, start), stop) for stop in self._stops]
        found = [(at, stop) for at, stop in found if at >= 0]
        if not found:
            return None
        at, stop = min(found, key=lambda pair: (pair[0], len(pair[1])))
        self._text = self._text[: at + len(stop) if self._include_stop else at]
        self._done = True
        return stop
