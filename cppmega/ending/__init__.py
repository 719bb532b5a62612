"""How a guarded process ends: its judgement, its record, and the processes it started.

Imports the guard and the run folders.
"""
