"""Kernels and autograd functions by family, each with a reference in plain torch.

A family is a folder: its functions are in `__init__`, the reference in `naive`, the backward passes
in `autograd`, and what is compiled in files that end with `_triton`. Families share only `common`.
They depend neither on Megatron nor on the engine.
"""
