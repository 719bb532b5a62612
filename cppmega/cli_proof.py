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


_patches_option = click.option(
    "--patches",
    type=click.Path(path_type=Path, file_okay=False),
    multiple=True,
    help="A catalogue of your own beside ours; may be given more than once.",
)


@cli.command()
@click.argument("old")
@click.argument("new")
@_patches_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def drift(old: str, new: str, patches: Sequence[Path], as_json: bool) -> None:
    """What an upgrade from OLD to NEW would do to every patch; run it before you upgrade.

    OLD and NEW are each a version (0.19.2; its wheel is downloaded with pip, once), a .whl file,
    or a folder that holds megatron/. Nothing is installed, changed or imported.

    \b
    same          the text that the patch edits did not change
    changed       it did: which statements, and whether our edit replaces them (!) or is beside (~)
    moved, gone   where it stands now, or what is most like it
    upstreamed    NEW has the fix, the patch retires itself
    newly-needed  NEW needs it, OLD did not
    lost-again    OLD has the fix, NEW has the bug again

    Exit status 0: after the upgrade every patch is known, fixed upstream or not applicable.
    """
    import tempfile

    from cppmega import catalogue, drift_report, given, report
    from cppmega import drift as drifting

    pages = catalogue.load(patches)
    with tempfile.TemporaryDirectory(prefix="cppmega-drift-") as scratch:
        sides = [
            (name, given.tree_of(name, Path(scratch) / place, report.say))
            for name, place in ((old, "old"), (new, "new"))
        ]
        found = drifting.compare(sides[0], sides[1], pages)
        if as_json:
            report.print_json(drift_report.as_json(found))
        else:
            for line in drift_report.lines(found):
                click.echo(line)
            if any(target.changes for page in found.pages for target in page.targets):
                report.say(drift_report.LEGEND)
            report.say(drift_report.closing(found))
    sys.exit(FINE if found.safe else NOT_AS_IT_MUST_BE)
