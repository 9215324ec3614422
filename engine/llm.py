"""The offline API: prompts in, finished samples out, in the shapes that vLLM users know.

Owns the loop that drives the engine and the progress bar. Knows nothing of schedules or tensors. One ``generate``
runs at a time; calls from other threads wait for their turn. Invariant: when ``generate`` returns or raises, no
request of its own is left in the engine.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from engine.assembly import build_engine
from engine.feature_tap import FeatureTap
from engine.outputs import RequestOutput
from engine.prompts import Prompt, TokenPrompt, one_per_prompt
from engine.request_group import RequestGroup
from engine.sampling_params import SamplingParams

_BAR_FROM = 16
"""A progress bar is shown by itself from this many samples on."""


class LLM:
    """A model and its engine.

    Args:
        model: ``"smollm2"``, an HF directory or a GGUF file.
        dtype: of weights and KV cache: "auto" (the checkpoint's), "float32" or "bfloat16".
        device: "auto" or "cpu".
        seed: seeds requests that bring none: the same calls in the same order give the same tokens.
        max_model_len: longest sequence in tokens; None is the model's.
        kv_cache_bytes: memory of the KV cache; None derives it from what is free.
        max_num_seqs: most samples running at once; None is 256.
        enable_prefix_caching: keep and reuse the pages of prompts.
        num_threads: threads of the CPU kernels; None is one for each usable core.
        speculative_config: None for plain decoding, or a dict of the fields of ``SpeculativeConfig``, such as
            ``{"method": "suffix"}`` or ``{"method": "eagle3", "model": directory}``. Tokens are the same either way.
        **kwargs: the other fields of ``EngineConfig``.

    Raises:
        ValueError: names the argument, what came, and the fix.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "auto",
        device: str = "auto",
        seed: int = 0,
        max_model_len: int | None = None,
        kv_cache_bytes: int | None = None,
        max_num_seqs: int | None = None,
        enable_prefix_caching: bool = True,
        num_threads: int | None = None,
        speculative_config: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.config, self.engine, self._reader = build_engine(
            model=model,
            dtype=dtype,
            device=device,
            seed=seed,
            max_model_len=max_model_len,
            kv_cache_bytes=kv_cache_bytes,
            max_num_seqs=max_num_seqs,
            enable_prefix_caching=enable_prefix_caching,
            num_threads=num_threads,
            speculative_config=speculative_config,
            **kwargs,
        )
        self._turn = threading.Lock()
        self._num_calls = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Run prompts to their end; results in the order of the prompts.

        Args:
            prompts: text, token ids, ``{"prompt": ...}`` or ``{"prompt_token_ids": [...]}``, or a list of a mix.
            sampling_params: one for all, or one for each; None is the defaults.
            use_tqdm: progress bar; None shows one from 16 samples on.

        Raises:
            ValueError: a prompt or parameter is bad; nothing has been run then.
        """
        tokens = self._reader.read_all(prompts)
        return self._run(tokens, one_per_prompt(sampling_params, len(tokens)), use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """``generate`` for one conversation or a list of them, through the model's chat template.

        Raises:
            ValueError: a message is malformed, or the model has no chat template.
        """
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise ValueError("chat needs a tokenizer with a chat template; the model has none")
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise ValueError(f"messages must be a list of at least one message, got {messages!r}")
        conversations: Any = [messages] if isinstance(messages[0], Mapping) else messages
        prompts: list[Prompt] = []
        for conversation in conversations:
            text = tokenizer.render_chat(conversation, add_generation_prompt=add_generation_prompt)
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": token_ids})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stats(self) -> dict[str, Any]:
        """Counters since the start. ``acceptance_length`` counts the bonus token: 1.0 without speculation."""
        counters, kv = self.engine.counters, self.engine.scheduler.kv
        return {
            "num_generated_tokens": counters.num_generated_tokens,
            "num_target_steps": counters.num_target_steps,
            "num_target_rows": counters.num_target_rows,
            "num_verifications": counters.num_verifications,
            "num_drafts": counters.num_drafts,
            "num_draft_tokens": counters.num_draft_tokens,
            "num_accepted_draft_tokens": counters.num_accepted_draft_tokens,
            "acceptance_length": counters.acceptance_length,
            "num_finished_requests": counters.num_finished_requests,
            "num_prompt_tokens": counters.num_prompt_tokens,
            "num_cached_prompt_tokens": counters.num_cached_prompt_tokens,
            "num_preemptions": counters.num_preemptions,
            "kv_pages_used": kv.num_used_pages,
            "kv_pages_total": kv.num_pages,
            "target_version": kv.version,
            "draft_version": self.engine.speculator.draft_version,
            "forward_time_s": counters.forward_time_s,
            "sample_time_s": counters.sample_time_s,
            "step_time_s": counters.step_time_s,
            "draft_time_s": counters.draft_time_s,
            "num_accepted_per_position": list(counters.num_accepted_per_position),
            "speculation": self.engine.speculator.explain(),
            "feature_tap": self.engine.taps.explain(),
        }

    def tuner_state(self) -> dict[str, Any]:
        """What the tuner has learnt, as plain values that JSON holds; see ``load_tuner_state``."""
        with self._turn:
            return self.engine.speculator.tuner.state_dict()

    def load_tuner_state(self, state: Mapping[str, Any]) -> None:
        """Go on from another run's ``tuner_state``: prices of this machine, acceptance of these drafters.

        Raises:
            ValueError: it is of another tuner, or malformed; nothing has changed then.
        """
        with self._turn:
            self.engine.speculator.tuner.load_state_dict(state)

    def attach_tap(self, tap: FeatureTap) -> None:
        """Hand out accepted tokens and the target's hidden states of them, as training data for a drafter.

        Costs no forward and changes no token. ``stats()["feature_tap"]`` says how it goes.

        Raises:
            ValueError: another tap is attached, or it does not fit the model.
        """
        with self._turn:
            self.engine.attach_tap(tap)

    def detach_tap(self) -> FeatureTap | None:
        """Take the tap off; it can be attached again. None where there is none."""
        with self._turn:
            return self.engine.detach_tap()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, with nothing changed, while a step runs."""
        with self._turn:
            return self.engine.scheduler.kv.reset_prefix_cache()

    def _run(
        self,
        prompts: Sequence[TokenPrompt],
        params: Sequence[SamplingParams],
        use_tqdm: bool | None,
    ) -> list[RequestOutput]:
        with self._turn:
            groups = self._add_all(prompts, params)
            try:
                self._drive(groups, use_tqdm)
            except BaseException:
                self.engine.recover()
                raise
            return [group.output() for group in groups]

    def _add_all(
        self, prompts: Sequence[TokenPrompt], params: Sequence[SamplingParams]
    ) -> list[RequestGroup]:
        """All of them, or none."""
        groups: list[RequestGroup] = []
        try:
            for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
                groups.append(self.engine.add(f"{self._num_calls}-{i}", prompt, p))
        except ValueError:
            self.engine.withdraw(groups)
            raise
        except BaseException:
            self.engine.recover()
            raise
        self._num_calls += 1
        return groups

    def _drive(self, groups: Sequence[RequestGroup], use_tqdm: bool | None) -> None:
        num_samples = sum(len(group.samples) for group in groups)
        show = num_samples >= _BAR_FROM if use_tqdm is None else use_tqdm
        counters = self.engine.counters
        with tqdm(total=num_samples, disable=not show, unit="sample", dynamic_ncols=True) as bar:
            tokens_before, finished = counters.num_generated_tokens, counters.num_finished_requests
            while self.engine.has_unfinished:
                self.engine.step()
                if show:
                    rate = (counters.num_generated_tokens - tokens_before) / (
                        bar.format_dict["elapsed"] or 1e-9
                    )
                    bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
                    bar.update(counters.num_finished_requests - finished)
                    finished = counters.num_finished_requests
