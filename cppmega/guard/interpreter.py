"""The options that Python was started with: some of them change the code or disable the guard."""

from __future__ import annotations

import sys

from cppmega.errors import CppmegaError


def check() -> None:
    """Refuse options under which the code would not be what was proved.

    Raises:
        CppmegaError: `optimized-python`, `isolated-python`.
    """
    if sys.flags.optimize:
        raise CppmegaError(
            "optimized-python",
            f"Python runs with -{'O' * sys.flags.optimize}, or PYTHONOPTIMIZE is set.",
            "It compiles the code without the assertions by which Megatron checks its arguments, "
            "and that is not the code that was proved.",
            "unset PYTHONOPTIMIZE, and start Python without -O",
        )
    ignores = "I" if sys.flags.isolated else "E" if sys.flags.ignore_environment else ""
    deaf = ignores + ("S" if sys.flags.no_site else "")
    if deaf:
        options = " ".join(f"-{letter}" for letter in deaf)
        raise CppmegaError(
            "isolated-python",
            f"Python runs with {options}, which the processes that it starts inherit.",
            "Data loaders and checkpoint writers would import megatron without the guard.",
            "start Python without these options",
        )
