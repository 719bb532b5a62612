"""Layers and options that recipes request and Megatron lacks."""
