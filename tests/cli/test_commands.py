"""The console: one object of JSON on every exit, stable exit codes, no heavy import."""

from __future__ import annotations

import json
import math
import os
import pty
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from cppmega.authoring import drift_result
from cppmega.cli.main import cli, main
from cppmega.errors import CppmegaError
from cppmega.overlay import verdict
from cppmega.preflight.checks import ORDER
from tests.support import VERSIONS, copy, shown, speed
from tests.support.lab import A, B, Lab
from tests.support.made import snapshot


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    return Lab(tmp_path, monkeypatch)


def console(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a command, in this process."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as done:
        main(arguments)
    out, err = capsys.readouterr()
    code = done.value.code
    return (code if isinstance(code, int) else 0), out, err


_ENVELOPE = {"schema", "megatron", "digest", "ok", "patches"}
_VERDICT = {"name", "kind", "state", "proof", "target", "detail"}


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit status and the one JSON object."""
    code, out, _ = console(capsys, *arguments)
    value = json.loads(out)
    assert set(value) >= _ENVELOPE and value["schema"] == 1
    assert value["ok"] == (code == 0)
    for row in value["patches"]:
        assert arguments[0] == "list" or set(row) >= _VERDICT
    if value["megatron"] is not None:
        assert set(value["megatron"]) == {"version", "root"}
    if "error" in value:
        assert set(value["error"]) == {"name", "what", "why", "next"}
        assert all(value["error"].values())
    return code, value


# -- answers ----------------------------------------------------------------------------------


def test_json_through_a_life(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command, in every phase, with the exit status that belongs to it."""
    lab.wheel("0.9")
    lab.page()
    root = ("--megatron", str(lab.root), "--json")
    code, value = answer(capsys, "status", *root)
    assert code == 1 and value["patches"][0]["state"] == "pending" and value["digest"] == ""
    code, value = answer(capsys, "apply", "--check", *root)
    assert code == 1 and value["changed"] == [A]
    code, value = answer(capsys, "apply", *root)
    assert code == 0 and value["changed"] == [A]
    assert value["megatron"] == {"version": "0.9", "root": str(lab.root)}
    (row,) = value["patches"]
    assert (row["name"], row["kind"], row["state"]) == ("page", "source", "applied")
    assert row["proof"] == "unverified" and row["target"] == f"{A}:double"
    digest = value["digest"]
    assert len(digest) == 16
    for verb in ("apply", "status"):
        code, value = answer(capsys, verb, *root)
        assert code == 0 and value["digest"] == digest and value["changed"] == []
    assert answer(capsys, "apply", "--check", *root)[0] == 0
    code, value = answer(capsys, "diff", *root)
    assert code == 0 and "+    return 2 * x" in value["diff"]
    assert answer(capsys, "list", "--json")[1]["patches"][0]["name"] == "page"
    code, value = answer(capsys, "revert", "page", *root)
    assert code == 0 and value["patches"][0]["state"] == "off"
    answer(capsys, "apply", *root)
    code, value = answer(capsys, "revert", *root)
    assert code == 0 and value["changed"] == [A]
    lab.pristine()


def test_the_program_alone_shows_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    text = capsys.readouterr()
    assert ended.value.code == 0 and "apply" in text.out and not text.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--json",),
        ("nonsense", "--json"),
        ("status", "--jsno", "--json"),
        ("diff", "a", "b", "--json"),
        ("explain", "--json"),
    ],
)
def test_wrong_usage_is_two(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    """Also a script with a typing mistake reads an object, and not a usage text."""
    code, value = answer(capsys, *arguments)
    assert code == 2 and value["error"]["name"] == "wrong-usage"


@pytest.mark.parametrize("as_json", [True, False])
def test_failure_says_what_why_and_next(
    lab: Lab, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    lab.wheel()
    lab.page()
    arguments = ["revert", "pag", "--megatron", str(lab.root)]
    if as_json:
        code, value = answer(capsys, *arguments, "--json")
        assert value["error"]["name"] == "unknown-page" and "page" in value["error"]["what"]
    else:
        code, out, err = console(capsys, *arguments)
        assert out == ""
        assert err.startswith("error: unknown-page\n  what: ")
        assert "\n  why:  " in err and "\n  next: cppmega list" in err
    assert code == 1


def test_every_word_that_a_command_prints_is_explained(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    """Words of status and drift, and the names of the preflight's checks."""
    for words in (verdict.MEANING, verdict.PROOFS, drift_result.MEANING):
        for word, meaning in words.items():
            assert meaning in console(capsys, "explain", word)[1]
    for check in ORDER:
        code, out, _ = console(capsys, "explain", check)
        assert code == 0 and out.startswith(f"{check}, a check of cppmega preflight: ")


def test_a_word_that_nothing_has_gets_the_nearest(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    code, value, err = console(capsys, "explain", "drifte")
    assert code == 1 and value == "" and "Did you mean drifted?" in err


def test_state_word_first_then_name_then_detail(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.wheel()
    lab.page("one")
    lab.page("two", f"{B}:single", 'replacing("x", "x + 1", times=1)')
    lab.change(B, b"return x\n", b"return x  # by hand\n")
    code, out, err = console(capsys, "apply", "--megatron", str(lab.root))
    assert code == 1
    lines = [line.split() for line in out.splitlines()]
    assert lines[0][:2] == ["pending", "one"] and lines[1][:2] == ["foreign", "two"]
    assert "next: cp -r " in out and "megatron.edited && pip install --force-reinstall" in out
    assert err.rstrip().endswith(
        "nothing was changed: two cannot be applied; to train without: python -m "
        f"cppmega.apply_patches --megatron {lab.root} --without two"
    )
    lab.page("three", f"{B}:single", 'replacing("x", "x + 2", times=1)')
    _, out, err = console(capsys, "apply", "--megatron", str(lab.root), "--only", "two")
    assert "--without" not in err and "two cannot be applied" in err
    code, out, err = console(capsys, "apply", "--megatron", str(lab.root))
    assert code == 1 and out.count("next: cp -r ") == 1, "one refusal, once"
    assert out.count("outside cppmega") == out.count("differs from") == 1
    assert [line.split()[:2] for line in out.splitlines()[:3]] == [
        ["pending", "one"],
        ["foreign", "three"],
        ["foreign", "two"],
    ]
    assert err.rstrip().endswith("--without three --without two")


def test_unexpected_error_is_two_and_json(
    lab: Lab, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug of ours: still one object on stdout, and the traceback on stderr."""
    from cppmega.overlay import plan

    lab.wheel()
    lab.page()
    monkeypatch.setattr(plan, "in_order", lambda pages: 1 // 0)
    code, value = answer(capsys, "status", "--json", "--megatron", str(lab.root))
    assert code == 2 and value["error"]["name"] == "internal-error"
    code, out, err = console(capsys, "status", "--megatron", str(lab.root))
    assert code == 2 and out == "" and "Traceback" in err and "ZeroDivisionError" in err


def test_interrupt_is_130_and_json(
    lab: Lab, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cppmega.overlay import plan

    def interrupt(pages: object) -> None:
        raise KeyboardInterrupt

    lab.wheel()
    lab.page()
    monkeypatch.setattr(plan, "in_order", interrupt)
    code, value = answer(capsys, "apply", "--json", "--megatron", str(lab.root))
    assert code == 130 and value["error"]["name"] == "stopped"


def test_errors_have_kebab_names_and_cross_processes() -> None:
    import pickle

    error = CppmegaError("some-name", "what", "why", "next")
    assert pickle.loads(pickle.dumps(error)).as_json() == error.as_json()
    with pytest.raises(ValueError):
        CppmegaError("Some Name", "what", "why", "next")


# -- pages that are not right -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "name", "said"),
    [
        (("What: something\n", ""), "bad-page", "lacks What"),
        (("Upstream: Not sent: a test", "Upstream: no"), "bad-page", "neither a link"),
        (("Numerics: none (bitwise)", "Numerics: fine"), "bad-page", "Numerics"),
        (("Why: a test needs it\n", ""), "bad-page", "lacks Why"),
        (("reached='forward'", "reached='sometimes'"), "bad-page", "sometimes"),
        (("reached='forward'", "reached='forward', gate='TWICE'"), "bad-page", "CPPMEGA_"),
        (("pins={", "mark='', pins={"), "bad-page", "no edit carries a mark"),
        (("pins={", "mark='', kind='method-wrap', pins={"), "bad-page", "kind source only"),
        (("def verify", "def verfy"), "bad-page", "no verify()"),
        (("PATCH = ", "PATH = "), "bad-page", "no PATCH"),
        (("'1.0': '", "'1.0': 'x"), "bad-page", "is not a fingerprint"),
        (("from cppmega.page", "import torch\nfrom cppmega.page"), "bad-page", "imports torch"),
        (("PATCH = ", "raise ValueError('oops')\nPATCH = "), "page-failed", "oops"),
        (("PATCH = ", "raise SystemExit(0)\nPATCH = "), "page-failed", "SystemExit"),
        (("def verify", "def verify(:"), "page-failed", "SyntaxError"),
        (("reached='forward'", "reached='forward', after=('nobody',)"), "unknown-page", "nobody"),
        (("return False", "return source.nothing"), "page-failed", "fixed_upstream"),
    ],
)
def test_broken_page_is_named(
    lab: Lab,
    capsys: pytest.CaptureFixture[str],
    change: tuple[str, str],
    name: str,
    said: str,
) -> None:
    """A page that does not say what it is stops everything: it is never skipped in silence."""
    lab.wheel()
    page = lab.page(pins={"1.0": "0" * 16})
    text = page.read_text()
    assert text.count(change[0]) >= 1
    page.write_text(text.replace(*change, 1))
    if "import torch" in change[1]:  # only looked for, not imported: it may not be there
        page.write_text(page.read_text().replace("import torch", "if 0: pass\nimport torch"))
        sys.modules.setdefault("torch", sys)
    code, value = answer(capsys, "apply", "--json", "--megatron", str(lab.root))
    if sys.modules.get("torch") is sys:
        del sys.modules["torch"]
    assert code == 1 and value["error"]["name"] == name
    assert said in value["error"]["what"]
    lab.pristine()


def test_revert_needs_no_catalogue(lab: Lab, tmp_path: Path, capsys: Any) -> None:
    """A team's folder is gone, a page is broken: what is on disk can still be taken back."""
    lab.wheel()
    lab.page()
    team = tmp_path / "team"
    lab.page("theirs", f"{B}:single", 'replacing("x", "x + 1", times=1)', folder=team)
    root = ("--megatron", str(lab.root), "--json")
    assert answer(capsys, "apply", "--patches", str(team), *root)[0] == 0
    shutil.rmtree(team)
    (lab.pages / "page.py").write_text("def (")
    for verb in ("apply", "status"):
        assert answer(capsys, verb, *root)[0] == 1
    assert answer(capsys, "revert", *root)[0] == 0
    lab.pristine()


def test_catalogue_that_is_not_there(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    lab.wheel()
    code, value = answer(
        capsys, "apply", "--patches", "nowhere", "--json", "--megatron", str(lab.root)
    )
    assert code == 1 and value["error"]["name"] == "no-catalogue"


def test_catalogue_without_pages_removes_nothing(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistyped folder, or the one above: the patches that a team applied stay in the tree."""
    lab.wheel()
    (tmp_path / "checkout").mkdir()
    team = tmp_path / "checkout" / "patches"
    lab.page("theirs", f"{B}:single", 'replacing("x", "x + 1", times=1)', folder=team)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "_shared.py").touch()
    root = ("--megatron", str(lab.root), "--json")
    assert answer(capsys, "apply", "--patches", str(team), *root)[0] == 0
    before = snapshot(lab.root)
    for folder, hint in ((tmp_path / "empty", "revert"), (team.parent, f"--patches {team}")):
        for verb in ("apply", "status", "diff"):
            code, value = answer(capsys, verb, "--patches", str(folder), *root)
            assert code == 1 and value["error"]["name"] == "empty-catalogue"
            assert str(folder) in value["error"]["what"] and hint in value["error"]["next"]
    assert snapshot(lab.root) == before
    lab.applied("theirs")


def test_a_further_catalogue_adds_to_those_that_were_applied(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.wheel()
    first, second = tmp_path / "first", tmp_path / "second"
    lab.page("theirs", f"{B}:single", 'replacing("x", "x + 1", times=1)', folder=first)
    lab.page("others", f"{A}:Layer.backward", 'replacing("g", "g + 1", times=1)', folder=second)
    root = ("--megatron", str(lab.root), "--json")
    for folder in (first, second):
        assert answer(capsys, "apply", "--patches", str(folder), *root)[0] == 0
    lab.applied("theirs", "others")
    shutil.rmtree(first)
    code, value = answer(capsys, "apply", *root)
    assert code == 1 and f"--forget {first}" in value["error"]["next"]
    assert answer(capsys, "apply", "--forget", str(first), *root)[0] == 0
    lab.applied("others")


def test_wrong_root_says_what_a_root_is(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    lab.wheel()
    for root in (lab.root / "megatron", lab.root / "nowhere", lab.root / A):
        code, value = answer(capsys, "status", "--json", "--megatron", str(root))
        assert code == 1 and value["error"]["name"] == "no-megatron"
        assert "holds megatron/" in value["error"]["next"]


def test_relative_root(lab: Lab, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.wheel()
    lab.page()
    monkeypatch.chdir(lab.root)
    assert answer(capsys, "apply", "--json", "--megatron", ".")[0] == 0
    lab.applied("page")


def test_typo_in_the_environment(
    lab: Lab, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.wheel()
    lab.page(gate="CPPMEGA_TWICE")
    monkeypatch.setenv("CPPMEGA_TWIEC", "1")
    for verb in ("apply", "status"):
        code, value = answer(capsys, verb, "--json", "--megatron", str(lab.root))
        assert code == 1 and value["error"]["name"] == "unknown-variable"
        assert "CPPMEGA_TWICE" in value["error"]["next"]


# -- as processes -------------------------------------------------------------------------------


def test_colour_only_on_a_terminal_and_never_against_no_color(lab: Lab) -> None:
    """A log file with escape codes in it cannot be searched."""
    lab.wheel()
    lab.page()
    seen = {}
    for name, more in (("terminal", {}), ("no colour", {"NO_COLOR": "1"})):
        master, slave = pty.openpty()
        with subprocess.Popen(
            lab.command("status", "--megatron", str(lab.root)),
            env=lab.environment(TERM="xterm", **more),
            stdout=slave,
            stderr=subprocess.PIPE,
        ) as process:
            os.close(slave)
            seen[name] = shown(master)
            process.communicate()
    seen["pipe"] = lab.run("status").stdout.encode()
    assert b"\033[33mpending" in seen["terminal"]
    assert b"\033" not in seen["no colour"] and b"\033" not in seen["pipe"]


def test_reader_that_stops_reading(lab: Lab) -> None:
    """`cppmega diff | head -1` is no error."""
    lab.wheel()
    lab.page()
    command = shlex.join(lab.command("diff", "--megatron", str(lab.root)))
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | head -1"],
        env=lab.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("---") and done.stderr == ""


def test_every_command_is_in_a_section_of_the_help() -> None:
    named = cli.list_commands(click.Context(cli))
    assert sorted(named) == sorted(cli.commands)


_HEAVY = ("libcst", "torch", "rich", "psutil", "pyflakes", "megatron", "wrapt", "numpy")
_SEEN = f"""
import atexit
atexit.register(lambda: print([m for m in {_HEAVY!r} if m in sys.modules], file=sys.stderr))
"""


def test_nothing_heavy_is_imported(lab: Lab) -> None:
    """Looking must work in a broken environment, and fast."""
    lab.wheel()
    lab.page()
    assert "libcst" in lab.run("apply", prelude=_SEEN).stderr
    for arguments in (["status"], ["apply"], ["apply", "--check"], ["list"], ["explain", "page"]):
        done = lab.run(*arguments, prelude=_SEEN)
        assert done.returncode == 0
        assert done.stderr.splitlines()[-1] == "[]", arguments
    assert "torch" not in lab.run("diff", prelude=_SEEN).stderr
    assert lab.run("revert", prelude=_SEEN).stderr.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_speed_on_the_real_tree(tmp_path: Path) -> None:
    """A cold apply of every page in 4 s, a second one and status in 0.4 s, as whole processes."""
    root = copy(VERSIONS[-1], tmp_path / "site")
    console = ("-m", "cppmega")
    tree = ("--megatron", str(root))
    best = [math.inf] * 3
    for _ in range(8):  # the least of several measurements is what others disturbed least
        before = speed.slowness()
        times = [speed.seconds(*console, verb, *tree) for verb in ("apply", "apply", "status")]
        slow = (before + speed.slowness()) / 2
        best = [min(pair) for pair in zip(best, (one / slow for one in times), strict=True)]
        if best[0] <= 4 and max(best[1:]) <= 0.4:
            return
        speed.seconds(*console, "revert", *tree)
    raise AssertionError(best)
