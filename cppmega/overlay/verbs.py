"""Apply, status, diff and revert on one tree."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from cppmega.catalogue import gates
from cppmega.catalogue import loader as catalogue
from cppmega.catalogue.revision import engine_revision
from cppmega.errors import CppmegaError
from cppmega.overlay import plan as planning
from cppmega.overlay import receipt, remembered, transaction
from cppmega.overlay.compute import changes_of, overlay_digest, restored, rewritten
from cppmega.overlay.diagnose import ORPHANED, restoring
from cppmega.overlay.plan import Plan
from cppmega.overlay.receipt import Receipt
from cppmega.overlay.recovery import recovered
from cppmega.overlay.survey import Survey
from cppmega.overlay.verdict import DONE, NEEDED, Verdict
from cppmega.page import Page
from cppmega.rewriting import code_text
from cppmega.tree.installed import Tree, find_root

Say = Callable[[str], None]


def _silent(message: str) -> None:
    """Discard progress messages."""


@dataclass
class Session:
    """One tree and its catalogues; every verb starts here."""

    root: Path | None = None
    catalogues: Sequence[Path] | None = None
    """Folders, or names of installed catalogues, that were passed as `--patches`, in addition to
    those that the receipt remembers; None: the latter alone; empty: none at all."""
    say: Say = _silent
    forgotten: Sequence[Path] = ()
    """Remembered catalogues that are left out from now on."""
    _survey: Survey | None = None
    _pinned: Mapping[str, str] | None = None
    """Hashes of remembered catalogues; None if the user passed the folders now."""

    def __post_init__(self) -> None:
        self.root = self.root if self.root is not None else find_root()
        tree = self.read_tree()
        old = receipt.load(tree).receipt
        code_text.remember(old.code)
        written = {path: {entry.after} for path, entry in old.files.items()}
        for path, entries in transaction.interrupted(tree).items():
            written.setdefault(path, set()).update(entry.after for entry in entries)
        tree.check(written)
        given = [catalogue.located(str(each)) for each in self.catalogues or ()]
        left = [catalogue.located(str(each)) for each in self.forgotten]
        remembering = self.catalogues is None or bool(given)
        kept = [catalogue.located(each) for each in old.catalogues if remembering]
        kept = [folder for folder in kept if folder not in (*given, *left)]
        if kept:
            self.say("also patching from " + ", ".join(map(str, kept)) + " (from the receipt)")
            self._pinned = {
                stored: old.catalogue_hashes.get(stored, "")
                for stored in map(catalogue.stored, kept)
            }
        self.catalogues = [*kept, *given]

    @cached_property
    def pages(self) -> dict[str, Page]:
        """Every page of the catalogues, by name.

        Raises:
            CppmegaError: `catalogue-changed`, and the errors of `catalogue.load`.
        """
        return self._load(None)

    def load_for(self, names: Sequence[str]) -> None:
        """Load the pages for a command on some of them, without others that cannot be loaded.

        Pages that were loaded or given before stay.
        """
        if "pages" not in self.__dict__:
            self.pages = self._load({*names, *receipt.load(self.read_tree()).receipt.pages})

    def _load(self, needed: Collection[str] | None) -> dict[str, Page]:
        if self._pinned is not None:
            assert self.root is not None
            remembered.refuse_changed(self._pinned, self.root)
        return catalogue.load(self.catalogues or (), needed, self.say)

    def read_tree(self) -> Tree:
        """Take a fresh snapshot of the tree; a verb that writes takes another under the lock."""
        assert self.root is not None
        return Tree(self.root)

    def plan(self, excluded: Mapping[str, str] | None, environment: Mapping[str, str]) -> Plan:
        """Diagnose the tree as it is now.

        Args:
            excluded: excluded pages -> reason; None: those of the receipt.
        """
        tree = self.read_tree()
        loaded = recovered(tree, receipt.load(tree), self.pages)
        plan = planning.make(
            tree,
            loaded,
            self.pages,
            excluded=left_out(loaded.receipt, self.pages) if excluded is None else excluded,
            environment=environment,
            interrupted=transaction.interrupted(tree),
            earlier=self._survey,
        )
        self._survey = plan.survey
        return plan


@dataclass
class Outcome:
    """The result of a verb."""

    plan: Plan
    digest: str
    changed: list[str] = field(default_factory=list)
    """Files that were written or, with `check`, would be."""
    receipt_changed: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def verdicts(self) -> list[Verdict]:
        """One verdict per page, sorted by name."""
        return list(self.plan.verdicts.values())

    @property
    def ok(self) -> bool:
        """Whether the plan is finished and there is nothing to note."""
        return self.plan.finished and not self.notes


def status(session: Session) -> Outcome:
    """Determine the state of every page; writes nothing.

    Gates are those of the last apply, if there was one, since the files depend on them.
    """
    tree = session.read_tree()
    loaded = receipt.load(tree)
    gates.check(session.pages.values())
    environment = {**os.environ, **loaded.receipt.gates}
    plan = session.plan(None, environment)
    notes = [loaded.problem] if loaded.problem else []
    intact = loaded.exists and not loaded.problem
    if intact and loaded.receipt.digest != overlay_digest(loaded.receipt):
        notes.append("the receipt was edited by hand or damaged: cppmega apply rewrites it")
    if transaction.interrupted(tree):
        notes.append("an apply or revert was interrupted; run it again to finish or undo it")
    notes += [
        f"{file.path}: {file.story or ORPHANED}" for file in plan.views.values() if file.orphaned
    ]
    return Outcome(plan, loaded.receipt.digest if plan.finished else "", notes=notes)


def apply(
    session: Session,
    *,
    only: Sequence[str] = (),
    without: Sequence[str] = (),
    kinds: Sequence[str] = (),
    asked: Container[str] = (),
    check: bool = False,
    environment: Mapping[str, str] = os.environ,
) -> Outcome:
    """Bring the tree to the state that the active pages define, or change nothing.

    Args:
        only: the active pages; empty: every page.
        without: pages that are not active.
        kinds: what an active page must be for its user; empty: anything, but pages of kind speed
            that do not compute stock's bits are active only if they are `asked` for.
        asked: pages that are active whatever their kind.
        check: compute everything, write nothing.

    Raises:
        CppmegaError: anything that makes writing unsafe. Pages in a failure state do not raise:
            they are in the outcome, and nothing is written.
    """
    gates.check(session.pages.values(), environment)
    for name in only:
        page = catalogue.get(session.pages, name)
        if not gates.is_on(page, environment):
            raise CppmegaError(
                "gate-closed",
                f"{name} was requested by name, but its gate {page.patch.gate} is not set.",
                "A patch that is requested but not applied must stop the run.",
                f"export {page.patch.gate}=1",
            )
    for name in without:
        catalogue.get(session.pages, name)
    if only:
        others = set(session.pages) - set(only)
    else:
        others = {n for n, p in session.pages.items() if n not in asked and not _is_of(p, kinds)}
    chosen = Receipt(
        excluded=sorted(others | set(without)), only=sorted(only), kinds=sorted(set(kinds))
    )
    needed = {name for name in session.pages if name in asked or name in only}
    return _reconcile(session, lambda _: (chosen, environment), check, needed)


def revert(session: Session, names: Sequence[str] = ()) -> Outcome:
    """Remove some or all pages, restoring the exact pristine bytes.

    Raises:
        CppmegaError: `foreign-edit`, if a patched file was edited since; `unknown-page`.
    """
    tree = session.read_tree()
    loaded = receipt.load(tree)
    begun = bool(transaction.interrupted(tree))
    for name in names:
        if name not in loaded.receipt.pages:
            catalogue.get(session.pages, name)
    if names and (loaded.receipt.pages or begun):
        return _reconcile(session, lambda old: _without(old, names), check=False)
    if not names:
        try:
            _ = session.pages
        except CppmegaError as error:
            session.say(f"{error}; reverting by the receipt alone")
            session.pages = {}
        if receipt.folder(tree).is_dir():  # perhaps only what a killed run left there
            return _revert_all(session)
    session.say("nothing is applied")
    plan = _bare_plan(session)
    _refuse_orphans(plan, ())
    return Outcome(plan, "", notes=[loaded.problem] if loaded.problem else [])


def _revert_all(session: Session) -> Outcome:
    with transaction.locked(session.read_tree(), session.say):
        plan = _bare_plan(session)
        changes = dict(restored(plan, keep=set()))
        _refuse_orphans(plan, changes)
        transaction.commit(plan.tree, changes, None)
    return Outcome(_bare_plan(session), "", sorted(changes))


def _bare_plan(session: Session) -> Plan:
    """Plan the tree without any page."""
    return session.plan(dict.fromkeys(session.pages, "reverted"), {})


def _refuse_orphans(plan: Plan, restored: Container[str]) -> None:
    for path, file in plan.views.items():
        if file.orphaned and path not in restored:
            raise CppmegaError(
                "no-receipt",
                f"{path}: {file.story or ORPHANED}.",
                "Without that record, upstream's part of the file cannot be identified.",
                restoring(plan.tree, file),
            )


def diff(session: Session, name: str | None, environment: Mapping[str, str]) -> str:
    """Unified diff from the pristine text to the text with every active page, or with one page.

    A file that others have edited is shown as it is, since no page can be applied to it.
    """
    excluded: dict[str, str] | None = None
    if name is not None:
        session.load_for([name])
        catalogue.get(session.pages, name)
        excluded = dict.fromkeys(set(session.pages) - {name}, "not shown")
    plan = session.plan(excluded, environment)
    failures = [v for v in plan.failures if name in (None, v.name)]
    texts = {path: rewritten(plan, path).data for path, work in plan.work.items() if work.edits}
    for path, view in plan.views.items():
        edited = any(v.state == "foreign" and path in _files(session.pages, v) for v in failures)
        if edited and view.foreign and view.pristine is not None:
            session.say(f"{path}: edited by others; {restoring(plan.tree, view)} restores it")
            texts[path] = view.current or b""
    _refuse([v for v in failures if not _files(session.pages, v) & texts.keys()])
    if name is not None and plan.verdicts[name].state not in NEEDED:
        session.say(f"{name} is {plan.verdicts[name].state}: {plan.verdicts[name].detail}")
    pieces: list[str] = []
    for path, data in sorted(texts.items()):
        pristine = plan.views[path].pristine
        assert pristine is not None
        pieces.extend(
            difflib.unified_diff(
                pristine.decode(errors="replace").splitlines(keepends=True),
                data.decode(errors="replace").splitlines(keepends=True),
                f"a/{path}",
                f"b/{path}",
            )
        )
    return "".join(pieces)


def _files(pages: Mapping[str, Page], foreign: Verdict) -> set[str]:
    """Return the files that others may have edited, by a verdict; none if it says nothing of it."""
    return (
        {edit.path for edit in pages[foreign.name].patch.edits}
        if foreign.state == "foreign" and foreign.name in pages
        else set()
    )


def _refuse(failures: Sequence[Verdict]) -> None:
    for verdict in failures:
        raise CppmegaError(
            f"patch-{verdict.state}",
            f"{verdict.name}: {verdict.target}: {verdict.detail}.",
            "There is no known text to patch.",
            verdict.next or f"cppmega explain {verdict.name}",
        )


def _is_of(page: Page, kinds: Container[str]) -> bool:
    return page.patch.purpose in kinds if kinds else not page.only_where_asked


def left_out(chosen: Receipt, pages: Mapping[str, Page]) -> dict[str, str]:
    """Pages that a receipt leaves out -> why, and how each is applied."""
    return {name: _why_left_out(name, chosen, pages.get(name)) for name in chosen.excluded}


def _why_left_out(name: str, chosen: Receipt, page: Page | None) -> str:
    why, how = "removed by name", ""
    if chosen.only and name not in chosen.only:
        why = f"left out: --only asked for {', '.join(chosen.only)}"
    elif page is not None and not chosen.only and not _is_of(page, chosen.kinds):
        asked = f"--kind asked for {', '.join(chosen.kinds)}" if chosen.kinds else ""
        why = f"left out: {asked or 'its results are not those of stock, bit for bit'}"
    if page is not None and page.only_where_asked:
        how = " --kind all"
    return f"{why}; `python -m cppmega.apply_patches{how}` applies it again"


_Choice = tuple[Receipt, Mapping[str, str]]
"""A receipt that names the pages to leave out, and the environment that opens the gates."""


def _without(old: Receipt, names: Sequence[str]) -> _Choice:
    chosen = Receipt(excluded=sorted({*old.excluded, *names}), only=old.only, kinds=old.kinds)
    return chosen, {**os.environ, **old.gates}


def _reconcile(
    session: Session,
    choose: Callable[[Receipt], _Choice],
    check: bool,
    needed: Container[str] = (),
) -> Outcome:
    """Bring the tree into the chosen state.

    Args:
        choose: makes the choice from the receipt, as it is when the tree is planned.
        needed: pages that must be in the code, unless upstream has their fix.
    """
    plan = _planned(session, choose)
    _refuse([v for v in plan.verdicts.values() if v.state == "unported" and v.name in needed])
    if plan.failures:
        plan = _planned_under_lock(session, choose)
    if plan.failures:
        return Outcome(plan, "")
    _refuse_orphans(plan, ())
    if not _needs_writing(session, plan):
        return Outcome(plan, plan.loaded.receipt.digest)
    if check:
        changes, new = changes_of(plan, session.catalogues or ())
        return Outcome(plan, new.digest, sorted(changes), receipt_changed=True)
    with transaction.locked(session.read_tree(), session.say):
        plan = _planned(session, choose)  # the tree may have changed during the wait
        if plan.failures:
            return Outcome(plan, "")
        if not _needs_writing(session, plan):
            return Outcome(plan, plan.loaded.receipt.digest)
        changes, new = changes_of(plan, session.catalogues or ())
        if plan.loaded.problem:
            session.say(f"{plan.loaded.problem}; writing a new one")
        transaction.commit(plan.tree, changes, new)
    data = {path: change.data for path, change in changes.items()}
    return Outcome(plan.written(data, new), new.digest, sorted(changes), True)


def _planned(session: Session, choose: Callable[[Receipt], _Choice]) -> Plan:
    chosen, environment = choose(receipt.load(session.read_tree()).receipt)
    plan = session.plan(left_out(chosen, session.pages), environment)
    plan.only, plan.kinds = chosen.only, chosen.kinds
    return plan


def _planned_under_lock(session: Session, choose: Callable[[Receipt], _Choice]) -> Plan:
    """Plan again while no other process writes, since a half-written tree looks foreign."""
    if not receipt.folder(session.read_tree()).is_dir():
        return _planned(session, choose)
    try:
        with transaction.locked(session.read_tree(), session.say):
            return _planned(session, choose)
    except transaction.ReadOnlyTreeError:
        return _planned(session, choose)


def _needs_writing(session: Session, plan: Plan) -> bool:
    """Whether there may be something to write; False only if the receipt rules it out."""
    old = plan.loaded.receipt
    done = {v.name for v in plan.verdicts.values() if v.state in DONE}
    return (
        not plan.loaded.exists
        or bool(plan.loaded.problem)
        or old.digest != overlay_digest(old)
        or not plan.finished
        or (receipt.folder(plan.tree) / transaction.UNFINISHED).exists()
        or old.gates != plan.gates
        or old.excluded != list(plan.excluded)
        or old.only != plan.only
        or old.kinds != plan.kinds
        or old.engine != engine_revision()
        or old.catalogues != [*map(catalogue.stored, session.catalogues or ())]
        or old.catalogue_hashes != remembered.pins(session.catalogues or ())
        or set(old.pages) != done
        or any(old.pages[name].text != plan.pages[name].text for name in done)
        or any(path not in plan.work for path in old.files)
    )
