"""Kernels and autograd functions, each with its plain reference.

They know neither Megatron nor the engine.
"""
