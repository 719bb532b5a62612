"""Predict what an upgrade would do to every patch, from the code that changed.

Two trees are diagnosed with the same catalogue, as `apply` would do it, and the results are
compared. Every page counts as wanted, including gated ones. Nothing is written or imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec import structs

from cppmega.authoring import similar, statements
from cppmega.authoring.drift_result import MEANING, Drift, PageDrift, Side, TargetDrift, Word
from cppmega.authoring.statements import Touched
from cppmega.errors import CppmegaError
from cppmega.host import console
from cppmega.overlay import plan as planning
from cppmega.overlay import receipt
from cppmega.overlay.receipt import Loaded, Receipt
from cppmega.overlay.survey import MISSING
from cppmega.overlay.verdict import FAILURES, NEEDED, PatchState
from cppmega.page import Edit, Page
from cppmega.rewriting.errors import EditMismatchError
from cppmega.tree.installed import PACKAGES, Tree

if TYPE_CHECKING:
    from cppmega.proof.verify import Proved

_OF_FAILURE: Mapping[PatchState, Word] = {
    "moved": "moved",
    "absent": "gone",
    "ambiguous": "ambiguous",
    "foreign": "foreign",
    "conflict": "conflict",
}


def compare(
    old: tuple[str, Tree],
    new: tuple[str, Tree],
    pages: Mapping[str, Page],
    wanted: Mapping[str, Sequence[str]] | None = None,
) -> Drift:
    """Diagnose both trees and compare the results.

    Args:
        old: the name that the user gave the old tree, and the tree.
        new: the same for the new tree.
        pages: the catalogue.
        wanted: page -> the recipes that need it.

    Raises:
        CppmegaError: `nothing-to-do`.
    """
    if not any(old[1].has(name) and new[1].has(name) for name in PACKAGES):
        raise CppmegaError(
            "nothing-to-do",
            f"{old[0]} and {new[0]} hold no package in common that patches target.",
            "No patch would be compared, and all of them would be reported as safe.",
            "cppmega drift OLD NEW, with two releases of one package",
        )
    before = _side(*old, pages, Receipt())
    served = [name for name, v in before.plan.verdicts.items() if v.state in NEEDED]
    # Answers belong to the bytes of a file, so unchanged files are surveyed only once.
    known = Receipt(
        survey=before.plan.survey.used, served=dict.fromkeys(served, before.tree.version)
    )
    after = _side(*new, pages, known)
    order = planning.in_order(pages)
    drifts = [
        _page(pages[name], before, after, order, tuple((wanted or {}).get(name, ())))
        for name in console.each("comparing", sorted(pages))
    ]
    words = list(MEANING)
    drifts.sort(key=lambda page: (page.safe and page.word != "lost-again", words.index(page.word)))
    return Drift(before, after, tuple(drifts))


def proved(drift: Drift, proofs: Mapping[str, Proved]) -> Drift:
    """Return the drift with the proofs of the pages that declare themselves upstreamed in NEW."""

    def one(page: PageDrift) -> PageDrift:
        if page.page.name not in proofs:
            return page
        result = proofs[page.page.name]
        word: Word = "not-fixed" if result.proof == "failed" else page.word
        return replace(page, word=word, proof=result.proof, proved=result.detail)

    pages = sorted(map(one, drift.pages), key=lambda page: page.word != "not-fixed")
    return Drift(drift.old, drift.new, tuple(pages))


def _side(requested: str, tree: Tree, pages: Mapping[str, Page], earlier: Receipt) -> Side:
    """Diagnose one tree.

    Args:
        earlier: the answers and the pages of the tree that comes before it.
    """
    loaded = receipt.load(tree)
    known = structs.replace(
        loaded.receipt,
        survey={**earlier.survey, **loaded.receipt.survey},
        served={**earlier.served, **loaded.receipt.served},
    )
    gates = {page.patch.gate: "1" for page in pages.values() if page.patch.gate}
    loaded = Loaded(known, loaded.problem, loaded.exists)
    return Side(requested, planning.make(tree, loaded, pages, environment=gates))


def _page(
    page: Page, old: Side, new: Side, order: Sequence[str], recipes: tuple[str, ...]
) -> PageDrift:
    was, now = old.plan.verdicts[page.name], new.plan.verdicts[page.name]
    word = _word(page, old, new)
    if word == "not-compared" or now.state not in ("unported", "not-applicable"):
        recipes = ()
    elif recipes and word == "not-needed":
        word = "not-applicable"
    targets: tuple[TargetDrift, ...] = ()
    if word not in ("not-needed", "not-compared") and (now.state != "unported" or now.failed):
        targets = tuple(_target(t, page, old, new, order) for t in _targets(page, old, new))
    if word == "same" and any(target.word not in ("same", "left") for target in targets):
        word = "changed"
    if word == "gone" and any(t.target == now.target and t.word == "moved" for t in targets):
        word = "moved"
    return PageDrift(page, word, was, now, targets, recipes=recipes)


def _word(page: Page, old: Side, new: Side) -> Word:
    was, now = old.plan.verdicts[page.name].state, new.plan.verdicts[page.name].state
    packages = page.patch.distributions
    if any(not side.tree.has(package) for package in packages for side in (old, new)):
        return "not-compared"
    if was == "upstreamed" and (now in NEEDED or now == "drifted"):
        return "lost-again"
    if now in NEEDED:
        return "newly-needed" if was in ("not-applicable", "unported") else "same"
    if now == "unported":
        return "unported"
    if now in FAILURES:
        return _OF_FAILURE.get(now, "changed" if was in NEEDED else "unknown")
    if was in NEEDED or was in FAILURES:
        return "upstreamed" if now == "upstreamed" else "not-applicable"
    return "not-needed"


def _targets(page: Page, old: Side, new: Side) -> list[str]:
    """Return the symbols to compare: those edited in OLD or in NEW, else those that failed."""
    edited = [*old.fitting(page.name), *new.fitting(page.name)]
    now = new.plan.verdicts[page.name]
    if now.failed:
        edited.append(now.target)
        if not old.fitting(page.name):
            every = dict.fromkeys(edit.target for edit in page.patch.edits)
            edited += [
                t for t in every if new.fingerprint(page, t) not in {MISSING, *_pins(page, t)}
            ]
    if not edited and old.plan.verdicts[page.name].state != "not-applicable":
        edited = [old.plan.verdicts[page.name].target]
    return list(dict.fromkeys(edited))


def _pins(page: Page, target: str, preferred: str = "") -> dict[str, str]:
    """Return the pinned version of each fingerprint: the preferred one, else the last."""
    edits = [edit for edit in page.patch.edits if edit.target == target]
    pins = [(pin, version) for edit in edits for version, pin in edit.pins.items()]
    return dict(sorted(pins, key=lambda entry: entry[1] == preferred))


def _version(page: Page, target: str, side: Side) -> str:
    """Return the version of the distribution that the target belongs to."""
    edit = next(edit for edit in page.patch.edits if edit.target == target)
    return side.tree.version_of(edit.distribution)


def _target(target: str, page: Page, old: Side, new: Side, order: Sequence[str]) -> TargetDrift:
    before, after = old.fingerprint(page, target), new.fingerprint(page, target)
    known = _pins(page, target, _version(page, target, new)).get(after, "")
    in_new = new.fitting(page.name)
    if in_new and target not in in_new:
        return TargetDrift(target, "left", known)
    if after == MISSING:
        return _missing(target, page, old, new)
    if after.startswith("?"):
        return TargetDrift(target, "ambiguous", misfit=f"it is defined {after[1:]} times")
    if after.startswith("!"):
        return TargetDrift(target, "unreadable", misfit=after[1:].rstrip("."))
    was = old.plan.verdicts[page.name].state
    only_new = was in NEEDED and in_new and target not in old.fitting(page.name)
    if only_new or not old.lines(target):
        return TargetDrift(target, "added", known)
    if before == after:
        return TargetDrift(target, "same", known)
    return _changed(target, page, old, new, known, order)


def _missing(target: str, page: Page, old: Side, new: Side) -> TargetDrift:
    survey, symbol = new.plan.survey, target.partition(":")[2]
    edit = next(edit for edit in page.patch.edits if edit.target == target)

    def text_of(place: str) -> str:
        there = replace(edit, target=place)
        return survey.fingerprint(survey.read(there.path), there)

    paths = survey.elsewhere(target)
    places = [
        (p, _pins(page, target).get(text_of(p), "")) for p in (f"{x}:{symbol}" for x in paths)
    ]
    places.sort(key=lambda place: not place[1])  # with a known text first
    lines = old.lines(target)
    matches = similar.most_similar(new.tree, target, lines) if lines and not places else []
    renamed = next(
        (m.target for m in matches if similar.is_new_name(target, m, old.plan.survey)), ""
    )
    if renamed:
        places = [(renamed, _pins(page, target).get(text_of(renamed), ""))]
    if not places:
        return TargetDrift(target, "gone", nearest=tuple(matches))
    first, known = places[0]
    changes = tuple(statements.changes(lines, new.lines(first)))
    moved = tuple(place for place, _ in places)
    return TargetDrift(target, "moved", known, changes, places=moved)


def _changed(
    target: str, page: Page, old: Side, new: Side, known: str, order: Sequence[str]
) -> TargetDrift:
    edit = old.fitting(page.name).get(target)
    others = [e for e in reversed(page.patch.edits) if e.target == target and e is not edit]
    # Edits take most of the time, so none is tried in vain: none that upstream's fix retires, and
    # none on a known text if the text of OLD provides the same information.
    retired = new.plan.verdicts[page.name].state == "upstreamed"
    on_old_text = [edit] if edit and not retired else []
    on_new_text = [*([edit] if edit else []), *others]
    if known:
        on_new_text = [] if edit else [e for e in others if known in e.pins]
    on_new_text = [] if retired else on_new_text
    earlier = [
        (new.fitting(name) | old.fitting(name))[target]
        for name in order
        if target in new.fitting(name) | old.fitting(name)
        and planning.comes_after(new.plan.pages, page.name, name)
    ]
    on_old, _ = _touched(old, target, earlier, on_old_text)
    on_new, misfit = _touched(new, target, earlier, on_new_text)
    tried = not known and any(choice.kind == "source" for choice in on_new_text)
    tried = tried and _statements_after(new, target, earlier) is not None
    return TargetDrift(
        target,
        "changed",
        known,
        tuple(statements.changes(old.lines(target), new.lines(target), on_old, on_new)),
        fits=on_new is not None if tried else None,
        misfit=misfit,
    )


def _touched(
    side: Side, target: str, earlier: Sequence[Edit], choices: Sequence[Edit]
) -> tuple[Touched | None, str]:
    """Return what the first edit that fits does to the text of a tree, or why none fits.

    Args:
        earlier: edits of pages that come before this one, and that its edits may build on.
    """
    source, before = side.plan.survey.source(target), _statements_after(side, target, earlier)
    misfit = ""
    for edit in choices:
        if edit.kind != "source" or not source or before is None:
            continue
        try:
            after = _edited(source, target, [*earlier, edit])
        except EditMismatchError as error:
            misfit = misfit or error.problem
        except CppmegaError as error:
            misfit = misfit or error.what.rstrip(".")
        except Exception as error:  # an edit is a page's code and may raise anything
            misfit = misfit or f"the edit raises {type(error).__name__}: {error}"
        else:
            ours = statements.touched(before, after)
            return statements.carried(ours, before, side.lines(target)), ""
    return None, misfit


def _statements_after(side: Side, target: str, earlier: Sequence[Edit]) -> list[str] | None:
    """Return the statements after the earlier edits; None if these do not fit."""
    if not earlier:
        return side.lines(target)
    try:
        return _edited(side.plan.survey.source(target), target, earlier)
    except Exception:  # their own pages report what is wrong
        return None


def _edited(source: str, target: str, edits: Sequence[Edit]) -> list[str]:
    """Return the statements of a definition after some edits."""
    import libcst as cst

    from cppmega.rewriting import fingerprint

    _, node = fingerprint.parse_definition(source, target)
    for edit in edits:
        node = edit.edit(node)
    return statements.of_source(cst.Module([]).code_for_node(node))
