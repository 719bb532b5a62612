"""A catalogue that is installed is found and remembered by its name; `--patches` adds to others."""

from __future__ import annotations

from pathlib import Path

import pytest

from cppmega.catalogue import loader as catalogue


@pytest.fixture
def team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The pages of a distribution called `team`, which pip would have installed so."""
    site = tmp_path / "site"
    info = site / "team_patches-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: team-patches\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[cppmega.catalogues]\nteam = team_patches.pages\n")
    pages = site / "team_patches" / "pages"
    pages.mkdir(parents=True)
    (site / "team_patches" / "__init__.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(site))
    return pages


def test_it_is_found_by_name_and_not_imported(team: Path) -> None:
    assert catalogue.located("team") == team
    assert catalogue.stored(team) == "team"
    assert catalogue.located("nobody") == Path("nobody").resolve()


def test_a_folder_of_that_name_counts_if_it_has_pages(
    team: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here = tmp_path / "team"
    here.mkdir()
    assert catalogue.located("team") == team
    (here / "mine.py").touch()
    assert catalogue.located("team") == here
