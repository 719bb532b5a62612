"""The preflight as a whole: order, prerequisites, answers, the command."""

from __future__ import annotations

import importlib
import json
import os
import pty
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cppmega.cli import findings as cli_findings
from cppmega.cli.main import cli
from cppmega.errors import CppmegaError
from cppmega.host.configuration import Configuration
from cppmega.preflight import checks
from cppmega.preflight import examine as preflight
from cppmega.preflight.context import Context
from cppmega.preflight.findings import Finding, NotApplicable, NotRun, Problems, Remark
from cppmega.recipe.run_options import RunOptions
from tests.preflight.contexts import launch
from tests.support import PATIENCE, REPOSITORY, patched, shown

pytestmark = pytest.mark.slow

WRONG = CppmegaError("some-error", "What.", "Why.", "next")
PATH = {**launch().environ, "PYTHONPATH": str(REPOSITORY)}


def test_every_check_is_in_the_order_once_and_behind_what_it_needs() -> None:
    files = {
        path.stem for path in (REPOSITORY / "cppmega" / "preflight" / "checks").glob("[a-z]*.py")
    }
    assert sorted(checks.ORDER) == sorted(files)
    for at, name in enumerate(checks.ORDER):
        module = importlib.import_module(f"cppmega.preflight.checks.{name}")
        assert set(getattr(module, "AFTER", ())) <= set(checks.ORDER[:at]), name
        assert module.__doc__ and module.check.__doc__, name


