"""Every error that the code can raise, with its causes and remedies, read from code and rules.

The sentences of an error are written only where it is raised: the index follows the statements of a
module to each place that builds an error of four parts, and takes the sentences of rules from the
rules. What is known only at run time is a placeholder.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import islice, product
from pathlib import Path

from cppmega.catalogue import loader as catalogue
from cppmega.errors import CppmegaError, did_you_mean
from cppmega.host.paths import PACKAGE, shipped
from cppmega.rules import RULES, recipes, starts
from cppmega.rules.rule import Rule

_ALTERNATIVES = 8
"""Beyond this number, alternatives no longer describe anything."""
_TEXTS = (ast.JoinedStr, ast.IfExp, ast.BinOp, ast.BoolOp, ast.Name)
_GENERIC = {"name", "word", "path", "total", "first"}
"""Words that mean nothing without the one before them."""
_FUNCTIONS = {
    *("str", "len", "sorted", "list", "set", "self", "type", "__name__", "min", "max", "gib"),
    *("replace", "strip", "rstrip", "lower", "resolve", "absolute", "read", "read_text", "counted"),
    *("fsdecode", "join", "describe", "or", "and", "if", "else", "not", "in", "is", "None"),
}
"""Words whose result is named after another one."""
_FIELDS = re.compile(r"<[^<>]+>")
_KEBAB = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
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
    by_name: dict[str, dict[str, Cause]] = {}
    # What is read from text stays; which pages there are may change within a process.
    for name, cause in (*_raised(shipped("upstream_patches"), *folders), *rules(folders)):
        alike = _FIELDS.sub("<>", cause.render())  # two callers of a helper word it alike
        by_name.setdefault(name, {}).setdefault(alike, cause)
    return {name: sorted(by_name[name].values()) for name in sorted(by_name)}


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
    for rule in (*RULES, *starts.RULES, *(rule for page in pages for rule in page.patch.rules)):
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
def _raised(*catalogues: Path) -> tuple[tuple[str, Cause], ...]:
    """The errors that are built in the text of the package, and of catalogues."""
    pages = [path for folder in catalogues for path in sorted(folder.rglob("*.py"))]
    own = (path for path in sorted(PACKAGE.rglob("*.py")) if path not in pages)
    return tuple(cause for path in (*own, *pages) for cause in _of_file(path))


def _of_file(path: Path) -> Iterator[tuple[str, Cause]]:
    text = path.read_text()
    if "Error(" not in text and "__init__(" not in text:
        return
    tree = ast.parse(text)
    reader = _Reader()
    reader.read(tree.body, {})
    title = (ast.get_docstring(tree) or "").partition("\n")[0]
    within = path.relative_to(PACKAGE.parent if path.is_relative_to(PACKAGE) else path.parent)
    module = ".".join(within.with_suffix("").parts).removesuffix(".__init__")
    for names, happened, matters, cures in reader.errors():
        for name, what, why in product(names, happened, matters):
            if _KEBAB.fullmatch(_FIELDS.sub("x", name)) and not _FIELDS.fullmatch(name):
                yield name, Cause(what, why, tuple(cures), module, title)


@dataclass(frozen=True, eq=False)
class _Value:
    """An expression, and what the names in it can stand for."""

    node: ast.expr
    names: _Names


_Names = dict[str, list[_Value]]


@dataclass(eq=False)
class _Reader:
    """Follows the statements of a module in their order, with the texts that names have."""

    function: ast.FunctionDef | ast.AsyncFunctionDef | None = None
    built: list[tuple[ast.Call, _Names, str]] = field(default_factory=list)
    """Errors, the names that their words use, and the helper that builds them for others."""
    calls: dict[str, list[tuple[ast.Call, _Names]]] = field(default_factory=dict)
    helpers: dict[str, ast.arguments] = field(default_factory=dict)
    errors_here: set[str] = field(default_factory=set)

    def _is_error(self, called: ast.expr) -> bool:
        name = ast.unparse(called).rpartition(".")[2]
        return name.endswith("Error") or name == "__init__" or name in self.errors_here

    def read(self, body: Iterable[ast.stmt], names: _Names) -> None:
        """Read a block; the names that it assigns are added to those given."""
        later = []
        for statement in body:
            blocks = [*_blocks(statement)]
            self._expressions(statement, names)
            match statement:
                case ast.ClassDef(name=name, bases=bases) if any(map(self._is_error, bases)):
                    self.errors_here.add(name)
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    later.append(statement)  # it sees the module's names, wherever they are
                    continue
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    names[name] = [_Value(value, dict(names))]
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    names[name] = [_Value(value, dict(names))]
            before = dict(names)
            for block in blocks:
                inside = dict(before)
                self.read(block, inside)
                for name in inside.keys() - {n for n in before if before[n] is inside.get(n)}:
                    names[name] = [*names.get(name, ()), *inside[name]]
        for function in later:
            self.helpers[function.name], outer = function.args, self.function
            taken = {one.arg for one in (*function.args.args, *function.args.kwonlyargs)}
            self.function = function
            self.read(function.body, {n: v for n, v in names.items() if n not in taken})
            self.function = outer

    def _expressions(self, statement: ast.stmt, names: _Names) -> None:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return
        waiting: list[ast.AST] = [statement]
        while waiting:
            node = waiting.pop()
            children = [*ast.iter_child_nodes(node)]
            waiting += [
                one for one in children if not isinstance(one, ast.stmt | ast.ExceptHandler)
            ]
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func).rpartition(".")[2]
                self.calls.setdefault(called, []).append((node, dict(names)))
                if len(node.args) == 4 and self._is_error(node.func):
                    within = self.function.name if self.function is not None else ""
                    if isinstance(statement, ast.Raise) and not within.startswith("_"):
                        within = ""  # its arguments are a caller's values, not words of the error
                    self.built.append((node, dict(names), within))

    def errors(self) -> Iterator[list[list[str]]]:
        """The texts of the four parts of each error, for each call of the helper that builds it."""
        for call, names, function in self.built:
            used = {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}
            given = self.helpers.get(function)
            parameters = [one.arg for one in (*given.args, *given.kwonlyargs)] if given else []
            inner = used & {*parameters} - {"self"} and function != "__init__"
            callers = self.calls.get(function, []) if inner else []
            for bound in [_bound(given, *one) for one in callers if given] or [{}]:
                yield [_spelled(_texts(part, {**names, **bound})) for part in call.args]


def _spelled(texts: list[str]) -> list[str]:
    """The texts without those that only pass on another error's, where there are others."""
    return [text for text in texts if not _FIELDS.fullmatch(text)] or texts


