"""Run folders: their files, typed; runs listed, watched, compared and stopped.

Imports the overlay's records, recipes, the tracker of checkpoints, and what lies below.
"""
