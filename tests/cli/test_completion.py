"""Names are completed in a shell, quickly: nothing heavy is imported and no page is executed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.shell_completion import CompletionItem, ShellComplete
from click.testing import CliRunner

from cppmega.catalogue import loader as catalogue
from cppmega.cli.completion import SHELLS
from cppmega.cli.main import cli
from cppmega.recipe import index
from tests.support import REPOSITORY
from tests.support.lab import Lab


def completed(*words: str) -> list[str]:
    return [item.value for item in found(*words)]


def found(*words: str) -> list[CompletionItem]:
    """The completions of the last word."""
    *before, incomplete = words
    shell = ShellComplete(cli, {}, "cppmega", "_CPPMEGA_COMPLETE")
    return shell.get_completions(list(before), incomplete)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.chdir(tmp_path)
    made = Lab(tmp_path, monkeypatch)
    for name in ("one", "other"):
        made.page(name, code="raise SystemExit(3)")  # a page that is executed ends the process
    return made


PATCHES = ("explain", "diff", "verify", "revert", "pin", "export")


@pytest.mark.parametrize("command", PATCHES)
def test_patches_are_completed_with_their_titles(lab: Lab, command: str) -> None:
    assert completed(command, "") == ["one", "other"]
    (item,) = found(command, "ot")
    assert (item.value, item.help) == ("other", "Page other of a test")


def test_a_patch_that_is_already_named_is_left_out(lab: Lab) -> None:
    assert completed("verify", "one", "o") == ["other"]
    assert completed("apply", "--only", "one", "--only", "o") == ["other"]


def test_your_own_patches_are_completed_too(lab: Lab, tmp_path: Path) -> None:
    lab.page("mine", folder=tmp_path / "own")
    assert completed("diff", "--patches", str(tmp_path / "own"), "m") == ["mine"]
    assert completed("diff", "--patches", str(tmp_path / "missing"), "o") == ["one", "other"]


@pytest.mark.parametrize("command", ["preflight", "launch"])
def test_recipes_are_completed_by_name_or_else_by_path(command: str) -> None:
    assert completed(command, "") == index.shipped()
    assert completed(command, "smoke") == ["smoke_cpu"]
    (item,) = found(command, "./wide")
    assert (item.value, item.type) == ("./wide", "file")


def run_folder(runs: Path, name: str, age: int) -> None:
    (runs / name).mkdir(parents=True)
    manifest = runs / name / "manifest.json"
    manifest.write_text("{}")
    os.utime(manifest, (1e9 - age, 1e9 - age))


@pytest.mark.parametrize("command", ["attach", "logs", "stop", "compare"])
def test_runs_are_completed_the_newest_first(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CPPMEGA_RUNS", raising=False)
    monkeypatch.chdir(tmp_path)
    run_folder(tmp_path / "runs", "demo-1", age=2)
    run_folder(tmp_path / "runs", "demo-2", age=1)
    run_folder(tmp_path / "elsewhere", "far", age=0)
    assert completed(command, "d") == ["demo-2", "demo-1"]
    assert completed(command, "--runs", "elsewhere", "") == ["far"]
    assert completed("launch", "smoke_cpu", "--resume", "demo-1") == ["demo-1"]


def parameters() -> list[tuple[click.Command, click.Parameter]]:
    names = {"run", "recipe", "one", "other", "resume", "only", "names"}
    return [(c, p) for c in cli.commands.values() for p in c.params if p.name in names]


def test_everything_that_takes_such_a_name_is_completed() -> None:
    assert len(parameters()) >= 11
    for command, parameter in parameters():
        with command.make_context(command.name, [], resilient_parsing=True) as context:
            if parameter.name in ("recipe", "only", "names"):
                assert parameter.shell_complete(context, ""), (command.name, parameter.name)
            else:
                assert parameter._custom_shell_complete is not None, (command.name, parameter.name)


def ask(shell: str, line: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Ask as the shell's script does; stderr lists the modules that were imported."""
    words = line.split(" ")
    code = """
import atexit, sys
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
from cppmega.cli.main import main
main([])
"""
    asked = {
        "_CPPMEGA_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": words[-1] if shell == "fish" else str(len(words) - 1),
        "PYTHONPATH": str(REPOSITORY),
    }
    return subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": os.environ["PATH"], **asked},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=True,
    )


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_gets_an_answer_without_anything_heavy(shell: str, tmp_path: Path) -> None:
    done = ask(shell, "cppmega explain mtp_roll", tmp_path)
    assert "mtp_roll_packed_sequences" in done.stdout
    heavy = {"torch", "rich", "libcst", "megatron", "numpy", "importlib.metadata"}
    assert not heavy & set(done.stderr.split())


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_for_that_shell(shell: str) -> None:
    done = CliRunner().invoke(cli, ["completion", shell])
    assert done.exit_code == 0 and f"{shell}_complete" in done.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_with_the_script(tmp_path: Path) -> None:
    program = tmp_path / "cppmega"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m cppmega "$@"\n')
    program.chmod(0o755)
    script = """
eval "$(cppmega completion bash)"
COMP_WORDS=(cppmega explain mtp_roll); COMP_CWORD=2
$(complete -p cppmega | sed 's/.*-F \\([^ ]*\\).*/\\1/') cppmega
echo "${COMPREPLY[@]}"
"""
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script],
        env={"PATH": path, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["mtp_roll_packed_sequences"], done.stderr


def test_the_titles_are_those_of_the_pages() -> None:
    (item,) = found("explain", "mtp_roll_packed_sequences")
    page = catalogue.load()["mtp_roll_packed_sequences"]
    assert item.help == page.doc.strip().splitlines()[0].rstrip(".")
