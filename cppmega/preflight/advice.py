"""Which pages serve a command line, and what would make it use more of them.

The pages themselves say so: `when` by the arguments, `asked_by` by the arguments that are missing,
`gate` by a variable, and the rules by what cannot be combined.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cppmega.catalogue import gates, page_rules
from cppmega.errors import CppmegaError
from cppmega.host import command_words
from cppmega.overlay.verdict import DONE, NEEDED, Verdict
from cppmega.preflight.context import Context
from cppmega.recipe.arithmetic import parameters
from cppmega.recipe.from_arguments import from_arguments
from cppmega.recipe.memory import GIB, estimate
from cppmega.recipe.recipe import Recipe
from cppmega.recipe.validate import with_words
from cppmega.rules.rule import Run

APPLY = "python -m cppmega.apply_patches"


@dataclass(frozen=True, slots=True)
class Possibility:
    """A change to a run with which pages serve it that do not yet."""

    how: str
    """A command, or arguments to add or to leave out."""
    pages: tuple[str, ...]
    saves: float | None = None
    """GiB on the fullest GPU, by the estimate; negative: costs. None: not known."""
    other_model: bool = False
    """Whether the model would have other parameters."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What the catalogue has for one run."""

    serves: tuple[str, ...]
    """Pages that such a run reaches, in the code or once they are applied."""
    conditional: tuple[str, ...]
    """Pages of which no argument tells whether a run reaches them."""
    possible: tuple[Possibility, ...]
    irrelevant: Mapping[str, str]
    """All other pages -> why."""
    pending: bool
    """Whether any that serves has yet to be applied."""
    gib: float | None
    """The estimate of the run's fullest GPU; None: not known."""


def advise(context: Context) -> Advice:
    """Ask every page about a command line.

    Raises:
        CppmegaError: `page-failed`; what the checks of the line raise.
        NotApplicable: nothing that Megatron parses is launched.
    """
    return _Asked(context).answer()


class _Asked:
    def __init__(self, context: Context) -> None:
        self.pages, self.verdicts = context.session.pages, context.plan.verdicts
        self.args, self.world = context.megatron_args, context.launch_line.world
        self.refused: dict[str, str] = {}
        """Pages that would be used but for a rule -> the rule."""
        self.words = context.launch_line.flags
        left_out = {n for n, one in self.verdicts.items() if one.state == "off"}
        left_out -= {name for name in left_out if self.pages[name].patch.gate}
        self.usable = {n for n, one in self.verdicts.items() if one.state in NEEDED} | left_out
        self.applied = {n for n, one in self.verdicts.items() if one.state in DONE}
        self.left_out = left_out | {n for n in self.pages if self.pages[n].only_where_asked}

    def answer(self) -> Advice:
        now = self._used(self.usable, self.args)
        asked = (now & self.left_out) - self.applied
        conditional = {n for n in now - asked if self._is_conditional(self.pages[n].patch)}
        possible = [*self._by_arguments(now), *self._by_gates()]
        for how, special in ((f"{APPLY} --kind all", True), (APPLY, False)):
            names = {n for n in asked if self.pages[n].only_where_asked is special}
            possible += [Possibility(how, self._sorted(names))] if names else []
        serves = now - asked - conditional
        rest = self.pages.keys() - now - {name for each in possible for name in each.pages}
        recipe = self._recipe(self.args)
        return Advice(
            self._sorted(serves),
            self._sorted(conditional),
            tuple(possible),
            {name: self._why(self.verdicts[name]) for name in sorted(rest)},
            bool(serves - self.applied),
            estimate(recipe, attends=True).gib if recipe is not None else None,
        )

    @staticmethod
    def _is_conditional(patch: Any) -> bool:
        return patch.reached == "never" and patch.when is None

    def _sorted(self, names: set[str]) -> tuple[str, ...]:
        return tuple(sorted(names, key=lambda name: (self.pages[name].patch.purpose, name)))

    def _used(self, names: set[str], args: Namespace) -> set[str]:
        """Those of the pages that a run with these arguments reaches."""
        questions = {name: self.pages[name].patch.when for name in names}
        return {n for n, when in questions.items() if when is None or gates.wanted(n, when, args)}

    def _by_arguments(self, now: set[str]) -> Iterator[Possibility]:
        for words in dict.fromkeys(page.patch.asked_by for page in self.pages.values()):
            left_out = [word for word in words if word.startswith("--no-")]
            if not words or (left_out and not {*left_out} <= self.words):
                continue
            meant = [word.replace("--no-", "--") for word in words]
            args = Namespace(**with_words(vars(self.args), meant))
            more = self._used(self.usable - now, args)
            changed = {option.name for option in command_words.read(words)}
            how = f"without {' '.join(words)}" if left_out else f"with {' '.join(words)}"
            if more and self._may(how, args, more, more | now, self.words | changed):
                yield self._weighed(how, more, args)

    def _by_gates(self) -> Iterator[Possibility]:
        closed: dict[str, set[str]] = {}
        for name, one in self.verdicts.items():
            gate = self.pages[name].patch.gate
            if one.state == "off" and gate and not self.args.cppmega_variables.get(gate):
                closed.setdefault(gate, set()).add(name)
        for gate, names in closed.items():
            args = Namespace(**vars(self.args))
            args.cppmega_variables = {**self.args.cppmega_variables, gate: "1"}
            conditional = {n for n in names if self._is_conditional(self.pages[n].patch)}
            more = self._used(names, args) - conditional
            how = f"{gate}=1 {APPLY}"
            if more and self._may(how, args, more, more, self.words):
                yield self._weighed(how, more, args, (gate, "1"))

    def _may(
        self, how: str, args: Namespace, more: set[str], used: set[str], words: frozenset[str]
    ) -> bool:
        """Whether a run with these arguments breaks no rule that it does not break as it is."""
        pages = [self.pages[name] for name in used]
        before, after = (
            {error.what: error for error in page_rules.broken(pages, run)}
            for run in (self._run(self.args, self.words), self._run(args, words))
        )
        broken = [what for what in after if what not in before]
        self.refused |= dict.fromkeys(more if broken else (), f"{how}: {' '.join(broken)}")
        return not broken

    def _run(self, args: Namespace, words: frozenset[str]) -> Run:
        present = [self.pages[name] for name in self.usable]
        absent = [page for name, page in self.pages.items() if name not in self.usable]
        provided = page_rules.ProvidedBy(tuple(present), tuple(absent))
        return Run(args, args.cppmega_variables, words=words, pages=provided)

    def _weighed(
        self, how: str, names: set[str], args: Namespace, *gate: tuple[str, str]
    ) -> Possibility:
        """A possibility with the memory that it would save."""
        old, new = self._recipe(self.args), self._recipe(args)
        if old is None or new is None:
            return Possibility(how, self._sorted(names))
        new = new.with_(gates=gate)
        before, after = (estimate(one, attends=True) for one in (old, new))
        saves = (before.total - after.total) / GIB
        other = parameters(old).total != parameters(new).total
        return Possibility(how, self._sorted(names), saves, other)

    def _recipe(self, args: Namespace) -> Recipe | None:
        try:
            return from_arguments(Run(args, args.cppmega_variables), self.world)
        except CppmegaError:
            return None  # no estimate; whether the line is sound is the preflight's question

    def _why(self, verdict: Verdict) -> str:
        if verdict.name in self.refused:
            return self.refused[verdict.name]
        if verdict.name in self.usable or self.pages[verdict.name].patch.gate:
            return "these arguments do not use it"
        return f"{verdict.state}: {verdict.detail}" if verdict.detail else verdict.state
