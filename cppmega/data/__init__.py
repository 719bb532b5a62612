"""Indexed datasets: tokenized, written, read completely, and recorded.

Imports only what lies below: the machine's helpers, the cache of the trees, and errors.
"""