def test_every_check_is_broken_and_left_healthy_by_some_test() -> None:
    texts = [path.read_text() for path in (REPOSITORY / "tests" / "preflight").glob("test_*.py")]
    for name in checks.ORDER:
        broken = [f'refuses("{name}"' in "".join(text.split()) for text in texts]
        assert any(broken) or name == "kernel_parity", name  # it needs a GPU: its verdict is tested


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Checks by name, in this order, each with what it does; `b` stands on `a`."""
    found: dict[str, object] = {}

    def module(path: str) -> object:
        name = path.rpartition(".")[2]

        def check(context: Context) -> Problems:
            answer = found[name]
            if isinstance(answer, list):
                yield from answer
            elif isinstance(answer, Exception):
                raise answer
            return str(answer)

        apart = ("some-remark",)
        return SimpleNamespace(AFTER=("a",) if name == "b" else (), APART=apart, check=check)

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
    made["a"] = [WRONG, WRONG]
    expected = ["a failed some-error", "a failed some-error", "b not-run", "c not-applicable"]
    assert states(context, said) == (False, expected)
    assert said == ["a", "c"], "what is not run is not announced"
    assert preflight.examine(context).failures[0].error.render() == WRONG.render()


def test_an_error_apart_hides_no_answer(made: dict[str, object]) -> None:
    context = launch(root=patched("0.19.2"))
    made |= {"a": [CppmegaError("some-remark", "a", "b", "c")], "b": [WRONG]}
    made["c"] = NotRun("d does not hold")
    expected = ["a failed some-remark", "b failed some-error", "c not-run"]
    assert states(context) == (False, expected)
    assert context.unsound == {"b", "c"}


def test_what_the_configuration_skips_is_remarked_and_not_run(made: dict[str, object]) -> None:
    context = launch(root=patched("0.19.2"))
    made |= {"a": "fine", "b": "fine", "c": [WRONG]}
    context.configuration = Configuration(skip_checks={"c": "the quota is ours"}, file="x.toml")
    found = preflight.examine(context)
    assert found.ok and found.findings[-1].what == "skipped by x.toml: the quota is ours"
    assert isinstance(found.findings[-1].what, Remark)
    context.configuration = Configuration(skip_checks={"d": "a typo"})
    with pytest.raises(CppmegaError, match="unknown-check"):
        preflight.examine(context)


def command(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cppmega", "preflight", *words],
        env=PATH,
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        timeout=PATIENCE,
    )


def test_the_command_says_state_name_reason_and_next_command(tmp_path: Path) -> None:
    done = command("smoke_cpu", "--megatron", str(tmp_path))
    assert done.returncode == 1
    held, others, waiting, *failed = done.stdout.splitlines()
    assert held.split()[0] == "ok" and "debug_variables, gates" in held
    assert others.startswith("not-applicable ") and others.endswith(
        "concern this launch (-v lists them)"
    )
    assert waiting.split()[0] == "not-run" and ", patches, " in waiting
    assert failed[0].split() == ["failed", "one_root", "no-megatron"]
    assert [line.split()[0] for line in failed[1:4]] == ["what:", "why:", "next:"]
    assert done.stderr == ""
    answer = json.loads(command("smoke_cpu", "--megatron", str(tmp_path), "--json").stdout)
    assert answer["megatron"] is None and not answer["ok"]
    assert answer["checks"][0]["name"] == "no-megatron"


def finding(check: str, state: Any, what: str) -> Finding:
    return Finding(check, state, what=what)


def test_what_is_printed_in_short_and_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    """Thirty checks that do not concern a launch are one line; a remark is not lost among them."""
    rows = [finding(f"c{number}", "not-applicable", "no GPU") for number in range(30)]
    rows += [Finding("bad", "failed", "some-error", "What.", "Why.", "next")]
    rows += [Finding("bad", "failed", "some-error", "And what.", "Why.", "next")]
    rows += [finding("a", "ok", "fine"), finding("mock", "ok", Remark("MOCK DATA"))]
    rows += [finding("late", "not-run", "bad does not hold")]
    cli_findings.print_findings(rows)
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert lines[:5] == [
        ["ok", "2 checks hold: a, mock"],
        ["not-applicable", "30 checks do not concern this launch (-v lists them)"],
        ["not-run", "1 check waits for those that fail: late"],
        ["ok", "mock  MOCK DATA"],
        ["failed", "bad   some-error"],
    ]
    assert [line[0] for line in lines[5:]] == ["what:", "And", "why:", "next:"]
    cli_findings.print_findings(rows, verbose=True)
    full = capsys.readouterr().out.splitlines()
    assert len(full) == 35 + 6 and "c7    no GPU" in full[7]
    assert [line.split()[0] for line in full[30:34]] == ["failed", "what:", "why:", "next:"]


def test_progress_is_one_line_of_a_terminal_and_nothing_in_a_pipe() -> None:
    """Nor is work within the work shown, or a message written behind a name."""
    script = (
        "from cppmega.host import console\n"
        "with console.Progress('preflight', 2) as progress:\n"
        "    progress('one')\n"
        "    for _ in console.each('inner', 'ab'): pass\n"
        "    progress('two')\n"
        "    console.numbered(3, 10)('said')\n"
    )
    command = [sys.executable, "-c", script]
    piped = subprocess.run(command, env=PATH, stderr=subprocess.PIPE, text=True, check=True)
    assert piped.stderr == "[ 3/10] said\n"
    outer, inner = pty.openpty()
    subprocess.run(command, env=PATH, stderr=inner, check=True)
    os.close(inner)
    start = "\r\033[K"
    assert shown(outer).decode() == (
        f"{start}preflight: [1/2] one{start}preflight: [2/2] two{start}[ 3/10] said\r\n{start}"
    )


def test_nobody_reads_the_progress_or_the_whole_answer(tmp_path: Path) -> None:
    """Neither ends the command or hides its exit status; a closed stream is like /dev/null."""
    words = shlex.join([sys.executable, "-m", "cppmega", "preflight", "--megatron", str(tmp_path)])
    for line in (f"{words} smoke_cpu | true", f"{words} smoke_cpu 2>&1 >out | true"):
        done = subprocess.run(
            ["bash", "-c", f"{line}; echo ${{PIPESTATUS[0]}}"], **_piped(tmp_path)
        )
        assert done.stdout == "1\n" and "Exception" not in done.stderr, (line, done)
    assert "no-megatron" in (tmp_path / "out").read_text()
    done = subprocess.run(["bash", "-c", f"{words} smoke_cpu >&- 2>&- <&-"], **_piped(tmp_path))
    assert done.returncode == 1


def _piped(folder: Path) -> dict[str, Any]:
    return {"env": PATH, "cwd": folder, "capture_output": True, "text": True, "timeout": PATIENCE}


def test_wrong_usage() -> None:
    assert command("smoke_cpi").returncode == 1
    assert "smoke_cpu" in command("smoke_cpi").stderr
    assert command("--set", "lr=1").returncode == 2


@pytest.mark.parametrize("line", ["smoke_cpu {}", "--json smoke_cpu {}"])
def test_the_words_of_the_launch_line_need_no_dashes(
    monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    class AskedError(Exception):
        pass

    def examine(context: Context, say: object) -> None:
        raise AskedError(context.options)

    monkeypatch.setattr(preflight, "examine", examine)
    words = ["--data", "x", "--save", "y", "--exit-interval", "3"]
    with pytest.raises(AskedError) as asked:
        cli.main(["preflight", *line.format(" ".join(words)).split()], standalone_mode=False)
    options = RunOptions(data=("x",), save=Path("y"), exit_interval=3)
    assert asked.value.args == (options,)
