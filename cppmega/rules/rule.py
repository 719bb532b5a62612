"""A rule of what a run may be, as data, and the run that it is asked about."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from cppmega.errors import CppmegaError
from cppmega.sizes.megatron_args import destination, synonyms


class Run:
    """What is known of a run before its first step. An option that it lacks reads as None."""

    def __init__(
        self,
        options: Any,
        variables: Mapping[str, str] = os.environ,
        *,
        saved: Mapping[str, tuple[int, ...]] | None = None,
        recipe: Any = None,
        words: Collection[str] | None = None,
        pages: Any = None,
        trainer: Any = None,
    ) -> None:
        """Collect what is known.

        Args:
            options: Megatron's parsed arguments, or a model's configuration.
            variables: the `CPPMEGA_*` variables of the ranks.
            saved: names and shapes of the tensors from which the run resumes.
            recipe: the recipe that the arguments come from.
            words: the options on the command line, such as `--bf16`.
            pages: what the pages of the tree provide; see `page_rules.ProvidedBy`.
            trainer: the trainer's options of this start.
        """
        self._options = options
        self.cppmega_variables = variables
        self.saved = saved or {}
        self.recipe, self.words, self.pages, self.trainer = recipe, words, pages, trainer

    def __getattr__(self, name: str) -> Any:
        names = (one for one in (name, *synonyms(name)) if hasattr(self._options, one))
        return getattr(self._options, next(names, name), None)

    def __contains__(self, name: str) -> bool:
        """Whether there is such an option, which the installed release may lack."""
        return hasattr(self._options, name)


class UnsupportedError(CppmegaError):
    """Two things were asked for that do not work together.

    Args:
        part: the part of the run that does not support the other.
        option: what it does not support, by the name of the argument where there is one.
    """

    part: str
    option: str

    def __init__(self, part: str, option: str = "", why: str = "", next: str = "") -> None:  # noqa: A002
        handled = sys.exception()
        # Megatron's `build_module` raises it again as its type, with only the message.
        if not option and isinstance(handled, UnsupportedError):
            part, option, why, next = handled.part, handled.option, handled.why, handled.next  # noqa: A001
        what = f"{option[:1].upper()}{option[1:]} cannot be combined with {part}."
        super().__init__("unsupported", what, why, next)
        self.part, self.option = part, option

    def __reduce__(self) -> tuple[type[CppmegaError], tuple[str, str, str, str]]:
        return type(self), (self.part, self.option, self.why, self.next)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a run, or something that it asks for: an argument, or a value of it."""

    name: str
    used: Callable[[Any], object]
    """Called with a run: whether it has the part; a text is put in place of `{}` in the name."""
    instead: str = ""
    """How to run without it, as the end of a sentence; empty: leave it out."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: when it is broken, and the sentences of the error.

    The sentences may name options of the run in braces, and what `when` returns.
    """

    when: Callable[[Any], object]
    """Called with the run: false where the rule holds. True, or the names and values for the
    sentences, or several of those, one for each error. A question about a text that cannot be read
    may raise its error."""
    what: str = ""
    why: str = ""
    cure: str = ""
    name: str = ""
    """Of the error; empty: as whoever asks calls an invalid value."""
    concerns: str = ""
    """The part of the run that it is about."""
    option: str = ""
    """What `concerns` does not support; such a rule has no `what` and raises `unsupported`."""

    def error(
        self,
        case: Mapping[str, Any],
        run: Any = None,
        name: str = "arguments-invalid",
        about: str = "",
    ) -> CppmegaError:
        """The error of one case in which the rule is broken, by the names and values of its answer.

        Args:
            case: the names and values.
            run: of whose options the sentences may name others.
            name: of the error, if the rule gives none.
            about: text before what happened, such as the name of the recipe.
        """
        names = _Names(run, case)
        why, cure = self.why.format_map(names), self.cure.format_map(names)
        if self.option:
            return UnsupportedError(self.concerns, self.option.format_map(names), why, cure)
        return CppmegaError(self.name or name, about + self.what.format_map(names), why, cure)


class _Names(dict[str, Any]):
    """The names in a rule's sentences: what its question answers, then the options of the run."""

    def __init__(self, run: Any, case: Mapping[str, Any]) -> None:
        super().__init__(case)
        self._run = run

    def __missing__(self, name: str) -> Any:
        return getattr(self._run, name)


Row = tuple[Callable[[Any], object], str, *tuple[str, ...]]
"""Of a rule: when it is broken and why that matters, then its cure and its name, if it has them."""
Table = Mapping[Part | str, Mapping[str, Row]]
"""Rules by the part that they are about, and by the sentence that says what is broken."""


def stated(table: Table, cure: str = "") -> tuple[Rule, ...]:
    """The rules of a table.

    Args:
        table: a rule is asked about the runs that have its part.
        cure: of rules that state none.
    """
    rules = []
    for part, rows in table.items():
        whose = Part(part, lambda run: True) if isinstance(part, str) else part
        for what, (when, why, *rest) in rows.items():
            own_cure, name, *_ = *rest, "", ""
            broken = _both(whose.used, when)
            rules.append(Rule(broken, what, why, own_cure or cure, name, whose.name))
    return tuple(rules)


def unsupported(part: Part, options: Mapping[Part | str, str]) -> tuple[Rule, ...]:
    """The rules that a part does not support these options, each for its reason.

    An option given by name is an argument of Megatron, which is asked for unless it is false.
    """
    rules = []
    for option, why in options.items():
        asked = Part(option, attrgetter(destination(option))) if isinstance(option, str) else option
        name = asked.name.replace("{}", "{how}")
        cures = asked.instead or f"leave out {name}", part.instead or "leave one of the two out"
        when = _both(part.used, asked.used)
        rules.append(Rule(when, "", why, ", or ".join(cures), concerns=part.name, option=name))
    return tuple(rules)


def _both(one: Callable[[Any], object], other: Callable[[Any], object]) -> Callable[[Any], object]:
    return lambda run: one(run) and other(run)


def errors(
    rules: Iterable[Rule], run: Any, name: str = "arguments-invalid", about: str = ""
) -> Iterator[CppmegaError]:
    """The errors of all rules that a run breaks, in their order; see `Rule.error`."""
    for rule in rules:
        try:
            answer = rule.when(run)
            for case in answer if isinstance(answer, Iterator) else [answer] if answer else []:
                names = case if isinstance(case, Mapping) else {"how": case}
                yield rule.error(names, run, name, about)
        except CppmegaError as error:
            yield error


def check(
    rules: Iterable[Rule], run: Any, name: str = "arguments-invalid", about: str = ""
) -> None:
    """Raise the first error of a run that breaks a rule; see `Rule.error`."""
    for error in errors(rules, run, name, about):
        raise error
