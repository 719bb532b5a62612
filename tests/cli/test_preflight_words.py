"""Which words of `cppmega preflight` are the trainer's, and which are Megatron's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cppmega.cli import main
from cppmega.preflight import examine
from cppmega.preflight.context import Context
from cppmega.recipe.run_options import RunOptions
from cppmega.training import options as trainer_options

FLAGS = [flag for option in trainer_options._words.params for flag in option.opts if "--" in flag]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The launch that a command line asks about."""
    seen: list[Context] = []

    def examined(context: Context, progress: Any) -> Any:
        seen.append(context)
        return SimpleNamespace(findings=(), ok=True)

    def of(*words: str) -> Context:
        with pytest.raises(SystemExit):
            main(["preflight", *words])
        return seen.pop()

    monkeypatch.setattr(examine, "examine", examined)
    return of


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("value", [(), ("3",)])
def test_words_after_the_dashes_are_megatrons(
    asked: Any, flag: str, value: tuple[str, ...]
) -> None:
    words = (flag, *value, "--lr", "1")
    alone = asked("--", *words)
    assert (alone.recipe, alone.arguments, alone.options) == (None, words, RunOptions())
    of_recipe = asked("smoke_cpu", "--save", "here", "--", *words)
    assert of_recipe.arguments == words and of_recipe.options.save == Path("here")


def test_a_line_without_a_recipe_is_megatrons_without_dashes(asked: Any) -> None:
    words = ("--num-layers", "2", "--profile", "--save", "x", "--load=y", "--load", "z")
    context = asked(*words)
    assert context.arguments == words and context.options == RunOptions()
    options = context.launch_line.options
    assert (options.save, options.load) == (Path("x"), Path("z"))


def test_words_before_the_dashes_are_the_trainers(asked: Any) -> None:
    context = asked("smoke_cpu", "--profile", "3", "--log-params-norm", "--", "--profile")
    assert context.options.profile == 3
    assert context.arguments == ("--log-params-norm", "--profile")
