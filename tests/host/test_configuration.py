"""`[tool.cppmega]`: found from below, checked, and put before the words that were typed."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest

from cppmega.errors import CppmegaError
from cppmega.host import configuration
from tests.support import REPOSITORY


def written(folder: Path, text: str, name: str = "cppmega.toml") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return folder


def test_the_nearest_file_with_settings_is_read(tmp_path: Path) -> None:
    written(tmp_path, 'kind = ["fix"]')
    below = written(tmp_path / "below", "[project]\nname = 'x'", "pyproject.toml")
    assert configuration.read(below).kind == ["fix"]
    written(below, "[tool.cppmega]\nkind = ['all']", "pyproject.toml")
    found = configuration.read(below)
    assert found.kind == ["all"] and found.file == str(below / "pyproject.toml")


def test_settings_are_words_of_the_commands_that_have_the_option(tmp_path: Path) -> None:
    text = 'megatron = "tree"\npatches = ["ours", "installed"]\nwithout = {a_page = "it is slow"}'
    (tmp_path / "ours").mkdir()
    found = configuration.read(written(tmp_path, text))
    every = found.words({"--megatron", "--patches", "--without"})
    folders = [f"{tmp_path}/tree", f"{tmp_path}/ours", "installed"]
    assert every[1::2] == [*folders, "a_page"]
    assert found.words({"--patches"}) == every[2:6]
    assert found.said(every).endswith("a_page: it is slow")


def test_options_of_a_launch(tmp_path: Path) -> None:
    text = "[launch]\ntmux = 'run'\nnnodes = 2\ndry-run = true\nset = ['a=1', 'b=2']"
    words = configuration.read(written(tmp_path, text)).launch_words()
    assert words == ["--tmux", "run", "--nnodes", "2", "--dry-run", "--set", "a=1", "--set", "b=2"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("patch = []", "patch"),
        ("kind = 'fix'", "array"),
        ("without = ['a_page']", "object"),
        ("kind = [", "at end"),
        ("file = 'x'", "file"),
    ],
)
def test_what_is_no_setting_is_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(CppmegaError, match=said) as caught:
        configuration.read(written(tmp_path, text))
    assert caught.value.name == "bad-configuration"


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, "kind = ['fix']")
    os.chown(tmp_path / "cppmega.toml", os.getuid(), -1)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 7)
    if os.getuid() != 0:
        with pytest.raises(CppmegaError, match="belongs to user"):
            configuration.read(tmp_path)
    else:
        assert configuration.read(tmp_path).kind == ["fix"]  # root's files are everybody's


def test_the_example_of_the_documentation_is_valid() -> None:
    text = (REPOSITORY / "docs" / "environment.md").read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    table = tomllib.loads(example)["tool"]["cppmega"]
    shown = {name.replace("-", "_") for name in table}
    assert shown == set(configuration.Configuration.__struct_fields__) - {"file"}
    configuration.checked(table, Path(__file__))
