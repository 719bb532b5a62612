"""The page of production status, docs/production.md, from recipes and result files.

A result is a JSON file in benchmarks/results with the keys `recipe`, `changes`, `date`, `gpus`,
`stack`, `data` and `runs`, as `benchmarks/slices/training.py` writes it. A run has `overlay`,
`steps`, `tokens_per_second` of all GPUs and `peak_gib`, or `out_of_memory`. An optional `log` of
the result names a file beside it; without one, the run's `curve`, an entry per step, is what is
kept. Both TFLOP/s are tokens/s times operations per token of the recipe, with the run's changes,
whose documents are not packed. Written by `python scripts/readme_figures.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cppmega.catalogue import loader as catalogue
from cppmega.cli import recipes_list
from cppmega.recipe import Recipe
from cppmega.recipe import index as recipes_index
from cppmega.recipe.arithmetic import flops, megatron_flops, parameters
from tools.markdown import table

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
EARLIER = "earlier_overlay"
HEADS = (
    *("recipe", "run", "GPUs", "precision", "steps", "tokens/s per GPU"),
    *("TFLOP/s per GPU, every layer as it is", "TFLOP/s per GPU, formula of the record"),
    *("peak memory, GiB", "date"),
)
REPORTED = "as reported, no log"
NOT_MEASURED = "not measured"
_LENGTH = ("train_iters", "global_batch", "eval_")
"""Changes that make a run longer or larger, or evaluate it, and no other run."""
_FEW = 2
"""Changes whose values are shown in the tables."""


@dataclass(frozen=True)
class Run:
    """One measured run of a recipe."""

    recipe: Recipe
    """With the run's changes."""
    changes: tuple[str, ...]
    name: str
    file: Path
    result: dict[str, Any]

    @property
    def row(self) -> dict[str, Any]:
        """What was measured."""
        found: dict[str, Any] = self.result["runs"][self.name]
        return found

    @property
    def what(self) -> str:
        """The recipe and its changes; of many, only the names, which the result's own page sets."""
        if len(self.changes) <= _FEW:
            return ", ".join([self.recipe.name, *self.changes])
        names = [one.partition("=")[0] for one in self.changes]
        return f"{self.recipe.name} with other {', '.join(names[:-1])} and {names[-1]}"

    @property
    def tokens(self) -> float | None:
        """Tokens per second and GPU; None: out of memory."""
        if "out_of_memory" in self.row:
            return None
        return float(self.row["tokens_per_second"]) / int(self.result["gpus"])

    def cells(self, link: str) -> list[str]:
        """A row of the table.

        Args:
            link: folder of the results, as the page sees it.
        """
        shown = f"[{self.what}]({link}/{self.file.stem}.md)"
        gpus = f"{self.result['gpus']} x {self.result['stack']['gpu'].removeprefix('NVIDIA ')}"
        first = [shown, self.name, gpus, self.recipe.precision]
        if self.tokens is None:
            return [*first, "", "out of memory", "", "", "", self.result["date"]]
        counted, record = flops(self.recipe), record_flops(self.recipe)
        work = (f"{each * self.tokens / 1e12:.0f}" for each in (counted, record))
        numbers = (str(self.row["steps"]), f"{self.tokens:.0f}", *work)
        return [*first, *numbers, f"{self.row['peak_gib']:.1f}", self.result["date"]]


def record_flops(recipe: Recipe) -> float:
    """Floating-point operations of one token as the earlier overlay counted NAM56R's.

    Megatron's formula for hybrid models, with every D and + counted as full attention, and R, like
    M, as Mamba-2. Speeds that were reported without a log, 289 TFLOP/s among them, are in this
    unit. Only for comparison with those.
    """
    return megatron_flops(recipe, recipe.layout.letters.translate(str.maketrans("D+R", "**M")))


def runs(folder: Path = RESULTS) -> list[Run]:
    """Every measured run of a shipped recipe that Megatron trains, by the name of its file."""
    found = []
    for path in sorted(folder.glob("*.json")):
        for result in _results(json.loads(path.read_text())):
            recipe = recipes_index.with_text(
                recipes_index.load(result["recipe"]), result["changes"]
            )
            changes = tuple(one for one in result["changes"] if not one.startswith(_LENGTH))
            found += [Run(recipe, changes, name, path, result) for name in result["runs"]]
    return found


def _results(result: Any) -> Iterator[dict[str, Any]]:
    """The results of single recipes in a file: its own, or one for each side of its models."""
    if not isinstance(result, dict):
        return
    shares_a_gpu = result.get("benchmark") == "parts"  # and so has no speed
    if result.get("recipe") in recipes_index.shipped() and "runs" in result and not shares_a_gpu:
        yield result
    models = result.get("models", {}) if result.get("benchmark") == "models" else {}
    for recipe, sides in models.items():
        for name, side in sides.items():
            changes = [f"micro_batch_size={side['choice'][1]}"]
            yield {**result, "recipe": recipe, "changes": changes, "runs": {name: side["run"]}}


