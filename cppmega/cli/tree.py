"""Commands on a tree: apply, list, explain, status, diff, revert."""

from __future__ import annotations

import ast
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cppmega.cli import completion
from cppmega.cli.group import (
    answer,
    carrying,
    cli,
    json_option,
    patches_option,
    session_of,
    tree_options,
)
from cppmega.cli.reports.option import Reports, report_option
from cppmega.errors import CppmegaError, did_you_mean
from cppmega.host import console
from cppmega.host.table import Row, put, show, table
from cppmega.host.wording import counted, listed
from cppmega.page import PURPOSES, Page

if TYPE_CHECKING:
    from cppmega.catalogue.decisions import Decision
    from cppmega.cli.error_index import Cause


@cli.command()
@tree_options
@click.option(
    "--only",
    multiple=True,
    metavar="NAME",
    help="Apply only this patch; repeatable.",
    shell_complete=completion.patches,
)
@click.option(
    "--without",
    multiple=True,
    metavar="NAME",
    help="Leave this patch out, such as one that does not support a new release yet; repeatable.",
    shell_complete=completion.patches,
)
@click.option(
    "--kind",
    "kinds",
    type=click.Choice([*PURPOSES, "all"]),
    multiple=True,
    help="Apply only patches of this kind: fix (stock is wrong, or dies), speed (the same results "
    "sooner), feature (only runs that ask for it change), or all; repeatable. The default is all "
    "but patches of kind speed that do not compute stock's bits.",
)
@click.option(
    "--recipe",
    metavar="RECIPE",
    help="Apply what this recipe needs, too, whatever its kind.",
    shell_complete=completion.recipes,
)
@click.option(
    "--forget",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="DIRECTORY",
    help="Leave out a catalogue that an earlier apply was given; repeatable.",
)
@click.option("--check", is_flag=True, help="Write nothing; exit 1 if something would be written.")
def apply(
    root: Path | None,
    patches: Sequence[Path],
    as_json: bool,
    only: Sequence[str],
    without: Sequence[str],
    kinds: Sequence[str],
    recipe: str | None,
    forget: Sequence[Path],
    check: bool,
) -> None:
    """Apply every patch to the installed Megatron.

    If one of them cannot be applied, nothing is changed.
    """
    if both := set(only) & set(without):
        raise click.UsageError(f"--only and --without both name {', '.join(sorted(both))}")
    if only and (kinds or recipe):
        raise click.UsageError("--only names every patch: --kind and --recipe add nothing to it")
    import gc

    from cppmega.overlay import verbs as overlay
    from cppmega.overlay import verdict as state

    gc.disable()  # the process is short, and collecting would take a tenth of its time
    session = session_of(root, patches, forget)
    if not as_json:
        console.say(f"megatron-core {session.read_tree().version} in {session.root}")
    outcome = overlay.apply(
        session,
        only=only,
        without=without,
        kinds=PURPOSES if "all" in kinds else kinds,
        asked=_needed_by(recipe, session.pages),
        check=check,
    )
    gc.freeze()  # nor are the syntax trees of every file searched for cycles at the end
    ok = outcome.ok and not (check and (outcome.changed or outcome.receipt_changed))
    verb = "would change" if check else "changed"
    closing = f"{state.summary(outcome.verdicts)}; {verb} {counted(len(outcome.changed), 'file')}"
    if outcome.plan.failures:
        names = [verdict.name for verdict in outcome.plan.failures]
        chosen = [f"--kind {kind}" for kind in kinds] + (
            [f"--recipe {shlex.quote(recipe)}"] if recipe else []
        )
        chosen += [f"--without {name}" for name in [*without, *names]]
        if only:
            chosen = [f"--only {name}" for name in only if name not in names]
        closing = f"{state.summary(outcome.verdicts)}; nothing was changed: {listed(names)} cannot "
        closing += "be applied"
        if chosen:
            command = f"python -m cppmega.apply_patches {' '.join(chosen)}"
            closing += f"; to train without: {carrying(command, patches)}"
    elif outcome.digest:
        closing += f"; overlay {outcome.digest}"
    answer(session, outcome, as_json, ok, closing)


def _needed_by(recipe: str | None, pages: Mapping[str, Page]) -> tuple[str, ...]:
    if recipe is None:
        return ()
    from cppmega.overlay.wanted import wanted_patches
    from cppmega.recipe import index

    return wanted_patches(index.load(recipe), pages)


