"""Test the declared range of torch, Triton and Python: oldest, middle and newest, each installed.

usage: python -m benchmarks.stacks [STACK...] [--steps apply,verify,...] [--folder .stacks]

Each stack gets an environment of its own, and every step its own process there. Results are merged
into benchmarks/results/stacks.json, of which scripts/readme_figures.py writes docs/stacks.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "benchmarks" / "results" / "stacks.json"
NIGHTLY = "TORCH_NIGHTLY_INDEX"
"""The variable with the address at which torch's nightly builds for a CPU are found."""


@dataclass(frozen=True)
class Stack:
    """What an environment is built of; torch brings its Triton."""

    python: str
    torch: str
    megatron: str


STACKS = {
    "oldest": Stack("3.11", "torch==2.7.*", "megatron-core==0.16.1"),  # the last for 3.11
    "middle": Stack("3.12", "torch==2.8.*", "megatron-core==0.19.2"),
    "newest": Stack("3.13", "torch==2.15.*", "megatron-core==0.19.2"),
    "nightly": Stack("3.13", "--pre torch", "megatron-core==0.19.2"),
}

PYTEST = ("-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider")
STEPS: dict[str, tuple[str, ...]] = {
    "apply": ("-m", "cppmega", "apply"),
    "verify": ("-m", "cppmega", "verify"),
    "smoke": (
        *("-m", "cppmega.run", "scripts/smoke.py", "train", "--steps", "20"),
        *("--out", "SCRATCH/run", "--data", "SCRATCH/data"),
    ),
    "kernels": (*PYTEST, "tests/ops"),
    "features": (*PYTEST, "tests/features"),
    "guard": (*PYTEST, "tests/guard"),
    "overlay": (*PYTEST, "tests/overlay"),
    # For CI: each family's kernels once, in the interpreter; and the guard beside real libraries.
    "subset": (*PYTEST, "tests/ops", "-k", "interpret and not memory"),
    "live": (*PYTEST, "tests/guard", "-k", "live"),
}
PARTS = ("subset", "live")
"""Steps that are a part of others, and run only where they are asked for."""
DEFAULT = tuple(name for name in STEPS if name not in PARTS)


def main() -> None:
    """Run the steps of each stack; exit 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("stacks", nargs="*", metavar="STACK", help=", ".join(STACKS))
    parser.add_argument("--steps", default=",".join(DEFAULT), help=", ".join(STEPS))
    parser.add_argument("--folder", type=Path, default=REPOSITORY / ".stacks")
    asked = parser.parse_args()
    wrong = False
    for name in asked.stacks or [name for name in STACKS if name != "nightly"]:
        python = build(asked.folder / name, STACKS[name])
        found = {step: run(python, step, asked.folder) for step in asked.steps.split(",")}
        wrong |= any(one["exit"] for one in found.values())
        if name != "nightly":  # what it is changes every day
            _merge(name, python, found)
    sys.exit(wrong)


def build(folder: Path, stack: Stack) -> Path:
    """The interpreter of a stack's environment, built once."""
    python = folder / "bin" / "python"
    if (folder / "complete").exists():
        return python
    nightly = "--pre" in stack.torch
    if nightly and not os.environ.get(NIGHTLY):
        sys.exit(f"stacks: set {NIGHTLY} to the address of torch's nightly builds for a CPU")
    found = {**os.environ, "UV_INDEX": os.environ[NIGHTLY]} if nightly else None
    uv = [sys.executable, "-m", "uv"]
    base = interpreter(stack.python)
    subprocess.run([*uv, "venv", "-q", "--clear", "--python", base, folder], check=True)
    install = [*uv, "pip", "install", "-q", "--python", python]
    packages = [*stack.torch.split(), "numpy", "psutil"]
    subprocess.run([*install, *packages], env=found, check=True)
    # Without dependencies, so that nothing takes the torch away.
    subprocess.run([*install, "--no-deps", stack.megatron], check=True)
    subprocess.run(
        [*install, "hatchling", "editables", "setuptools", "-e", f"{REPOSITORY}[dev]"], check=True
    )
    (folder / "complete").touch()
    return python


def interpreter(version: str) -> str:
    """A Python of this version that starts: one on PATH, else pyenv's, else the version for uv.

    A `python3.13` on PATH may be pyenv's, which starts only the versions that are chosen there. uv
    downloads what is not found, if it may.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates = (f"python{version}", *pyenv.glob(f"versions/{version}.*/bin/python"))
    told = "import sys; print('{}.{}'.format(*sys.version_info))"
    for candidate in map(str, candidates):
        with contextlib.suppress(OSError):
            done = subprocess.run([candidate, "-c", told], capture_output=True, text=True)
            if done.stdout.strip() == version:
                return candidate
    return version


def run(python: Path, step: str, folder: Path) -> dict[str, object]:
    """One step: its exit status, seconds, and the last line that tells the result."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("CPPMEGA_", "PYTHON"))}
    environment = {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    started = time.monotonic()
    with (
        Path(folder, f"{python.parent.parent.name}-{step}.log").open("w+") as log,
        tempfile.TemporaryDirectory(prefix="cppmega-stack-") as scratch,
    ):
        words = [word.replace("SCRATCH", scratch) for word in STEPS[step]]
        done = subprocess.run(
            [python, *words], cwd=REPOSITORY, env=environment, stdout=log, stderr=log
        )
        log.seek(0)
        lines = log.read().splitlines()
    last = _summary(step, lines)
    print(f"{python.parent.parent.name}: {step}: exit {done.returncode}: {last}", flush=True)
    return {
        "date": f"{datetime.date.today()}",
        "exit": done.returncode,
        "seconds": round(time.monotonic() - started),
        "result": last,
    }


def _summary(step: str, lines: list[str]) -> str:
    """The result of a step, as its output tells it."""
    if step == "verify":
        words = Counter(line.partition(" ")[0] for line in lines)
        kinds = ("passed", "unverified", "stale", "failed")
        return ", ".join(f"{words[kind]} {kind}" for kind in kinds if words[kind])
    if step == "smoke":
        reached = any(re.search(r"\d+ patch(es)? reached, ", line) for line in lines)
        return "trains" if reached else ""
    told = [line for line in lines if re.search(r"\d+ (passed|failed|applied)", line)]
    return re.sub(r"; changed .*| in [\d.]+s.*", "", (told or [""])[-1].strip("= "))


def _merge(name: str, python: Path, found: dict[str, dict[str, object]]) -> None:
    probe = (
        "import json, platform; from importlib.metadata import version\n"
        "names = 'torch', 'triton', 'megatron-core', 'numpy'\n"
        "print(json.dumps({'python': platform.python_version(), **{n: version(n) for n in names}}))"
    )
    printed = subprocess.run([python, "-c", probe], capture_output=True, text=True, check=True)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    entry = results.setdefault(name, {"steps": {}})
    entry["versions"] = json.loads(printed.stdout)
    entry["steps"] |= found
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
