"""A new head that is worth training: which words it knows, and what it starts from.

Owns the draft vocabulary by frequency and the initial weights of a head. Knows nothing of optimisers. A
random head (``engine/models/eagle_init.py``) learns the same function, later: training is short, so it starts from
what the target knows already.

- *Vocabulary.* The ids that rollouts use most (FR-Spec, arXiv 2502.14856: a small part of the vocabulary has nearly
  all the mass, and the head's matrix is most of a drafter's cost). Tokens of responses count; ids that have not been
  seen follow in the order of prompts' counts and then of their numbers, which in byte-pair vocabularies is about
  the order of frequency.
- *Weights.* The layer is the target's last one, its attention behind a small random half for the embedding; ``fc``
  hands on the highest tap with a little of the others, scaled by how large they are; ``lm_head`` and the final norm
  are the target's.

Invariant: the same target, sequences and seed give the same head.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.models.eagle_init import drafter_config, random_drafter
from engine.models.eagle_layout import D2T, HEAD, EagleConfig
from engine.models.layout import EMBEDDING, FINAL_NORM, WeightSource
from engine.models.layout import HEAD as TARGET_HEAD
from tlt_train.sequence import TrainingSequence

_LAYER, _ATTN, _MLP = "midlayer.", "midlayer.self_attn.", "midlayer.mlp."
_EMBEDDING_SHARE = 0.02  # standard deviation of the embedding's half of the attention's inputs
_FC_SHARE = 0.03  # of the highest tap's size that the random part of fc adds
_MEASURED_ROWS = 4096


def frequent_ids(
    sequences: Iterable[TrainingSequence], vocab_size: int, draft_vocab_size: int
) -> tuple[Tensor, float]:
    """The ids that a draft vocabulary should hold, ascending, and the share of response tokens that they cover.

    Returns:
        ([draft_vocab_size] int64, share in [0, 1]; 1.0 where there is no response token).

    Raises:
        ValueError: a size that the target's vocabulary cannot give.
    """
    if not 1 <= draft_vocab_size <= vocab_size:
        raise ValueError(f"draft_vocab_size must be 1..{vocab_size}, got {draft_vocab_size}")
    counts = np.zeros((2, vocab_size), dtype=np.int64)
    for sequence in sequences:
        cut = min(max(sequence.prompt_len - sequence.start, 0), sequence.num_tokens)
        counts[0] += np.bincount(sequence.token_ids[cut:], minlength=vocab_size)
        counts[1] += np.bincount(sequence.token_ids[:cut], minlength=vocab_size)
    order = np.lexsort((np.arange(vocab_size), -counts[1], -counts[0]))
    chosen = np.sort(order[:draft_vocab_size])
    total = counts[0].sum()
    covered = counts[0][chosen].sum() / total if total else 1.0
    return torch.from_numpy(chosen.astype(np.int64)), float(covered)


def read_target(
    weights: WeightSource, config: ModelConfig, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """(embedding, head), each [V, H]; one tensor where they are tied."""
    shape = (config.vocab_size, config.hidden_size)
    embedding = _read(weights, EMBEDDING, shape, dtype)
    return embedding, embedding if config.tied_head else _read(weights, TARGET_HEAD, shape, dtype)


def new_head(
    target: ModelConfig,
    weights: WeightSource,
    sequences: Sequence[TrainingSequence],
    *,
    kind: str,
    tap_layers: Sequence[int],
    draft_vocab_size: int,
    seed: int = 0,
) -> tuple[EagleConfig, dict[str, Tensor]]:
    """A head for rollouts like ``sequences``.

    Args:
        target, weights: of the model.
        sequences: what it will be trained on, or some of it; their features say how large taps are.
        kind: "eagle3" or "eagle".
        tap_layers: of their features; "eagle" reads none.
        draft_vocab_size: ids that an eagle3 head can propose, at most the target's.
        seed: of the random part.

    Returns:
        (config, tensors by canonical name as fp32).

    Raises:
        ValueError: the kind is unknown or the sizes do not fit the target.
    """
    size = min(draft_vocab_size, target.vocab_size) if kind == "eagle3" else None
    config = drafter_config(target, kind, draft_vocab_size=size)
    if kind == "eagle3":
        config = replace(config, tap_layers=tuple(tap_layers))
    tensors = random_drafter(config, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    hidden = target.hidden_size
    last = f"model.layers.{target.num_layers - 1}."
    if kind == "eagle":
        # the feature is handed on, beside a little of the embedding
        drawn = torch.randn((hidden, hidden), generator=generator) * hidden**-0.5
        tensors["fc.weight"] = torch.cat((drawn, torch.eye(hidden)), dim=1)
        _copy_layer(tensors, weights, last, (_MLP + "down_proj.weight", _ATTN + "o_proj.weight"))
        return config, tensors
    ids, _ = frequent_ids(sequences, target.vocab_size, config.draft_vocab_size)
    head = read_target(weights, target)[1]
    tensors[D2T] = ids - torch.arange(config.draft_vocab_size)
    tensors[HEAD] = head[ids].clone()
    tensors["norm.weight"] = _read(weights, FINAL_NORM, (hidden,))
    tensors["fc.weight"] = _fusion(config, _tap_sizes(config, sequences), generator)
    tensors[_LAYER + "hidden_norm.weight"] = _read(
        weights, last + "input_layernorm.weight", (hidden,)
    )
    _copy_layer(tensors, weights, last)
    for name in ("q_proj", "k_proj", "v_proj"):
        rows = tensors[f"{_ATTN}{name}.weight"].shape[0]
        own = _read(weights, f"{last}self_attn.{name}.weight", (rows, hidden))
        drawn = torch.randn((rows, hidden), generator=generator) * _EMBEDDING_SHARE
        tensors[f"{_ATTN}{name}.weight"] = torch.cat((drawn, own), dim=1)
    return config, tensors


def _copy_layer(
    tensors: dict[str, Tensor], weights: WeightSource, layer: str, small: Sequence[str] = ()
) -> None:
    """The target's weights of a layer where the head has the same tensors; ``small`` ones start at a tenth."""
    shared = ("post_attention_layernorm", "self_attn.o_proj")
    for name in (*shared, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
        own = f"{_LAYER}{name}.weight"
        tensors[own] = _read(weights, f"{layer}{name}.weight", tuple(tensors[own].shape))
        if own in small:
            tensors[own] *= 0.1


def _tap_sizes(config: EagleConfig, sequences: Sequence[TrainingSequence]) -> Tensor:
    """[taps * H] root mean square of each feature, the first position of a text apart: it is of another size."""
    parts: list[np.ndarray] = []
    num_rows = 0
    for sequence in sequences:
        rows = sequence.features[1 if sequence.start == 0 else 0 :, : config.feature_width]
        parts.append(np.asarray(rows))
        num_rows += len(rows)
        if num_rows >= _MEASURED_ROWS:
            break
    bits = np.ascontiguousarray(np.concatenate(parts)).view(np.int16)
    features = torch.from_numpy(bits).view(torch.bfloat16).float()
    features = features[features.isfinite().all(dim=1)]  # one NaN must not spoil the head
    return features.square().mean(dim=0).sqrt()


def _fusion(config: EagleConfig, sizes: Tensor, generator: torch.Generator) -> Tensor:
    """fc [H, taps * H]: the highest tap as it is, and a random mixture of all taps that is small beside it."""
    hidden, width = config.hidden_size, config.feature_width
    drawn = torch.randn((hidden, width), generator=generator) / (sizes.clamp(min=1e-6) * width**0.5)
    fc = drawn * (_FC_SHARE * sizes[-hidden:].mean())
    fc[:, -hidden:] += torch.eye(hidden)
    return fc


def _read(
    weights: WeightSource, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> Tensor:
    out = torch.empty(shape, dtype=dtype)
    weights.read(name, out)
    return out
