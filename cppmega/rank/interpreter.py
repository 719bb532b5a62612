"""The options that Python was started with: some of them change the code, or hide the guard."""

from __future__ import annotations

import sys

from cppmega.errors import CppmegaError


def check() -> None:
    """Refuse those under which a run would not be what was proved.

    Raises:
        CppmegaError: `optimized-python`, `isolated-python`.
    """
    if sys.flags.optimize:
        raise CppmegaError(
            "optimized-python",
            f"Python runs with -{'O' * sys.flags.optimize}, or PYTHONOPTIMIZE is set.",
            "It compiles other code than what was proved, without the assertions by which "
            "Megatron checks its arguments.",
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
