"""Code of pages and recipes: whatever it does, the command fails by name and nothing is written."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from cppmega.catalogue import gates
from cppmega.errors import CppmegaError
from cppmega.recipe import index as recipes_index
from tests.support.lab import Lab
from tests.support.made import snapshot


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    lab = Lab(tmp_path, monkeypatch)
    lab.wheel()
    return lab


def refused(lab: Lab) -> CppmegaError:
    """Apply, which must raise and write nothing."""
    before = snapshot(lab.root)
    with pytest.raises(CppmegaError) as caught:
        lab.apply()
    assert snapshot(lab.root) == before
    return caught.value


ACTS = {
    "sys.exit": ("import sys; sys.exit(0)", "SystemExit"),
    "base exception": ("class Odd(BaseException): pass\nraise Odd('x')", "raises Odd"),
    "os._exit": ("import os; os._exit(0)", "ends the process (os._exit)"),
    "os.abort": ("import os; os.abort()", "ends the process (os.abort)"),
    "kill": ("import os; os.kill(os.getpid(), 9)", "sends a signal (os.kill)"),
    "exec": ("import os; os.execvp('true', ['true'])", "starts a process (os.exec)"),
    "fork": ("import os; os.fork()", "starts a process (os.fork)"),
    "subprocess": ("import subprocess; subprocess.run(['true'])", "starts a process"),
    "system": ("import os; os.system('true')", "starts a process (os.system)"),
    "swallowed": (
        "import os\ntry: os.system('true')\nexcept BaseException: pass",
        "starts a process (os.system)",
    ),
    "write": ("open('left.txt', 'w').write('x')", "writes the file left.txt"),
    "remove": ("import os; os.remove('left.txt')", "changes the file left.txt (os.remove)"),
    "network": (
        "import socket\nwith socket.socket() as one: one.connect(('127.0.0.1', 9))",
        "uses the network",
    ),
    "chdir": ("import os; os.chdir('/')", "changes the process (os.chdir)"),
    "environment": ("import os; os.environ['LEFT'] = '1'", "changes the environment (LEFT)"),
    "path": ("import sys; sys.path.insert(0, '/x')", "changes sys.path"),
}


def indented(code: str, by: str = "    ") -> str:
    return "".join(f"{by}{line}\n" for line in code.splitlines())


@pytest.fixture(params=ACTS)
def act(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, str]:
    """What the code does, and what must be said of it; afterwards the process is as before."""
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    handler = signal.getsignal(signal.SIGALRM)
    yield ACTS[request.param]
    assert list(sys.path) == before and "LEFT" not in os.environ
    assert signal.getsignal(signal.SIGALRM) is handler
    assert Path.cwd() == tmp_path and not Path("left.txt").exists()


def test_a_page_that_acts_when_it_is_loaded(lab: Lab, act: tuple[str, str]) -> None:
    code, said = act
    lab.page(code=code)
    error = refused(lab)
    assert error.name == "page-failed" and said in error.what


FEW = pytest.mark.parametrize(
    "act", ["sys.exit", "os._exit", "kill", "swallowed", "environment"], indirect=True
)


@FEW
def test_an_edit_that_acts(lab: Lab, act: tuple[str, str]) -> None:
    code, said = act
    body = f"def act(node):\n{indented(code)}    return replacing('x + x', '2 * x')(node)\n"
    lab.page(edit="act", code=body)
    error = refused(lab)
    assert error.name == "bad-edit" and said in error.what and "page" in error.what


@FEW
def test_a_question_that_acts(lab: Lab, act: tuple[str, str]) -> None:
    """`fixed_upstream` is asked where the text is unknown."""
    code, said = act
    lab.page(fixed="act()", pins={"1": "0" * 16}, code=f"def act():\n{indented(code)}")
    error = refused(lab)
    assert error.name == "page-failed" and said in error.what and "fixed_upstream" in error.what


@FEW
def test_a_recipe_that_acts(tmp_path: Path, act: tuple[str, str]) -> None:
    code, said = act
    own = tmp_path / "own.py"
    own.write_text(code)
    with pytest.raises(CppmegaError) as caught:
        recipes_index.load(str(own))
    assert caught.value.name == "recipe-broken" and said in caught.value.what


@pytest.mark.parametrize(
    ("when", "said"),
    [
        (lambda args: 1 / 0, "raises ZeroDivisionError"),
        (lambda args: sys.exit(0), "raises SystemExit"),
        (lambda args: os._exit(0), "ends the process"),
        (lambda args: "yes", "returns str"),
        (lambda args: None, "returns NoneType"),
    ],
)
def test_when_answers_or_is_an_error(when, said: str) -> None:
    with pytest.raises(CppmegaError) as caught:
        gates.wanted("page", when, SimpleNamespace())
    assert caught.value.name == "page-failed" and said in caught.value.what


def test_fixed_upstream_answers_true_or_false(lab: Lab) -> None:
    lab.page(fixed='"x + x"', pins={"1": "0" * 16})
    assert "returns str" in refused(lab).what


# -- what does not end --------------------------------------------------------------------------

_SLOW = """
from cppmega.host import load_file
from cppmega.rewriting import rewrite

