"""Hyper-connections in training: curves of the kernels and of the reference, time and memory.

    python -m benchmarks.slices.mhc_training --site SITE --work SCRATCH --out DIR [--only PART,...]

    small   50 steps of a small GPT and a small hybrid in fp32: by the reference on the CPU and
            twice on the GPU, once more from weights that are each one rounding away, and by the
            kernels, also recomputed (`mhc_curves.py`)
    gpt     the recipe gpt_mhc_h200 (8 layers, C 4096): without streams, by the kernels, recomputed
            as one block and by blocks of 2 layers, and twice by the reference
    slice   the recipe nam56r_h200_slice_mhc, and the same without streams
    dev     forward and backward of the GPT in Megatron's branch dev: without streams, by dev's
            kernels and by ours, in one process (`mhc_dev_step.py`; needs --dev)

Every run is a process, after which DIR/mhc_training_DEVICE.json and .md are written; at the end, a
.png with the curves. A run that is in there is not repeated (`--again` does), so a call that came
to the end of --minutes is continued by the same command. Without a GPU there is only `small`, at
sizes that Triton's interpreter can do. What has no result is named as not run.

SITE holds a pristine `megatron/` with its dist-info, as pip or an unpacked wheel leave them; it is
copied and never changed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.harness import results
from benchmarks.harness import trees as sides
from benchmarks.harness.gpu import card
from benchmarks.slices.mhc_training_report import draw, table
from benchmarks.slices.report import headline, measured, steps_of
from benchmarks.slices.report import table as of_recipe
from benchmarks.slices.training import Bench, header, prepare, said
from benchmarks.slices.turns import apply
from cppmega.host.packages import version
from cppmega.recipe import index as recipes_index
from cppmega.recipe import memory

PAGES = ("mhc_connections", "float16_keep_fp32")
"""Of the small models, beside which no other page may bend a curve."""
_FIRST_GUESS = {"small": 60.0, "gpt": 120.0, "slice": 150.0, "dev": 120.0}
"""Seconds that a run may take, until one of its part has shown how many."""
_ONE_STREAM = ("mhc_num_residual_streams=1",)
_RECOMPUTED = ("recompute_modules=('mhc',)",)
_PLAIN = ("use_fused_mhc=False",)
RECIPES = {"gpt": "gpt_mhc_h200", "slice": "nam56r_h200_slice_mhc"}
RUNS: dict[str, dict[str, tuple[str, ...]]] = {
    "gpt": {
        "without": _ONE_STREAM,
        "ours": (),
        "recomputed": _RECOMPUTED,
        "recomputed by 2": (*_RECOMPUTED, "mhc_recompute_layer_num=2"),
        "reference": _PLAIN,
        "again": _PLAIN,
    },
    "slice": {"without": _ONE_STREAM, "ours": ()},
}
"""Part -> run -> changes of its recipe."""
SMALL = {
    "reference on the CPU": ("reference", "cpu"),
    **{way: (way, "") for way in ("reference", "again", "nudged", "fused", "recomputed")},
}
"""Run -> its way, and the device where that is not the best there is."""
ON_CPU = ("reference", "again", "nudged", "fused")
OF_RECIPE = (
    *("overlay", "steps", "milliseconds", "tokens_per_second", "tflops_per_gpu"),
    *("tflops_per_gpu_by_megatron", "peak_gib", "first_loss", "last_loss"),
)
"""What a recipe's result has of its run; the curves are in the log."""
LABELS = {
    "small": tuple(SMALL),
    **{part: tuple(runs) for part, runs in RUNS.items()},
    "dev": ("step",),
}
"""Part -> its runs, in their order."""


