"""``tlt drafter``: make drafters.

Owns the words of the command line. Invariant: as ``engine.cli``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_commands(commands: Any) -> None:
    """Add ``drafter`` to the sub-commands of ``tlt``."""
    parser = commands.add_parser("drafter", help="make a drafter for a model")
    actions = parser.add_subparsers(dest="action", required=True)
    init = actions.add_parser("init", help="a new head with random weights, to be trained")
    init.add_argument("--target", required=True, help="smollm2, an HF directory or a GGUF file")
    init.add_argument("--kind", default="eagle3", choices=("eagle", "eagle3"))
    init.add_argument("--output", required=True, help="directory to write")
    init.add_argument(
        "--draft-vocab-size", type=int, default=None, help="of an eagle3 head: the lowest N ids"
    )
    init.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    init.add_argument("--seed", type=int, default=0)
    init.set_defaults(run=_init, verbose=False)


def _init(options: argparse.Namespace) -> int:
    import torch

    from engine.models.eagle_checkpoint import save_drafter
    from engine.models.eagle_init import drafter_config, random_drafter
    from engine.models.loader import open_checkpoint

    output = Path(options.output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"--output {options.output} exists and is not an empty directory")
    target = open_checkpoint(options.target).config
    config = drafter_config(target, options.kind, draft_vocab_size=options.draft_vocab_size)
    tensors = random_drafter(config, seed=options.seed, dtype=getattr(torch, options.dtype))
    save_drafter(output, config, tensors, target=target)
    count = sum(t.numel() for t in tensors.values() if t.is_floating_point())
    print(f"{options.kind} head of {count / 1e6:.1f}M parameters for {options.target}: {output}")
    return 0
