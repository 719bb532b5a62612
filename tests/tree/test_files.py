"""Files that may not be read or written, and those of odd texts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.lab import FILES, A, Lab
from tests.support.made import pin, snapshot, write
from tests.tree.labs import fails

# -- permissions ------------------------------------------------------------------------------


@pytest.fixture
def stranger(lab: Lab, tmp_path: Path) -> Iterator[dict[str, object]]:
    """How to start a process that owns nothing of the tree; root sees no permissions at all."""
    folders = [Path(part) for part in tmp_path.parents if part != Path("/")] + [tmp_path, lab.pages]
    old = {folder: folder.stat().st_mode for folder in folders}
    for folder in folders:
        if folder.stat().st_uid == os.geteuid():
            folder.chmod(old[folder] & 0o7777 | 0o055)
    yield {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
    for path in lab.root.rglob("*"):
        path.chmod(0o755)
    for folder, mode in old.items():
        if folder.stat().st_uid == os.geteuid():
            folder.chmod(mode & 0o7777)


def _read_only(lab: Lab) -> None:
    for path in [*lab.root.rglob("*"), lab.root]:
        path.chmod(0o555 if path.is_dir() else 0o444)


def _as_stranger(lab: Lab, how: dict[str, object], *arguments: str) -> dict[str, object]:
    """Its answer; everything is imported before the rights are given up, because the interpreter
    itself may lie where the stranger may not read."""
    twin = lab.pages.parent / "twin"
    shutil.rmtree(twin, ignore_errors=True)
    write(twin, FILES)
    code = f"""
import io, os, shutil, sys
from contextlib import redirect_stdout
from pathlib import Path
from cppmega.catalogue import loader as catalogue
from cppmega import cli
catalogue.builtin_folder = lambda: Path({str(lab.pages)!r})
for verb in ("apply", "status", "revert"):
    try:
        with redirect_stdout(io.StringIO()):
            cli.main([verb, "--json", "--megatron", {str(twin)!r}])
    except SystemExit:
        pass
if {bool(how)!r}:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
cli.main(sys.argv[1:])
"""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments, "--megatron", str(lab.root)],
        env=lab.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    answer: dict[str, object] = json.loads(done.stdout)
    answer["code"] = done.returncode
    return answer


@pytest.mark.slow
@pytest.mark.parametrize("patched", [False, True])
def test_read_only_tree(lab: Lab, stranger: dict[str, object], patched: bool) -> None:
    """A system-wide installation: everything can be looked at, and a write is refused by name."""
    lab.wheel()
    lab.page()
    if patched:
        lab.apply()
        lab.page(edit='replacing("x + x", "x * 2")')
    _read_only(lab)
    before = snapshot(lab.root)
    status = _as_stranger(lab, stranger, "status", "--json")
    assert status["patches"][0]["state"] == "pending"  # type: ignore[index]
    for verb in ["apply", "revert"] if patched else ["apply"]:
        answer = _as_stranger(lab, stranger, verb, "--json")
        assert answer["code"] == 1
        assert answer["error"]["name"] == "read-only-tree"  # type: ignore[index]
        assert snapshot(lab.root) == before
    assert _as_stranger(lab, stranger, "apply", "--check", "--json")["changed"] == [A]


def test_writable_folder_with_a_read_only_package(lab: Lab, stranger: dict[str, object]) -> None:
    """Our folder can be made, the files cannot be replaced: nothing may stay behind."""
    lab.wheel()
    lab.page()
    _read_only(lab)
    lab.root.chmod(0o777)
    answer = _as_stranger(lab, stranger, "apply", "--json")
    assert answer["error"]["name"] == "read-only-tree"  # type: ignore[index]
    assert not (lab.root / ".cppmega").exists()


@pytest.mark.parametrize("path", [A, ".cppmega/receipt.json", ".cppmega"])
def test_file_that_may_not_be_read(lab: Lab, stranger: dict[str, object], path: str) -> None:
    """Also when root patched the tree and left its receipt to itself."""
    lab.wheel()
    lab.page()
    lab.apply()
    (lab.root / path).chmod(0o000)
    answer = _as_stranger(lab, stranger, "status", "--json")
    assert answer["error"]["name"] == "unreadable-file"  # type: ignore[index]


def test_read_only_file_in_a_writable_tree(lab: Lab) -> None:
    """Package managers ship 0444: the file is replaced and keeps its permissions."""
    lab.wheel()
    lab.page()
    (lab.root / A).chmod(0o444)
    assert lab.apply().ok
    assert (lab.root / A).stat().st_mode & 0o777 == 0o444
    lab.revert()
    assert (lab.root / A).stat().st_mode & 0o777 == 0o444
    lab.pristine()


# -- texts ------------------------------------------------------------------------------------

_LATIN = b"# -*- coding: latin-1 -*-\n" + FILES[A].replace(b"# the sum", b"# die Gr\xf6\xdfe")
_TEXTS = {
    "crlf": FILES[A].replace(b"\n", b"\r\n"),
    "cr": FILES[A].replace(b"\n", b"\r"),
    "mixed": FILES[A].replace(b"\n", b"\r\n", 9),
    "latin-1": _LATIN,
    "bom": b"\xef\xbb\xbf" + FILES[A],
    "no newline at the end": FILES[A][: FILES[A].index(b"\n\n\nclass Layer")],
    "tabs": FILES[A].replace(b"    ", b"\t"),
    "two spaces": FILES[A].replace(b"    ", b"  "),
    "form feed": FILES[A].replace(b"\n\ndef double", b"\n\f\ndef double"),
    "utf-8": FILES[A].replace(b"# the sum", "# 中文 ö \U0001f600".encode()),
}


@pytest.mark.parametrize("name", _TEXTS)
def test_odd_texts_keep_every_other_byte(lab: Lab, name: str) -> None:
    """Line ends, encodings and indentation stay what they are; revert restores the bytes."""
    lab.files[A] = data = _TEXTS[name]
    lab.wheel()
    lab.page(pins={"1.0": pin(FILES[A], "double")})
    assert lab.apply().ok
    patched = (lab.root / A).read_bytes()
    encoding = "latin-1" if name == "latin-1" else "utf-8"
    scope: dict[str, object] = {}
    exec(compile(patched, A, "exec"), scope)
    assert scope["double"](4) == 8  # type: ignore[operator]
    start, end = data.index(b"def double"), data.index(b"x + x") + len(b"x + x")
    assert patched.endswith(data[end:])
    assert patched.startswith(data[: data.index(b"LIMIT = 1")])
    assert data[start:].split(b"# ")[1][:6] in patched
    lines = patched.decode(encoding).splitlines(keepends=True)
    if name in ("crlf", "cr"):
        end_of_line = {"crlf": "\r\n", "cr": "\r"}[name]
        assert all(line.endswith(end_of_line) for line in lines if line.strip())
    assert lab.revert().ok
    lab.pristine()


def test_text_that_the_encoding_cannot_hold(lab: Lab) -> None:
    """The page writes a sign that latin-1 lacks: refused, rather than the file re-encoded."""
    lab.files[A] = _LATIN
    lab.wheel()
    lab.page(
        edit="""replacing("x + x", "x + x + len('中')")""", pins={"1.0": pin(FILES[A], "double")}
    )
    fails(lab, "text-not-encodable")
