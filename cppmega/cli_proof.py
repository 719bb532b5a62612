"""Commands that prove: verify, drift, new, pin."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from cppmega.cli_base import FINE, NOT_AS_IT_MUST_BE, cli, session_of, tree_options


@cli.command()
@click.argument("names", nargs=-1)
@tree_options
def verify(names: Sequence[str], root: Path | None, patches: Sequence[Path], as_json: bool) -> None:
    """Run every page's proof: it must pass on patched code, fail on stock and on a mutant."""
    from cppmega import report
    from cppmega import verify as proofs

    session = session_of(root, patches)
    proved = proofs.verify(session, names)
    ok = all(one.proof not in ("failed", "stale") for one in proved)
    if as_json:
        rows = [one.as_json() for one in proved]
        report.print_json({"schema": 1, "ok": ok, "pages": rows})
    else:
        width = max((len(one.name) for one in proved), default=0)
        for one in proved:
            code = {"passed": "32", "failed": "31", "stale": "31"}.get(one.proof, "33")
            click.echo(
                f"{report.coloured(f'{one.proof:<11}', code)} {one.name:<{width}}  {one.detail}"
            )
    sys.exit(FINE if ok else NOT_AS_IT_MUST_BE)
