"""Draw the packages of cppmega and their imports into CONTRIBUTING.md; a test compares them.

usage: python scripts/architecture.py

An arrow that follows from others (a imports b, b imports c) is left out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "cppmega"
_EVERYWHERE = {"errors", "page"}
"""Leaves that nearly every package imports: their arrows would hide the others."""

Graph = dict[str, set[str]]


def rooms() -> Graph:
    """Packages and top-level modules of cppmega, and what each of them imports."""
    graph: Graph = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] == "__init__":
            continue
        found = {name.split(".")[1] for name in _imports(path) if "." in name}
        graph.setdefault(parts[0], set()).update(found - {parts[0]})
    return {room: targets & graph.keys() for room, targets in graph.items()}


def _imports(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    typing_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            if node.module == "cppmega":
                yield from (f"cppmega.{alias.name}" for alias in node.names)
            elif node.module.startswith("cppmega."):
                yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("cppmega."))


def reduced(graph: Graph) -> Graph:
    """The graph without arrows that follow from others."""

    def below(room: str) -> set[str]:
        return graph[room] | {far for near in graph[room] for far in below(near)}

    return {
        room: {to for to in targets if not any(to in below(other) for other in targets - {to})}
        for room, targets in graph.items()
    }


def arrows() -> Graph:
    """What a picture shows: each package, and the arrows from it."""
    graph = {room: targets - _EVERYWHERE for room, targets in rooms().items()}
    return reduced({room: to for room, to in graph.items() if room not in _EVERYWHERE})


def picture() -> str:
    """The packages as a Mermaid flowchart."""
    lines = ["```mermaid", "flowchart TD"]
    for room, targets in sorted(arrows().items()):
        lines += [f"  {room} --> {to}" for to in sorted(targets)]
    return "\n".join([*lines, "```", ""])


def table() -> str:
    """What each package holds, from the first line of its docstring."""
    lines = ["| package | what is in it |", "|---|---|"]
    for room in sorted(rooms()):
        init, module = PACKAGE / room / "__init__.py", PACKAGE / f"{room}.py"
        doc = ast.get_docstring(ast.parse((init if init.is_file() else module).read_text())) or ""
        lines.append(f"| `{room}` | {doc.partition(chr(10))[0]} |")
    return "\n".join([*lines, ""])


def rewritten(text: str) -> str:
    """The document with picture and table as the code has them."""
    for name, part in (("picture", picture()), ("packages", table())):
        pattern = rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- /{name} -->)"
        text, count = re.subn(pattern, lambda m, p=part: m[1] + p + m[2], text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"CONTRIBUTING.md has {count} places for {name}, not one")
    return text


if __name__ == "__main__":
    document = REPOSITORY / "CONTRIBUTING.md"
    document.write_text(rewritten(document.read_text()))