@cli.command(name="list")
@click.option(
    "--upstream",
    is_flag=True,
    help="Show the pull requests of each patch, their status, and when the patch retires.",
)
@patches_option
@json_option
def list_pages(upstream: bool, patches: Sequence[Path], as_json: bool) -> None:
    """List every patch of the catalogue by subject, with its kind and title.

    \b
    fix      stock is wrong, or dies
    speed    the same results sooner, or as the page's `Numerics` says
    feature  only runs that ask for it change

    With --upstream: the status of each patch upstream, as its page states it (no network is used),
    and the newest release that needs it; those that retire first come first.

    \b
    released  a release has it: the patch is for older ones
    merged    a branch has it, but no release yet: the patch retires with one of the next
    open      upstream has not decided; closed: upstream declined it
    unstated  the page does not state the status
    not-sent  there is no pull request, for the reason that is shown
    """
    from cppmega.catalogue import loader as catalogue

    pages = catalogue.load(patches)
    if upstream:
        _list_upstream(pages, as_json)
        return
    if as_json:
        rows = [
            {
                "name": p.name,
                "kind": p.patch.kind,
                "purpose": p.patch.purpose,
                "subject": p.subject,
                "gate": p.patch.gate,
                **p.labels,
            }
            for p in pages.values()
        ]
        console.print_json({**console.ENVELOPE, "ok": True, "patches": rows})
        return
    widths = (0, max(map(len, PURPOSES)), max(map(len, pages)))
    for title, members in catalogue.by_subject(pages, patches):
        click.echo(f"{title}:")
        cells = (("", page.patch.purpose, page.name, _title(page)) for page in members)
        show(table(map(Row, cells), widths))


def _list_upstream(pages: Mapping[str, Page], as_json: bool) -> None:
    import msgspec

    from cppmega.authoring import upstream
    from cppmega.cli import upstream_list

    rows = upstream.ledger(pages)
    if as_json:
        answer = {"ok": True, "patches": msgspec.to_builtins(rows)}
        console.print_json({**console.ENVELOPE, **answer})
        return
    show(upstream_list.lines(rows))
    console.say(upstream_list.closing(rows))


def _title(page: Page) -> str:
    gate = f" [{page.patch.gate}=1]" if page.patch.gate else ""
    return page.title + gate


@cli.command(context_settings={"ignore_unknown_options": True})  # arguments of Megatron are names
@click.argument("name", shell_complete=completion.patches)
@patches_option
def explain(name: str, patches: Sequence[Path]) -> None:
    """Explain a patch, an error, a state, a check, a variable, or an argument.

    A patch: what it does, why, and the texts it is pinned to. An error: what causes it, why it
    matters, and the next command; what only a run knows is in <angle brackets>. A word of `cppmega
    status`, `drift` or `verify`, or a check of the preflight: what it means. An argument of
    Megatron: the rules that name it, such as what it cannot be combined with. A variable, argument
    or script of the earlier overlay: what became of it.
    """
    from cppmega.catalogue import decisions
    from cppmega.catalogue import loader as catalogue
    from cppmega.host import env

    pages = catalogue.load(patches, [name])
    variable = name.partition("=")[0]
    readers = [page for _, page in sorted(pages.items()) if variable in _variables(page)]
    if name in pages:
        _explain_page(pages[name])
    elif readers or variable in env.NAMES:
        _explain_variable(variable, readers)
    elif any((rows := decisions.find(name), rules := _rules_about(name, patches))):
        for row, decision in rows.items():
            _explain_decision(row, decision)
        for rule in rules:
            put(f"{rule.title}\n{rule.render()}\n")
    elif name.startswith("-"):
        raise click.NoSuchOption(name)
    elif meanings := {c: words[name] for c, words in _vocabularies().items() if name in words}:
        for command, meaning in meanings.items():
            put(f"{name}, in the answer of cppmega {command}: {meaning}")
    elif check := _check(name):
        put(f"{name}, a check of cppmega preflight: {check}")
    elif causes := _causes(name, patches):
        for cause in causes:
            put(f"{name}: {cause.title}\n{cause.render()}\n")
    else:
        words = chain.from_iterable(_vocabularies().values())
        raise _unknown(name, [*pages, *env.NAMES, *decisions.names(), *words])


def _vocabularies() -> dict[str, dict[str, str]]:
    """Command -> the words of its answer, with what each means."""
    from cppmega.authoring import drift_result
    from cppmega.overlay import verdict

    return {
        "status": {str(word): meaning for word, meaning in verdict.MEANING.items()},
        "drift": {str(word): meaning for word, meaning in drift_result.MEANING.items()},
        "verify": {str(word): meaning for word, meaning in verdict.PROOFS.items()},
    }


def _check(name: str) -> str:
    """What a preflight check requires; empty if there is no check of that name."""
    from cppmega.host.paths import PACKAGE

    file = PACKAGE / "preflight" / "checks" / f"{name}.py"
    if not name.isidentifier() or name.startswith("_") or len(name) > 100 or not file.is_file():
        return ""
    return ast.get_docstring(ast.parse(file.read_text())) or ""


def _unknown(name: str, known: Iterable[str]) -> CppmegaError:
    return CppmegaError(
        "unknown-page",
        f"Nothing is called {name}." + did_you_mean(name, known, 3),
        "The explanation of something else would mislead.",
        "cppmega list shows the patches; an error's name is the word after `error:`",
    )


def _variables(page: Page) -> tuple[str, ...]:
    """The variables that a page declares."""
    return (*filter(None, [page.patch.gate]), *page.patch.variables)


