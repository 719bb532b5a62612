"""The installed version's own parser and validation accept the launch line."""

from __future__ import annotations

from cppmega.errors import CppmegaError
from cppmega.preflight.context import Context

AFTER: tuple[str, ...] = ("one_root", "recipe_complete", "imported_process")


def check(context: Context) -> str:
    """Read the answer of the process that imported the parser.

    Raises:
        CppmegaError: `argument-refused` with the nearest name, `arguments-invalid`.
        NotApplicable: nothing that Megatron parses is launched.
    """
    parsed, version = context.parsed_line, context.session.read_tree().version
    if parsed.refused:
        near = [f"{flag} (did you mean {other}?)" for flag, other in parsed.near.items() if other]
        raise CppmegaError(
            "argument-refused",
            f"megatron-core {version} refuses the line: {parsed.refused.rstrip('.')}."
            + (f" Unknown: {', '.join(near)}." if near else ""),
            "It has no such argument or value.",
            "correct the words after --, or what a recipe adds with plus()",
        )
    if parsed.invalid:
        raise CppmegaError(
            "arguments-invalid",
            f"megatron-core {version} refuses the values of the line: {parsed.invalid}",
            "Every rank would end with that error after it was started.",
            "--set FIELD=VALUE, or correct the words after --",
        )
    return f"{len(context.launch_line.argv)} words"
