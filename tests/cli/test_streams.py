"""Streams, paths and interrupts that a command cannot choose end in one clear error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cppmega.cli.main import main
from tests.support import REPOSITORY

LONG, RAW = "a" * 3000, "\udcff\udcfe"


def command(code: str, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run a command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", f"import signal, sys\n{code}"],
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        **how,
    )


@pytest.mark.parametrize("words", [["recipes", "--json"], ["explain", "no", "--json"], ["-h"]])
def test_a_full_stdout_is_one_error(words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = command(f"from cppmega.cli import main; main({words})", stdout=full)
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot-write\n") and "Traceback" not in done.stderr


@pytest.mark.parametrize("module", ["cppmega.check_data", "cppmega.data.command"])
def test_a_full_stdout_of_another_command(module: str) -> None:
    code = f"import runpy; sys.argv[1:] = ['-h']; runpy.run_module({module!r}, None, '__main__')"
    with Path("/dev/full").open("w") as full:
        done = command(code, stdout=full)
    assert done.returncode == 2 and done.stderr.startswith("error: cannot-write\n")


def test_a_reader_that_stops_does_not_change_the_status() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = command("from cppmega.cli import main; main(['-h'])", stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("module", ["click", "cppmega.cli.tree", "cppmega.cli.main"])
def test_an_interrupt_during_imports_is_reported(module: str) -> None:
    code = f"""
class Hook:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Hook())
from cppmega.cli import main
main(["list", "--json"])
"""
    done = command(code, stdout=subprocess.PIPE)
    assert done.returncode == 130 and json.loads(done.stdout)["error"]["name"] == "stopped"
    assert done.stderr == ""


@pytest.mark.parametrize("name", [LONG, RAW], ids=["long", "raw"])
@pytest.mark.parametrize(
    "words",
    [
        *(["explain", "NAME"], ["preflight", "NAME"], ["launch", "NAME"], ["logs", "NAME"]),
        *(["status", "--megatron", "NAME"], ["list", "--patches", "NAME"], ["new", "NAME"]),
        *(["runs", "--runs", "NAME"], ["diff", "NAME"], ["verify", "NAME"], ["launch", "NAME.py"]),
    ],
    ids="-".join,
)
def test_any_name_is_answered(
    words: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        main([word.replace("NAME", name) for word in words])
    printed = capsys.readouterr().err
    assert done.value.code in (1, 2) or "there is no run" in printed
    assert "internal-error" not in printed and "Traceback" not in printed
