"""The installed version's own parser takes the launch line, and its validation agrees."""

from __future__ import annotations

from cppmega.errors import CppmegaError
from cppmega.preflight.context import Context

AFTER: tuple[str, ...] = ("one_root", "recipe_complete", "imported_process")


def check(context: Context) -> str:
    """Ask the process that imported it.

    Raises:
        CppmegaError: `argument-refused` with the nearest name, `arguments-invalid`.
        NotApplicable: nothing that Megatron parses is launched.
    """
    line, version = context.line, context.session.tree.version
    found = context.process["line"]
    if found["refused"]:
        near = [f"{flag} (did you mean {other}?)" for flag, other in found["near"].items() if other]
        raise CppmegaError(
            "argument-refused",
            f"megatron-core {version} refuses the line: {found['refused'].rstrip('.')}."
            + (f" Unknown: {', '.join(near)}." if near else ""),
            "It knows no such argument or value.",
            "correct the words behind --, or what a recipe adds with plus()",
        )
    if found["invalid"]:
        raise CppmegaError(
            "arguments-invalid",
            f"megatron-core {version} refuses the values of the line: {found['invalid']}",
            "Every rank would end with that, after it was started.",
            "--set, or correct the words behind --",
        )
    return f"{len(line.argv)} words"
