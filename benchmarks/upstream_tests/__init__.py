"""Megatron's own unit tests on a stock and on a patched tree."""
