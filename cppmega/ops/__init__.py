"""Kernels and autograd functions, each with a reference in plain torch.

They depend neither on Megatron nor on the engine.
"""
