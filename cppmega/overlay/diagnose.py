"""Diagnose one page on one tree: whether its targets are known, and if not, why."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cppmega.overlay.receipt import FOLDER, Loaded, Written, original
from cppmega.overlay.survey import MISSING, Survey
from cppmega.overlay.verdict import PatchState, Verdict
from cppmega.page import Edit, Page, left_alone
from cppmega.rewriting.marks import COMMENT
from cppmega.rewriting.source import plain
from cppmega.tree.installed import PACKAGES, Origin, Tree, sha256
from cppmega.tree.resolve import label_of, requirement

_FOOTPRINTS = (b"_cppmega_reached(", COMMENT.encode())
"""Patched text contains one of these, which identifies it even without a receipt."""
ORPHANED = "it contains a cppmega patch, but no receipt records which text is upstream's"
COMMITTED = "the commit contains patched text: it was committed after an apply"


@dataclass(frozen=True, slots=True)
class FileView:
    """A file: its bytes, its pristine bytes, and what vouches for them."""

    path: str
    current: bytes | None
    pristine: bytes | None
    """The text that pins are compared with; None where it is not available."""
    origin: Origin
    patched: bool
    """The current bytes are what an earlier apply wrote."""
    story: str = ""
    """Why a patched file is not as apply left it: edited since, or its original is missing."""

    @property
    def foreign(self) -> bool:
        """Whether the file is neither pristine nor as it was patched."""
        return self.current is not None and self.pristine != self.current and not self.patched

    @property
    def orphaned(self) -> bool:
        """Whether the file contains patched text that nothing on disk accounts for."""
        explained = self.patched or self.story not in ("", COMMITTED)
        return not explained and contains_patch(self.current)


def contains_patch(data: bytes | None) -> bool:
    """Whether bytes contain patched text."""
    return any(mark in (data or b"") for mark in _FOOTPRINTS)


def view(
    tree: Tree, loaded: Loaded, path: str, interrupted: Mapping[str, Sequence[Written]]
) -> FileView:
    """Compare one file with its pristine text.

    Args:
        interrupted: the writes that unfinished transactions made or were about to make, by path.
    """
    current = tree.read(path)
    origin, wanted = tree.pristine(path)
    entry = loaded.receipt.files.get(path)
    if current is None:
        return FileView(path, None, None, origin, False)
    now = sha256(current)
    written = list(interrupted.get(path, ()))
    written += [Written(entry.before, entry.after)] if entry is not None else []
    if origin == "unverified":
        # Nothing vouches for the file: its text before the first apply counts as pristine, unless
        # the file has been replaced by another one of upstream's since.
        wanted = written[-1].before if written and contains_patch(current) else now
    if now == wanted:
        committed = origin == "git" and contains_patch(current)
        return FileView(path, current, current, origin, False, COMMITTED if committed else "")
    kept = original(tree, wanted) or tree.git_blob(path)
    patched = kept is not None and any(w.after == now and w.before == wanted for w in written)
    story = ""
    if written and not patched:
        story = f"{path} was edited after cppmega patched it"
        if written[-1].after == now:
            story = f"{path} is as cppmega patched it, but its original is missing"
    return FileView(path, current, kept, origin, patched, story)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The edits that fit a tree, or the verdict that explains why none does."""

    edits: tuple[Edit, ...] = ()
    before: Mapping[str, str] | None = None
    verdict: Verdict | None = None


def diagnose(
    page: Page, tree: Tree, loaded: Loaded, survey: Survey, views: Mapping[str, FileView]
) -> Diagnosis:
    """Find the edits of a page that this tree needs."""
    prints = {
        e.target: _fingerprint_of(page, e, views[e.path], survey, loaded) for e in page.patch.edits
    }
    shape = _fitting(page, prints)
    if shape is not None:
        edits = tuple(known[prints[target]] for target, known in shape.items())
        edits = tuple(edit for edit in edits if edit.edit is not left_alone)
        strange = [edit for edit in edits if views[edit.path].foreign]
        if strange:
            return Diagnosis(verdict=_foreign(page, strange[0], tree, views))
        if not edits:
            return _without_edits(page, "upstreamed", "the pinned texts need no edit")
        return Diagnosis(edits, {edit.target: prints[edit.target] for edit in edits})
    upstream = _upstream_views(page, views)
    of_upstream = {
        e.target: _fingerprint_of(page, e, upstream[e.path], survey, loaded)
        for e in page.patch.edits
    }
    blind = {path for path, file in upstream.items() if file.foreign or file.orphaned}
    needed_here = _fitting(page, of_upstream) or (blind and _is_pinned_here(page, tree))
    # What a patched file has become since is not upstream's, whatever upstream's text answers.
    spoiled = any(
        views[edit.path].orphaned or (views[edit.path].story and prints[edit.target] != MISSING)
        for edit in page.patch.edits
    )
    if needed_here or spoiled or any(text.startswith("!") for text in prints.values()):
        return Diagnosis(verdict=_failure(page, tree, survey, prints, views))
    for distribution in page.patch.distributions:
        if not tree.has(distribution):
            return _without_edits(page, "not-applicable", _absence(tree, distribution))
    for target in _features(page):
        known = target.partition(":")[0] not in blind
        if known and not survey.exists(target) and not survey.elsewhere(target):
            return _without_edits(page, "not-applicable", f"{target} does not exist in this tree")
    if survey.fixed(page) and not blind & survey.read_for_fixed(page):
        return _without_edits(page, "upstreamed", "the code already contains the fix")
    for target in page.patch.builds_on:
        if target.partition(":")[0] not in blind and not survey.exists(target):
            detail = f"nobody has ported it: {target} does not exist in this tree"
            return _without_edits(page, "unported", detail)
    if blind:
        # In a file that is not upstream's, a missing feature or a present fix proves nothing.
        return Diagnosis(verdict=_unknown(page, tree, upstream, min(blind)))
    return Diagnosis(verdict=_failure(page, tree, survey, of_upstream, upstream))


