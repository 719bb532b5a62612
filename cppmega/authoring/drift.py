"""The report before an upgrade: what would become of every patch, from what changed in the code.

Two trees are diagnosed with the same catalogue, as `apply` would do it, and their answers are laid
side by side. Every page counts as wanted, gated ones too. Nothing is written and nothing imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from cppmega.authoring import similar as nearest
from cppmega.authoring import statements
from cppmega.authoring.similar import Match
from cppmega.authoring.statements import Change, Touched
from cppmega.errors import CppmegaError
from cppmega.overlay import plan as planning
from cppmega.overlay import receipt
from cppmega.overlay.plan import Plan
from cppmega.overlay.receipt import Loaded
from cppmega.overlay.survey import MISSING
from cppmega.overlay.verdict import FAILURES, NEEDED, Proof, State, Verdict
from cppmega.page import Edit, Page
from cppmega.tree.installed import Tree

if TYPE_CHECKING:
    from cppmega.proof.verify import Proved

Word = Literal[
    "lost-again",
    "not-fixed",
    "changed",
    "moved",
    "gone",
    "unknown",
    "newly-needed",
    "upstreamed",
    "not-applicable",
    "same",
    "not-needed",
    "not-compared",
    "ambiguous",
    "foreign",
    "conflict",
]
MEANING: dict[Word, str] = {
    "lost-again": "OLD has the fix, NEW has the bug again",
    "not-fixed": "NEW has the fix by its text, and does not pass the proof",
    "changed": "the text that the patch edits is another",
    "moved": "the target stands in another file",
    "gone": "nothing of that name is left",
    "unknown": "the text is not known, neither in OLD nor in NEW, or only NEW has the feature",
    "newly-needed": "OLD does not need it, NEW does, and its text is known",
    "upstreamed": "NEW has the fix; the patch retires itself",
    "not-applicable": "the feature is not in NEW",
    "same": "the text that the patch edits is the same",
    "not-needed": "neither of the two needs it",
    "not-compared": "it patches a package that is not in both trees",
    "ambiguous": "the target is defined more than once",
    "foreign": "a file of NEW is not upstream's",
    "conflict": "two pages edit one symbol without an order",
}
_OF_FAILURE: Mapping[State, Word] = {
    "moved": "moved",
    "absent": "gone",
    "ambiguous": "ambiguous",
    "foreign": "foreign",
    "conflict": "conflict",
}

_RENAMED = 0.75
"""A definition that is so much like one that is gone is the same under another name."""

_MISFIT = "An edit does not fit its target: "

TargetWord = Literal["same", "changed", "moved", "gone", "added", "left", "ambiguous", "unreadable"]
"""`added`: the page edits it in NEW only; `left`: in OLD only."""


@dataclass(frozen=True, slots=True)
class TargetDrift:
    """One symbol in the two trees."""

    target: str
    word: TargetWord
    known: str = ""
    """The version whose pin NEW's text has; "" where no pin has it."""
    changes: tuple[Change, ...] = ()
    fits: bool | None = None
    """Whether an edit of the page applies to NEW's unknown text; None where none was tried."""
    misfit: str = ""
    """Why it does not."""
    places: tuple[str, ...] = ()
    nearest: tuple[Match, ...] = ()
    fixed_there: bool = False
    """Whether the page's own `fixed_upstream` says that the nearest match has the fix."""

    @property
    def renamed(self) -> bool:
        """Whether it is gone, and something very much like it is there with the bug in it."""
        alike = bool(self.nearest) and self.nearest[0].likeness >= _RENAMED
        return alike and not self.fixed_there

    def as_json(self) -> dict[str, Any]:
        """One entry of `targets` in the JSON answer."""
        return {
            "target": self.target,
            "change": self.word,
            "known": self.known,
            "changes": [change.as_json() for change in self.changes],
            "fits": self.fits,
            "misfit": self.misfit,
            "places": list(self.places),
            "nearest": [match.as_json() for match in self.nearest],
            "fixed_there": self.fixed_there,
        }


@dataclass(frozen=True, slots=True)
class PageDrift:
    """One patch in the two trees."""

    page: Page
    word: Word
    old: Verdict
    new: Verdict
    targets: tuple[TargetDrift, ...]
    proof: Proof | None = None
    """Of a page that NEW's text makes upstreamed: what its proof says there; None: not run."""
    proved: str = ""
    """The detail of that proof."""

    @property
    def safe(self) -> bool:
        """Whether `apply` would go on with it in NEW, and rightly so."""
        if self.word in ("not-compared", "gone", "not-fixed"):
            return self.word == "not-compared"
        return self.new.state not in FAILURES