def _bound(parameters: ast.arguments, call: ast.Call, names: _Names) -> _Names:
    """What a call gives to the parameters of a helper."""
    words = [one.arg for one in parameters.args if one.arg != "self"]
    defaults = zip(reversed(words), reversed(parameters.defaults), strict=False)
    given = {
        **dict(defaults),
        **{
            a.arg: d
            for a, d in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True)
            if d
        },
        **dict(zip(words, call.args, strict=False)),
        **{one.arg: one.value for one in call.keywords if one.arg},
    }
    return {name: [_Value(node, names)] for name, node in given.items()}


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for _, value in ast.iter_fields(node):
        parts = value if isinstance(value, list) else ()
        if parts and all(isinstance(one, ast.stmt) for one in parts):
            yield parts
        for one in parts:
            if isinstance(one, ast.ExceptHandler | ast.match_case):
                yield one.body


def _texts(node: ast.expr, names: _Names) -> list[str]:
    """The texts that an expression can have, with placeholders."""
    match node:
        case ast.Constant():
            return [str(node.value)]
        case ast.FormattedValue():
            return _texts(node.value, names)
        case ast.JoinedStr(values=parts):
            return _joined(parts, names)
        case ast.BinOp(op=ast.Add(), left=left, right=right) if _is_text(node):
            return _joined([left, right], names)
        case ast.BinOp(op=ast.Div(), left=left, right=ast.Constant(value=str(last))):
            return [f"{text}/{last}" for text in _texts(left, names)]
        case ast.BinOp(op=ast.Mult(), left=ast.Constant(value=str()) as text):
            return _texts(text, names)
        case ast.IfExp(body=one, orelse=other):
            return _distinct([one, other], names)
        case ast.BoolOp(op=ast.Or(), values=values):
            return _distinct(values, names)
        case ast.Call(func=ast.Name(id="did_you_mean" | "suggestion")):
            return [""]
        case ast.Name(id=name) if name in names:
            known = [value for value in names[name] if _is_text(value.node)]
            texts = [text for value in known for text in _texts(value.node, value.names)]
            return [*dict.fromkeys(texts)] or [_placeholder(node)]
    return [_placeholder(node)]


def _distinct(nodes: list[ast.expr], names: _Names) -> list[str]:
    spelled = [one for one in nodes if getattr(one, "value", "") is not None]
    texts = dict.fromkeys(text for node in spelled for text in _texts(node, names))
    return [text for text in texts if text] or [""]


def _joined(parts: list[ast.expr], names: _Names) -> list[str]:
    choices = product(*(_texts(part, names) for part in parts))
    return ["".join(choice) for choice in islice(choices, _ALTERNATIVES)]


def _is_text(node: ast.expr) -> bool:
    """Whether an expression consists of words; other values keep the name of their variable."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str | int) and node.value not in ("", True, False)
    if isinstance(node, ast.BinOp):
        return any(map(_is_text, (node.left, node.right))) and "'" in ast.unparse(node)
    return isinstance(node, _TEXTS)


def _placeholder(node: ast.expr) -> str:
    """The word under which a reader knows a value: the last name in it that means something."""
    for part in ast.walk(node):
        if isinstance(part, ast.comprehension):
            return _placeholder(part.iter)
    if isinstance(node, ast.Subscript) and "environ" in ast.unparse(node.value):
        return "<value>"
    words = re.findall(r"[A-Za-z_]\w*", re.sub(r"f?'[^']*'", "", ast.unparse(node)))
    words = [word for word in words if word not in _FUNCTIONS] or ["value"]
    meaning = [word for word in words if word not in _GENERIC]
    return f"<{(meaning[-1:] or words)[0].strip('_').lower().replace('_', ' ')}>"
