"""What an EAGLE head is: its shape, the tensors that it is made of, and what it asks of its target.

Owns ``EagleConfig``, the names of the tensors and the checks against a target. Knows nothing of files or of how a
head computes (``eagle.py``). Names are those of EAGLE-3 checkpoints (``midlayer.`` for the one layer); ``canonical``
reads the other spellings. Invariant: a config that passed ``check_target`` can be run beside that target.

Two kinds: "eagle" (EAGLE-1, arXiv 2401.15077) reads the target's final hidden state and uses the target's head;
"eagle3" (arXiv 2503.01840) reads the inputs of three layers and has a head of its own over part of the vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from engine.config import ModelConfig, RopeConfig

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
D2T = "d2t"
T2D = "t2d"
NUM_TAPS = 3
_PREFIX = re.compile(r"^(?:model\.)?(?:layers\.0\.|midlayer\.)")
_IGNORED = re.compile(r"rotary_emb\.inv_freq$|^verifier_(?:norm|lm_head)\.weight$")


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """Shape and meaning of a head.

    Attributes:
        kind: "eagle" or "eagle3".
        vocab_size: of the target.
        draft_vocab_size: rows of the head; ``d2t`` says which ids of the target they are.
        hidden_size, target_hidden_size: of the head and of its target.
        tap_layers: layers of the target whose input it reads (transformers' ``hidden_states[i]``); () for "eagle".
        max_position_embeddings: what it was trained for; it runs at any position.
        qkv_bias, o_bias, mlp_bias, fc_bias, qk_norm: which of these tensors there are.
        norm_before_fc: one norm over all taps before ``fc`` (``input_norm``).
        fc_norm: a norm for each tap before ``fc`` (EAGLE-3.1).
        norm_before_residual: the residual stream starts from the normed feature.
        norm_output: the normed hidden state is what the next depth reads (EAGLE-3.1).
        own_head: False uses the target's head.
    """

    kind: Literal["eagle", "eagle3"]
    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tap_layers: tuple[int, ...] = ()
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    fc_bias: bool = False
    qk_norm: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    own_head: bool = False

    @property
    def feature_width(self) -> int:
        """Floats that the head reads of each position of the target."""
        return self.target_hidden_size * (len(self.tap_layers) or 1)

    @property
    def layer_width(self) -> int:
        """Floats that enter the layer's attention."""
        return self.hidden_size * (2 if self.kind == "eagle3" else 1)


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Layers tapped where a checkpoint names none: 2, L/2 and L - 3, spread out where L is too small for these."""
    if num_layers >= 7:
        return (2, num_layers // 2, num_layers - 3)
    if num_layers >= 3:
        return (num_layers // 4, num_layers // 2, 3 * num_layers // 4)
    return (0, num_layers // 2, num_layers)


def canonical(weights: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The tensors by the names used here, without those that say nothing.

    Raises:
        ValueError: no mapping, or two names for one tensor.
    """
    try:
        given = dict(weights)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"drafter weights must be a dict name -> tensor or pairs of these, got {type(weights).__name__}"
        ) from error
    found: dict[str, Any] = {}
    for name, tensor in given.items():
        if not isinstance(name, str):
            raise ValueError(f"drafter weights must map names to tensors, got the name {name!r}")
        short = _PREFIX.sub("midlayer.", name, count=1).removeprefix("model.")
        if _IGNORED.search(short):
            continue
        if short in found:
            raise ValueError(f"drafter weights: {name} and another name are both {short}")
        found[short] = tensor
    return found


