"""Patches for an installed Megatron-LM, and the proof that they are in the code that trains."""

__version__ = "0.1.0"
