"""From a config to a running engine: opens the model, sizes the cache, puts the parts together.

Owns the order of construction and nothing afterwards. Invariant: on any error nothing is left behind but what
Python frees.
"""

from __future__ import annotations

import logging

from engine.batch import PAGE
from engine.config import EngineConfig, ResolvedConfig
from engine.engine import Engine
from engine.kv_cache import KVCache
from engine.models.decoder import Decoder
from engine.models.loader import Checkpoint, open_checkpoint
from engine.ops import resolve_ops
from engine.runner import ModelRunner
from engine.sampler import Sampler
from engine.scheduler import Scheduler

logger = logging.getLogger(__name__)


def build_engine(config: EngineConfig) -> tuple[ResolvedConfig, Engine]:
    """Make an engine for the model that ``config`` names.

    Raises:
        ValueError: names the argument or file, what came, and the fix.
    """
    checkpoint = open_checkpoint(config.model)
    resolved = config.resolve(checkpoint.config)
    return resolved, _build(checkpoint, resolved)


def _build(checkpoint: Checkpoint, config: ResolvedConfig) -> Engine:
    ops = resolve_ops(config.ops, device=config.device, num_threads=config.num_threads)
    max_rows = max(config.max_num_batched_tokens, config.max_num_seqs)
    decoder = Decoder(
        config.model,
        checkpoint.weights,
        ops,
        dtype=config.dtype,
        max_rows=max_rows,
        max_positions=config.max_model_len,
    )
    page_bytes = PAGE * config.model.kv_bytes_per_token(config.dtype)
    kv = KVCache(
        config.kv_cache_bytes // page_bytes,
        page_size=PAGE,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    scheduler = Scheduler(
        kv,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max_rows,
        max_model_len=config.max_model_len,
    )
    runner = ModelRunner(
        decoder,
        num_pages=kv.num_pages,
        max_rows=max_rows,
        max_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
    )
    sampler = Sampler(
        ops,
        vocab_size=config.model.vocab_size,
        max_rows=max_rows,
        processed_logprobs=config.logprobs_mode == "processed_logprobs",
    )
    return Engine(
        scheduler,
        runner,
        sampler,
        tokenizer=checkpoint.tokenizer,
        eos_token_ids=frozenset(config.model.eos_token_ids),
        max_model_len=config.max_model_len,
        seed=config.seed,
    )
