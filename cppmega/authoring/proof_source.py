"""The proof of a page as a test module of its own, which imports nothing of this package.

What `verify` uses of its page, of modules that pages share and of `cppmega.proof` is copied before
it. A proof that needs more of this package, such as a kernel, cannot be handed to upstream.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cppmega.errors import CppmegaError
from cppmega.page import Page
from cppmega.rewriting.function_source import without_linter_comments

_ROOT = Path(__file__).parents[2]
_COPIED = "cppmega.proof."
"""Modules of this package that may be copied."""
_PLAIN = {"cppmega.proof.assigned.replace": "setattr"}
"""Functions of this package with a builtin that does the same where no guard watches."""
_LATER = "from __future__ import annotations"
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_Import = ast.Import | ast.ImportFrom


def test_module(page: Page) -> str:
    """Return the text of a module with one test, `test_NAME`, unformatted.

    Raises:
        CppmegaError: `export-refused`.
    """
    home = _Module(page.name, Path(page.path))
    copied = _Copied(page)
    verify = home.defined["verify"]
    assert isinstance(verify, ast.FunctionDef)
    leading = []
    for statement in verify.body:
        if not isinstance(statement, _Import) or home.own(statement):
            break
        leading.append(statement)
    body = copied.text_of(home, verify, drop=leading)
    body = re.sub(r"def verify(.*:)\n\s*\n", rf"def test_{page.name}\1\n", body, count=1)
    imports = [*copied.imports, *map(ast.unparse, leading)]
    if any(_LATER.encode() in module.text for module in (home, *copied.modules.values())):
        imports.insert(0, _LATER)
    title = page.title
    parts = [f'"""{title}"""', "\n".join(dict.fromkeys(imports)), *copied.blocks, body]
    return without_linter_comments("\n\n\n".join(filter(None, parts))) + "\n"


@dataclass
class _Module:
    """A page, or a module that its proof imports."""

    name: str
    path: Path
    text: bytes = b""
    defined: dict[str, ast.stmt] = field(default_factory=dict)
    """Name -> the top-level statement that binds it."""

    def __post_init__(self) -> None:
        self.text = self.path.read_bytes()
        pending = ast.parse(self.text).body[::-1]
        while pending:
            statement = pending.pop()
            if isinstance(statement, ast.If | ast.Try):
                pending += statement.body
            for name in _bound(statement):
                self.defined.setdefault(name, statement)

    def own(self, statement: _Import) -> bool:
        """Whether an import is one of this package, or of the catalogue."""
        if isinstance(statement, ast.Import):
            return any(alias.name.partition(".")[0] == "cppmega" for alias in statement.names)
        return statement.level > 0 or (statement.module or "").partition(".")[0] == "cppmega"

    def imported(self, statement: ast.stmt, name: str) -> tuple[str, Path]:
        """The dotted name and the path, without suffix, to which an import of ours binds a name."""
        assert isinstance(statement, ast.ImportFrom)
        alias = next(a for a in statement.names if (a.asname or a.name) == name)
        parts = [*(statement.module or "").split("."), alias.name]
        folder = self.path.parents[statement.level - 1] if statement.level else _ROOT
        return ".".join(filter(None, parts)), folder.joinpath(*filter(None, parts))


@dataclass
class _Copied:
    """What has been copied so far, in the order in which it must be defined."""

    page: Page
    imports: list[str] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)
    modules: dict[Path, _Module] = field(default_factory=dict)
    _names: dict[str, ast.stmt] = field(default_factory=dict)
    """Name in the test -> what it names."""
    _done: list[ast.stmt] = field(default_factory=list)

    def text_of(self, module: _Module, statement: ast.stmt, drop: Sequence[ast.stmt]) -> str:
        """The text of a statement, with what it refers to copied and renamed.

        Args:
            drop: statements in it to leave out.
        """
        ours = [n for n in ast.walk(statement) if isinstance(n, _Import) and module.own(n)]
        local = {name: node for node in ours for name in _bound(node)}
        swaps: dict[tuple[int, int], tuple[int, bytes]] = {}
        starts = [0]
        for line in module.text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))

        def replace(node: ast.expr, new: str) -> None:
            first = starts[node.lineno - 1] + node.col_offset
            last = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            swaps[first, 0] = last, new.encode()

        holders = {id(n.value): n for n in ast.walk(statement) if isinstance(n, ast.Attribute)}
        for node in _global_names(statement, frozenset(), frozenset(local)):
            binding = local.get(node.id) or module.defined.get(node.id)
            if binding is None or binding is statement:
                continue
            if not isinstance(binding, _Import):
                replace(node, self._copy(module, node.id))
            elif not module.own(binding):
                alias = next(
                    a
                    for a in binding.names
                    if node.id in (a.asname, a.name.partition(".")[0], a.name)
                )
                one: ast.stmt = ast.Import([alias])
                if isinstance(binding, ast.ImportFrom):
                    one = ast.ImportFrom(binding.module, [alias], 0)
                self.imports.append(ast.unparse(one))
            else:
                holder = holders.get(id(node))
                new = self._resolved(module.imported(binding, node.id), holder)
                replace(holder if holder is not None and new[1] else node, new[0])
        for gone in (*ours, *drop):
            first, last = starts[gone.lineno - 1], starts[gone.end_lineno or 0]
            swaps[first, 1] = last, b""
        decorated = getattr(statement, "decorator_list", [])
        at = starts[min(n.lineno for n in (statement, *decorated)) - 1]
        end, pieces = starts[statement.end_lineno or 0], []
        for (first, _), (last, new_text) in sorted(swaps.items()):
            if first >= at:
                pieces += [module.text[at:first], new_text]
                at = last
        return b"".join([*pieces, module.text[at:end]]).decode().rstrip()

    def _resolved(
        self, imported: tuple[str, Path], holder: ast.Attribute | None
    ) -> tuple[str, bool]:
        """The name in the test of what is imported, and whether the holder is part of it."""
        dotted, path = imported
        of_module = path.with_suffix(".py").is_file()
        if of_module and holder is not None:
            dotted, name, file = f"{dotted}.{holder.attr}", holder.attr, path.with_suffix(".py")
        else:
            name, file = path.name, path.parent.with_suffix(".py")
        if dotted in _PLAIN:
            return _PLAIN[dotted], of_module
        beyond = dotted.startswith("cppmega.") and not dotted.startswith(_COPIED)
        if beyond or not file.is_file():
            raise refused(self.page, f"its proof calls {dotted}")
        module = self.modules.setdefault(file, _Module(dotted, file))
        return self._copy(module, name), of_module

    def _copy(self, module: _Module, name: str) -> str:
        """Copy a definition, and return its name in the test."""
        statement = module.defined[name]
        new = name
        if isinstance(statement, _Function) and not name.startswith("_"):
            new = f"_{name}"  # a test often has a variable of that name
        if self._names.setdefault(new, statement) is not statement:
            raise refused(self.page, f"its proof uses two definitions that are called {name}")
        if statement not in self._done:
            self._done.append(statement)
            text = self.text_of(module, statement, [])
            self.blocks.append(text.replace(f"def {name}(", f"def {new}(", 1))
        return new


def refused(page: Page, why: str) -> CppmegaError:
    """The error for a page that cannot be handed to upstream."""
    return CppmegaError(
        "export-refused",
        f"{page.name} cannot be exported: {why}.",
        "Upstream's code and tests import nothing of cppmega.",
        f"cppmega explain {page.name}",
    )


def _bound(statement: ast.AST) -> Iterator[str]:
    """Yield the names that a statement binds in its own scope."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, _Import):
        for alias in statement.names:
            yield alias.asname or alias.name.partition(".")[0]
    elif not isinstance(statement, ast.Lambda):
        if isinstance(statement, ast.Name) and isinstance(statement.ctx, ast.Store):
            yield statement.id
        if isinstance(statement, ast.ExceptHandler) and statement.name:
            yield statement.name
        for child in ast.iter_child_nodes(statement):
            yield from _bound(child)


def _global_names(node: ast.AST, bound: frozenset[str], free: frozenset[str]) -> Iterator[ast.Name]:
    """Yield the names that a node looks up outside of its own scopes.

    Args:
        bound: the names of the scopes around it.
        free: names that count as global wherever they are bound.
    """
    if isinstance(node, _Function):
        given = node.args
        every = (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg)
        body = node.body if isinstance(node.body, list) else [node.body]
        inner = {argument.arg for argument in every if argument is not None}
        inner |= {name for statement in body for name in _bound(statement)}
        rest = [child for child in ast.iter_child_nodes(node) if child not in body]
        for child in rest:
            yield from _global_names(child, bound, free)
        for child in body:
            yield from _global_names(child, bound | (inner - free), free)
        return
    if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
        bound = bound | {name for part in node.generators for name in _bound(part.target)}
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in bound:
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _global_names(child, bound, free)
