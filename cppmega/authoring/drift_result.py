"""The effects of an upgrade on the targets of a page, on the page, and on all pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from cppmega.authoring import statements
from cppmega.authoring.similar import Match
from cppmega.authoring.statements import StatementChange
from cppmega.overlay.plan import Plan
from cppmega.overlay.verdict import Proof, Verdict
from cppmega.page import Edit, Page
from cppmega.tree.installed import Tree

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
    "unported",
]
MEANING: dict[Word, str] = {
    "lost-again": "OLD has the fix, NEW has the bug again",
    "not-fixed": "the text of NEW looks fixed, but the proof fails on it",
    "changed": "the text that the patch edits has changed",
    "moved": "the target is in another file, or has another name",
    "gone": "no definition has that name anymore",
    "unknown": "the text is known neither in OLD nor in NEW, or only NEW has the feature",
    "newly-needed": "OLD does not need the patch, NEW does, and its text is known",
    "upstreamed": "NEW has the fix; the patch retires itself",
    "not-applicable": "the feature is not in NEW",
    "same": "the text that the patch edits is unchanged",
    "not-needed": "neither tree needs the patch",
    "not-compared": "it patches a package that is not in both trees",
    "ambiguous": "the target is defined more than once",
    "foreign": "a file of NEW differs from upstream's",
    "conflict": "two pages edit one symbol and declare no order",
    "unported": "nobody has ported the patch to NEW; unsafe if OLD or a recipe needs it",
}

TargetWord = Literal["same", "changed", "moved", "gone", "added", "left", "ambiguous", "unreadable"]
"""`added`: the page edits it in NEW only; `left`: in OLD only."""


class TargetDrift(msgspec.Struct, frozen=True, rename={"word": "change"}):
    """One symbol in the two trees, as the JSON answer has it."""

    target: str
    word: TargetWord
    known: str = ""
    """The version that has NEW's text pinned; "" if there is none."""
    changes: tuple[StatementChange, ...] = ()
    fits: bool | None = None
    """Whether an edit of the page applies to NEW's unknown text; None if none was tried."""
    misfit: str = ""
    """Why it does not."""
    places: tuple[str, ...] = ()
    nearest: tuple[Match, ...] = ()


@dataclass(frozen=True, slots=True)
class PageDrift:
    """One patch in the two trees."""

    page: Page
    word: Word
    old: Verdict
    new: Verdict
    targets: tuple[TargetDrift, ...]
    proof: Proof | None = None
    """The result of the proof, for a page that NEW upstreamed; None if it did not run."""
    proved: str = ""
    """The detail of that proof."""
    recipes: tuple[str, ...] = ()
    """Recipes that need the patch, where NEW serves it no more."""

    @property
    def safe(self) -> bool:
        """Whether `apply` would succeed with the page on NEW, and rightly so."""
        if self.word in ("not-compared", "not-fixed"):
            return self.word == "not-compared"
        return not self.new.failed and not self.recipes


@dataclass
class Side:
    """One of the two trees, diagnosed."""

    requested: str
    """The name that the user gave it."""
    plan: Plan
    texts: dict[str, list[str]] = field(default_factory=dict)

    @property
    def tree(self) -> Tree:
        """The files of this side."""
        return self.plan.tree

    @property
    def label(self) -> str:
        """The name in messages."""
        version = self.tree.version
        named = version == "unknown" or self.requested == version
        return self.requested if named else f"{version} ({self.requested})"

    def lines(self, target: str) -> list[str]:
        """Return the statements of a target; none unless it is defined exactly once."""
        if target not in self.texts:
            source = self.plan.survey.source(target)
            self.texts[target] = statements.of_source(source) if source else []
        return self.texts[target]

    def fingerprint(self, page: Page, target: str) -> str:
        """Return the fingerprint from the survey: "" for a missing symbol, `?N`, `!reason`."""
        before = self.plan.before.get(page.name, {})
        if target in before:
            return before[target]
        edit = next(edit for edit in page.patch.edits if edit.target == target)
        return self.plan.survey.fingerprint(self.plan.survey.read(edit.path), edit)

    def fitting(self, name: str) -> dict[str, Edit]:
        """Return the edits that this tree needs, by target."""
        return {edit.target: edit for edit in self.plan.edits.get(name, ())}


@dataclass(frozen=True, slots=True)
class Drift:
    """The effect of an upgrade from one tree to the other."""

    old: Side
    new: Side
    pages: tuple[PageDrift, ...]

    @property
    def safe(self) -> bool:
        """Whether `apply` would succeed on NEW, and the recipes have what they need there."""
        return all(page.safe for page in self.pages)

    @property
    def unserved(self) -> list[PageDrift]:
        """Patches that serve OLD, or a recipe needs, and that have nothing to patch in NEW."""
        return [page for page in self.pages if page.recipes or page.new.served]
