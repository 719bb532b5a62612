"""The preflight as a whole: order, prerequisites, answers, the command."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from cppmega import checks, cli, preflight
from cppmega.check import Context, NotApplicable, Refused
from cppmega.errors import CppmegaError
from tests.preflights import launch
from tests.support import REPOSITORY, patched

WRONG = CppmegaError("some-error", "What.", "Why.", "next")


def test_every_check_is_in_the_order_once_and_behind_what_it_needs() -> None:
    files = {path.stem for path in (REPOSITORY / "cppmega" / "checks").glob("[a-z]*.py")}
    assert sorted(checks.ORDER) == sorted(files)
    for at, name in enumerate(checks.ORDER):
        module = importlib.import_module(f"cppmega.checks.{name}")
        assert set(module.AFTER) <= set(checks.ORDER[:at]), name
        assert module.__doc__ and module.check.__doc__, name


def test_every_check_is_broken_and_left_healthy_by_some_test() -> None:
    texts = [path.read_text() for path in (REPOSITORY / "tests").glob("test_preflight*.py")]
    for name in checks.ORDER:
        broken = [f'refuses("{name}"' in "".join(text.split()) for text in texts]
        assert any(broken) or name == "kernel_parity", name  # it needs a GPU: its verdict is tested


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Checks by name, in this order, each with what it does; `b` stands on `a`."""
    found: dict[str, object] = {}

    def module(path: str) -> object:
        name = path.rpartition(".")[2]

        def check(context: Context) -> str:
            if isinstance(found[name], Exception):
                raise found[name]
            return str(found[name])

        return SimpleNamespace(AFTER=("a",) if name == "b" else (), check=check)

    monkeypatch.setattr(preflight, "ORDER", ("a", "b", "c"))
    monkeypatch.setattr(preflight.importlib, "import_module", module)
    return found


def states(context: Context, progress: list[str] | None = None) -> tuple[bool, list[str]]:
    found = preflight.examine(context, progress.append if progress is not None else None)
    return found.ok, [f"{one.check} {one.state} {one.name}".strip() for one in found.findings]


def test_a_check_whose_prerequisite_failed_is_not_run(made: dict[str, object]) -> None:
    context, said = launch(root=patched("0.19.2")), list[str]()
    made |= {"a": "fine", "b": "fine", "c": NotApplicable("nothing to say")}
    assert states(context) == (True, ["a ok", "b ok", "c not-applicable"])
    made["a"] = Refused([WRONG, WRONG])
    expected = ["a failed some-error", "a failed some-error", "b not-run", "c not-applicable"]
    assert states(context, said) == (False, expected)
    assert said == ["a", "c"], "what is not run is not announced"
    assert preflight.examine(context).failures[0].error.render() == WRONG.render()


def command(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cppmega", "preflight", *words],
        env={**launch().environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        timeout=60,
    )


def test_the_command_says_state_name_reason_and_next_command(tmp_path: Path) -> None:
    done = command("smoke_cpu", "--megatron", str(tmp_path))
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["failed", "one_root", "no-megatron"]
    assert [line.split()[0] for line in lines[1:4]] == ["what:", "why:", "next:"]
    assert "not-run" in done.stdout and "preflight: one_root" in done.stderr
    answer = json.loads(command("smoke_cpu", "--megatron", str(tmp_path), "--json").stdout)
    assert answer["megatron"] is None and not answer["ok"]
    assert answer["checks"][0]["name"] == "no-megatron"


def test_wrong_usage() -> None:
    assert command("smoke_cpi").returncode == 1
    assert "smoke_cpu" in command("smoke_cpi").stderr
    assert command("--set", "lr=1").returncode == 2


@pytest.mark.parametrize("line", ["smoke_cpu -- {}", "smoke_cpu {}", "--json smoke_cpu {}"])
def test_the_words_of_the_launch_line_need_no_dashes(
    monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    class AskedError(Exception):
        pass

    def examine(context: Context, say: object) -> None:
        raise AskedError(context.arguments)

    monkeypatch.setattr(preflight, "examine", examine)
    words = ["--data", "x", "--save", "y", "--exit-interval", "3"]
    with pytest.raises(AskedError) as asked:
        cli.cli.main(["preflight", *line.format(" ".join(words)).split()], standalone_mode=False)
    assert asked.value.args == (tuple(words),)
