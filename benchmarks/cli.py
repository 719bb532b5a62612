"""Measure the fast commands as whole processes, next to two plain ways to do the same.

usage: python -m benchmarks.cli [--version 0.19.2] [--runs 7] [--out benchmarks/results]

Writes cli.json and cli.md; `python scripts/readme_figures.py` then copies the table into the
README. The baselines are `git apply` of the same diff, without any check, and a libcst pass over
the same complete files: the work of a rewriter that does not cut its targets out first.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import click

from benchmarks.harness import results
from cppmega import __version__
from cppmega.tree import wheels

WHOLE_MODULE = """
import sys, libcst
for path in sys.argv[1:]:
    module = libcst.parse_module(open(path).read())
    open(path, "w").write(module.visit(libcst.CSTTransformer()).code)
"""


def seconds(command: list[str], cwd: Path) -> float:
    """Wall time of one process, without colors."""
    environment = {**os.environ, "NO_COLOR": "1"}
    started = time.perf_counter()
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    spent = time.perf_counter() - started
    if done.returncode:
        sys.exit(f"{' '.join(command[:5])}: exit {done.returncode}\n{done.stderr[-2000:]}")
    return spent


def measure(version: str, runs: int) -> dict[str, list[float]]:
    python = [sys.executable, "-m", "cppmega"]
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "tree"
        shutil.copytree(wheels.unpacked(version, print), root)
        at, here = ["--megatron", str(root)], Path(scratch)
        diff = subprocess.run([*python, "diff", *at], capture_output=True, text=True, check=True)
        patch = Path(scratch) / "overlay.diff"
        patch.write_text(diff.stdout)
        files = [line[6:] for line in diff.stdout.splitlines() if line.startswith("+++ b/")]
        rows: dict[str, list[float]] = {}
        git = ["git", "apply", "-p1", str(patch)]
        verbs = {"cold apply": "apply", "second apply": "apply"}
        verbs |= {verb: verb for verb in ("status", "diff", "revert")}
        commands = {
            **{name: ([*python, verb, *at], here) for name, verb in verbs.items()},
            "git apply": (git, root),
            "libcst, whole files": ([sys.executable, "-c", WHOLE_MODULE, *files], root),
        }
        for _ in range(runs + 1):
            for name, (command, folder) in commands.items():
                rows.setdefault(name, []).append(seconds(command, folder))
                if name == "git apply":
                    seconds([*git[:2], "-R", *git[2:]], root)
        return {name: values[1:] for name, values in rows.items()}  # the first run warms the disk


@click.command(help=__doc__)
@click.option("--version", default="0.19.2")
@click.option("--runs", default=7)
@results.out_option()
def main(version: str, runs: int, out: Path) -> None:
    rows = measure(version, runs)
    listing = [sys.executable, "-m", "cppmega", "list", "--json"]
    listed = subprocess.run(listing, capture_output=True, text=True, check=True).stdout
    result = {
        "date": date.today().isoformat(),
        "cppmega": __version__,
        "megatron-core": version,
        "pages": len(json.loads(listed)["patches"]),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "seconds": {name: sorted(values) for name, values in rows.items()},
    }
    results.write(out, "cli", result, table(result))


def table(result: dict[str, Any]) -> str:
    rows = (
        [name, values[0], statistics.median(values), values[-1]]
        for name, values in result["seconds"].items()
    )
    columns = ["command", *((name, ".2f") for name in ("minimum", "median", "maximum"))]
    return results.page(
        f"Whole processes on {result['cores']} cores, Python {result['python']}, megatron-core "
        f"{result['megatron-core']}, {result['pages']} pages, {result['date']}; seconds.",
        results.table(columns, rows),
    )


if __name__ == "__main__":
    main()
