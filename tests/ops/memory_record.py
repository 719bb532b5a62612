"""What shared memory kernels were found to take: tests/golden/kernel_memory.json.

Triton's passes over them take minutes, and have the same result until what they are given changes.
The key of a result is a hash of all of that, so that a changed kernel has none and is compiled. A
few recorded kernels are compiled in every run nevertheless, and all with `TESTS_RECOMPILE=1`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

Record = dict[str, dict[str, int]]
"""Bytes of shared memory by architecture and key."""

FILE = Path(__file__).parent.parent / "golden" / "kernel_memory.json"
COMMAND = "python scripts/record_golden.py kernel_memory"
RECOMPILE = "TESTS_RECOMPILE"
"""The variable that, when it is 1, makes tests ignore the record."""
SPILLS = "TESTS_SPILLS"
"""The variable that, when it is 1 as well, makes tests assemble what they compile: `spills`."""
SAMPLED = 2
"""How many recorded kernels of each architecture every run compiles: those with the least keys."""


def key_of(module: str, options: str, arch: int, passes: str) -> str:
    """A hash of all that the answer depends on.

    Triton's own hash of a kernel would not do: it is kept when a test replaces a constant, and
    contains the line at which a function begins.

    Args:
        module: a kernel in Triton's first intermediate language, without line numbers.
        options: a hash of the options of its launch.
        arch: the architecture that it is compiled for.
        passes: the text of what runs the passes.
    """
    import triton
    from triton._C.libtriton import get_cache_invalidating_env_vars

    switches = sorted(get_cache_invalidating_env_vars().items())
    parts = (module, options, arch, passes, triton.__version__, switches)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def known(key: str, arch: int, compiled: Callable[[], int], name: str = "") -> int:
    """The recorded answer, or that of compiling.

    Args:
        key: of `key_of`.
        arch: the architecture.
        compiled: finds the answer.
        name: of the kernel.

    Raises:
        AssertionError: a recorded answer was sampled, and is wrong.
    """
    of_arch = _read(FILE).get(str(arch), {})
    recorded = of_arch.get(key)
    if recorded is None or _ignored() or key in sorted(of_arch)[:SAMPLED]:
        found = compiled()
        assert _ignored() or recorded in (None, found), f"{recorded} is recorded, run: {COMMAND}"
    else:
        found = recorded
    with _asked().open("a") as file:  # one short line, which other processes do not tear
        file.write(json.dumps([str(arch), key, found, name]) + "\n")
    return found


def asked() -> Record:
    """All that this session of pytest, or the one with this scratch folder, has asked for."""
    found: Record = {}
    for arch, key, size, _ in _lines():
        found.setdefault(arch, {})[key] = size
    return found


def largest() -> Record:
    """The most bytes that each kernel takes in these launches, by architecture and name.

    Those of tests have no family, and are left out.
    """
    found: Record = {}
    for arch, _, size, name in _lines():
        if "." not in name:
            continue
        of_arch = found.setdefault(arch, {})
        of_arch[name] = max(size, of_arch.get(name, 0))
    return found


def assembles() -> bool:
    """Whether kernels are to be assembled."""
    return os.environ.get(SPILLS) == "1"


def note(arch: int, name: str, log: str) -> None:
    """Note what the assembler says of a kernel.

    Args:
        arch: the architecture.
        name: of the kernel.
        log: what the assembler prints, about each function of the kernel.
    """
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill stores", log)))
    registers = max(map(int, re.findall(r"Used (\d+) registers", log)))
    with _spills().open("a") as file:
        file.write(json.dumps([str(arch), name, spilled, registers]) + "\n")


def spills() -> dict[str, dict[str, list[int]]]:
    """The most bytes that a thread of each kernel stores instead of in registers, and these.

    By architecture and name. Those of tests have no family, and are left out.
    """
    found: dict[str, dict[str, list[int]]] = {}
    for line in _spills().read_text().splitlines():
        arch, name, *spill = json.loads(line)
        if "." in name:
            of_arch = found.setdefault(arch, {})
            of_arch[name] = max(spill, of_arch.get(name, spill))
    return found


def beside(recorded: dict[str, Any], asked: dict[str, Any], family: str) -> dict[str, Any]:
    """What a family's tests have found, with what is recorded of the kernels of others.

    A kernel that several families launch keeps the most that it took in the launches of any.

    Args:
        recorded: `largest` and `spills` of all families, by what they are.
        asked: those of this one.
        family: its name; if it is empty, all were asked, and nothing else is kept.
    """
    if not family:
        return asked
    found: dict[str, Any] = {}
    for what in recorded.keys() | asked.keys():
        before, now = recorded.get(what, {}), asked.get(what, {})
        for arch in before.keys() | now.keys():
            old, new = before.get(arch, {}), now.get(arch, {})
            shared = {name for name in old.keys() & new if not name.startswith(f"{family}.")}
            most = {name: max(old[name], new[name]) for name in shared}
            found.setdefault(what, {})[arch] = {**old, **new, **most}
    return found


def unrecorded() -> int:
    """How many answers this session needed and did not find in the record."""
    if _ignored():
        return 0
    recorded = _read(FILE)
    return sum(len(found.keys() - recorded.get(arch, {})) for arch, found in asked().items())


def _lines() -> list[tuple[str, str, int, str]]:
    text = _asked().read_text() if _asked().exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def _ignored() -> bool:
    return os.environ.get(RECOMPILE) == "1"


def _spills() -> Path:
    return Path(os.environ["TESTS_SCRATCH"], "kernel_spills")


def _asked() -> Path:
    return Path(os.environ["TESTS_SCRATCH"], "kernel_memory")


@cache
def _read(file: Path) -> Record:
    found: Record = json.loads(file.read_text()) if file.exists() else {}
    return found
