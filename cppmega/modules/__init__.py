"""Modules that take the place of Megatron's, in patched code and in recipes."""
