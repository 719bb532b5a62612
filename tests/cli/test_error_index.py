"""The index of errors holds every error that the code can raise, in the words it is raised with."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from cppmega.cli import error_index
from cppmega.cli.main import main
from tests.support import REPOSITORY

SOURCES = [
    *(REPOSITORY / "cppmega").rglob("*.py"),
    *(REPOSITORY / "upstream_patches").rglob("*.py"),
]
NAMED = re.compile(r"Error\(\s*\"([a-z0-9-]+)\"")
DOCUMENTED = re.compile(r"`([a-z0-9]+(?:-[a-z0-9]+)+)`")
PASSING_ON = {
    "authoring/laws.py": {"'law-' + name.replace(' ', '-')"},
    "rules/rule.py": {"self.concerns", "self.name or name"},  # those of rules
    "data/corpus.py": {"name"},  # data-unfinished or data-not-found
    "guard/agreement.py": {"first.name"},  # of another rank's error
    "guard/modules.py": {"first.name"},
    "overlay/verbs.py": {"f'patch-{verdict.state}'"},
    "preflight/checks/patches.py": {"f'patch-{first.state}'"},
    "preflight/findings.py": {"self.name"},
    "rewriting/rewrite.py": {
        "'target-ambiguous' if found else 'target-absent'",
        "error.name",
    },
}
"""The names of errors that are not one literal: those of other errors, and those composed here."""


@cache
def errors() -> error_index.Index:
    return error_index.index()


@cache
def nodes(path: Path) -> list[ast.AST]:
    """The functions, classes and calls of a file."""
    kinds = ast.FunctionDef | ast.ClassDef | ast.Call
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]


def constructions(path: Path) -> list[ast.Call]:
    calls = (node for node in nodes(path) if isinstance(node, ast.Call))
    return [
        call
        for call in calls
        if isinstance(call.func, ast.Name)
        and call.func.id.endswith("Error")
        and len(call.args) == 4
    ]


def test_every_error_that_is_named_in_the_source_is_in_the_index() -> None:
    named = {name for path in SOURCES for name in NAMED.findall(path.read_text())}
    assert len(named) > 250
    assert named - errors().keys() == {"law-"}  # the beginning of a composed name


def test_every_error_that_a_docstring_promises_is_in_the_index() -> None:
    promised = {
        name
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef)
        for raises in re.findall(r"CppmegaError: (.*(?:\n {8,}.*)*)", ast.get_docstring(node) or "")
        for name in DOCUMENTED.findall(raises)
    }
    assert len(promised) > 100
    assert [name for name in sorted(promised) if not error_index.look_up(name, errors())] == []


def test_every_name_that_is_not_a_literal_is_known_to_this_test() -> None:
    """A new way to name an error must be one that the index understands."""
    found: dict[str, set[str]] = {}
    for path in SOURCES:
        for call in constructions(path):
            if not isinstance(call.args[0], ast.Constant):
                place = str(path.relative_to(REPOSITORY / "cppmega"))
                found.setdefault(place, set()).add(ast.unparse(call.args[0]))
    assert found == PASSING_ON
    composed = {"law-<name>", "patch-<state>", "target-ambiguous", "target-absent"}
    assert composed | {"data-unfinished", "data-not-found"} <= errors().keys()


def test_every_error_is_built_from_four_parts_in_their_order() -> None:
    """The index reads nothing else; a subclass that words itself is read in its constructor."""
    classes = {
        node.name
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.ClassDef) and "CppmegaError" in map(ast.unparse, node.bases)
    }
    otherwise = {
        call.func.id
        for path in SOURCES
        for call in nodes(path)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id in {"CppmegaError", *classes}
        and (len(call.args) != 4 or call.keywords)
    }
    assert len(classes) > 5 and otherwise == {"EditMismatchError"}
    assert "edit-mismatch" in errors()


def test_every_cause_has_its_parts_in_words() -> None:
    for name, causes in errors().items():
        assert causes, name
        for cause in causes:
            for part in (cause.what, cause.why, *cause.next):
                assert part.strip(), name
                assert all(re.fullmatch(r"<[\w |]+>", one) for one in re.findall("<.*?>", part))


_DESTROYS = re.compile(
    r"\bgit\b[^;]* (?:checkout|reset|clean|restore)\b|\bre-?install\b"
    r"|\b(?:rm|remove|delete|overwrite|unpack)\b"
)
_SAVES = re.compile(r"\b(?:cp|mv|save|move)\b")
_HARMLESS = (
    *("from PYTHONPATH", "from the other's `after`", "from sys.meta_path", "remove the link"),
    *("remove it with `cppmega revert", "remove stale locks", "reinstall it for this torch"),
    *("never a checkpoint without inspecting it", "rm <cached>", "rm <foreign>"),
)
"""Remedies that take away what a machine made, or a setting."""


def test_no_remedy_destroys_work_before_it_is_saved() -> None:
    """An edit that is restored away, or a folder that is removed, may be the only copy."""
    checked = 0
    for name, causes in errors().items():
        for remedy in (remedy for cause in causes for remedy in cause.next):
            destroys = _DESTROYS.search(remedy)
            if destroys and not any(words in remedy for words in _HARMLESS):
                saves = _SAVES.search(remedy)
                assert saves and saves.start() < destroys.start(), f"{name}: {remedy}"
                checked += 1
    assert checked >= 4


WRONG = (
    ("apply", "--megatron", "/nowhere"),
    ("apply", "--patches", "/nowhere"),
    ("diff", "mtp_roll", "--megatron", "/nowhere"),
    ("drift", "nothing", "else"),
    ("explain", "mtp_roll"),
    ("explain", "not-an-error"),
    ("launch", "no_recipe"),
    ("launch", "smoke_cpu", "--set", "x"),
    ("logs", "nothing", "--runs", "/nowhere"),
    ("new", "Not-A-Name"),
    ("preflight", "smoke_cpu", "--set", "hidden_sise=3"),
)


@pytest.mark.parametrize("command", WRONG, ids=" ".join)
def test_an_error_is_explained_in_the_words_it_was_raised_with(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(command)
    said = re.search(
        r"error: (\S+)\n  what: (.*)\n  why:  (.*)\n  next: (.*)", capsys.readouterr().err
    )
    assert said is not None
    name, what, why, cure = said.groups()
    assert any(
        fits(cause.what, what)
        and fits(cause.why, why)
        and any(fits(one, cure) for one in cause.next)
        for cause in error_index.look_up(name, errors())
    ), said[0]


def fits(template: str, text: str) -> bool:
    """Whether a run can have filled a template to a text; a suggestion may follow it."""
    pattern = ".*".join(map(re.escape, re.split("<.*?>", template)))
    return re.fullmatch(pattern + "( Did you mean .*)?", text) is not None


def test_explain_prints_the_cause_and_the_cure(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("data-not-found", "stopped", "patch-drifted"):
        with pytest.raises(SystemExit) as done:
            main(["explain", name])
        assert not done.value.code
        printed = capsys.readouterr().out
        for cause in error_index.look_up(name, errors()):
            assert cause.what in printed and cause.why in printed and cause.next[0] in printed


OWN = '''
from cppmega.errors import CppmegaError

LIMIT = 3


class Own(CppmegaError):
    """An error of a user's page."""


