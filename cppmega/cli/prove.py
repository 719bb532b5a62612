"""The command that proves patches: verify."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cppmega.cli import completion
from cppmega.cli.group import FINE, NOT_AS_IT_MUST_BE, cli, session_of, tree_options
from cppmega.cli.reports.option import Reports, report_option
from cppmega.host import console
from cppmega.host.console import Style
from cppmega.host.table import Row, show, table

if TYPE_CHECKING:
    from cppmega.proof.verify import Proved

_STYLES: dict[str, Style] = {"passed": "good", "failed": "bad", "stale": "bad"}


@cli.command()
@click.argument("names", nargs=-1, shell_complete=completion.patches)
@report_option
@tree_options
@click.option(
    "--record",
    is_flag=True,
    help="Store proofs that need more than a CPU in a file next to the pages, for machines that "
    "cannot run them.",
)
@click.option(
    "--deep",
    is_flag=True,
    help="Also compare every kernel with its plain reference on this machine's first GPU: what a "
    "stack needs on which the kernels were never tested.",
)
def verify(
    names: Sequence[str],
    root: Path | None,
    patches: Sequence[Path],
    as_json: bool,
    record: bool,
    deep: bool,
    reports: Reports,
) -> None:
    """Prove every patch, or those named.

    A proof must pass on patched code, and fail on stock code and on a mutant that has the patch's
    text without its behavior. Where upstream has the fix, it must pass on stock. Without NAMES the
    exit status is also 1 if a patch is in a failure state, which `cppmega status` shows.
    """
    from cppmega.cli.reports import answers
    from cppmega.host import interpreter
    from cppmega.proof import verify as proofs

    gc.disable()  # the syntax trees of every file hold no cycles
    session = session_of(root, patches)
    interpreter.require_torch(session.read_tree().root, "cppmega verify")
    recorded: list[Path] = []
    kernels = _compared(session.read_tree().root) if deep else []
    proved = [*proofs.verify(session, names, recorded if record else None), *kernels]
    ok = all(one.proof not in ("failed", "stale") for one in proved)
    if as_json:
        rows = [one.as_json() for one in proved]
        files = [str(path) for path in recorded]
        console.print_json({"schema": 1, "ok": ok, "pages": rows, "recorded": files})
    else:
        printed = (
            Row((one.proof, one.name, one.detail), _STYLES.get(one.proof, "waiting"))
            for one in proved
        )
        show(table(printed, widths=(10,)))
        for path in recorded:
            console.say(f"recorded in {path}: commit it with the pages")
    reports.write(lambda: answers.of_verify(proved, session.pages))
    sys.exit(FINE if ok else NOT_AS_IT_MUST_BE)


def _compared(root: Path) -> list[Proved]:
    """The kernels beside their references, as proofs.

    Raises:
        CppmegaError: `no-gpu`, or what the process says that runs them.
    """
    from cppmega.preflight.checks import kernel_parity
    from cppmega.proof.verify import Proved

    return [
        Proved(
            f"kernel: {one.kernel}",
            "passed" if one.ok else "failed",
            one.why or f"{one.error} of the reference's norm away from it",
            {},
        )
        for one in kernel_parity.on_this_machine(os.environ, root).kernels
    ]
