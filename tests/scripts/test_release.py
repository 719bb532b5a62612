"""A release is cut and checked by a script; its addresses come from one setting."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import REPOSITORY

sys.path[:0] = [str(REPOSITORY / "scripts"), str(REPOSITORY)]
cut_release = importlib.import_module("cut_release")

BEFORE = "# Changelog\n\nAll changes.\n\n"
OLD = "### Added\n\n#### Patches\n\n- old\n\n### Fixed\n\n- a mend\n"
CHANGELOG = BEFORE + "## [Unreleased]\n\n### Added\n\n- new\n\n### Fixed\n\n- late\n\n"


def test_entries_get_a_version_of_their_own_or_join_one_that_is_not_published() -> None:
    made = cut_release.cut(f"{CHANGELOG}## [0.1.0] - 2026-01-01\n\n{OLD}", "0.2.0", "2026-02-03")
    assert made == (
        f"{BEFORE}## [Unreleased]\n\n## [0.2.0] - 2026-02-03\n\n### Added\n\n- new\n\n### Fixed\n\n"
        f"- late\n\n## [0.1.0] - 2026-01-01\n\n{OLD}"
    )
    made = cut_release.cut(f"{CHANGELOG}## [0.1.0] - 2026-01-01\n\n{OLD}", "0.1.0", "2026-02-03")
    assert made == (
        f"{BEFORE}## [Unreleased]\n\n## [0.1.0] - 2026-02-03\n\n### Added\n\n- new\n\n"
        "#### Patches\n\n- old\n\n### Fixed\n\n- late\n- a mend\n"
    )
    text = (REPOSITORY / "CHANGELOG.md").read_text()
    again = cut_release.written(*cut_release.read(text))
    assert "".join(again.split()) == "".join(text.split())


def test_a_release_needs_its_entries_cut_and_the_address_of_the_repository(tmp_path: Path) -> None:
    for name in ("scripts", "cppmega"):
        (tmp_path / name).mkdir()
    for name in ("release.sh", "cut_release.py"):
        shutil.copy(REPOSITORY / "scripts" / name, tmp_path / "scripts")
    shutil.copy(REPOSITORY / "cppmega/__init__.py", tmp_path / "cppmega")
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    (tmp_path / "CHANGELOG.md").write_text(f"{CHANGELOG}## [0.0.1] - 2026-01-01\n\n{OLD}")
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)

    def release(*words: str) -> str:
        command = ["bash", "scripts/release.sh", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode == 0) is bool(words), done
        return done.stdout + done.stderr

    assert "make them agree" in release()
    release("prepare", "9.8.7")
    assert '__version__ = "9.8.7"' in (tmp_path / "cppmega/__init__.py").read_text()
    assert "states no address of the repository" in release()
    text = (tmp_path / "CHANGELOG.md").read_text()
    (tmp_path / "CHANGELOG.md").write_text(text.replace("## [9", "- more\n\n## [9"))
    assert "release.sh prepare VERSION" in release()


def test_the_addresses_of_a_distribution() -> None:
    pytest.importorskip("hatchling")
    build = importlib.import_module("hatch_build")
    assert build.urls("", "", "1.0") == {}
    found = build.urls("https://host/us/cppmega", "https://docs", "1.0")
    assert found["Changelog"] == "https://host/us/cppmega/blob/v1.0/CHANGELOG.md"
    assert sorted(found) == ["Changelog", "Documentation", "Issues", "Repository"]
    readme = "[here](docs/a.md#b) [there](https://x) [below](#c)\n"
    assert build.without_relative_links(readme, "") == "here [there](https://x) [below](#c)\n"
    assert "[here](https://f/docs/a.md#b)" in build.without_relative_links(readme, "https://f")