def expected_shapes(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    """Every floating point tensor that a head must have; an embedding of its own may come on top."""
    hidden, inner, width = config.hidden_size, config.intermediate_size, config.layer_width
    q_width = config.num_q_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    eagle3 = config.kind == "eagle3"
    fc_width = config.feature_width + (0 if eagle3 else hidden)
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, out: int, into: int, bias: bool) -> None:
        shapes[name + ".weight"] = (out, into)
        if bias:
            shapes[name + ".bias"] = (out,)

    def norm(name: str, size: int, there: bool = True) -> None:
        if there:
            shapes[name + ".weight"] = (size,)

    norm("input_norm", config.feature_width, config.norm_before_fc)
    for tap in range(len(config.tap_layers)):
        norm(f"fc_norm.{tap}", config.target_hidden_size, config.fc_norm)
    linear("fc", hidden, fc_width, config.fc_bias)
    norm("midlayer.input_layernorm", hidden, eagle3)
    norm("midlayer.hidden_norm", hidden, eagle3)
    linear("midlayer.self_attn.q_proj", q_width, width, config.qkv_bias)
    linear("midlayer.self_attn.k_proj", kv_width, width, config.qkv_bias)
    linear("midlayer.self_attn.v_proj", kv_width, width, config.qkv_bias)
    norm("midlayer.self_attn.q_norm", config.head_dim, config.qk_norm)
    norm("midlayer.self_attn.k_norm", config.head_dim, config.qk_norm)
    linear("midlayer.self_attn.o_proj", hidden, q_width, config.o_bias)
    norm("midlayer.post_attention_layernorm", hidden)
    linear("midlayer.mlp.gate_proj", inner, hidden, config.mlp_bias)
    linear("midlayer.mlp.up_proj", inner, hidden, config.mlp_bias)
    linear("midlayer.mlp.down_proj", hidden, inner, config.mlp_bias)
    norm("norm", hidden, eagle3)
    if config.own_head:
        shapes[HEAD] = (config.draft_vocab_size, hidden)
    return shapes


def check_names(config: EagleConfig, shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Refuse tensors that are not the head's, given the shapes of what came by canonical name.

    Raises:
        ValueError: what is missing, unexpected or of another shape.
    """
    expected = expected_shapes(config)
    if missing := [name for name in expected if name not in shapes]:
        raise ValueError(
            f"{where}: {len(missing)} tensors of an {config.kind} head are missing: {_some(missing)}"
        )
    optional = {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        D2T: (config.draft_vocab_size,),
        T2D: (config.vocab_size,),
    }
    for name, shape in (expected | optional).items():
        if name in shapes and tuple(shapes[name]) != shape:
            raise ValueError(
                f"{where}: tensor {name} has shape {list(shapes[name])}, expected {list(shape)} for an "
                f"{config.kind} head with hidden_size {config.hidden_size}, vocab_size {config.vocab_size}, "
                f"draft_vocab_size {config.draft_vocab_size}, target_hidden_size {config.target_hidden_size}"
            )
    if extra := [name for name in shapes if name not in expected and name not in optional]:
        raise ValueError(
            f"{where}: {len(extra)} tensors do not belong to an {config.kind} head of this config: {_some(extra)}"
        )


def check_target(config: EagleConfig, target: ModelConfig) -> None:
    """Refuse a head that was made for another target.

    Raises:
        ValueError: what differs.
    """
    for what, own, its in (
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("target_hidden_size", config.target_hidden_size, target.hidden_size),
    ):
        if own != its:
            raise ValueError(
                f"the drafter does not fit this target: its {what} is {own}, the target's is {its}"
            )
    if config.draft_vocab_size > config.vocab_size:
        raise ValueError(
            f"the drafter's draft_vocab_size {config.draft_vocab_size} is more than the vocabulary of "
            f"{config.vocab_size}"
        )
    if outside := [tap for tap in config.tap_layers if not 0 <= tap <= target.num_layers]:
        raise ValueError(
            f"the drafter does not fit this target: it reads the inputs of layers {list(config.tap_layers)}, of which "
            f"{outside} are not among the target's 0..{target.num_layers}"
        )
    if not config.own_head and (
        config.hidden_size != target.hidden_size or config.draft_vocab_size != config.vocab_size
    ):
        raise ValueError(
            f"the drafter has no lm_head, and the target's does not fit it: hidden_size {config.hidden_size} and "
            f"draft_vocab_size {config.draft_vocab_size}, the target's are {target.hidden_size} and "
            f"{target.vocab_size}"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
