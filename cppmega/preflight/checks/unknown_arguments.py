"""Every argument of the launch line is known: to Megatron's parser, or to the script."""

from __future__ import annotations

from cppmega.errors import CppmegaError
from cppmega.preflight.context import Context
from cppmega.preflight.findings import NotApplicable, Remark

AFTER: tuple[str, ...] = ("one_root", "recipe_complete", "imported_process")


def check(context: Context) -> str:
    """Read which words the installed version's parser has left over.

    Raises:
        CppmegaError: `argument-refused` with the nearest names.
        NotApplicable: nothing that Megatron parses is launched, or the parser stops earlier.
    """
    parsed, version = context.parsed_line, context.session.read_tree().version
    if parsed.refused:
        raise NotApplicable("the parser refuses the line before it has read all of it")
    added = f", {len(parsed.added)} from the script" if parsed.added else ""
    if parsed.respelled:
        added += f"; read as Megatron's own: {', '.join(parsed.respelled)}"
    if not parsed.unknown:
        return f"megatron-core {version} knows every argument{added}"
    listed = ", ".join(
        words + (f" (did you mean {near}?)" if near else "")
        for words, near in parsed.unknown.items()
    )
    if context.allows_unknown:
        return Remark(f"left to the script, and inspected by no check: {listed}{added}")
    raise CppmegaError(
        "argument-refused",
        f"megatron-core {version} has no such argument{added}: {listed}.",
        "Every rank ends with that error, unless the script adds the argument.",
        "correct the words after --, or what a recipe adds with plus()"
        if context.recipe is not None
        else "correct it, or if the script adds it: --arguments-from MODULE:FUNCTION, or "
        "--unknown-arguments allow",
    )
