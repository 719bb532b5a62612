"""One page on one tree: is its text known, and if not, what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cppmega.page import Edit, Page
from cppmega.receipt import Loaded, original
from cppmega.state import State, Verdict
from cppmega.survey import MISSING, Survey
from cppmega.tree import REINSTALL, Origin, Tree, sha256


@dataclass(frozen=True, slots=True)
class Written:
    """Hashes of a file before and after one of our writes."""

    before: str
    after: str


@dataclass(frozen=True, slots=True)
class FileView:
    """A file as the engine sees it: what is there, what was there, who says so."""

    path: str
    current: bytes | None
    pristine: bytes | None
    """The text that pins are compared with; None where it cannot be had."""
    origin: Origin
    ours: bool
    """The current bytes are what an earlier apply wrote."""

    @property
    def foreign(self) -> bool:
        """Neither pristine nor ours."""
        return self.current is not None and self.pristine != self.current and not self.ours


def view(tree: Tree, loaded: Loaded, path: str, interrupted: Mapping[str, Written]) -> FileView:
    """Look at one file.

    Args:
        interrupted: what a transaction that did not finish was about to write.
    """
    current = tree.read(path)
    origin, wanted = tree.pristine(path)
    if current is None:
        return FileView(path, None, None, origin, False)
    now = sha256(current)
    entry = loaded.receipt.files.get(path)
    written = [interrupted[path]] if path in interrupted else []
    written += [Written(entry.before, entry.after)] if entry is not None else []
    if origin == "unverified":
        # Nobody vouches for the file: what we found before our first edit counts as pristine.
        wanted = written[-1].before if written else now
    if now == wanted:
        return FileView(path, current, current, origin, False)
    kept = original(tree, wanted) or tree.git_blob(path)
    ours = kept is not None and any(w.after == now and w.before == wanted for w in written)
    return FileView(path, current, kept, origin, ours)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The edits that fit a tree, or the verdict that says why none does."""

    edits: tuple[Edit, ...] = ()
    before: Mapping[str, str] | None = None
    verdict: Verdict | None = None


def diagnose(
    page: Page, tree: Tree, loaded: Loaded, survey: Survey, views: Mapping[str, FileView]
) -> Diagnosis:
    """Find the edits of a page that this tree needs."""
    found = {e.target: _look(page, e, views[e.path], survey, loaded) for e in page.patch.edits}
    for shape in page.patch.shapes():
        if all(found[target] in known for target, known in shape.items()):
            edits = tuple(known[found[target]] for target, known in shape.items())
            strange = [edit for edit in edits if views[edit.path].foreign]
            if strange:
                return Diagnosis(verdict=_foreign(page, strange[0], tree, views))
            return Diagnosis(edits, {edit.target: found[edit.target] for edit in edits})
    for distribution in dict.fromkeys(edit.distribution for edit in page.patch.edits):
        if not tree.has(distribution):
            return _no(page, "not-applicable", f"{distribution} is not installed here")
    for target in page.patch.feature:
        if not survey.exists(target) and not survey.elsewhere(target):
            return _no(page, "not-applicable", f"there is no {target}")
    if survey.fixed(page):
        return _no(page, "upstreamed", "the code has the fix")
    return Diagnosis(verdict=_failure(page, tree, survey, found, views))


def _look(page: Page, edit: Edit, file: FileView, survey: Survey, loaded: Loaded) -> str:
    """Fingerprint of the target: in the pristine text if the file is ours, else as it stands.

    A target that still has the text we gave it, in a file that was edited since, counts as known:
    what is wrong there is the file.
    """
    if file.ours:
        return survey.fingerprint(file.pristine, edit)
    now = survey.fingerprint(file.current, edit)
    applied = loaded.receipt.pages.get(page.name)
    prints = applied.targets.get(edit.target) if applied is not None else None
    if prints and file.foreign and now == prints.get("after"):
        return prints["before"]
    return now


def _no(page: Page, state: State, detail: str) -> Diagnosis:
    edit = page.patch.edits[0]
    return Diagnosis(verdict=Verdict(page.name, page.patch.kind, state, edit.target, detail))


def _failure(
    page: Page,
    tree: Tree,
    survey: Survey,
    found: Mapping[str, str],
    views: Mapping[str, FileView],
) -> Verdict:
    """No shape fits: name the first target of the nearest one that does not, and what it is."""
    shapes = page.patch.shapes()
    shape = max(shapes, key=lambda s: sum(found[t] not in (MISSING,) for t in s) - len(s))
    shape = max(
        [s for s in shapes if len(s) == len(shape)] or shapes,
        key=lambda s: sum(found[t] in known for t, known in s.items()),
    )
    for target, known in shape.items():
        print_ = found[target]
        if print_ in known:
            continue
        state, detail, command = _why(page, target, print_, tree, survey, views)
        return Verdict(page.name, page.patch.kind, state, target, detail, next=command)
    target = next(iter(shape))
    detail = "its symbols are known one by one, but no version has them together"
    command = f"cppmega drift OLD {tree.version}"
    return Verdict(page.name, page.patch.kind, "drifted", target, detail, next=command)


def _why(
    page: Page,
    target: str,
    print_: str,
    tree: Tree,
    survey: Survey,
    views: Mapping[str, FileView],
) -> tuple[State, str, str]:
    path = target.partition(":")[0]
    explain = f"cppmega explain {page.name}"
    reinstall = REINSTALL.format(version=tree.version)
    if print_ == MISSING:
        places = survey.elsewhere(target)
        if places:
            return "moved", f"it now stands in {', '.join(places)}", explain
        what = "the file is gone" if views[path].current is None else "the symbol is gone"
        return "absent", what, explain
    if print_.startswith("?"):
        return "ambiguous", f"it is defined {print_[1:]} times", explain
    if print_.startswith("!"):
        return "drifted", print_[1:].rstrip("."), reinstall
    if views[path].foreign and views[path].origin != "unverified":
        detail = "its text is not upstream's: it was edited by hand or by another tool"
        if b"_cppmega_reached" in (views[path].current or b""):
            detail = "it carries our patch, but neither receipt nor original is left"
        return "drifted", detail, reinstall
    edits = [edit for edit in page.patch.edits if edit.target == target]
    versions = dict.fromkeys(version for edit in edits for version in edit.pins)
    return "drifted", f"its text is none of those known ({', '.join(versions)})", explain


def _foreign(page: Page, edit: Edit, tree: Tree, views: Mapping[str, FileView]) -> Verdict:
    who = "the wheel's RECORD" if views[edit.path].origin == "record" else "the commit"
    detail = f"{edit.path} differs from {who} outside of the target"
    if views[edit.path].origin == "unverified":
        detail = f"{edit.path} was edited after we patched it"
    command = REINSTALL.format(version=tree.version)
    return Verdict(page.name, page.patch.kind, "foreign", edit.target, detail, next=command)
