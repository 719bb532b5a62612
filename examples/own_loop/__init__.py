"""A training loop of one's own on megatron.core, under the guard."""
