"""Processes of the preflight, for what cannot be known without importing torch."""
