"""Checkpoints on disk, read without running the code that they name."""