def check(count, path):
    if count > LIMIT:
        raise refused(f"{count} of {path.name}")
    kept = "nothing"
    if path:
        kept = f"{path}"
    raise Own("own-error", f"It kept {kept}.", "It matters.", "a" if path else "b")


def refused(what, cure="do less"):
    return CppmegaError("own-refusal", f"Too much: {what}.", f"The limit is {LIMIT}.", cure)
'''


def test_the_errors_of_a_users_catalogue_are_explained_too(tmp_path: Path) -> None:
    (tmp_path / "page.py").write_text(OWN)
    found = error_index.index([tmp_path])
    (refusal,) = found["own-refusal"]
    assert refusal.what == "Too much: <count> of <path>."
    assert refusal.why == "The limit is 3." and refusal.next == ("do less",)
    assert [cause.what for cause in found["own-error"]] == ["It kept <path>.", "It kept nothing."]
    assert {cause.next for cause in found["own-error"]} == {("a", "b")}
    assert found.keys() - errors().keys() == {"own-refusal", "own-error"}


def test_a_page_that_cannot_be_read_is_left_out_of_what_others_raise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "page.py").write_text("def (")
    with pytest.raises(SystemExit) as done:
        main(["explain", "own-error", "--patches", str(tmp_path)])
    said = capsys.readouterr().err
    assert done.value.code == 1 and "page is left out" in said and "error: unknown-error" in said
