"""Indexed datasets: tokenized, written, read whole, and recorded."""
