"""Training of drafters for the engine: data, losses, packing, trainer, checkpoints, export."""