@dataclass
class Training:
    """One call: the runs that are left, as long as there is time."""

    site: Path
    work: Path
    out: Path
    data: Path | None
    steps: int
    deadline: float
    again: bool = False
    dev: Path | None = None
    """A pristine checkout of Megatron's branch dev."""

    def __post_init__(self) -> None:
        has_gpu = torch.cuda.is_available()
        self.device = torch.cuda.get_device_name() if has_gpu else "CPU"
        self.stem = self.out / f"mhc_training_{card(self.device)}"
        self.taken: dict[str, list[float]] = {}
        self.call = datetime.now(UTC).isoformat(timespec="minutes")
        """When this call began: hosts differ, so times of two calls have no ratio."""
        file = self.stem.with_suffix(".json")
        kept = json.loads(file.read_text()) if file.is_file() and not self.again else {}
        self.report: dict[str, Any] = {
            **{part: {} for part in LABELS},
            **kept,
            **{"benchmark": "mhc_training", "date": date.today().isoformat()},
            **{"device": self.device, "torch": torch.__version__, "triton": version("triton")},
            "megatron-core": version("megatron-core"),
        }

    def wanted(self) -> dict[str, tuple[str, ...]]:
        """The runs of each part that this machine can do."""
        if self.device == "CPU":
            return {"small": ON_CPU}
        return {part: runs for part, runs in LABELS.items() if part != "dev" or self.dev}

    def part(self, name: str) -> None:
        """Run what is left of a part, and write after each run."""
        runs: dict[str, Callable[[str], dict[str, Any]]] = {"small": self.small, "dev": self.step}
        run = runs.get(name) or (lambda label: self.trained(name, label))
        for label in self.wanted().get(name, ()):
            if label in self.report[name]:
                continue
            left = self.deadline - time.monotonic()
            taken = self.taken.setdefault(name, [])
            if left < 1.2 * max(taken, default=_FIRST_GUESS[name]):
                print(f"{name} {label}: {left:.0f} s are left, not started", file=sys.stderr)
                return
            print(f"{name}: {label}", file=sys.stderr, flush=True)
            started = time.monotonic()
            self.report[name][label] = {**run(label), "call": self.call, **self.beside(name)}
            taken.append(time.monotonic() - started)
            self.write()

    def beside(self, part: str) -> dict[str, float]:
        """The step without streams of this call, whose ratio stays when that run is repeated."""
        base = self.report[part].get("without", {})
        if base.get("call") != self.call or "milliseconds" not in base:
            return {}
        return {"milliseconds_without": base["milliseconds"]}

    def small(self, label: str) -> dict[str, Any]:
        """The curves of both small models, trained one way."""
        way, device = SMALL[label]
        root = self.tree("small", self.site, PAGES)
        sizes = "TINY" if self.device == "CPU" else "SIZES"
        code = "from benchmarks.slices import mhc_curves as c\n"
        code += f"c.main({way!r}, {self.steps}, c.{sizes})"
        variables = {}
        if self.device == "CPU" and way == "fused":
            variables["TRITON_INTERPRET"] = "1"
        if device == "cpu":
            # With more threads than idle cores, each small product would wait for the last one.
            variables |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "2"}
        return self.said(f"small {label}", root, code, variables)

    def step(self, label: str) -> dict[str, Any]:
        """A step of the GPT of dev by each implementation."""
        assert self.dev is not None
        root = self.tree("dev", self.dev, ("mhc_fused_kernels",))
        code = "from benchmarks.slices import mhc_dev_step as s\ns.main()"
        return self.said(f"dev {label}", root, code, {})

    def tree(self, name: str, pristine: Path, pages: Sequence[str]) -> Path:
        """A copy of a pristine Megatron with these pages alone."""
        root = self.work / "trees" / name
        if not root.is_dir():
            sides.copy(pristine, root)
            apply(root, pages)
        return root

    def said(
        self, label: str, root: Path, code: str, variables: Mapping[str, str]
    ) -> dict[str, Any]:
        """What code prints as JSON, in a process that runs a tree."""
        log = self.out / f"{label.replace(' ', '-')}.log"
        return said(root, code, variables, log, max(1.0, self.deadline - time.monotonic()))

    def trained(self, part: str, label: str) -> dict[str, Any]:
        """A recipe's run with some changes, measured; out of memory is a result, too."""
        changes = (*RUNS[part][label], f"train_iters={self.steps}")
        recipe = recipes_index.load(RECIPES[part])
        data = self.data or prepare(self.work / "data" / "corpus", (), self.site)
        left = max(1.0, self.deadline - time.monotonic())
        bench = Bench(recipe, changes, self.site, self.work, self.out, data.resolve(), left)
        file = f"{part}-{label.replace(' ', '-')}"
        bench.clear(file)
        try:
            bench.wait(file, bench.start(file, bench.tree("overlay")))
        except MemoryError:
            return {"out_of_memory": True}
        rows = bench.rows(file)
        changed = recipes_index.with_text(recipe, changes)
        tokens = changed.micro_batch_size * changed.seq_length
        facts = {"facts": header(bench)} if label == "ours" else {}
        return {
            **facts,
            **{k: v for k, v in measured(rows).items() if k not in ("curve", "mtp")},
            **_curves(rows),
            "peak_bytes": max(row["peak_gib"] for row in steps_of(rows)) * memory.GIB,
            "states_bytes": memory.estimate(changed).states,
            "stream_bytes": 2 * tokens * changed.hidden_size,
            "layers": changed.num_layers or len(changed.layout.main),
        }

    def write(self) -> None:
        """Write what there is."""
        self.stem.with_suffix(".json").write_text(json.dumps(self.report, indent=1) + "\n")
        self.stem.with_suffix(".md").write_text("\n".join(self.lines()) + "\n")
        for part, recipe in RECIPES.items():
            if "facts" in (run := self.report[part].get("ours", {})):
                self.write_recipe(recipe, run)

    def write_recipe(self, recipe: str, run: dict[str, Any]) -> None:
        """Write a run of a recipe as `slices/training.py` writes a recipe's result."""
        kept = {key: value for key, value in run.items() if key in OF_RECIPE}
        log = self.stem.with_suffix(".json").name
        result = {
            **run["facts"],
            "benchmark": "mhc_training",
            "log": log,
            "runs": {"overlay": kept},
        }
        result["headline"] = headline(result)
        target = self.out / f"{recipe}.json"
        target.write_text(json.dumps(result, indent=1) + "\n")
        target.with_suffix(".md").write_text(of_recipe(result))

    def lines(self) -> Iterator[str]:
        """The report, and what of it was not run."""
        missing = [
            f"{part}, {label}"
            for part, labels in LABELS.items()
            for label in labels
            if label not in self.report[part]
        ]
        yield from table(self.report)
        if missing:
            yield from ("", f"Not run: {'; '.join(missing)}.")


