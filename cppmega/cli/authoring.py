"""Commands for authors of patches: drift, pin, port, export, new."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from cppmega.cli import completion
from cppmega.cli.group import FINE, NOT_AS_IT_MUST_BE, carrying, cli, json_option, patches_option
from cppmega.cli.reports.option import Reports, report_option
from cppmega.errors import CppmegaError
from cppmega.host import console
from cppmega.host.table import show
from cppmega.page import Page


@cli.command()
@click.argument("old")
@click.argument("new")
@report_option
@patches_option
@click.option(
    "--prove",
    is_flag=True,
    help="For patches whose fix is in NEW's text, run the proofs on NEW's code, which is imported.",
)
@click.option(
    "--recipe",
    "recipes",
    multiple=True,
    metavar="NAME|FILE",
    help="A recipe that you train: the patches that it needs must serve NEW; repeatable.",
    shell_complete=completion.recipes,
)
@click.option(
    "-v", "--verbose", is_flag=True, help="Show what changed for every patch, and what to do."
)
@json_option
def drift(
    old: str,
    new: str,
    patches: Sequence[Path],
    prove: bool,
    recipes: Sequence[str],
    verbose: bool,
    as_json: bool,
    reports: Reports,
) -> None:
    """Show what an upgrade of Megatron would do to every patch.

    OLD and NEW are each a version such as 0.19.2 (its wheel is downloaded with pip, once), a .whl
    file, or a folder that holds megatron/. A release of another package that patches target is
    named as in liger-kernel==0.8.5. Nothing is installed or changed; without --prove nothing is
    imported.

    \b
    same          the text that the patch edits is unchanged
    changed       it has changed: in statements that the edit replaces (!), or next to them (~)
    moved, gone   it is elsewhere or renamed, or absent; shows its place, or what is most like it
    upstreamed    NEW has the fix and the patch retires; --prove tests that the fix works
    not-fixed     NEW's text has the fix, but fails the proof
    newly-needed  NEW needs the patch, OLD did not
    unported      nobody has ported the patch to NEW; unsafe if OLD has it, or --recipe needs it
    lost-again    OLD has the fix, NEW has the bug again

    Exit status 0: after the upgrade every patch that OLD needs is known or fixed upstream.
    """
    import tempfile

    from cppmega.authoring import drift as drifting
    from cppmega.authoring import drift_report
    from cppmega.catalogue import loader as catalogue
    from cppmega.cli.reports import answers
    from cppmega.overlay.wanted import wanted_patches
    from cppmega.recipe import index
    from cppmega.tree import resolve

    pages = catalogue.load(patches)
    wanted: dict[str, list[str]] = {}
    for recipe in map(index.load, recipes):
        for name in wanted_patches(recipe, pages):
            wanted.setdefault(name, []).append(recipe.name)
    with tempfile.TemporaryDirectory(prefix="cppmega-drift-") as scratch:
        sides = [
            (name, resolve.tree_of(name, Path(scratch) / place, console.say))
            for name, place in ((old, "old"), (new, "new"))
        ]
        comparison = drifting.compare(sides[0], sides[1], pages, wanted)
        if prove:
            from cppmega.proof import verify

            comparison = drifting.proved(
                comparison, verify.upstreamed(comparison.new.plan, console.say)
            )
        if as_json:
            answer = drift_report.as_json(comparison)
            for row in answer["patches"]:
                row["next"] = carrying(row["next"], patches)
            console.print_json(answer)
        else:
            lines = (drift_report.lines if verbose else drift_report.verdict)(comparison)
            show(carrying(line, patches) for line in lines)
            if not verbose:
                console.say("with -v: what changed, and what to do about each patch")
            elif any(target.changes for page in comparison.pages for target in page.targets):
                console.say(drift_report.LEGEND)
            console.say(drift_report.closing(comparison))
        reports.write(lambda: answers.of_drift(comparison, patches))
    sys.exit(FINE if comparison.safe else NOT_AS_IT_MUST_BE)


@cli.command()
@click.argument("name", shell_complete=completion.patches)
@click.argument("version")
@click.option(
    "--from",
    "source",
    metavar="ROOT|WHEEL",
    help="Read the text from a folder that holds megatron/, or from a wheel (default: the wheel "
    "of VERSION, downloaded with pip).",
)
@click.option(
    "--like",
    default="",
    metavar="VERSION",
    help="Use the edits that the page has for this version.",
)
@click.option(
    "--unverified", is_flag=True, help="Pin even if the proof cannot run on this machine."
)
@patches_option
@json_option
def pin(
    name: str,
    version: str,
    source: str | None,
    like: str,
    unverified: bool,
    patches: Sequence[Path],
    as_json: bool,
) -> None:
    """Add a version of Megatron, or of the package that it targets, to a patch.

    Every law must hold on the text of that version.

    The page's edit is applied to the new text, applied again and reverted, and its proof must pass
    with the patch, fail without it, and fail on a patch that does nothing. Otherwise nothing is
    written. Only the pin is added to the page's file; everything else stays as it is.
    """
    import tempfile

    import msgspec

    from cppmega.authoring import pin as pinning
    from cppmega.catalogue import loader as catalogue
    from cppmega.tree import resolve

    page = catalogue.get(catalogue.load(patches, [name]), name)
    with tempfile.TemporaryDirectory(prefix="cppmega-pin-") as folder:
        scratch = Path(folder)
        release = resolve.requirement(version, page.patch.distributions[0])
        tree = resolve.tree_of(source or release, scratch / "given", console.say)
        if "megatron-core" not in page.patch.distributions:
            tree = resolve.with_megatron(tree, scratch / "joined")
        done = pinning.pin(
            page, version, tree, scratch, console.say, like=like, unverified=unverified
        )
    if as_json:
        changed = {"ok": True, "changed": [done.path] if done.added else []}
        console.print_json({**console.ENVELOPE, **changed, **msgspec.to_builtins(done)})
        return
    word = console.styled("pinned" if done.added else "already pinned", "good")
    click.echo(f"{word} {name} for {version} in {done.path}")
    for target, fingerprint in done.added.items():
        click.echo(f"    {target}  {fingerprint}")
    for note in done.notes:
        console.say(f"note: {note}")


@cli.command()
@click.argument("old")
@click.argument("new")
@click.option(
    "--label",
    default="",
    metavar="NAME",
    help="The version to pin NEW's texts for (default: its version, or its folder's name).",
)
@patches_option
@json_option
def port(old: str, new: str, label: str, patches: Sequence[Path], as_json: bool) -> None:
    """Pin every patch on NEW whose edit carries over from OLD; list the others as work.

    OLD and NEW are named as in `cppmega drift`. An edit carries over if it fits the new text and
    upstream changed none of the statements that it replaces; then every law and the proof must hold
    there. The rest is listed with the statements that differ, and with what to do.

    Exit status 0: every patch that NEW needs is known there.
    """
    import tempfile

    from cppmega.authoring import drift as drifting
    from cppmega.authoring import pin as pinning
    from cppmega.authoring import port as porting
    from cppmega.catalogue import loader as catalogue
    from cppmega.tree import resolve

    pages = catalogue.load(patches)
    with tempfile.TemporaryDirectory(prefix="cppmega-port-") as folder:
        sides = [
            (name, resolve.tree_of(name, Path(folder) / place, console.say))
            for name, place in ((old, "old"), (new, "new"))
        ]
        comparison = drifting.compare(sides[0], sides[1], pages)

        carried = [one.page.name for one in comparison.pages if porting.carries_over(one)]

        def pin_page(page: Page) -> pinning.Pinned:
            console.numbered(carried.index(page.name) + 1, len(carried))(page.name)
            scratch = Path(folder) / page.name
            scratch.mkdir()
            version = label or resolve.label_of(comparison.new.tree, page.patch.distributions[0])
            tree = comparison.new.tree
            if "megatron-core" not in page.patch.distributions:
                tree = resolve.with_megatron(tree, scratch / "joined")
            return pinning.pin(page, version, tree, scratch, console.say)

        rows = []
        for one in porting.port(comparison.pages, pin_page):
            rows.append(one)
            if not as_json:
                show(carrying(line, patches) for line in porting.lines(one, comparison))
    left = [one.drift.page.name for one in rows if one.pinned is None]
    if as_json:
        listed = [one.as_json(comparison) for one in rows]
        for row in listed:
            row["next"] = carrying(row["next"], patches)
        answer = {"ok": not left, "patches": listed}
        console.print_json({**console.ENVELOPE, **answer})
    console.say(f"{len(rows) - len(left)} pinned; to do: {', '.join(left) or 'nothing'}")
    sys.exit(NOT_AS_IT_MUST_BE if left else FINE)


@cli.command()
@click.argument("name", shell_complete=completion.patches)
@click.option(
    "--tree",
    "checkout",
    required=True,
    type=click.Path(path_type=Path),
    metavar="CHECKOUT",
    help="A checkout of Megatron-LM; its working tree and current branch stay as they are.",
)
@click.option("--branch", default="", metavar="NAME", help="Default: fix/ and the patch's name.")
@patches_option
@json_option
def export(name: str, checkout: Path, branch: str, patches: Sequence[Path], as_json: bool) -> None:
    """Commit a patch on a new branch of a Megatron checkout, as upstream would write it.

    The commit has the edit without marks, formatted with black and isort, and a unit test made from
    the patch's proof. Nothing of cppmega is imported or named in it: a patch whose edit or proof
    calls cppmega is refused. Nothing is pushed.
    """
    import msgspec

    from cppmega.authoring import export as exporting
    from cppmega.catalogue import loader as catalogue
    from cppmega.tree.installed import Tree

    page = catalogue.get(catalogue.load(patches, [name]), name)
    done = exporting.export(page, Tree(checkout.absolute()), branch)
    if as_json:
        console.print_json({**console.ENVELOPE, "ok": True, **msgspec.to_builtins(done)})
        return
    click.echo(f"exported  {done.branch}  {done.commit[:10]}  {', '.join(done.files)}")
    console.say(f"read it: git -C {checkout} show {done.branch}")
    console.say(f"test it there: pytest {done.test}; it must fail without the edit")


@cli.command()
@click.argument("name")
@click.option(
    "--target",
    "targets",
    multiple=True,
    metavar="PATH:SYMBOL",
    help="The function, method or class to patch, or a statement: CONSTANT, Class.field, the flag "
    "of a `try` block of imports, or import.NAME; repeatable.",
)
@click.option(
    "--from-commit",
    "rev",
    metavar="REV",
    help="Take targets and edits from a commit of the checkout of Megatron-LM at --megatron.",
)
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the page; in a checkout, one of the catalogue's subjects (default: "
    "upstream_patches of a checkout, else ./patches). With --catalogue, where to create it.",
)
@click.option(
    "--catalogue",
    "is_catalogue",
    is_flag=True,
    help="Instead of a page, write a project NAME to install, whose pages --patches NAME finds.",
)
@click.option(
    "--megatron",
    "root",
    type=click.Path(path_type=Path),
    metavar="ROOT",
    help="Look up the target in this folder (default: the Megatron that Python would import).",
)
@json_option
def new(
    name: str,
    targets: Sequence[str],
    rev: str | None,
    folder: Path | None,
    is_catalogue: bool,
    root: Path | None,
    as_json: bool,
) -> None:
    """Write the page of a new patch, with TODO wherever you have to fill something in.

    The page loads as it is. With --target megatron/core/transformer/mlp.py:MLP.forward the text of
    the installed Megatron is pinned. The edit, and the proof that it works, are yours to write.
    With --from-commit only the proof is, and the hunks that no edit expresses, which are listed.
    """
    from cppmega.authoring import from_commit, scaffold
    from cppmega.catalogue import loader as catalogue
    from cppmega.tree.installed import Tree, find_root

    if is_catalogue:
        if targets or root or rev:
            raise click.UsageError("--catalogue takes only --dir.")
        _new_catalogue(name, folder or Path(), as_json)
        return
    if rev and targets:
        raise click.UsageError("--from-commit names the targets; leave out --target.")
    where = folder or scaffold.default_folder()
    home = catalogue.catalogue_of(where / f"{name}.py")
    is_own = home.resolve() != catalogue.builtin_folder().resolve()
    begun = is_own and home.is_dir() and catalogue.page_files(home)
    pages = catalogue.load([home] if begun else [], [name])
    commit = from_commit.read(root or find_root(), rev) if rev else None
    tree = Tree(root or find_root()) if targets else None
    if commit:
        with suppress(CppmegaError):  # no Megatron is installed, or only the checkout
            tree = Tree(find_root())
    path = scaffold.new(name, where, targets, tree, pages, commit)
    left = commit.left if commit else []
    extra = f" --patches {home}" if is_own else ""
    steps = [
        f"write the edit and the proof: {path}",
        f"see what it changes: cppmega diff {name}{extra}",
        f"prove it: cppmega verify {name}{extra}",
        f"add a Megatron version: cppmega pin {name} VERSION{extra}",
    ]
    _say_written(path, [path], steps, {"page": str(path), "left": left}, as_json)
    for hunk in [] if as_json else left:
        console.say(f"left to you: {hunk}")


def _new_catalogue(name: str, parent: Path, as_json: bool) -> None:
    from cppmega.authoring import distribution

    files = distribution.new(name, parent)
    home, pages = files[0].parent, files[-1].parent
    steps = [
        f"write a page: cppmega new my_fix --dir {pages}",
        f"install it: pip install -e {home}",
        f"apply it: cppmega apply --patches {name}",
    ]
    _say_written(home, files, steps, {"catalogue": str(home)}, as_json)


def _say_written(
    what: Path, files: Sequence[Path], steps: Sequence[str], more: dict[str, Any], as_json: bool
) -> None:
    if as_json:
        written = {"ok": True, "changed": [str(file) for file in files], **more, "steps": steps}
        console.print_json({**console.ENVELOPE, **written})
        return
    click.echo(str(what))
    for number, step in enumerate(steps, 1):
        console.say(f"{number}. {step}")
