"""Small made trees and catalogues, for tests of the engine that need no real Megatron."""

from __future__ import annotations

import base64
import hashlib
import textwrap
from pathlib import Path

from cppmega.rewriting import fingerprint

THING = """\
import os


def double(x):
    # upstream forgot to double
    return x


def half(x):
    return x / 2
"""


def tree(root: Path, files: dict[str, str] | None = None, version: str = "0.19.2") -> Path:
    """ROOT of a made megatron-core with a RECORD that vouches for its files."""
    files = {"megatron/core/__init__.py": "", "megatron/core/thing.py": THING} | (files or {})
    rows = []
    for path, text in files.items():
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        rows.append(f"{path},sha256={digest.decode()},{len(text)}")
    info = root / f"megatron_core-{version}.dist-info"
    info.mkdir()
    (info / "RECORD").write_text("\n".join(rows) + "\n")
    (info / "METADATA").write_text(f"Name: megatron-core\nVersion: {version}\n")
    return root


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
    """Write one page; `source` is the pristine text that is pinned."""
    folder.mkdir(parents=True, exist_ok=True)
    text = f'''"""A made page.

What: it doubles.
Why: upstream forgot; seen in a test.
Upstream: Not sent: it is made.
Remove: never.
Numerics: changes results: they become right.
"""

from cppmega.edits import *  # noqa: F403
from cppmega.page import Edit, Patch

{more}

PATCH = Patch(
    edits=(
        Edit({target!r}, {{"0.19.2": {fingerprint.of_source(source)!r}}}, {edit}),
    ),
    {patch},
)


def fixed_upstream(source):
{textwrap.indent(fixed, "    ")}


def verify():
{textwrap.indent(verify, "    ")}
'''
    (folder / f"{name}.py").write_text(text)
    return folder / f"{name}.py"