def _curves(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Loss and gradient norm by step, as those of the small models."""
    steps = steps_of(rows)
    return {
        "loss": [row["loss"] for row in steps],
        "grad norm": [row["grad_norm"] for row in steps],
    }


@click.command()
@results.places("Prepared dataset [Python's own sources].", required=False)
@click.option("--dev", type=results.FOLDER, help="Pristine checkout of Megatron's branch dev.")
@click.option("--only", help=f"Parts, in this order [{','.join(LABELS)}].")
@click.option("--minutes", default=28.0, show_default=True, help="Time limit of this call.")
@click.option("--steps", default=50, show_default=True, help="Of every run.")
@click.option("--again", is_flag=True, help="Repeat the runs that have a result.")
def main(
    site: Path,
    work: Path,
    out: Path,
    data: Path | None,
    dev: Path | None,
    only: str | None,
    minutes: float,
    steps: int,
    again: bool,
) -> None:
    """Run what is left of the parts, and print the report."""
    deadline = time.monotonic() + 60 * minutes
    chosen = only.split(",") if only else list(LABELS)
    unknown = sorted(set(chosen) - set(LABELS))
    if unknown:
        raise click.BadParameter(f"{', '.join(unknown)}: the parts are {', '.join(LABELS)}")
    for folder in (work, out):
        folder.mkdir(parents=True, exist_ok=True)
    folders = (site.resolve(), work.resolve(), out.resolve())
    training = Training(*folders, data, steps, deadline, again, dev and dev.resolve())
    failed = False
    for name in chosen:
        try:
            training.part(name)
        except (click.ClickException, subprocess.TimeoutExpired) as error:
            failed = True  # the other parts may still have their time
            print(f"{name}: {error}", file=sys.stderr)
    training.write()
    draw(training.report, training.stem.with_suffix(".png"))
    print("\n".join(training.lines()))
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
