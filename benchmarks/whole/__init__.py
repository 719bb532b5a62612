"""Runs that train a whole recipe."""
