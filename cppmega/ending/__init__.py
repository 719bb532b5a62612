"""How a guarded process ends: its verdict, its record, and the processes it started.

Imports the guard and the run folders.
"""