def measured(link: str, folder: Path = RESULTS) -> str:
    """The table of every measured run."""
    return table(HEADS, [run.cells(link) for run in runs(folder)])


def reported(folder: Path = RESULTS) -> str:
    """The table of what the earlier overlay's authors reported, in both units."""
    earlier = json.loads((folder / f"{EARLIER}.json").read_text())
    whole = recipes_index.load(earlier["recipe_of_the_model"])
    trunk = whole.with_(pattern=whole.pattern.partition("/")[0])
    rows = []
    for row in earlier["rows"]:
        model = trunk if row.get("without_mtp") else whole
        tokens, counted = row.get("tokens_per_second_per_gpu"), flops(model)
        if tokens:
            honest = tokens * counted / 1e12
        else:
            honest = row["tflops_per_gpu"] * counted / record_flops(model)
        cells = [row["setting"], earlier["host"].replace("NVIDIA ", ""), row["precision"]]
        cells += [f"{tokens:,}" if tokens else "not reported", f"{honest:.0f}"]
        rows.append([*cells, str(row["tflops_per_gpu"]), str(row.get("peak_gib", "")), REPORTED])
    heads = ("setting", *(head for head in HEADS[2:-1] if head != "steps"), "source")
    return table(heads, rows)


def page(folder: Path = RESULTS) -> str:
    """The generated part of docs/production.md."""
    taken = runs(folder)
    recipes = [recipes_index.load(name) for name in recipes_index.shipped()]
    earlier = json.loads((folder / f"{EARLIER}.json").read_text())
    model = recipes_index.load(earlier["recipe_of_the_model"])
    parts = [
        "",
        "## Measured",
        "",
        "Medians of the steps after the tenth, on real data, with loader, optimizer and logging: a "
        "run of few steps says what it needs rather than how fast it is. Every row links its "
        "result.",
        "",
        measured("results", folder),
        "",
        "## Reported by the earlier overlay",
        "",
        "The whole NAM56R; its README named 4.73 billion parameters, those of a width of 3584 with "
        "one MTP depth, and the pattern `*EME*EME*EMM*`. Its launchers train the width 4096, two "
        f"depths and `AEMEAEMEAEMR`: {parameters(model).total / 1e9:.2f} billion parameters.",
        "The formula of these rows counts "
        f"{record_flops(model) / 1e9:.2f} GFLOP a token: attention as full "
        "attention, Mamba-3 and M2RNN as Mamba-2.",
        f"With every layer counted as it is, a token costs {flops(model) / 1e9:.2f}.",
        "",
        reported(folder),
        "",
        "## Each recipe",
        "",
        "What a recipe needs, how it starts, and what ran. The patches are applied and the run is "
        "started with the same variables.",
        "",
    ]
    trained = [recipe for recipe in recipes if recipe.kind != "loop"]
    return "\n".join([*parts, *_recipes(trained, taken)])


def _recipes(recipes: Iterable[Recipe], taken: list[Run]) -> Iterator[str]:
    pages = catalogue.load()
    for recipe in recipes:
        described = recipes_list.describe(recipe, pages, ())
        gates = " ".join(f"{name}={value}" for name, value in recipe.wanted_gates)
        asked = any(pages[name].only_where_asked for name in recipe.patches)
        words = (
            "python -m cppmega.apply_patches" + (f" --recipe {recipe.name}" if asked else ""),
            f"cppmega launch {recipe.name} --data data/corpus",
        )
        work = described["gflop_per_token"], round(record_flops(recipe) / 1e9, 3)
        environment = " ".join(f"{name}={value}" for name, value in recipe.environment)
        rows = [
            ("what", recipe.purpose),
            (
                "commands",
                "<br>".join(f"`{' '.join(filter(None, (gates, each)))}`" for each in words),
            ),
            ("environment", f"`{environment}`, set by the trainer" if environment else "nothing"),
            ("precision", recipe.precision),
            ("needs", ", ".join(f"{name} {versions}" for name, versions in recipe.stack)),
            ("memory, by estimate", f"{described['memory_gib_per_gpu']:.1f} GiB per GPU"),
            ("GFLOP a token", f"{work[0]:.2f}; by the formula of the record {work[1]:.2f}"),
        ]
        own = [run for run in taken if run.recipe.name == recipe.name]
        if not own:
            rows.append(("status", NOT_MEASURED))
        yield from (f"### {recipe.name}", "", table(("", ""), rows), "")
        if own:
            heads = ("run", "date", "host", "versions", "overlay", "log")
            yield from (table(heads, map(_provenance, own)), "")


def _provenance(run: Run) -> list[str]:
    """Where, when and with what a run was measured."""
    stack = run.result["stack"]
    versions = ", ".join(f"{part} {version}" for part, version in stack.items() if part != "gpu")
    log = run.result.get("log")
    if run.tokens is None:
        log = "none"
    elif log is None:
        log = f"curve in `{run.file.name}`"
    return [
        ", ".join([run.name, *run.changes]),
        run.result["date"],
        f"{run.result['gpus']} x {stack['gpu']}",
        versions,
        run.row.get("overlay", "not said"),
        log,
    ]
