"""From a config to a running engine: opens the model, sizes the cache, puts the parts together.

Owns the order of construction and nothing afterwards. Invariant: on any error nothing is left behind but what
Python frees.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from engine.batch import PAGE
from engine.config import EngineConfig, ResolvedConfig
from engine.engine import Engine
from engine.grammar import Grammars
from engine.kv_cache import KVCache
from engine.models.decoder import Decoder
from engine.models.loader import Checkpoint, open_checkpoint
from engine.ops import resolve_ops
from engine.prompts import PromptReader
from engine.runner import ModelRunner
from engine.sampler import Sampler
from engine.scheduler import Scheduler
from engine.spec.config import SpeculativeConfig
from engine.spec_assembly import build_speculator
from engine.tokenizer import Tokenizer


def build_engine(
    *, speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None, **arguments: Any
) -> tuple[ResolvedConfig, Engine, PromptReader]:
    """Make an engine, and the reader of its prompts, from the arguments of ``LLM``.

    Raises:
        ValueError: names the argument or file, what came, and the fix.
    """
    speculation = SpeculativeConfig.of(speculative_config)
    config = EngineConfig.from_kwargs(**arguments)
    checkpoint = open_checkpoint(config.model)
    resolved = config.resolve(checkpoint.config)
    reader = PromptReader(
        checkpoint.tokenizer,
        vocab_size=resolved.model.vocab_size,
        max_model_len=resolved.max_model_len,
    )
    return resolved, _build(checkpoint, resolved, speculation), reader


def _build(
    checkpoint: Checkpoint, config: ResolvedConfig, speculation: SpeculativeConfig | None
) -> Engine:
    ops = resolve_ops(config.ops, device=config.device, num_threads=config.num_threads)
    max_rows = config.max_num_batched_tokens
    decoder = Decoder(
        config.model,
        checkpoint.weights,
        ops,
        dtype=config.dtype,
        max_rows=max_rows,
        max_positions=config.max_model_len,
    )
    num_pages = config.kv_cache_bytes // (PAGE * config.model.kv_bytes_per_token(config.dtype))

    def make_scheduler() -> Scheduler:
        kv = KVCache(num_pages, page_size=PAGE, enable_prefix_caching=config.enable_prefix_caching)
        return Scheduler(
            kv,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=max_rows,
            max_model_len=config.max_model_len,
        )

    runner = ModelRunner(
        decoder,
        num_pages=num_pages,
        max_rows=max_rows,
        max_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
    )
    tokenizer, decode, grammars = checkpoint.tokenizer, None, None
    if tokenizer is not None:
        decode = partial(_token_text, tokenizer)
        grammars = Grammars(tokenizer, config.model.vocab_size)
    sampler = Sampler(
        ops,
        vocab_size=config.model.vocab_size,
        max_rows=max_rows,
        decode=decode,
        processed_logprobs=config.logprobs_mode == "processed_logprobs",
        grammars=grammars,
    )
    speculator = build_speculator(speculation, config, runner)
    return Engine(
        make_scheduler,
        runner,
        sampler,
        speculator,
        tokenizer=tokenizer,
        eos_token_ids=frozenset(config.model.eos_token_ids),
        max_model_len=config.max_model_len,
        seed=config.seed,
    )


def _token_text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.decode([token_id], skip_special_tokens=False)
