"""Models with hyper-connections in 0.19.2 and in upstream's branches: the same checkpoint?

usage: python -m benchmarks.mhc_upstream --repository CLONE [--ref REF]... [--out FOLDER]

CLONE is a clone of Megatron-LM, bare or not; of each REF its `megatron/` is unpacked into a
temporary folder. A GPT and hybrid models of the tests, with MTP depths, are built there and in
0.19.2 with the page `mhc_connections`, in fp32 on a CPU, all their parameters drawn. Each tree
saves a checkpoint (torch_dist) that the other one loads. Compared are names and shapes of the
parameters and of what a checkpoint holds, and, from each tree's weights, loss and gradients of one
batch. Writes mhc_upstream.json and .md, and exits with 1 where something differs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.harness import results
from tests.support import patched, python

VERSION = "0.19.2"
PAGES = ("mhc_connections", "float16_keep_fp32")
REFS = ("pull-request/6401", "dev")
"""What 0.20 will have for hybrid models, and the branch whose GPT has the learned contraction."""
BOUNDS = {"losses apart": 1e-5, "gradients apart": 1e-4}
"""What sums in fp32 in another order explain; of gradients see `_apart`."""
SMALL = 1e-3
WORKER = "from benchmarks import mhc_upstream_worker as w; w.main({folder!r}, {other!r})"


def unpacked(repository: Path, ref: str, to: Path) -> dict[str, str]:
    """Unpack `megatron/` of a commit, and say which one it is."""
    git = ["git", "-C", str(repository)]
    line = subprocess.run(
        [*git, "log", "-1", "--format=%H %cs", ref], check=True, capture_output=True, text=True
    ).stdout.split()
    to.mkdir(parents=True)
    with subprocess.Popen([*git, "archive", line[0], "megatron"], stdout=subprocess.PIPE) as found:
        subprocess.run(["tar", "-x", "-C", str(to)], check=True, stdin=found.stdout)
    return {"ref": ref, "commit": line[0], "of": line[1]}


def exchanged(ours: Path, theirs: Path, folder: Path) -> dict[str, Any]:
    """Let each tree build the models, and load what the other one has saved."""
    first, second = folder / "ours", folder / "theirs"
    for root, own, other in ((ours, first, ""), (theirs, second, first), (ours, first, second)):
        code = WORKER.format(folder=str(own), other=str(other))
        done = python(root, code, fresh=True, timeout=600)
        if done.returncode:
            raise SystemExit(f"{root.name}: {done.stderr[-3000:]}")
    return {
        name: compared(
            *(torch.load(place / f"{name}.pt") for place in (first, second)),
            *(torch.load(place / f"{name}-loaded.pt") for place in (first, second)),
        )
        for name in json.loads((second / "cases.json").read_text())
    }


def compared(
    ours: dict[str, Any], theirs: dict[str, Any], ours_loaded: Any, theirs_loaded: Any
) -> dict[str, Any]:
    """What differs between two trees that have built a model, and loaded the other's weights.

    Of each: shapes, checkpoint, loss and gradients from its own weights, and the last two again
    from the other's.
    """
    pairs = ((ours, theirs_loaded), (theirs, ours_loaded))
    return {
        "parameters": len(ours["parameters"]),
        "saved": len(ours["saved"]),
        "different parameters": _different(ours["parameters"], theirs["parameters"]),
        "different in checkpoints": _different(ours["saved"], theirs["saved"]),
        "losses": [ours["loss"], theirs["loss"]],
        "losses apart": max(abs(a["loss"] - b["loss"]) for a, b in pairs),
        "gradients apart": max(_apart(a["gradients"], b["gradients"]) for a, b in pairs),
    }


def _different(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Name -> both shapes, where they differ or one is missing."""
    names = sorted(ours.keys() | theirs.keys())
    return {
        name: [ours.get(name), theirs.get(name)]
        for name in names
        if ours.get(name) != theirs.get(name)
    }


def _apart(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Largest distance of gradients, relative to the largest gradient of that parameter.

    One that is a thousandth of the model's largest or less is a sum in which nearly everything
    cancels, such as that of the first site's mixing matrix, and counts as a thousandth.
    """
    if ours.keys() != theirs.keys():
        return float("inf")
    largest = {name: gradient.abs().max().item() for name, gradient in ours.items()}
    least = SMALL * max(largest.values())
    return max(
        (a - theirs[name]).abs().max().item() / max(largest[name], least)
        for name, a in ours.items()
    )


def is_same(found: dict[str, Any]) -> bool:
    differ = found["different parameters"] or found["different in checkpoints"]
    return not differ and all(found[name] <= bound for name, bound in BOUNDS.items())


def table(report: dict[str, Any]) -> str:
    columns = ["upstream", "model", "parameters", "entries of a checkpoint"]
    columns += ["names or shapes that differ", "losses apart", "gradients apart", "the same"]
    return results.page(
        "# Hyper-connections: checkpoints of 0.19.2 and of upstream's branches",
        f"Written by `benchmarks/mhc_upstream.py`, {report['date']}, torch {report['torch']}, fp32 "
        f"on a CPU. Each tree loads the checkpoint of the other; {VERSION} has the pages "
        f"{', '.join(PAGES)}.",
        results.table(columns, _cells(report)),
        "Gradients: the largest distance, relative to the largest gradient of that parameter, or "
        f"to {SMALL:g} of the model's largest where that is more.",
    )


def _cells(report: dict[str, Any]) -> Iterator[list[Any]]:
    for tree in report["trees"]:
        commit = f"{tree['ref']} at {tree['commit'][:10]} of {tree['of']}"
        for name, found in tree["models"].items():
            differ = found["different parameters"] | found["different in checkpoints"]
            yield [
                *(commit, name, found["parameters"], found["saved"], ", ".join(differ) or "none"),
                *(f"{found[f'{what} apart']:.1e}" for what in ("losses", "gradients")),
                "yes" if is_same(found) else "**no**",
            ]


@click.command(help=__doc__)
@results.folder_option("--repository", "a clone of Megatron-LM", required=True)
@click.option("--ref", "refs", multiple=True, default=REFS, help="commits or branches")
@results.out_option()
def main(repository: Path, refs: tuple[str, ...], out: Path) -> None:
    report: dict[str, Any] = {"date": date.today().isoformat(), "torch": torch.__version__}
    report["trees"] = []
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.setdefault("TESTS_SCRATCH", scratch)
        ours = patched(VERSION, *PAGES)
        for number, ref in enumerate(refs):
            folder = Path(scratch, str(number))
            tree = unpacked(repository, ref, folder / "tree")
            report["trees"].append(tree | {"models": exchanged(ours, folder / "tree", folder)})
    results.write(out, "mhc_upstream", report, table(report))
    found = [each for tree in report["trees"] for each in tree["models"].values()]
    sys.exit(not all(map(is_same, found)))


if __name__ == "__main__":
    main()
