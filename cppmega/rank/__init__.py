"""Checks inside a training process: imports, runtime patches, marks, and agreement of ranks."""
