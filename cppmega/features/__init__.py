"""Layers and options that recipes ask for and Megatron does not have."""
