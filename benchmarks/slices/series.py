"""Runs of recipes, several of each kind, that one call begins and the next continues."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import click

from benchmarks.harness import results, runs
from benchmarks.harness.gpu import card
from benchmarks.harness.results import Places
from benchmarks.harness.runs import Bench
from benchmarks.slices.training import measured
from cppmega.recipe import index as recipes_index

_FIRST_GUESS = 60.0
"""Seconds that a run may take, until one has shown how many."""


class Model(NamedTuple):
    """A recipe, what is changed in all of its runs, and what in each."""

    recipe: str
    shared: tuple[str, ...]
    runs: Mapping[str, tuple[str, ...]]


def turns(labels: Iterable[str], count: int) -> Iterator[tuple[int, str]]:
    """The number of the turn and a label: each label once per turn, every other turn reversed."""
    every = [*labels]
    for turn in range(count):
        yield from ((turn, label) for label in every[:: 1 - 2 * (turn % 2)])


@dataclass
class Series:
    """The runs of one call. Each is a process, and is in the result as soon as it has ended."""

    places: Places
    benchmark: str
    page: Callable[[Mapping[str, Any]], str]
    steps: int
    deadline: float
    gpus: int | None = None
    """GPUs that the result names [those of the recipe]."""
    longest: float = _FIRST_GUESS
    failed: set[str] = field(default_factory=set)

    def model(self, name: str, model: Model, order: Iterable[tuple[int, str]]) -> None:
        """Run what of the order is not in the result yet, until the time is up."""
        recipe = recipes_index.load(model.recipe)
        structured = recipe.structure is not None
        corpus = self.places.work / "data" / ("structured" if structured else "corpus")
        data = self.places.data or runs.prepare(corpus, self.places.site, structured)
        bench = Bench(recipe, (), *self.places._replace(data=data), 1.0)
        facts = {**runs.header(bench), "benchmark": self.benchmark}
        del facts["recipe"], facts["changes"]
        facts["gpus"] = self.gpus or facts["gpus"]
        target = f"{self.benchmark}_{card(facts['stack']['gpu'])}"
        earlier = results.read(self.places.out, target).get("models", {}).get(name)
        if earlier is not None and earlier.get("data") != facts["data"]:
            raise click.ClickException(
                f"{target}.json in {self.places.out} has runs of {name} on other data, with which "
                "these cannot be compared. Give that --data, or another --out."
            )
        for turn, label in order:
            if self._wanted(target, name, label, turn):
                found = self._measured(bench, name, model, label, turn)
                if found is not None:
                    self._keep(target, facts, name, model, label, found)

    def _wanted(self, target: str, name: str, label: str, turn: int) -> bool:
        done = results.read(self.places.out, target).get("models", {}).get(name, {})
        run = f"{name}, {label}"
        if run in self.failed or len(done.get("runs", {}).get(label, [])) > turn:
            return False
        left = self.deadline - time.monotonic()
        if left < 1.2 * self.longest:
            print(f"{run}: {left:.0f} s are left, not started", file=sys.stderr)
            return False
        return True

    def _measured(
        self, bench: Bench, name: str, model: Model, label: str, turn: int
    ) -> dict[str, Any] | None:
        """None for a run that failed, which does not end the others."""
        started = time.monotonic()
        changes = (*model.shared, *model.runs[label], f"train_iters={self.steps}")
        changed = recipes_index.with_text(bench.recipe, changes)
        of = replace(bench, recipe=changed, changes=changes, timeout=self.deadline - started)
        file = f"{name}-{label}-{turn}".replace(",", "").replace(" ", "-")
        try:
            rows = runs.trained(of, file, of.tree("overlay"))
            if rows is None:
                raise click.ClickException("it does not fit on this GPU")
            found = measured(rows)
        except click.ClickException as error:
            self.failed.add(f"{name}, {label}")
            print(f"{name}, {label}: {error.message}", file=sys.stderr)
            return None
        self.longest = max(self.longest, time.monotonic() - started)
        return found

    def _keep(
        self,
        target: str,
        facts: Mapping[str, Any],
        name: str,
        model: Model,
        label: str,
        found: dict[str, Any],
    ) -> None:
        with results.changing(self.places.out, target) as result:
            made = {"recipe": model.recipe, "changes": [*model.shared], "data": facts["data"]}
            made["runs"] = {}
            result.update({fact: value for fact, value in facts.items() if fact != "data"})
            of = result.setdefault("models", {}).setdefault(name, made)
            every = {**of["runs"], label: [*of["runs"].get(label, []), found]}
            of["runs"] = {each: every[each] for each in model.runs if each in every}
            (self.places.out / f"{target}.md").write_text(self.page(result))


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--only`, `--run`, `--steps` and `--minutes`, which every series has."""
    for option in (
        click.option("--minutes", default=28.0, show_default=True, help="Time limit of this call."),
        click.option(
            "--steps", default=20, show_default=True, help="Steps of a run, ten to warm up."
        ),
        click.option("--run", "labels", multiple=True, help="Only runs of this name [all]."),
        click.option("--only", help="Models, in this order [all]."),
    ):
        command = option(command)
    return command


def chosen(model: Model, labels: Iterable[str]) -> list[str]:
    """The runs of a model that are named, or all; in the order of the model.

    Raises:
        click.BadParameter: it has none of these.
    """
    wanted = set(labels) or set(model.runs)
    if not wanted & set(model.runs):
        raise click.BadParameter(f"the runs of {model.recipe} are {'; '.join(model.runs)}")
    return [label for label in model.runs if label in wanted]
