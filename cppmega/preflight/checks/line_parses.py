"""The installed version's own parser and validation accept the launch line."""

from __future__ import annotations

from cppmega.errors import CppmegaError
from cppmega.preflight.context import Context
from cppmega.preflight.findings import Problems, Remark
from cppmega.recipe import field_types

_MAY_BE_0 = ("train_iters",)
"""In a line that only evaluates."""
AFTER: tuple[str, ...] = ("one_root", "recipe_complete", "imported_process")


def check(context: Context) -> Problems:
    """Read the answer of the process that imported the parser.

    Yields:
        `arguments-invalid`.

    Raises:
        CppmegaError: `argument-refused`, `arguments-invalid`.
        NotApplicable: nothing that Megatron parses is launched.
    """
    parsed, version = context.parsed_line, context.session.read_tree().version
    line = context.launch_line
    if {"-h", "--help"} & line.flags:
        raise CppmegaError(
            "argument-refused",
            "The line asks for help.",
            "Megatron prints its arguments, or fails to, in place of a run.",
            "leave --help out; cppmega preflight --help is about this command",
        )
    if parsed.refused:
        raise CppmegaError(
            "argument-refused",
            f"megatron-core {version} refuses the line: {parsed.refused.rstrip('.')}.",
            "It has no such value.",
            "correct the words after --, or what a recipe adds with plus()",
        )
    if parsed.args.get("use_checkpoint_args"):
        return Remark("not validated: --use-checkpoint-args takes arguments from the checkpoint")
    correct = "correct the words after --"
    unset = ", ".join(f"--{name.replace('_', '-')}" for name in parsed.unset)
    if context.recipe is not None:
        correct = f"--set FIELD=VALUE, or {correct}"
    elif unset and context.adds_arguments:
        return Remark(
            f"the validation of megatron-core {version} ends at {unset}: the script has to set it, "
            "since neither the line nor a default does; the rest is not validated"
        )
    elif unset:
        correct = (
            f"add {unset}; if the script sets it, add its value, or --unknown-arguments allow "
            "before the --"
        )
    if parsed.invalid:
        raise CppmegaError(
            "arguments-invalid",
            f"megatron-core {version} refuses the values of the line: {parsed.invalid}",
            "Every rank would end with that error after it was started.",
            correct,
        )
    for name, value in parsed.args.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or name in (*_MAY_BE_0, *parsed.added):
            continue
        if problem := field_types.number_problem(name, value):
            yield CppmegaError(
                "arguments-invalid",
                f"megatron-core {version} accepts --{name.replace('_', '-')} {value}: {problem}",
                "No run has that value: every rank would end with an error, or learn nothing.",
                correct,
            )
    return f"{len(line.argv)} words"
