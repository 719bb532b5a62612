"""The command line: options, status codes, and one module for each group of commands."""

from cppmega.host import interrupts

with interrupts.deferred():
    from cppmega.cli.main import main

__all__ = ["main"]
