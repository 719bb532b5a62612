"""Megatron's training loop with a recipe: what must hold, data, batches, steps, log."""
