"""What the overlay does for models that others train: stock and overlay, each with its best choice.

\b
    python -m benchmarks.models run --site SITE --work SCRATCH --out DIR [--only MODEL,...]
    python -m benchmarks.models without --site SITE --work SCRATCH --out DIR [--only MODEL,...]
    python -m benchmarks.models page DIR

A model is a recipe: a cut of a public model at its true widths. For either side, `run` tries every
micro-batch size, doubled until it no longer fits, first without recompute and then, from there on,
with each of the model's recompute sets; the overlay begins with the largest that stock holds. The
fastest choice trains 50 steps from the same weights on the same samples. `without` repeats the
overlay's choice with one page left out at a time. What is in the result is not repeated, and
nothing runs longer than --minutes, so the same command continues. Calls with other models may run
at the same time on other GPUs of the host; each needs its own SCRATCH. With --memory, a larger card
stands for a smaller one: PyTorch takes no more than that.

Stock has the pages without which it does not start, and no others; the page of results names them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, Literal

import click

from benchmarks.harness import results, runs, trees
from benchmarks.harness.gpu import card
from benchmarks.harness.results import FOLDER, Places
from benchmarks.harness.runs import STARTS, Bench, Row
from benchmarks.slices.training import apart, curve, measured, steps_of
from cppmega.recipe import index as recipes_index
from cppmega.recipe.memory import KEY_PER_HEAD

BATCH = 8
"""Sequences of a step, on either side."""
STEPS = 50
"""Steps of the run with the best choice."""
TRIAL, WARM = 7, 3
"""Steps of a trial, and those of them that warm up."""
SIDES = ("stock", "overlay")
_MEAN_OF_TWO = 2
"""The step for which Megatron logs the mean of the first two (`log_second_line`)."""

Choice = tuple[tuple[str, ...], int]
"""Recomputed modules, and sequences per pass."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is measured of a recipe."""

    title: str
    recomputed: tuple[tuple[str, ...], ...]
    """Sets of modules to recompute, from little to much; nothing comes before them."""
    stock: tuple[str, ...] = ()
    """Changes to the recipe on stock, beyond those of every model."""
    arguments: tuple[str, ...] = ()
    """Megatron's own on stock: as fields they would make the recipe ask for pages."""
    needs: tuple[str, ...] = ()
    """Pages without which stock has no such layers or does not start."""
    gates: tuple[tuple[str, str], ...] = ()
    """Those with which the overlay trains it."""
    pages: tuple[str, ...] = ()
    """Those that `without` leaves out in turn."""


