"""No module but those of the rules, and the headers of pages, states what a run may be."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import cppmega
from cppmega.catalogue import loader as catalogue
from cppmega.rules import RULES, starts
from cppmega.rules import recipes as of_recipes
from cppmega.sizes.megatron_args import destination

PACKAGE = Path(cppmega.__file__).parent
CATALOGUE = catalogue.builtin_folder()
STATED = (*RULES, *of_recipes.RULES, *starts.RULES)
NAMES = {rule.name for rule in STATED if rule.name} | {"unsupported"}
NAMES -= {"bad-pattern", "dsa-index-sharing", "dsa-dense-loss", "checkpoint-of-another-model"}
NAMES -= {"package-missing", "training-not-in-wheel", "wrong-world-size", "already-trained"}
NAMES -= {"dsa-backend-declines", "not-supported"}
"""Texts that cannot be read, checkpoints when they are loaded, calls of a step, and commands that
start no recipe raise these, too."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    """All modules outside the rules, pages included."""
    for folder in (PACKAGE, CATALOGUE):
        for path in sorted(folder.rglob("*.py")):
            name = path.relative_to(folder).as_posix()
            if folder is CATALOGUE or not name.startswith("rules/"):
                yield name, ast.parse(path.read_text())


def calls(tree: ast.AST, *names: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            yield node


def test_the_error_of_a_rule_is_built_by_no_other_module() -> None:
    built = {
        (name, call.args[0].value)
        for name, tree in modules()
        for call in calls(tree, "CppmegaError", "UnsupportedError")
        if call.args and isinstance(call.args[0], ast.Constant)
    }
    assert not {(name, error) for name, error in built if error in NAMES}


def test_rules_are_stated_by_the_headers_of_pages_alone() -> None:
    stating = {name for name, tree in modules() if [*calls(tree, "Rule", "unsupported")]}
    pages = {Path(page.path).name for page in catalogue.load().values() if page.patch.rules}
    assert {Path(name).name for name in stating} == pages


def option_names() -> set[str]:
    """The arguments that questions of combinations read."""
    tree = ast.parse((PACKAGE / "rules" / "combinations.py").read_text())
    given = {destination(name) for rule in RULES if (name := rule.option).startswith("--")}
    read = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "run"
    }
    return (given | read) - {"recipe", "pages", "words", "saved", "trainer"}


def test_no_other_module_refuses_an_option_of_the_table() -> None:
    names = option_names()
    assert len(names) > 30
    found = set()
    for module, tree in modules():
        for node in ast.walk(tree):
            if not isinstance(node, ast.If):
                continue
            refused = any(
                [*calls(statement, "CppmegaError")]
                for statement in node.body
                if isinstance(statement, (ast.Raise, ast.Expr))
            )
            read = {
                each.attr if isinstance(each, ast.Attribute) else getattr(each, "value", "")
                for each in ast.walk(node.test)
                if isinstance(each, (ast.Attribute, ast.Constant))
            }
            if refused and names & read:
                found.add((module, *sorted(names & read)))
    assert not found
