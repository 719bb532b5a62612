"""Every error that the code can raise, with its causes and remedies, read from code and rules.

The sentences of an error are written only where it is raised: the index finds each place that
builds a `CppmegaError` and takes the sentences from there, and those of rules from the rules. What
is known only at run time is a placeholder.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

from cppmega.catalogue import loader as catalogue
from cppmega.cli.error_sentences import (
    Module,
    Scope,
    defaults,
    parameters,
    sentences,
    text_functions,
)
from cppmega.errors import CppmegaError, did_you_mean
from cppmega.host.paths import PACKAGE, shipped
from cppmega.rules import RULES, recipes
from cppmega.rules.rule import Rule

_ROOT = "CppmegaError"
_PARTS = ("name", "what", "why", "next")
_FIELDS = re.compile(r"<[^<>]+>")
_NAMES = re.compile(r"\{(\w+)[^}]*\}")
"""What a rule's sentence names: an option, or what its question has found."""


@dataclass(frozen=True, order=True)
class Cause:
    """One way in which an error arises."""

    what: str
    why: str
    next: tuple[str, ...]
    """The remedies; several are alternatives."""
    module: str
    title: str
    """The first line of the module's docstring."""

    def render(self) -> str:
        """The three parts as lines, like those of the error itself."""
        cures = "\n        or: ".join(self.next)
        return f"  what: {self.what}\n  why:  {self.why}\n  next: {cures}"


Index = dict[str, list[Cause]]
"""Name of an error -> its causes; a name with a placeholder represents several."""


def index(catalogues: Iterable[Path] = ()) -> Index:
    """The errors of the package, of the shipped pages and of further catalogues, by name."""
    folders = tuple(catalogues)
    found: dict[str, dict[str, Cause]] = {}
    # What is read from text stays; which pages there are may change within a process.
    for name, cause in (*_constructed(folders), *rules(folders)):
        alike = _FIELDS.sub("<>", cause.render())  # two callers of a helper word it alike
        found.setdefault(name, {}).setdefault(alike, cause)
    return {name: sorted(found[name].values()) for name in sorted(found)}


@cache
def _constructed(catalogues: tuple[Path, ...]) -> tuple[tuple[str, Cause], ...]:
    """The errors that are built in the text of a module."""
    modules = [*_shipped_modules(), *(one for folder in catalogues for one in _pages(folder))]
    texts = text_functions(modules)
    for module in modules:
        module.texts.update(texts)
    return tuple(_Constructions(modules).causes())


def of_rule(rule: Rule, name: str = "arguments-invalid") -> tuple[str, Cause]:
    """The name of a rule's error, and the rule as its cause."""
    what = rule.what or f"{rule.option} cannot be combined with {rule.concerns}."
    happened, matters, cure = (_NAMES.sub(r"<\1>", text) for text in (what, rule.why, rule.cure))
    title = f"A rule of {rule.concerns}."
    name = "unsupported" if rule.option else rule.name or name
    return name, Cause(happened, matters, (cure,), "cppmega.rules", title)


def rules(catalogues: Iterable[Path] = ()) -> Iterator[tuple[str, Cause]]:
    """Every rule with sentences: of every run, of recipes, and of pages."""
    for rule in recipes.RULES:
        yield of_rule(rule, "recipe-invalid")
    try:
        pages = catalogue.load([*catalogues]).values()
    except CppmegaError:  # of a page that is being written
        pages = catalogue.load().values()
    for rule in (*RULES, *(rule for page in pages for rule in page.patch.rules)):
        if rule.what or rule.option:
            yield of_rule(rule)


def look_up(name: str, errors: Index) -> list[Cause]:
    """The causes of an error.

    Raises:
        CppmegaError: `unknown-error`.
    """
    for known, causes in errors.items():
        if name == known or _pattern(known).fullmatch(name):
            return causes
    raise CppmegaError(
        "unknown-error",
        f"No error is called {name}." + did_you_mean(name, errors, 3),
        "The explanation of another one would mislead.",
        "cppmega explain NAME, with the word after `error:`",
    )


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile("[a-z0-9-]+".join(map(re.escape, _FIELDS.split(name))))