@dataclass
class Side:
    """One of the two trees, diagnosed."""

    given: str
    """As the user named it."""
    plan: Plan
    texts: dict[str, list[str]] = field(default_factory=dict)

    @property
    def tree(self) -> Tree:
        """Its files."""
        return self.plan.tree

    @property
    def label(self) -> str:
        """How messages call it."""
        version = self.tree.version
        return version if self.given == version else f"{version} ({self.given})"

    def lines(self, target: str) -> list[str]:
        """The statements of a target; empty where it is not defined exactly once."""
        if target not in self.texts:
            source = self.plan.survey.source(target)
            self.texts[target] = statements.of_source(source) if source else []
        return self.texts[target]

    def fingerprint(self, page: Page, target: str) -> str:
        """As the survey gives it: "" for a missing symbol, `?N`, `!reason`."""
        before = self.plan.before.get(page.name, {})
        if target in before:
            return before[target]
        edit = next(edit for edit in page.patch.edits if edit.target == target)
        return self.plan.survey.fingerprint(self.plan.survey.read(edit.path), edit)

    def fitting(self, name: str) -> dict[str, Edit]:
        """Target -> the edit that this tree needs."""
        return {edit.target: edit for edit in self.plan.edits.get(name, ())}


@dataclass(frozen=True, slots=True)
class Drift:
    """What an upgrade from one tree to the other would do."""

    old: Side
    new: Side
    pages: tuple[PageDrift, ...]

    @property
    def safe(self) -> bool:
        """Whether `apply` would go through on NEW."""
        return all(page.safe for page in self.pages)


def compare(old: tuple[str, Tree], new: tuple[str, Tree], pages: Mapping[str, Page]) -> Drift:
    """Diagnose both trees, each given with the name that the user gave it, and compare them."""
    before = _side(*old, pages, {})
    # Answers belong to the bytes of a file, so a file that did not change is asked about once.
    after = _side(*new, pages, before.plan.survey.used)
    order = planning.in_order(pages)
    found = [_page(pages[name], before, after, order) for name in sorted(pages)]
    words = list(MEANING)
    found.sort(key=lambda page: (page.safe and page.word != "lost-again", words.index(page.word)))
    return Drift(before, after, tuple(found))


def proved(drift: Drift, proofs: Mapping[str, Proved]) -> Drift:
    """The same answer with the proofs of the pages that call themselves upstreamed in NEW."""

    def one(page: PageDrift) -> PageDrift:
        if page.page.name not in proofs:
            return page
        made = proofs[page.page.name]
        word: Word = "not-fixed" if made.proof == "failed" else page.word
        return replace(page, word=word, proof=made.proof, proved=made.detail)

    pages = sorted(map(one, drift.pages), key=lambda page: page.word != "not-fixed")
    return Drift(drift.old, drift.new, tuple(pages))


def _side(given: str, tree: Tree, pages: Mapping[str, Page], answers: Mapping[str, str]) -> Side:
    loaded = receipt.load(tree)
    known = replace(loaded.receipt, survey={**answers, **loaded.receipt.survey})
    gates = {page.patch.gate: "1" for page in pages.values() if page.patch.gate}
    loaded = Loaded(known, loaded.problem, loaded.exists)
    return Side(given, planning.make(tree, loaded, pages, environment=gates))


def _page(page: Page, old: Side, new: Side, order: Sequence[str]) -> PageDrift:
    was, now = old.plan.verdicts[page.name], new.plan.verdicts[page.name]
    word = _word(page, old, new)
    targets: tuple[TargetDrift, ...] = ()
    if word not in ("not-needed", "not-compared"):
        targets = tuple(_target(t, page, old, new, order) for t in _targets(page, old, new))
    if word == "not-applicable" and any(target.renamed for target in targets):
        word = "gone"  # apply would take a new name for a feature that was removed
    if word == "same" and any(target.word not in ("same", "left") for target in targets):
        word = "changed"
    return PageDrift(page, word, was, now, targets)


