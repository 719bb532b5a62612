"""Loops of one's own under the guard."""
