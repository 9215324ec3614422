"""Whether recorded data are of this target: by its weights, not by the path that they lay at.

Owns the fingerprint of a target and the check of a directory of data against one. Knows nothing of training. Hidden
states of other weights, such as those of an earlier step of reinforcement learning at the same path, would teach a head what
its target no longer computes; the same weights at another path are the same target. Invariant: the fingerprint is a
function of the config and the weights alone.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict

import torch

from engine.models.loader import Checkpoint, open_checkpoint
from tlt_train.shards import ShardMeta, ShardReader

_ROWS = 64  # of a matrix
_ENDS = ("bos_token_id", "eos_token_ids")  # of the config: hidden states know nothing of them


def fingerprint(target: Checkpoint) -> str:
    """32 hex digits: a hash of the config and of a sample of the weights, in float32.

    The sample: all vectors (norms, biases), and some rows of the smallest matrices (keys and values of every layer) and of
    all matrices of the last layer. It takes a small part of the time of loading; weights that differ in no row of the
    sample are not told apart.
    """
    shapes = target.weights.shapes()
    smallest = min(math.prod(shape) for shape in shapes.values() if len(shape) > 1)
    last_layer = f".{target.config.num_layers - 1}."
    digest = hashlib.blake2b(digest_size=16)
    shape_of_model = {n: v for n, v in asdict(target.config).items() if not n.endswith(_ENDS)}
    digest.update(repr(sorted(shape_of_model.items())).encode())
    for name, shape in sorted(shapes.items()):
        digest.update(f"\0{name}{tuple(shape)}".encode())
        if len(shape) > 1 and math.prod(shape) > smallest and last_layer not in name:
            continue
        tensor = torch.empty(shape, dtype=torch.float32)
        target.weights.read(name, tensor)
        rows = tensor.reshape(shape[0] if len(shape) > 1 else 1, -1)
        rows = rows[:: math.ceil(rows.shape[0] / _ROWS)].contiguous()
        digest.update(rows.numpy().data)
    return digest.hexdigest()


def check_data(reader: ShardReader, target: str) -> None:
    """That data are of ``target`` ("smollm2", an HF directory or a GGUF file); data without a fingerprint, by its name.

    Raises:
        ValueError: they are of another, or a sequence has a token that is not in its vocabulary.
    """
    opened = open_checkpoint(target)
    check_target(reader, target, opened)
    vocab_size = opened.config.vocab_size
    for sequence in reader:
        low, high = int(sequence.token_ids.min()), int(sequence.token_ids.max())
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"--data {reader.directory}: sequence {sequence.key!r} has the token {low if low < 0 else high}, the "
                f"target {target!r} has {vocab_size}; generate data with this target"
            )


def check_target(reader: ShardReader, target: str, opened: Checkpoint) -> None:
    """As ``check_data``, without a look at the tokens.

    Raises:
        ValueError: the data are of another target.
    """
    meta: ShardMeta = reader.meta
    where = f"--data {reader.directory}"
    if not meta.target_fingerprint:
        if meta.target != target:
            raise ValueError(
                f"{where} is of the target {meta.target!r}, not of {target!r}; give that --target, or generate data with "
                f"this one"
            )
    elif meta.target_fingerprint != fingerprint(opened):
        name = "" if meta.target == target else f" {meta.target!r}"
        raise ValueError(
            f"{where} is of other weights{name} than the target {target!r} has now; its hidden states would teach what "
            f"this target does not compute: generate data with this one"
        )
