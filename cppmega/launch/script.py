"""A training script of one's own, which is launched like a recipe.

Its arguments may contain `{run}`, the run folder, and `{load}`, the folder of the checkpoint from
which it is to start: its own once there is one, else that of the run that it resumes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cppmega.errors import CppmegaError
from cppmega.launch.request import LaunchRequest
from cppmega.recipe.run_options import RunOptions
from cppmega.runs import placeholders

OPTIONS = ("root", "accept", "allow_fallback")
"""The options of a start that are not those of cppmega's trainer."""


@dataclass(frozen=True, slots=True)
class Script:
    """A script."""

    file: Path

    @property
    def name(self) -> str:
        """The stem of its run folders' names."""
        return self.file.stem

    @property
    def calls_megatrons_parser(self) -> bool:
        """Whether Megatron parses its arguments: it imports megatron.training."""
        return any(name.startswith("megatron.training") for name in _imports(self.file))

    def words(self, options: RunOptions) -> tuple[str, ...]:
        """What `cppmega.run` is given before the script's arguments."""
        chosen = {name: getattr(options, name) for name in OPTIONS}
        return (*RunOptions(**chosen).words(), str(self.file))


def find(name: str) -> Script | None:
    """The script of a path; None if it is a recipe, or cannot be read as either."""
    path = Path(name)
    if not name.endswith(".py") or not path.is_file():
        return None
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return None
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if "RECIPE" in named or any(one.startswith("cppmega.recipe") for one in _imports(path)):
        return None
    return Script(path.absolute())


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def refuse_options(script: Script, options: RunOptions) -> None:
    """Refuse options of cppmega's trainer, which a script does not have.

    Raises:
        CppmegaError: `not-supported`.
    """
    words = options.words(without=OPTIONS)
    if words:
        raise CppmegaError(
            "not-supported",
            f"{' '.join(words)}: {script.name} is a script of your own, and these are options of "
            "recipes.",
            "The option would be ignored silently.",
            f"cppmega launch {script.file} -- and then the script's own arguments",
        )


def refuse_options_of_scripts(request: LaunchRequest) -> None:
    """Refuse options of scripts in the launch of a recipe.

    Raises:
        CppmegaError: `not-supported`.
    """
    if request.arguments_from or request.allows_unknown:
        raise CppmegaError(
            "not-supported",
            f"--arguments-from and --unknown-arguments are for scripts; {request.recipe} is a "
            "recipe, whose trainer adds no arguments.",
            "The option would be ignored silently.",
            "leave it out",
        )


def refuse_without_load(script: Script, arguments: tuple[str, ...]) -> None:
    """Refuse to resume a script that is not told from where.

    Raises:
        CppmegaError: `load-not-stated`.
    """
    if not any(placeholders.LOAD in word for word in arguments):
        raise CppmegaError(
            "load-not-stated",
            f"No argument of {script.name} contains {placeholders.LOAD}.",
            "It would begin anew, in a run that is recorded as a resumed one.",
            "state where the script begins, such as: --resume RUN -- --load '{load}'",
        )