def _word(page: Page, old: Side, new: Side) -> Word:
    was, now = old.plan.verdicts[page.name].state, new.plan.verdicts[page.name].state
    packages = {edit.distribution for edit in page.patch.edits} - {"megatron-core"}
    if any(not side.tree.has(package) for package in packages for side in (old, new)):
        return "not-compared"
    if was == "upstreamed" and (now in NEEDED or now == "drifted"):
        return "lost-again"
    if now in NEEDED:
        return "newly-needed" if was == "not-applicable" else "same"
    if now in FAILURES:
        return _OF_FAILURE.get(now, "changed" if was in NEEDED else "unknown")
    if was in NEEDED or was in FAILURES:
        return "upstreamed" if now == "upstreamed" else "not-applicable"
    return "not-needed"


def _targets(page: Page, old: Side, new: Side) -> list[str]:
    """The symbols worth a look: those edited in OLD or in NEW, else those that went wrong."""
    edited = [*old.fitting(page.name), *new.fitting(page.name)]
    now = new.plan.verdicts[page.name]
    if now.state in FAILURES:
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
    """Fingerprint -> a version that the page pins it for: the preferred one, else the last."""
    edits = [edit for edit in page.patch.edits if edit.target == target]
    pins = [(pin, version) for edit in edits for version, pin in edit.pins.items()]
    return dict(sorted(pins, key=lambda entry: entry[1] == preferred))


def _target(target: str, page: Page, old: Side, new: Side, order: Sequence[str]) -> TargetDrift:
    before, after = old.fingerprint(page, target), new.fingerprint(page, target)
    known = _pins(page, target, new.tree.version).get(after, "")
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
    places: list[tuple[str, str]] = []
    for path in survey.elsewhere(target):
        there = replace(edit, target=f"{path}:{symbol}")
        text = survey.fingerprint(survey.read(path), there)
        places.append((there.target, _pins(page, target).get(text, "")))
    places.sort(key=lambda place: not place[1])  # with a known text first
    if places:
        first, known = places[0]
        changes = statements.changes(old.lines(target), new.lines(first))
        moved = tuple(place for place, _ in places)
        return TargetDrift(target, "moved", known, tuple(changes), places=moved)
    lines = old.lines(target)
    like = nearest.nearest(new.tree, target, lines) if lines else []
    fixed = bool(like) and nearest.is_fixed_there(page, survey, target, like[0])
    return TargetDrift(target, "gone", nearest=tuple(like), fixed_there=fixed)


def _changed(
    target: str, page: Page, old: Side, new: Side, known: str, order: Sequence[str]
) -> TargetDrift:
    edit = old.fitting(page.name).get(target)
    others = [e for e in reversed(page.patch.edits) if e.target == target and e is not edit]
    # Edits take most of the time, so none is tried for nothing: not one that upstream's fix
    # retires, and not one on a text that the page knows where that of OLD tells as much.
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
    tried = tried and _left_by(new, target, earlier) is not None
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
    """What the first edit that fits does to the text of a tree, or why none does.

    Args:
        earlier: edits of pages that come before this one; ours may be made for what they leave.
    """
    source, before = side.plan.survey.source(target), _left_by(side, target, earlier)
    misfit = ""
    for edit in choices:
        if edit.kind != "source" or not source or before is None:
            continue
        try:
            after = _edited(source, target, [*earlier, edit])
        except CppmegaError as error:
            misfit = misfit or error.what.removeprefix(_MISFIT).rstrip(".")
        except Exception as error:  # an edit is a page's code and may raise anything
            misfit = misfit or f"the edit raises {type(error).__name__}: {error}"
        else:
            ours = statements.touched(before, after)
            return statements.carried(ours, before, side.lines(target)), ""
    return None, misfit


def _left_by(side: Side, target: str, earlier: Sequence[Edit]) -> list[str] | None:
    """The statements that the edits before ours leave; None where they do not fit themselves."""
    if not earlier:
        return side.lines(target)
    try:
        return _edited(side.plan.survey.source(target), target, earlier)
    except Exception:  # their own pages say what is wrong
        return None


def _edited(source: str, target: str, edits: Sequence[Edit]) -> list[str]:
    """The statements of a definition after some edits."""
    import libcst as cst

    from cppmega.rewriting import fingerprint

    _, node = fingerprint.parse_definition(source, target)
    for edit in edits:
        node = edit.edit(node)
    return statements.of_source(cst.Module([]).code_for_node(node))
