"""`cppmega port`: what carries over is pinned, and the rest is a list of work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.authoring.drifts import FILE, OLD, command, page
from tests.support import made

pytestmark = pytest.mark.slow

PROVED = "from megatron.core.work import work\nassert work([1, 2, 3, 4], 3)[0] == 60"


def test_what_carries_over_is_pinned_and_the_rest_is_listed(tmp_path: Path) -> None:
    other = "megatron/core/other.py"
    ours, theirs, third = (
        page(tmp_path / "pages", name=name, target=f"{path}:work", verify=PROVED)
        for name, path in (
            ("carries", FILE),
            ("replaced", other),
            ("unproved", "megatron/core/third.py"),
        )
    )
    away = OLD.replace("size + 1", "size + 2")
    inside = OLD.replace("total * scale", "total * scale + 0")
    files = {FILE: OLD, other: OLD, "megatron/core/third.py": OLD, "megatron/__init__.py": ""}
    old = made.tree(tmp_path / "old", files, "1.0")
    files |= {FILE: away, other: inside, "megatron/core/third.py": away}
    new = made.tree(tmp_path / "new", files, "2.0")
    Path(third.path).write_text(Path(third.path).read_text().replace("== 60", "== 61"))
    before = {p.name: Path(p.path).read_text() for p in (ours, theirs, third)}
    done = command(tmp_path / "pages", "port", old, new, "--json")
    answer = json.loads(done.stdout)
    rows = {row["name"]: row for row in answer["patches"]}
    assert (done.returncode, answer["ok"]) == (1, False)
    assert list(rows["carries"]["pinned"]) == [f"{FILE}:work"] and rows["carries"]["todo"] == ""
    assert '"2.0"' in Path(ours.path).read_text()
    assert "upstream changed what it replaces" in rows["replaced"]["todo"]
    assert rows["replaced"]["targets"][0]["changes"][0]["meets"] == "replaced"
    assert "law `verify`" in rows["unproved"]["todo"]
    for left in (theirs, third):
        assert Path(left.path).read_text() == before[left.name]
    Path(third.path).unlink()
    again = command(tmp_path / "pages", "port", old, new)
    assert again.returncode == 1 and "to do: replaced" in again.stderr
    assert " carries " not in again.stdout and "next:  cppmega pin replaced 2.0" in again.stdout