def short(whole):
    def contained(failed, seconds=None):
        return whole(failed, 0.3 if failed("").name == "{0}" else seconds)
    return contained

load_file.contained = short(load_file.contained)
rewrite.contained = short(rewrite.contained)
"""
"""A short limit for what fails by that name; whatever comes before has all the time it needs."""
ENDLESS = {
    "sleep": "import time; time.sleep(600)",
    "loop": "while True: pass",
    "regex": "import re; re.match(r'(a+)+$', 'a' * 60 + 'b')",
}


def page_of(lab: Lab, code: str, where: str) -> None:
    if where == "load":
        lab.page(code=f"def act():\n{indented(code)}act()\n")
    else:
        lab.page(edit="act", code=f"def act(node):\n{indented(code)}    return node\n")


@pytest.mark.parametrize("where", ["load", "edit"])
@pytest.mark.parametrize("how", ENDLESS)
def test_code_that_does_not_end_is_interrupted(lab: Lab, how: str, where: str) -> None:
    page_of(lab, ENDLESS[how], where)
    before = snapshot(lab.root)
    name = "page-failed" if where == "load" else "bad-edit"
    done = lab.run("apply", "--json", prelude=_SLOW.format(name))
    assert done.returncode == 1
    error = json.loads(done.stdout)["error"]
    assert error["name"] == name
    assert "has not finished after 0.3 seconds" in error["what"]
    assert snapshot(lab.root) == before


def test_an_exit_that_was_kept_is_refused_later(lab: Lab) -> None:
    lab.page(edit="act", code="import os\nend = os._exit\ndef act(node):\n    end(0)\n")
    error = refused(lab)
    assert error.name == "bad-edit" and "ends the process" in error.what


@pytest.mark.parametrize("prefix", [False, True], ids=["beside", "PYTHONPYCACHEPREFIX"])
def test_bytecode_of_what_a_page_imports_is_written(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: bool
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "cache") if prefix else None)
    monkeypatch.delitem(sys.modules, "imported_by_a_page", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "imported_by_a_page.py").write_text("x = 1\n")
    lab.page(code="import imported_by_a_page")
    assert lab.apply().ok
    assert list(
        tmp_path.glob(f"{'cache' if prefix else '__pycache__'}/**/imported_by_a_page.*.pyc")
    )


def test_what_a_page_prints_is_not_the_answer(lab: Lab) -> None:
    lab.page(code="print('noise')")
    done = lab.run("apply", "--json")
    assert json.loads(done.stdout)["ok"] and "noise" in done.stderr


def test_a_page_may_load_a_recipe(lab: Lab) -> None:
    """Pages read sizes from shipped recipes; what is wrong with one has its own name."""
    lab.page(
        code="""
        from cppmega.errors import CppmegaError
        from cppmega.recipe.index import load
        load("smoke_cpu")
        """
    )
    assert lab.apply().ok
