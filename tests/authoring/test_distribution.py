"""`cppmega new --catalogue`: a project that installs, and whose pages are found by its name."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest

from cppmega.authoring import distribution
from cppmega.catalogue import loader as catalogue
from cppmega.errors import CppmegaError
from tests.support import made


def test_its_wheel_names_the_package_of_the_pages(tmp_path: Path) -> None:
    home, *_ = (file.parent for file in distribution.new("team-fixes", tmp_path))
    made.page(home / "team_fixes")
    site = tmp_path / "site"
    site.mkdir()
    build = f"from hatchling.build import build_wheel; build_wheel({str(site)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=home, check=True)
    (wheel,) = site.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    (installed,) = distributions(path=[str(site)])
    (point,) = installed.entry_points.select(group=distribution.GROUP)
    assert (point.name, point.value) == ("team-fixes", "team_fixes")
    assert [name for name, _ in catalogue.page_files(site / point.value)] == ["double_doubles"]
    assert installed.requires == ["cppmega"]


@pytest.mark.parametrize(
    ("name", "error", "hint"),
    [
        ("Team Fixes", "bad-name", "cppmega new --catalogue team-fixes"),
        ("9", "bad-name", "cppmega new --catalogue my-patches"),
        ("taken", "catalogue-exists", "another name"),
    ],
)
def test_a_wrong_name_is_refused(tmp_path: Path, name: str, error: str, hint: str) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(CppmegaError) as caught:
        distribution.new(name, tmp_path)
    assert caught.value.name == error and hint in caught.value.next
    assert [entry.name for entry in tmp_path.rglob("*")] == ["taken"]
