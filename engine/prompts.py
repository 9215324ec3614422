"""From what a user passes as prompts to token ids, checked.

Owns the accepted forms (text, token ids, vLLM's dicts) and their error messages. Invariant: what it returns can
be run: at least one token, all inside the vocabulary, and room for one more within the context.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    text: str | None
    token_ids: list[int]


class PromptReader:
    """Reads prompts for one model.

    Args:
        tokenizer: None for a model without one; text prompts are refused then.
        vocab_size: V.
        max_model_len: longest sequence in tokens.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, vocab_size: int, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    def read_all(self, prompts: Prompt | Sequence[Prompt]) -> list[TokenPrompt]:
        """One prompt or a list of them. A flat list of integers is one prompt.

        Raises ValueError naming the prompt, what came and the fix.
        """
        if isinstance(prompts, (str, Mapping)):
            return [self.read(prompts, "prompts")]
        prompts = _plain(prompts)
        if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
            raise ValueError(
                f"prompts must be text, token ids or a list of them, got {type(prompts).__name__}"
            )
        if prompts and all(_is_integer(p) for p in prompts):
            return [self.read(prompts, "prompts")]  # type: ignore[arg-type]
        return [self.read(p, f"prompts[{i}]") for i, p in enumerate(prompts)]  # type: ignore[arg-type]

    def read(self, prompt: Prompt, name: str = "prompt") -> TokenPrompt:
        """One prompt; ``name`` is what error messages call it."""
        text: str | None = None
        if isinstance(prompt, Mapping):
            text, token_ids = self._read_mapping(prompt, name)
        elif isinstance(prompt, str):
            text, token_ids = prompt, None
        else:
            token_ids = prompt
        if token_ids is None:
            token_ids = self._encode(text or "", name)
        return TokenPrompt(text, self._checked(token_ids, name))

    def _read_mapping(
        self, prompt: Mapping[str, Any], name: str
    ) -> tuple[str | None, Sequence[int] | None]:
        unknown = set(prompt) - {"prompt", "prompt_token_ids"}
        if unknown or not prompt:
            raise ValueError(
                f"{name} must have the key 'prompt' or 'prompt_token_ids', got {list(prompt)}"
            )
        text = prompt.get("prompt")
        if text is not None and not isinstance(text, str):
            raise ValueError(f"{name}['prompt'] must be text, got {type(text).__name__}")
        return text, prompt.get("prompt_token_ids")

    def _encode(self, text: str, name: str) -> Sequence[int]:
        if self._tokenizer is None:
            raise ValueError(
                f"{name} is text, but the model has no tokenizer; pass {{'prompt_token_ids': [...]}}"
            )
        if not text:
            raise ValueError(f"{name} is empty; pass at least one character or token id")
        return self._tokenizer.encode(text)

    def _checked(self, token_ids: Any, name: str) -> list[int]:
        token_ids = _plain(token_ids)
        if isinstance(token_ids, (str, bytes)) or not isinstance(token_ids, Sequence):
            raise ValueError(f"{name} must be a list of token ids, got {type(token_ids).__name__}")
        if not token_ids:
            raise ValueError(f"{name} is empty; pass at least one token id")
        ids: list[int] = []
        for i, token_id in enumerate(token_ids):
            if not _is_integer(token_id):
                raise ValueError(f"{name}[{i}] must be a token id, got {token_id!r}")
            ids.append(operator.index(token_id))
            if not 0 <= ids[-1] < self._vocab_size:
                raise ValueError(
                    f"{name}[{i}]: token id {token_id} is outside the vocabulary of {self._vocab_size}"
                )
        if len(ids) >= self._max_model_len:
            raise ValueError(
                f"{name} has {len(ids)} tokens, the context is {self._max_model_len} (max_model_len) and one must "
                f"be left to generate; shorten the prompt or raise max_model_len"
            )
        return ids


def _plain(value: Any) -> Any:
    """Arrays and tensors as lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def _is_integer(value: object) -> bool:
    """An integer of Python, numpy or torch; True and False are none."""
    return hasattr(value, "__index__") and not isinstance(value, bool)


def one_per_prompt(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """Spread one SamplingParams over the prompts, or check that there is one for each."""
    if sampling_params is None:
        sampling_params = SamplingParams()
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    if not isinstance(sampling_params, Sequence):
        raise ValueError(
            f"sampling_params must be SamplingParams or a list of them, got {sampling_params!r}"
        )
    params = list(sampling_params)
    if len(params) != num_prompts:
        raise ValueError(
            f"sampling_params must be one SamplingParams or one for each of {num_prompts} prompts, got {len(params)}"
        )
    for i, p in enumerate(params):
        if not isinstance(p, SamplingParams):
            raise ValueError(f"sampling_params[{i}] must be SamplingParams, got {type(p).__name__}")
    return params
