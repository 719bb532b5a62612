"""Optimizers of a model in which some parameters are fp32, for `float16_keep_fp32`."""