def _features(page: Page) -> list[str]:
    """Definitions whose absence shows that there is nothing to fix.

    A target of the page, and what it defines, are none of them: upstream may have renamed it.
    """
    targets = {plain(edit.target) for edit in page.patch.edits}
    own = tuple(f"{target}." for target in targets)
    return [f for f in page.patch.feature if not f"{plain(f)}.".startswith(own)]


def _upstream_views(page: Page, views: Mapping[str, FileView]) -> dict[str, FileView]:
    """The files of a page and of its feature, each as upstream has it where that text is known."""
    depended = (*page.patch.feature, *page.patch.builds_on)
    paths = {e.path for e in page.patch.edits} | {f.partition(":")[0] for f in depended}
    return {
        path: replace(views[path], current=views[path].pristine, story="")
        if views[path].foreign and views[path].pristine is not None
        else views[path]
        for path in sorted(paths)
    }


def _is_pinned_here(page: Page, tree: Tree) -> bool:
    """Whether the page knows the text of this version, so that another text was edited."""
    return any(label_of(tree, edit.distribution) in edit.pins for edit in page.patch.edits)


def _absence(tree: Tree, distribution: str) -> str:
    elsewhere = imported_from(tree, distribution)
    where = f"; Python imports it from {elsewhere}, which is not patched" if elsewhere else ""
    return f"{distribution} is not installed here{where}"


def imported_from(tree: Tree, distribution: str) -> Path | None:
    """The folder from which Python imports a distribution that ROOT lacks; None if there is none.

    If ROOT is a checkout of Megatron, the other packages come from an environment.
    """
    if tree.has(distribution):
        return None
    from cppmega.host.packages import folder_of

    package = folder_of(PACKAGES[distribution])
    return package.parent if package is not None else None


def _fitting(page: Page, prints: Mapping[str, str]) -> Mapping[str, Mapping[str, Edit]] | None:
    """Find the shape of a page whose texts are all known in this tree.

    A shape that fits is rejected if another one recognises some texts here but not others, or edits
    a text that this shape leaves out. Then a target has drifted or a pin is missing, and only part
    of the page would be applied.
    """
    shapes = page.patch.shapes()
    for shape in shapes:
        if any(prints[target] not in known for target, known in shape.items()):
            continue
        rivals = [s for s in shapes if any(prints[target] in s[target] for target in s)]
        drifted = {t for s in rivals for t in s if prints[t] != MISSING and prints[t] not in s[t]}
        left_out = {
            t
            for s in rivals
            for t in set(s) - set(shape)
            if prints[t] in s[t] and s[t][prints[t]].edit is not left_alone
        }
        if not drifted - set(shape) and not left_out:
            return shape
    return None


def _fingerprint_of(page: Page, edit: Edit, file: FileView, survey: Survey, loaded: Loaded) -> str:
    """Fingerprint the target: in the pristine text if the file is patched, else in its bytes.

    A target that still has its patched text, in a file that was edited since, counts as known: the
    fault is in the file, not in the target.
    """
    if file.patched:
        return survey.fingerprint(file.pristine, edit)
    now = survey.fingerprint(file.current, edit)
    applied = loaded.receipt.pages.get(page.name)
    prints = applied.targets.get(edit.target) if applied is not None else None
    if prints is not None and file.foreign and now == prints.after:
        return prints.before
    return now


def _without_edits(page: Page, state: PatchState, detail: str) -> Diagnosis:
    edit = page.patch.edits[0]
    return Diagnosis(verdict=Verdict(page.name, page.patch.kind, state, edit.target, detail))