@cache
def _shipped_modules() -> tuple[Module, ...]:
    pages = shipped("upstream_patches")
    own = [path for path in sorted(PACKAGE.rglob("*.py")) if not path.is_relative_to(pages)]
    parts = (("cppmega", *path.relative_to(PACKAGE).with_suffix("").parts) for path in own)
    return (*map(_parsed, own, parts), *_pages(pages))


def _pages(folder: Path) -> Iterator[Module]:
    for path in sorted(folder.rglob("*.py")):
        yield _parsed(path, (folder.name, *path.relative_to(folder).with_suffix("").parts))


def _parsed(path: Path, parts: tuple[str, ...]) -> Module:
    kept = parts[:-1] if parts[-1] == "__init__" else parts
    return Module(".".join(kept), ast.parse(path.read_text()))


class _Constructions:
    """The places of all modules that build an error, directly or through a helper."""

    def __init__(self, modules: list[Module]) -> None:
        self.modules = modules
        self.classes = _subclasses(modules)
        self.calls: dict[str, list[tuple[Module, ast.Call]]] = {}
        """Name of what is called -> the calls."""
        for module in modules:
            for node in module.nodes:
                if isinstance(node, ast.Call):
                    self.calls.setdefault(_called(node), []).append((module, node))

    def causes(self) -> Iterator[tuple[str, Cause]]:
        """(name, cause) of every construction, except those that pass another error on."""
        for name in self.classes:
            for module, call in self.calls.get(name, ()):
                if len(call.args) == len(_PARTS):
                    for scope in self._scopes(module, call):
                        yield from _read(call, scope)
        for module, definition in _definitions(self.modules):
            yield from _own_constructor(module, definition, self.classes)

    def _scopes(self, module: Module, call: ast.Call) -> Iterator[Scope]:
        """The scopes of a construction: one, or one for each call of the helper it is in."""
        function = module.function_of(call)
        scope = Scope(module, call)
        wanted = {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}
        if function is None or not wanted & set(parameters(function)):
            yield scope
            return
        callers = list(self._callers(module, function.name))
        for there, calling in callers:
            outer = Scope(there, calling)
            given = {name: (node, Scope(module, function)) for name, node in defaults(function)}
            for name, node in _arguments(parameters(function), calling):
                given[name] = (node, outer)
            yield Scope(module, call, given)
        if not callers:
            yield scope

    def _callers(self, module: Module, function: str) -> Iterator[tuple[Module, ast.Call]]:
        for there, call in self.calls.get(function, ()):
            is_method = isinstance(call.func, ast.Attribute) and there is module
            if is_method or there.full_name(call.func) == f"{module.name}.{function}":
                yield there, call


def _subclasses(modules: Iterable[Module]) -> set[str]:
    bases = {
        definition.name: {_last(base) for base in definition.bases}
        for _, definition in _definitions(modules)
    }
    found = {_ROOT}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return found


def _definitions(modules: Iterable[Module]) -> Iterator[tuple[Module, ast.ClassDef]]:
    for module in modules:
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                yield module, node


def _own_constructor(
    module: Module, definition: ast.ClassDef, classes: set[str]
) -> Iterator[tuple[str, Cause]]:
    """The error of a subclass with its own sentences: `super().__init__(name, what, why, next)`."""
    if definition.name not in classes - {_ROOT}:
        return
    for node in ast.walk(definition):
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) == "super().__init__"
            and len(node.args) == len(_PARTS)
        ):
            yield from _read(node, Scope(module, node))


def _read(call: ast.Call, scope: Scope) -> Iterator[tuple[str, Cause]]:
    name, what, why, cure = call.args
    module = scope.module
    parts = product(*(sentences(part, scope) for part in (name, what, why)))
    for text, happened, matters in parts:
        if not _FIELDS.fullmatch(text):  # it passes on the name of another error
            cures = tuple(sentences(cure, scope))
            yield text, Cause(happened, matters, cures, module.name, module.title)


def _arguments(names: list[str], call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    own = isinstance(call.func, ast.Attribute) and names[:1] == ["self"]
    yield from zip(names[1:] if own else names, call.args, strict=False)
    for keyword in call.keywords:
        if keyword.arg is not None:
            yield keyword.arg, keyword.value


def _called(call: ast.Call) -> str:
    return _last(call.func)


def _last(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""