def _explain_variable(name: str, readers: Sequence[Page]) -> None:
    from cppmega.host import env

    own = {variable.name: variable.meaning for variable in env.VARIABLES}
    if name in own:
        put(f"{name}: {own[name]}")
    for page in readers:
        put(f"{name} is read by {page.name}: {page.title}")
        put(f"See `cppmega explain {page.name}`.")


def _explain_decision(name: str, row: Decision) -> None:
    from cppmega.catalogue.decisions import VERDICTS

    put(f"{name}: {row.title}\n")
    fields = [("Decision", VERDICTS[row.decision]), ("Why", row.why), ("Instead", row.instead)]
    fields += [("Number", f"{number.text} ({number.source})") for number in row.numbers]
    fields += [("Not measured", row.not_measured), ("Upstream", row.upstream)]
    fields += [("Variables", ", ".join(row.variables)), ("Known as", ", ".join(row.also))]
    for label, text in fields:
        if text:
            put(f"{label + ':':<14}{text}")
    put("")


def _explain_page(page: Page) -> None:
    put(f"{page.name} ({page.patch.kind}), revision {page.revision}\n")
    put(page.doc.strip() + "\n")
    for result in _cited_results(page.doc):
        put(f"Result:   {result}")
    put(f"Kind:     {page.patch.purpose}")
    put(f"Reached:  {page.patch.reached}")
    put(f"Gate:     {page.patch.gate or 'always on'}")
    put(f"Verify needs: {', '.join(page.patch.needs)}")
    for edit in page.patch.edits:
        put(f"Target:   {edit.target}")
        for version, pin in edit.pins.items():
            put(f"          {version:<14} {pin}")


def _rules_about(option: str, patches: Sequence[Path]) -> list[Cause]:
    """The rules that name an argument."""
    from cppmega.cli import error_index

    if not option.startswith("--"):
        return []
    named = re.compile(rf"{re.escape(option)}(?![\w-])")
    rules = (rule for _, rule in error_index.rules(patches))
    naming = (rule for rule in rules if named.search(f"{rule.title} {rule.what}"))
    return list(dict.fromkeys(naming))


def _causes(name: str, patches: Sequence[Path]) -> list[Cause]:
    from cppmega.cli import error_index

    errors = error_index.index(patches)
    if "-" not in name and name not in errors:
        return []  # a misspelled page
    return error_index.look_up(name, errors)


def _cited_results(doc: str) -> list[Path]:
    """Where the results that a page cites are on this machine, in a checkout or in a wheel."""
    from cppmega.host.paths import shipped

    return [
        path
        for name in re.findall(r"benchmarks/(results/[\w./]+\w)", doc)
        if (path := shipped("benchmarks") / name).is_file()
    ]


@cli.command()
@report_option
@tree_options
def status(root: Path | None, patches: Sequence[Path], as_json: bool, reports: Reports) -> None:
    """Show the state of every patch; write nothing."""
    from cppmega.cli.reports import answers
    from cppmega.overlay import verbs as overlay
    from cppmega.overlay import verdict as state

    session = session_of(root, patches)
    outcome = overlay.status(session)
    closing = state.summary(outcome.verdicts)
    if outcome.digest:
        closing += f"; overlay {outcome.digest}"
    reports.write(lambda: answers.of_status(outcome, patches))
    answer(session, outcome, as_json, outcome.ok, closing)


@cli.command()
@click.argument("name", required=False, shell_complete=completion.patches)
@tree_options
def diff(name: str | None, root: Path | None, patches: Sequence[Path], as_json: bool) -> None:
    """Show the changes to Megatron, of all patches or of one.

    They are printed as a diff from upstream's text.
    """
    from cppmega.overlay import verbs as overlay

    session = session_of(root, patches)
    text = overlay.diff(session, name, os.environ)
    if as_json:
        megatron = {"version": session.read_tree().version, "root": str(session.root)}
        console.print_json({**console.ENVELOPE, "megatron": megatron, "ok": True, "diff": text})
        return
    styles: dict[str, console.Style] = {"+": "good", "-": "bad", "@": "note"}
    for line in text.splitlines():
        click.echo(console.styled(line, styles.get(line[:1])))


@cli.command()
@click.argument("names", nargs=-1, shell_complete=completion.patches)
@tree_options
def revert(names: Sequence[str], root: Path | None, patches: Sequence[Path], as_json: bool) -> None:
    """Restore upstream's exact bytes, or remove individual patches.

    Without NAMES every patch is removed.
    """
    from cppmega.overlay import verbs as overlay
    from cppmega.overlay import verdict as state

    session = session_of(root, patches)
    outcome = overlay.revert(session, names)
    ok = not outcome.plan.failures and (outcome.ok or not names)
    closing = f"{state.summary(outcome.verdicts)}; changed {counted(len(outcome.changed), 'file')}"
    answer(session, outcome, as_json, ok, closing)
