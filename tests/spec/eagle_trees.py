"""The tree that an EAGLE drafter should propose to a greedy request, from plain torch over the last positions."""

from __future__ import annotations

from typing import Any

import torch

from engine.request import Request
from engine.spec.base import DraftPlan
from engine.spec.eagle import EagleDrafter
from tests.conftest import tiny_config, tiny_weights
from tests.models.eagle_oracle import Oracle, tiny_head


def oracle_tree(
    drafter: EagleDrafter, request: Request, features: Any, plan: DraftPlan
) -> list[Any]:
    """(joint score, token, parent, depth) of every node, expanded as far as the plan's width and depth go."""
    network = drafter.network
    config = network.config
    _, tensors = tiny_head(
        network.decoder.config, config.kind, draft_vocab_size=config.draft_vocab_size
    )
    raw = tiny_weights(tiny_config("llama", num_hidden_layers=7), 0)
    oracle = Oracle(config, tensors, raw["model.embed_tokens.weight"], raw["lm_head.weight"])
    tokens, window = request.token_ids, drafter._window
    n = len(tokens)
    logits = hidden = torch.empty(0)
    for row in range(n - 1):
        logits, hidden = oracle.row(
            features[row], tokens[row + 1], row, range(max(0, row + 1 - window), row)
        )
    ids = torch.arange(config.draft_vocab_size) + tensors.get("d2t", torch.tensor(0))
    nodes: list[Any] = []
    frontier = [(1.0, -1, logits, hidden, list(range(n - 1)))]
    for depth in range(1, plan.depth + 1):
        children: list[Any] = []
        for joint, parent, logit, state, line in frontier:
            top = logit.softmax(-1).topk(plan.width)
            for p, i in zip(top.values.tolist(), top.indices.tolist(), strict=True):
                nodes.append((joint * p, int(ids[i]), parent, depth))
                children.append((joint * p, len(nodes) - 1, state, line))
        children.sort(key=lambda child: -child[0])
        frontier = []
        for joint, node, state, line in children[: plan.width]:
            if depth == plan.depth:
                break
            visible = line[max(0, len(line) + 1 - window) :]
            logit, after = oracle.row(state, nodes[node][1], n - 2 + depth, visible, fed_back=True)
            frontier.append((joint, node, logit, after, [*line, len(oracle.keys) - 1]))
    return nodes
