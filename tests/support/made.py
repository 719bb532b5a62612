"""Small trees and pages, so that a test of the engine needs no Megatron and takes milliseconds."""

from __future__ import annotations

import base64
import hashlib
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cppmega.rewriting import fingerprint, source

THING = """\
import os


def double(x):
    # upstream forgot to double
    return x


def half(x):
    return x / 2
"""

_PAGE = '''\
"""Page {name} of a test.

What: {what}
Why: a test needs it
Upstream: Not sent: a test
Remove: never
Numerics: {numerics}
"""

from cppmega.edits import *  # noqa: F403
from cppmega.page import Edit, Patch, left_alone

{code}

PATCH = Patch(edits=({edits},), {header})


def fixed_upstream(source):
{fixed}


def verify():
{verify}
'''


def pin(data: bytes, symbol: str) -> str:
    """Fingerprint of a symbol in the bytes of a file."""
    text = source.decode(data, "the file")
    tree = source.parse(text, "the file")
    (node,) = source.find(tree, symbol)
    where = source.span(tree, text, node)
    return fingerprint.of_source("".join(text.lines[where.start : where.end]))


def edit_text(
    target: str,
    edit: str,
    data: bytes,
    pins: Mapping[str, str] | None = None,
    **more: Any,
) -> str:
    """Source of an `Edit(...)`; pinned to the symbol in the given bytes unless pins are given."""
    if pins is None:
        pins = {"1.0": pin(data, target.partition(":")[2])}
    rest = "".join(f", {key}={value}" for key, value in more.items())
    return f"Edit(target={target!r}, pins={dict(pins)!r}, edit={edit}{rest})"


def write(root: Path, files: Mapping[str, bytes]) -> None:
    """Files below a folder."""
    for path, data in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)


def dist_info(root: Path, version: str = "1.0", name: str = "megatron_core") -> Path:
    """The dist-info folder of a wheel that installed every file that lies below ROOT now."""
    folder = root / f"{name}-{version}.dist-info"
    folder.mkdir()
    package = {"megatron_core": "megatron"}.get(name, name)
    rows = []
    for path in sorted((root / package).rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append(f"{path.relative_to(root).as_posix()},sha256={digest},{len(data)}")
    rows.append(f"{folder.name}/RECORD,,")
    (folder / "RECORD").write_text("\n".join(rows) + "\n")
    return folder


def snapshot(root: Path) -> dict[str, bytes]:
    """Every file below ROOT except bytecode and our own lock."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and path.name != "lock"
    }


def leftovers(root: Path) -> list[str]:
    """What only a running transaction may leave behind."""
    names = [path.relative_to(root).as_posix() for path in root.rglob("*")]
    return [n for n in names if n.endswith((".cppmega-new", "/journal.json", "/unfinished"))]


def tree(root: Path, files: Mapping[str, str] | None = None, version: str = "0.19.2") -> Path:
    """ROOT of a small megatron-core with a RECORD that vouches for its files."""
    files = {"megatron/core/__init__.py": "", "megatron/core/thing.py": THING} | dict(files or {})
    write(root, {path: text.encode() for path, text in files.items()})
    info = dist_info(root, version)
    (info / "METADATA").write_text(f"Name: megatron-core\nVersion: {version}\n")
    return root


def page_text(
    name: str,
    edits: str,
    *,
    header: Mapping[str, Any] | str,
    code: str = "",
    fixed: str = "return False",
    verify: str = "pass",
    what: str = "something",
    numerics: str = "none (bitwise)",
) -> str:
    """Source of a page; `header` is what `Patch` takes besides its edits."""
    if not isinstance(header, str):
        header = ", ".join(f"{key}={value!r}" for key, value in header.items())
    return _PAGE.format(
        name=name,
        what=what,
        numerics=numerics,
        code=textwrap.dedent(code),
        edits=edits,
        header=header,
        fixed=textwrap.indent(fixed, "    "),
        verify=textwrap.indent(verify, "    "),
    )


def page(
    folder: Path,
    name: str = "double_doubles",
    *,
    target: str = "megatron/core/thing.py:double",
    source: str = "def double(x):\n    return x\n",
    edit: str = 'replacing("return x", "return 2 * x")',
    verify: str = "from megatron.core.thing import double\nassert double(2) == 4",
    patch: str = 'reached="forward"',
    fixed: str = "return False",
    more: str = "",
) -> Path:
    """Write one page for `tree()`; `source` is the pristine text that is pinned."""
    folder.mkdir(parents=True, exist_ok=True)
    edits = f"Edit({target!r}, {{'0.19.2': {fingerprint.of_source(source)!r}}}, {edit})"
    numerics = "changes results: they become right"
    file = folder / f"{name}.py"
    file.write_text(
        page_text(
            name, edits, header=patch, code=more, fixed=fixed, verify=verify, numerics=numerics
        )
    )
    return file


def second_page(folder: Path, reached: str) -> Path:
    """Write the page `half_halves`, which edits the other function of the same file."""
    return page(
        folder,
        "half_halves",
        target="megatron/core/thing.py:half",
        source="def half(x):\n    return x / 2\n",
        edit='replacing("return x / 2", "return x * 0.5")',
        patch=f"reached={reached!r}",
    )
