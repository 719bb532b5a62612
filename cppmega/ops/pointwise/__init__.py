"""Kernels that work on rows alone: rotary embedding, Hadamard transform, routing, linear layers."""
