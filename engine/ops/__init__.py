"""Ops: what a forward pass computes, each with a torch reference that defines it. See ``registry``."""

from engine.ops.registry import OpChoice, Ops, resolve_ops

__all__ = ["OpChoice", "Ops", "resolve_ops"]