def _failure(
    page: Page,
    tree: Tree,
    survey: Survey,
    prints: Mapping[str, str],
    views: Mapping[str, FileView],
) -> Verdict:
    """Explain why no shape fits, by the first unknown target of the closest shape."""
    shapes = page.patch.shapes()
    # The shape with the fewest missing targets; of these, the one with the fewest unknown texts.
    shape = min(
        shapes,
        key=lambda s: (
            sum(prints[t] == MISSING for t in s),
            sum(prints[t] not in known for t, known in s.items()),
        ),
    )
    unknown = [target for target, known in shape.items() if prints[target] not in known]
    files = {target: views[target.partition(":")[0]] for target in unknown}
    unknown.sort(key=lambda target: not (files[target].foreign or files[target].orphaned))
    known_somewhere = {t for s in shapes for t in s if prints[t] in s[t]}
    others = [t for t, text in prints.items() if text != MISSING and t not in known_somewhere]
    for target in unknown or others[:1]:
        fingerprint = prints[target]
        state, detail, command = _explained(page, target, fingerprint, tree, survey, views)
        return Verdict(page.name, page.patch.kind, state, target, detail, next=command)
    target = next(iter(shape))
    detail = "each of its symbols is known, but no pinned version combines them this way"
    command = _comparison(page, target, tree)
    return Verdict(page.name, page.patch.kind, "drifted", target, detail, next=command)


def _comparison(page: Page, target: str, tree: Tree) -> str:
    """The command that shows what upstream changed since the newest release with a pin."""
    edits = page.patch.edits
    package = next(edit.distribution for edit in edits if edit.target == target)
    labels = {label for edit in edits if edit.distribution == package for label in edit.pins}
    releases = [label for label in labels if label.replace(".", "").isdigit()]
    if not releases:
        return f"cppmega explain {page.name}"
    newest = max(releases, key=lambda label: tuple(map(int, label.split("."))))
    here = shlex.quote(str(tree.root))
    if package != "megatron-core":
        here = requirement(tree.version_of(package), package)
    return f"cppmega drift {requirement(newest, package)} {here}"


def _explained(
    page: Page,
    target: str,
    fingerprint: str,
    tree: Tree,
    survey: Survey,
    views: Mapping[str, FileView],
) -> tuple[PatchState, str, str]:
    path = target.partition(":")[0]
    compare = _comparison(page, target, tree)
    restore = restoring(tree, views[path])
    if views[path].story:
        return "drifted", views[path].story, restore
    if views[path].orphaned:
        return "drifted", ORPHANED, restore
    if fingerprint == MISSING:
        places = survey.elsewhere(target)
        if places:
            return "moved", f"it is now in {', '.join(places)}", compare
        what = "the file is gone" if views[path].current is None else "the symbol is gone"
        return "absent", what, compare
    if fingerprint.startswith("?"):
        return "ambiguous", f"it is defined {fingerprint[1:]} times", f"cppmega explain {page.name}"
    if fingerprint.startswith("!"):
        return "drifted", fingerprint[1:].rstrip("."), restore
    if views[path].foreign and _edited_since(target, fingerprint, page, survey, views[path]):
        detail = (
            f"it differs from {_voucher(views[path])}: it was edited by hand or by another tool"
        )
        return "drifted", detail, restore
    edits = [edit for edit in page.patch.edits if edit.target == target]
    versions = dict.fromkeys(version for edit in edits for version in edit.pins)
    return "drifted", f"its text matches no known version ({', '.join(versions)})", compare


def _edited_since(
    target: str, fingerprint: str, page: Page, survey: Survey, file: FileView
) -> bool:
    """Whether the text of a target in an edited file is not that of its own release or commit.

    Where upstream's text is not at hand, as in a wheel, the difference is that of the file.
    """
    edit = next(edit for edit in page.patch.edits if edit.target == target)
    return file.pristine is None or survey.fingerprint(file.pristine, edit) != fingerprint


def _unknown(page: Page, tree: Tree, views: Mapping[str, FileView], path: str) -> Verdict:
    """The verdict where an edited file hides whether upstream's text needs the patch."""
    file = views[path]
    targets = (edit.target for edit in page.patch.edits)
    named = [*targets, *page.patch.feature, *page.patch.builds_on]
    target = next(target for target in named if target.partition(":")[0] == path)
    what = file.story or (ORPHANED if file.orphaned else f"{path} differs from {_voucher(file)}")
    detail = f"{what}, so that it is unknown whether the patch is needed"
    command = restoring(tree, file)
    return Verdict(page.name, page.patch.kind, "foreign", target, detail, next=command)


def _voucher(file: FileView) -> str:
    return "the wheel's RECORD" if file.origin == "record" else "the commit"


def _foreign(page: Page, edit: Edit, tree: Tree, views: Mapping[str, FileView]) -> Verdict:
    file = views[edit.path]
    detail = file.story or f"{edit.path} differs from {_voucher(file)} outside the target"
    kind = page.patch.kind
    return Verdict(
        page.name, kind, "foreign", edit.target, detail, next=restoring(tree, views[edit.path])
    )


def restoring(tree: Tree, file: FileView) -> str:
    """The command that restores upstream's file, and keeps a copy of the file as it is."""
    if file.story == COMMITTED:
        log = f"git -C {tree.root} log --oneline -S_cppmega_reached -- {file.path}"
        return f"{log}; git revert the commit that it names, then apply again"
    if file.origin != "unverified":
        return tree.restore(file.path)
    ours = shlex.quote(str(tree.root / FOLDER))
    return f"{tree.saving(file.path)}mv {ours} {ours}.moved; unpack upstream's {file.path} again"
