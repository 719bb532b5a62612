"""The installed version's own parser and validation accept the launch line."""

from __future__ import annotations

from cppmega.errors import CppmegaError
from cppmega.preflight.context import Context
from cppmega.preflight.findings import refuse
from cppmega.recipe import field_types

_MAY_BE_0 = ("train_iters",)
"""In a line that only evaluates."""
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
    refuse(
        CppmegaError(
            "arguments-invalid",
            f"megatron-core {version} accepts --{name.replace('_', '-')} {value}: {problem}",
            "No run has that value: every rank would end with an error, or learn nothing.",
            "--set FIELD=VALUE, or correct the words after --",
        )
        for name, value in parsed.args.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in _MAY_BE_0
        if (problem := field_types.number_problem(name, value))
    )
    return f"{len(context.launch_line.argv)} words"