_MOE = (("moe_act",), ("moe_act", "mla_up_proj"))
_NO_BIAS, _BIAS = "moe_router_enable_expert_bias=False", "--moe-router-enable-expert-bias"
_TILELANG = ("--dsa-kernel-backend", "tilelang")
_GENERAL = (
    *("te_plain_layers", "grad_checks_no_host_sync", "optimizer_copies_at_once"),
    *("cross_entropy_fusion_linear", "grad_accumulation_without_apex"),
    "embedding_gradient_rows",
)
_EXPERTS = ("router_gating_backward", "te_permutation_calls")
_MLA = ("mla_rope_kernel", "mla_query_key_kernel")
_MTP = "mtp_loss_no_host_sync"
_DSA = (
    *("dsa_attention_kernels", "dsa_indexer_kernels", "dsa_indexer_prologue"),
    *("dsa_no_host_sync", "dsa_key_per_head"),
)
MODELS: Mapping[str, Model] = {
    "llama3_8b_h100_cut": Model(
        title="Llama-3 8B",
        recomputed=(("mlp",),),
        pages=_GENERAL,
    ),
    "qwen3_30b_a3b_h100_cut": Model(
        title="Qwen3-30B-A3B",
        recomputed=(("moe_act",), ("moe",)),
        pages=(*_GENERAL, *_EXPERTS),
    ),
    "deepseek_v3_h100_cut": Model(
        title="DeepSeek-V3",
        recomputed=(*_MOE, ("moe", "mla_up_proj", "mlp")),
        stock=(_NO_BIAS,),
        arguments=(_BIAS,),
        pages=(*_GENERAL, *_EXPERTS, *_MLA, _MTP),
    ),
    "dsv32_h100_cut": Model(
        title="DeepSeek-V3.2",
        recomputed=(*_MOE, ("moe", "mla_up_proj", "mlp")),
        stock=(_NO_BIAS,),
        arguments=(_BIAS, *_TILELANG),
        gates=(KEY_PER_HEAD,),
        pages=(*_DSA, *_GENERAL, *_EXPERTS, *_MLA, _MTP),
    ),
    "nemotron_h_h100_cut": Model(
        title="Nemotron-H 8B",
        recomputed=(("mlp",),),
        pages=_GENERAL,
    ),
    "nam56r_h100_1gpu_cut": Model(
        title="NAM56R",
        recomputed=(("core_attn", "moe_act", "mlp", "mla_up_proj"),),
        stock=(_NO_BIAS, "async_save=False"),
        arguments=(_BIAS,),
        needs=("own_mixers", "input_embeddings", "float16_keep_fp32"),
        pages=(*_GENERAL, *_EXPERTS, *_MLA, "dsa_no_host_sync", _MTP),
    ),
}
_ACCUMULATES, _LINEAR = "gradient_accumulation_fusion", "cross_entropy_fusion_impl"
_STOCK = (f"{_ACCUMULATES}=False", f"{_LINEAR}=native")
_OVERLAY = (f"{_ACCUMULATES}=True", f"{_LINEAR}=linear")
_ASKED = ("te_plain_layers", "router_gating_backward", "embedding_gradient_rows")
"""Pages that change the order of sums or a rounding, which a recipe asks for."""
_INSTEAD = {
    "cross_entropy_fusion_linear": f"{_LINEAR}=native",
    "grad_accumulation_without_apex": f"{_ACCUMULATES}=False",
}
"""Changes to the recipe where a page is left out without which its field would be refused."""
_ABSORBED = ("dsa_key_per_head", "dsa_attention_kernels")
"""Pages without which DSA has one latent key: Megatron's kernels take no others."""
_WORDS = {"dsa_attention_kernels": _TILELANG}
"""Megatron's own arguments that do what such a page does."""


@dataclass(frozen=True)
class Side:
    """A model on one side: where it runs, and how long it may."""

    model: Model
    recipe: str
    name: str
    places: Places
    deadline: float
    steps: int = STEPS
    given: Choice | None = None
    """What it trains with; None: search."""
    memory: float | None = None
    """GiB that PyTorch may take; None: all of the card's."""

    def changes(self, choice: Choice, steps: int, without: str = "") -> tuple[str, ...]:
        recomputed, micro_batch = choice
        if self.name == "stock":
            own = (*_STOCK, *self.model.stock, f"patches={(*STARTS, *self.model.needs)}")
        else:
            asked = (*recipes_index.load(self.recipe).patches, *_ASKED)
            patches = tuple(page for page in dict.fromkeys(asked) if page != without)
            own = (*_OVERLAY, f"patches={patches}", *filter(None, (_INSTEAD.get(without),)))
        return (
            *own,
            f"gates={self.gates(without)}",
            f"recompute_modules={recomputed}",
            f"micro_batch_size={micro_batch}",
            f"global_batch_size={BATCH}",
            f"train_iters={steps}",
        )

    def gates(self, without: str = "") -> tuple[tuple[str, str], ...]:
        """The gates with which this side trains while a page is left out."""
        return () if self.name == "stock" or without in _ABSORBED else self.model.gates

    def tree(self, without: str = "") -> Path:
        site, folder = self.places.site, self.places.work / "trees"
        if self.name == "stock":
            pages = trees.only((*STARTS, *self.model.needs))
            return trees.made(site, folder / self.recipe, *pages)
        left_out = ("--without", without) if without else ()
        gates = self.gates(without)
        name = "-".join((f"without-{without}" if without else "overlay", *dict(gates)))
        return trees.made(site, folder / name, "--kind", "all", *left_out, gates=gates)

    def ran(self, choice: Choice, steps: int, without: str = "") -> tuple[float, list[Row]] | None:
        """Seconds to the first step, and the rows; None if the GPU had too little memory.

        Raises:
            Stopped: there was no time left.
        """
        changes = self.changes(choice, steps, without)
        made = recipes_index.with_text(recipes_index.load(self.recipe), changes)
        left = self.deadline - time.monotonic()
        bench = Bench(made, changes, *self.places, left)
        if left < 60:
            raise runs.TimeIsUp(f"{self.recipe}, {self.name}: no time is left")
        name = "-".join((self.recipe, self.name, *map(str, (len(choice[0]), choice[1], steps))))
        name += f"-without-{without}" if without else ""
        bench.clear(name)
        tree = self.tree(without)
        started = time.monotonic()
        try:
            words = self.model.arguments if self.name == "stock" else _WORDS.get(without, ())
            process = bench.start(name, tree, "--", *words)
            bench.wait(name, process, until=1)
            first = time.monotonic() - started
            bench.wait(name, process)
        except MemoryError:
            return None
        return first, bench.rows(name)


