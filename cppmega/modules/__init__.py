"""Modules that replace Megatron's, in patched code and in recipes."""
