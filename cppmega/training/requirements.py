"""What a start is asked before it may touch a GPU, without torch: see `cppmega.rules.starts`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from cppmega.checkpoints import tracker as checkpoint_tracker
from cppmega.errors import CppmegaError
from cppmega.host import allocator, command_words
from cppmega.overlay import receipt
from cppmega.overlay.verbs import Session
from cppmega.overlay.verdict import Verdict
from cppmega.overlay.wanted import wanted_patches
from cppmega.recipe import Recipe
from cppmega.recipe.render import Rendered, render
from cppmega.recipe.run_options import RunOptions
from cppmega.rules import RULES, starts
from cppmega.rules.rule import Run, check
from cppmega.tree.installed import Tree


@dataclass(frozen=True)
class Start:
    """A start of a recipe, as the rules of `cppmega.rules.starts` see it."""

    recipe: Recipe
    options: RunOptions = field(default_factory=RunOptions)
    session: Session | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    nodes: int = 1
    nproc: int | None = None
    rdzv: str | None = None
    name: str | None = None

    @property
    def tree(self) -> Tree:
        """The tree that the run imports."""
        assert self.session is not None
        return self.session.read_tree()

    @cached_property
    def rendered(self) -> Rendered:
        """The recipe on that tree. An end token, known with the data, adds to it alone."""
        return render(self.recipe, self.tree.version, self.options)

    @property
    def world(self) -> int:
        """The number of ranks that this process is one of."""
        return int(self.environ.get("WORLD_SIZE", "1"))

    @property
    def loaded(self) -> int | None:
        """The steps of the checkpoint from which it resumes."""
        load = self.options.load
        return checkpoint_tracker.newest_step(load) if load is not None else None

    @property
    def steps(self) -> tuple[int, int]:
        """The number of steps already done, and the step after which the run ends."""
        done, every = self.loaded or 0, self.options.exit_interval
        last = self.recipe.train_iters if every is None else (done // every + 1) * every
        return done, min(last, self.recipe.train_iters)

    def check(self, *subjects: str) -> None:
        """Ask the rules of `cppmega.rules.starts` about these subjects.

        Raises:
            CppmegaError: the first one that is broken.
        """
        check((rule for subject in subjects for rule in starts.ABOUT[subject]), self)


IN_THE_CODE = ("applied", "armed", "upstreamed")
"""States that satisfy a recipe which needs a patch. `not-applicable` does not: the release lacks
the feature that the recipe relies on."""


def check_patches(recipe: Recipe, session: Session) -> str:
    """Check that the patches that the recipe needs are in the tree.

    Returns:
        The overlay digest, or `none`.

    Raises:
        CppmegaError: `patch-missing`.
    """
    applied = receipt.load(session.read_tree()).receipt
    verdicts = session.plan(None, {**os.environ, **applied.gates}).verdicts
    for name in wanted_patches(recipe, session.pages):
        if name not in verdicts or verdicts[name].state not in IN_THE_CODE:
            raise patch_missing(recipe, session, name, verdicts.get(name))
    return applied.digest or "none"


def patch_missing(
    recipe: Recipe, session: Session, name: str, verdict: Verdict | None
) -> CppmegaError:
    """The error for a patch that the recipe needs and the code does not have.

    Args:
        verdict: the verdict on it; None if no catalogue has a page of that name.
    """
    state: str = verdict.state if verdict is not None else "unknown"
    lacks = ""
    if verdict is not None and verdict.detail:
        state += f": {verdict.detail}"
    if name in session.pages:
        tree = session.read_tree()
        absent = [d for d in session.pages[name].patch.distributions if not tree.has(d)]
        lacks = f"install {', '.join(absent)} in {session.root}, then " if absent else ""
        if verdict is not None and verdict.state in ("unported", "not-applicable") and not absent:
            lacks = f"use a Megatron that it serves (cppmega explain {name}), or port it; then "
    return CppmegaError(
        "patch-missing",
        f"Recipe {recipe.name} needs the patch {name}; in {session.root} it is {state}.",
        "The run would stop later, or train something other than it claims.",
        f"{lacks}python -m cppmega.apply_patches{_how_to_ask(recipe, session, name)}",
    )


def _how_to_ask(recipe: Recipe, session: Session, name: str) -> str:
    """What a command must say to apply a page that is applied only on request."""
    page = session.pages.get(name)
    return f" --recipe {recipe.name}" if page is not None and page.only_where_asked else ""


def set_environment(variables: Sequence[tuple[str, str]]) -> None:
    """Set the variables that the run relies on, unless the user has; before torch is imported.

    A process that no launcher started is a world of one.
    """
    if "RANK" not in os.environ:
        single = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.environ.update(single)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        # The store's server picks any free port; one chosen here might be in use by then.
        os.environ.setdefault("MASTER_PORT", "0")
    for name, value in variables:
        os.environ.setdefault(name, value)
    allocator.set_in(os.environ)  # for a start without cppmega.run


def check_arguments(recipe: Recipe, options: RunOptions, args: Any) -> None:
    """Check the parsed arguments, in which a run may have claimed something that it did not do.

    Raises:
        CppmegaError: the first of `cppmega.rules` that is broken.
    """
    words = {option.name for option in command_words.read(sys.argv)}
    check(RULES, Run(args, os.environ, recipe=recipe, words=words, trainer=options))