def search(
    sets: Iterable[tuple[str, ...]],
    tried: Callable[[Choice], dict[str, Any] | None],
    size: int = 1,
) -> dict[Choice, float]:
    """The tokens/s of every choice from `size` on that fits; `tried` returns None for others.

    No set that recomputes more can be faster with a micro-batch that fits without it, so each
    begins where the one before no longer fits.
    """
    rates = {}
    for recomputed in ((), *sets):
        while size <= BATCH and (row := tried((recomputed, size))) is not None:
            rates[recomputed, size] = float(row["tokens_per_second"])
            size *= 2
    return rates


def too_large(choice: Choice, trials: Mapping[str, Any], memory: float | None) -> bool:
    """Whether the peaks of half and a quarter of the sequences, in line, end above the memory."""
    recomputed, size = choice
    smaller = (trials.get(label((recomputed, part))) for part in (size // 4, size // 2))
    peaks = [float(row["peak_gib"]) for row in smaller if row]
    return memory is not None and len(peaks) == 2 and peaks[1] + 2 * (peaks[1] - peaks[0]) > memory


def label(choice: Choice) -> str:
    """`4 per pass, recomputing mlp`."""
    recomputed, size = choice
    return f"{size} per pass" + f", recomputing {', '.join(recomputed)}" * bool(recomputed)


def trial(first: float, rows: list[Row]) -> dict[str, Any]:
    steps = steps_of(rows)
    rate = statistics.median(row["tokens_per_second"] for row in steps[WARM:])
    return {
        "tokens_per_second": round(rate, 1),
        "peak_gib": round(max(row["peak_gib"] for row in steps), 2),
        "seconds_to_first_step": round(first, 1),
    }


def fastest(side: Side, of: dict[str, Any], save: Callable[[], None]) -> Choice:
    """The fastest choice of a side; its trials are kept."""
    trials = of.setdefault(side.name, {}).setdefault("trials", {})
    begin = 1
    if side.name == "overlay":  # from the largest that stock holds without recompute
        fits = of.get("stock", {}).get("trials", {})
        while fits.get(label(((), 2 * begin))):
            begin *= 2

    def tried(choice: Choice) -> dict[str, Any] | None:
        if label(choice) not in trials and not too_large(choice, trials, side.memory):
            ran = side.ran(choice, TRIAL)
            trials[label(choice)] = ran and trial(*ran)
            save()
        row: dict[str, Any] | None = trials.get(label(choice))
        return row

    rates = search(side.model.recomputed, tried, begin)
    if not rates:
        raise click.ClickException(f"{side.recipe} does not fit on {side.name}")
    of[side.name]["largest_micro_batch"] = max(size for _, size in rates)
    return max(rates, key=rates.__getitem__)


def measure(side: Side, of: dict[str, Any], save: Callable[[], None]) -> None:
    """Train with the fastest choice of a side, or with the given one."""
    best = side.given or fastest(side, of, save)
    found, choice = of.setdefault(side.name, {}), [list(best[0]), best[1]]
    if found.get("choice") != choice:
        ran = side.ran(best, side.steps)
        if ran is None:
            raise click.ClickException(f"{side.recipe}, {side.name}: {label(best)} does not fit")
        found |= {"choice": choice, "run": measured(ran[1]), "seconds_to_first_step": round(ran[0])}
        found["memory_gib"] = side.memory
        save()


def leave_out(side: Side, of: dict[str, Any], save: Callable[[], None]) -> None:
    """Train with the overlay's choice, each of the model's pages left out in turn."""
    found = of[side.name]
    recomputed, size = found["choice"]
    rows = found.setdefault("without", {})
    with ThreadPool(4) as pool:  # the copies of all variants, before the GPU is wanted
        pool.map(side.tree, ("", *side.model.pages))
    for page in ("", *side.model.pages):  # "": all of them once more, in turn with the others
        if page not in rows:
            ran = side.ran((tuple(recomputed), size), TRIAL, page)
            rows[page] = ran and trial(*ran)
            save()


def page(result: Mapping[str, Any]) -> str:
    return results.page(
        f"# Models that others train, stock and overlay, {result['date']}",
        f"Written by `benchmarks/models.py`. {runs.on(result)} Every step has {BATCH} "
        "sequences. Each side trained with the fastest choice of those tried, or the given one, "
        "from the same weights on the same samples. Rates are medians after the tenth step. Losses "
        "are compared in all steps but the second, for which stock logs the mean of the first two. "
        "Where GiB are stated, PyTorch could take no more, to stand for a smaller card. Stock has "
        "the pages without which it does not start, as listed.",
        result.get("note", ""),
        results.table(_TITLES, _rows(result["models"])),
        *_trials(result["models"]),
        *_ablation(result["models"]),
    )


_TITLES = (
    *("model", "side", "choice", ("tokens/s", ".0f"), ("ratio", ".3f"), ("TFLOP/s", ".0f")),
    *(("peak, GiB", ".1f"), ("of GiB", ".0f"), ("s to first step", ".0f"), "largest micro-batch"),
    ("largest difference of losses", ".4f"),
)
_TRIED = ("tokens/s", "GiB", "s to first step")


def _rows(models: Mapping[str, Any]) -> Iterator[list[Any]]:
    for recipe, of in models.items():
        for name in SIDES:
            if "run" not in (side := of.get(name, {})):
                continue
            run, stock = side["run"], of.get("stock", {}).get("run")
            title = f"{MODELS[recipe].title} (`{recipe}`)" if name == SIDES[0] else ""
            pages = f", with {', '.join(MODELS[recipe].needs)}" if MODELS[recipe].needs else ""
            ratio = apart_by = None
            if name != SIDES[0] and stock is not None:
                ratio = run["tokens_per_second"] / stock["tokens_per_second"]
                compared = curve(run)
                compared.pop(_MEAN_OF_TWO, None)
                apart_by = apart(compared, curve(stock))
            yield [
                *(title, name + pages * (name == SIDES[0])),
                label((tuple(side["choice"][0]), side["choice"][1])),
                *(run["tokens_per_second"], ratio, run["tflops_per_gpu"], run["peak_gib"]),
                side.get("memory_gib"),
                side["seconds_to_first_step"],
                *(str(side.get("largest_micro_batch", "not searched")), apart_by),
            ]


def _trials(models: Mapping[str, Any]) -> Iterator[results.Page]:
    if any("trials" in side for of in models.values() for side in of.values()):
        yield "## What was tried"
        yield (
            "Peak memory at the same choice shows whether the overlay needs more than stock. First "
            "steps are timed from the start of the process; the first trial of a side compiles its "
            "kernels."
        )
        columns = ["model", "choice", *(f"{s}, {what}" for s in SIDES for what in _TRIED)]
        yield results.table(columns, _tried(models))


def _tried(models: Mapping[str, Any]) -> Iterator[list[str]]:
    for recipe, of in models.items():
        trials = [of.get(name, {}).get("trials", {}) for name in SIDES]
        for choice in dict.fromkeys(each for side in trials for each in side):
            yield [recipe, choice, *(cell for side in trials for cell in _trial(side, choice))]


def _trial(trials: Mapping[str, Any], choice: str) -> tuple[str, ...]:
    if choice not in trials:
        return ("not tried", "", "")
    row = trials[choice]
    if row is None:
        return ("out of memory", "", "")
    return (
        *(f"{row['tokens_per_second']:.0f}", f"{row['peak_gib']:.1f}"),
        f"{row['seconds_to_first_step']:.0f}",
    )


def _ablation(models: Mapping[str, Any]) -> Iterator[results.Page]:
    rows = []
    for recipe, of in models.items():
        without = of.get("overlay", {}).get("without", {})
        whole = without.get("")
        for name, row in without.items():
            if name and whole is not None:
                cells: list[Any] = ["out of memory", None]
                if row is not None:
                    cells[0] = whole["tokens_per_second"] / row["tokens_per_second"]
                    cells[1] = row["peak_gib"] - whole["peak_gib"]
                rows.append([recipe, f"`{name}`", *cells])
    if rows:
        yield "## Each page left out"
        yield "The whole overlay's tokens/s over those without the page, at the same choice."
        yield results.table(["model", "page", ("ratio", ".3f"), ("more GiB without", ".1f")], rows)


@click.group(help=__doc__)
def main() -> None:
    """Stock against overlay, each with its best choice."""


def _measuring(
    places: Places,
    only: str | None,
    minutes: float,
    steps: int,
    sides: Mapping[str, Choice | None],
    memory: float | None,
    part: Callable[[Side, dict[str, Any], Callable[[], None]], None],
) -> None:
    """Do a part on these sides of each chosen model; a model that fails ends none but itself."""
    deadline = time.monotonic() + 60 * minutes
    places.create()
    chosen = results.chosen(only, MODELS, "models")
    if memory is not None:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = f"per_process_memory_fraction:{_share(memory):.4f}"
    if places.data is None:
        places = places._replace(data=runs.prepare(places.work / "data" / "corpus", places.site))
    bench = Bench(recipes_index.load(chosen[0]), (), *places, 1.0)
    facts = {**runs.header(bench), "benchmark": "models"}
    del facts["recipe"], facts["changes"]
    target, failed = f"models_{card(facts['stack']['gpu'])}", False
    for recipe in chosen:
        of = results.read(places.out, target).get("models", {}).get(recipe, {})

        def save(recipe: str = recipe, of: dict[str, Any] = of) -> None:
            with results.changing(places.out, target) as result:
                result.update(facts)
                result.setdefault("models", {})[recipe] = of
                (places.out / f"{target}.md").write_text(page(result))

        try:
            for name, given in sides.items():
                side = Side(MODELS[recipe], recipe, name, places, deadline, steps, given, memory)
                part(side, of, save)
        except click.ClickException as error:  # the other models may still have their time
            failed = True
            print(f"{recipe}: {error.message}", file=sys.stderr)
    sys.exit(int(failed))


def _share(memory: float) -> float:
    """These GiB as a share of the card's memory, which a process asks that then ends."""
    code = "import torch; print(torch.cuda.get_device_properties(0).total_memory / 2**30)"
    asked = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return min(1.0, memory / float(asked.stdout))


class _ChoiceType(click.ParamType):
    """`2`, `2+moe_act,mla_up_proj`, or `none`."""

    name = "SIZE[+MODULE,...]"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        size, _, modules = value.partition("+")
        if value == "none":
            return value
        if not size.isdigit() or not 0 < int(size) <= BATCH:
            self.fail(f"{value} is neither `none` nor a number of sequences from 1 to {BATCH}.")
        return tuple(filter(None, modules.split(","))), int(size)


def _given(side: str) -> Callable[[Any], Any]:
    return click.option(
        f"--{side}",
        type=_ChoiceType(),
        help="Sequences per pass and recomputed modules, or none, to leave out this side [search].",
    )


_MINUTES = click.option("--minutes", default=9.0, show_default=True, help="Limit of this call.")
_MEMORY = click.option("--memory", type=float, help="GiB that a run may take [all of the card's].")
_ONLY = click.option("--only", help="Models, in this order [all].")


@main.command()
@results.places("Prepared dataset [Python's own sources].", required=False)
@_ONLY
@_MINUTES
@_MEMORY
@click.option("--steps", default=STEPS, show_default=True, help="Steps with the choice.")
@_given("stock")
@_given("overlay")
def run(
    places: Places,
    only: str | None,
    minutes: float,
    memory: float | None,
    steps: int,
    stock: Choice | Literal["none"] | None,
    overlay: Choice | Literal["none"] | None,
) -> None:
    """Search for each side's best choice, and train with it."""
    asked = {"stock": stock, "overlay": overlay}
    sides = {name: given for name, given in asked.items() if given != "none"}
    _measuring(places, only, minutes, steps, sides, memory, measure)


@main.command()
@results.places("Prepared dataset [Python's own sources].", required=False)
@_ONLY
@_MINUTES
@_MEMORY
def without(places: Places, only: str | None, minutes: float, memory: float | None) -> None:
    """Leave out each page in turn, with the overlay's choice of an earlier `run`."""
    _measuring(places, only, minutes, STEPS, {"overlay": None}, memory, leave_out)


@main.command(name="page")
@click.argument("result", type=FOLDER)
def write_page(result: Path) -> None:
    """Write RESULT.md of RESULT.json again."""
    text = page(json.loads(result.read_text()))
    result.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
