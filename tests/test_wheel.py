"""A wheel does what a checkout does: built once, unpacked, and run without the repository."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cppmega.cli.main import cli
from examples.smoke import corpus
from tests.support import REPOSITORY, VERSIONS, copy
from tests.support.made import snapshot

pytestmark = pytest.mark.slow

SHIPPED = ("cppmega", "upstream_patches", "recipes", "examples", "benchmarks/results")
FILES = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE")
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder of distributions, and their hashes; what they were built from is gone."""
    folder = tmp_path_factory.mktemp("built")
    source = copy_of_sources(folder / "source")
    found = build(source)
    (source / "dist").rename(folder / "dist")
    shutil.rmtree(source)
    return folder / "dist", found


@pytest.fixture(scope="module")
def installed(built: tuple[Path, dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel."""
    (wheel,) = built[0].glob("cppmega-*.whl")
    site = tmp_path_factory.mktemp("wheel") / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def copy_of_sources(to: Path) -> Path:
    """The files of the repository that a distribution is built from."""
    for name in SHIPPED:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, to / name, ignore=ignored)
    for name in (*FILES, ".gitignore"):
        shutil.copyfile(REPOSITORY / name, to / name)
    return to


def test_two_builds_give_the_same_bytes(built: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    """In other folders, at other times, under another umask; and the sdist gives the same wheel."""
    second = copy_of_sources(tmp_path / "a" / "second")
    for path in second.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
        os.utime(path, (0, 0))
    dist, one = built
    assert build(second) == one and {Path(name).suffix for name in one} == {".whl", ".gz"}
    (sdist,) = dist.glob("*.tar.gz")
    shutil.unpack_archive(sdist, tmp_path / "sdist", filter="data")
    (unpacked,) = (tmp_path / "sdist").iterdir()
    assert build(unpacked, "wheel").items() <= one.items()


def build(source: Path, *targets: str) -> dict[str, str]:
    """Build distributions of a source tree: file name -> hash."""
    chosen = [word for target in targets or ("sdist", "wheel") for word in ("--target", target)]
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--directory", "dist", *chosen],
        check=True,
        cwd=source,
        env={**os.environ, "SOURCE_DATE_EPOCH": "1700000000"},
        capture_output=True,
    )
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (source / "dist").iterdir()
    }


@pytest.fixture
def run(installed: Path, tmp_path: Path) -> Run:
    """Start Python in an empty folder, with the wheel in the place of the checkout."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(installed), "HOME": str(tmp_path)}

    def start(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    return start


def test_it_applies_and_reverts_every_patch(run: Run, installed: Path, tmp_path: Path) -> None:
    where = run("-c", "import cppmega; print(cppmega.__file__)").stdout
    assert where.startswith(str(installed))
    listed = json.loads(run("-m", "cppmega", "list", "--json").stdout)
    files = [*(REPOSITORY / "upstream_patches").glob("*/[a-z]*.py")]
    assert len(listed["patches"]) == len(files)
    root = copy(VERSIONS[-1], tmp_path / "site")
    before = snapshot(root)
    done = run("-m", "cppmega.apply_patches", "--kind", "all", "--json", "--megatron", str(root))
    assert done.returncode == 0, done.stdout
    assert run("-m", "cppmega", "status", "--megatron", str(root)).returncode == 0
    assert run("-m", "cppmega", "revert", "--megatron", str(root)).returncode == 0
    assert snapshot(root) == before


NO_TORCH = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
def without_torch(name, path=None, target=None):
    return None if name in ("torch", "megatron") else find(name, path, target)
PathFinder.find_spec = without_torch
"""


def test_without_torch_it_reads_and_patches_and_names_the_interpreter_that_trains(
    installed: Path, tmp_path: Path
) -> None:
    """As a tool of its own (`uv tool install`), with the tree of another environment."""
    root = copy(VERSIONS[-1], tmp_path / "env" / "lib" / "python3.12" / "site-packages")
    before = snapshot(root)
    trains = tmp_path / "env" / "bin" / "python"
    trains.parent.mkdir()
    trains.symlink_to(sys.executable)
    (tmp_path / "sitecustomize.py").write_text(NO_TORCH)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{tmp_path}:{installed}"}
        command = [sys.executable, "-m", "cppmega", *words, "--megatron", str(root)]
        return subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )

    name = "dataset_helpers_prebuilt"
    assert run("apply", "--only", name).returncode == 0
    assert run("status").returncode == 0
    refused = run("verify", name, "--json")
    error = json.loads(refused.stdout)["error"]
    assert refused.returncode == 1 and error["name"] == "package-missing"
    assert error["next"].startswith(f"{trains} -m cppmega verify")
    assert run("revert").returncode == 0
    assert snapshot(root) == before


@pytest.mark.megatron
def test_it_proves_a_patch(run: Run, tmp_path: Path) -> None:
    name, tree = (
        "dataset_helpers_prebuilt",
        ("--megatron", str(copy(VERSIONS[-1], tmp_path / "site"))),
    )
    assert run("-m", "cppmega", "apply", "--only", name, *tree).returncode == 0
    done = run("-m", "cppmega", "verify", name, *tree)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_knows_what_was_measured(run: Run) -> None:
    command = ("-m", "cppmega", "recipes", "--json")
    in_checkout = subprocess.run(
        [sys.executable, *command], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert json.loads(run(*command).stdout) == json.loads(in_checkout.stdout)


def test_it_has_the_results_that_pages_cite(run: Run, installed: Path) -> None:
    said = run("-m", "cppmega", "explain", "dsa_hadamard_transform").stdout
    (result,) = re.findall(r"^Result: +(.+)$", said, re.MULTILINE)
    assert Path(result).is_relative_to(installed) and Path(result).is_file()


def test_it_has_the_frozen_text_of_the_smoke_run(installed: Path) -> None:
    shipped = installed / "cppmega" / "examples" / "smoke" / corpus.TEXT.name
    assert shipped.read_bytes() == corpus.TEXT.read_bytes()


def test_every_relative_link_in_its_files_resolves(installed: Path) -> None:
    documents = list(installed.rglob("*.md"))
    assert len(documents) > 10
    for document in documents:
        for link in re.findall(r"\]\((?!https?://|#)([^)]+)\)", document.read_text()):
            assert (document.parent / link).exists(), f"{document}: {link}"


def test_its_description_is_the_readme_without_links_that_an_index_cannot_resolve(
    installed: Path,
) -> None:
    (metadata,) = installed.glob("cppmega-*.dist-info/METADATA")
    head, _, text = metadata.read_text().partition("\n\n")
    assert "Description-Content-Type: text/markdown" in head
    assert text.startswith("# cppmega")
    assert re.findall(r"\]\((?!https?://|#)[^)]+\)", text) == []
    readme = (REPOSITORY / "README.md").read_text().splitlines()
    assert [line for line in readme if "](" not in line and line not in text] == []


HELP = """
from click.testing import CliRunner
from cppmega.cli.main import cli
for words in ([], *([name] for name in cli.commands)):
    print(CliRunner().invoke(cli, [*words, "--help"]).output)
"""


def test_its_help_names_no_file_of_the_repository(run: Run) -> None:
    said = run("-c", HELP).stdout
    assert said.count("Usage:") == 1 + len(cli.commands)
    folders = "scripts|benchmarks|tests|upstream_patches|recipes"
    assert re.findall(rf"\b(?:{folders})/\S*", said) == []


def prose_strings(path: Path) -> Iterator[str]:
    """The strings of a module that are not docstrings, pieces of f-strings included."""
    tree = ast.parse(path.read_text())
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node not in docstrings
        ):
            yield node.value


def test_its_messages_name_no_script_of_the_repository(installed: Path) -> None:
    """The next command of an error must exist where only the wheel is."""
    modules = [*installed.rglob("*.py")]
    named = {
        f"{path.name}: {string}"
        for path in modules
        for string in prose_strings(path)
        if re.search(r"\b(?:scripts|tests)/(?!unit_tests)\w", string)  # that is Megatron's
    }
    assert len(modules) > 200 and named == set()
