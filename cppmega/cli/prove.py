"""The command that proves patches: verify."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from cppmega.cli.group import FINE, NOT_AS_IT_MUST_BE, cli, session_of, tree_options
from cppmega.host.console import Style

_STYLES: dict[str, Style] = {"passed": "good", "failed": "bad", "stale": "bad"}


@cli.command()
@click.argument("names", nargs=-1)
@tree_options
@click.option(
    "--record",
    is_flag=True,
    help="Keep the proofs that need more than a CPU in a file with the pages, for machines that "
    "cannot make them.",
)
def verify(
    names: Sequence[str], root: Path | None, patches: Sequence[Path], as_json: bool, record: bool
) -> None:
    """Run every page's proof: it must pass on patched code, fail on stock and on a mutant.

    Where upstream has the fix, it must pass on stock. Without NAMES, exit status 1 also where a
    page is in a failure state, which `cppmega status` shows.
    """
    from cppmega.host import console
    from cppmega.proof import verify as proofs

    session = session_of(root, patches)
    recorded: list[Path] = []
    proved = proofs.verify(session, names, recorded if record else None)
    ok = all(one.proof not in ("failed", "stale") for one in proved)
    if as_json:
        rows = [one.as_json() for one in proved]
        files = [str(path) for path in recorded]
        console.print_json({"schema": 1, "ok": ok, "pages": rows, "recorded": files})
    else:
        width = max((len(one.name) for one in proved), default=0)
        for one in proved:
            word = console.styled(f"{one.proof:<11}", _STYLES.get(one.proof, "waiting"))
            click.echo(f"{word} {one.name:<{width}}  {one.detail}")
        for path in recorded:
            console.say(f"recorded in {path}: commit it with the pages")
    sys.exit(FINE if ok else NOT_AS_IT_MUST_BE)
