"""Record the hashes of the patched files of every supported version: tests/golden/*.json.

Inspect `cppmega diff PAGE` before you commit new hashes: they declare that the bytes are intended.

The name `kernel_memory` records what shared memory the kernels of tests/ops take, by compiling all
of them, which takes minutes; with TESTS_RECOMPILE=0, it compiles only those that have changed. The
name `kernel_sizes` writes the most that each kernel takes and spills under the Triton of this
environment into benchmarks/results/kernel_sizes.json, beside that under others. It assembles all of
them, which takes a CPU half an hour; `--family NAME` does so with those of tests/ops/NAME.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.ops import memory_record
from tests.support import laws

MEMORY = memory_record.FILE.stem
SIZES = laws.REPOSITORY / "benchmarks" / "results" / "kernel_sizes.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "pages",
        nargs="*",
        metavar="PAGE",
        help="pages to record, besides all pages together (default: every page; hashes of pages "
        f"that no longer exist are removed), or {MEMORY} or {SIZES.stem}, which are recorded only "
        "if they are named",
    )
    parser.add_argument("--family", default="", help="of kernels, for kernel_sizes [all]")
    options = parser.parse_args()
    names = options.pages
    for name in names:
        if name not in (*laws.names(), MEMORY, SIZES.stem):
            parser.error(f"there is no page {name}")
    with tempfile.TemporaryDirectory(prefix="cppmega-golden-") as scratch:
        os.environ["TESTS_SCRATCH"] = scratch  # for trees of several packages
        if MEMORY in names:
            record_memory()
        if SIZES.stem in names:
            record_sizes(options.family)
        named = [name for name in names if name not in (MEMORY, SIZES.stem)]
        if named or not names:
            record(named or laws.names())
    if not names:
        _remove_others()


def record(names: list[str]) -> None:
    """Write the hashes of some pages, and of all pages together, where they have changed."""
    laws.GOLDEN.mkdir(exist_ok=True)
    for name in [*names, laws.TOGETHER]:
        file = laws.GOLDEN / f"{name}.json"
        _write(file, laws.golden(name))


def record_memory() -> None:
    """Write what the tests of shared memory ask for, and nothing that they no longer ask for."""
    os.environ.setdefault(memory_record.RECOMPILE, "1")
    _ask()
    _write(memory_record.FILE, memory_record.asked())


def record_sizes(family: str) -> None:
    """Write what the tests of shared memory find under this Triton, and what its assembler says."""
    import triton

    os.environ |= {memory_record.RECOMPILE: "1", memory_record.SPILLS: "1"}
    _ask(family)
    sizes = json.loads(SIZES.read_text()) if SIZES.exists() else {}
    asked = {"shared": memory_record.largest(), "spills": memory_record.spills()}
    found = memory_record.beside(sizes.get(triton.__version__, {}), asked, family)
    _write(SIZES, {**sizes, triton.__version__: found})


def _ask(family: str = "") -> None:
    """Run the tests that ask for the shared memory of kernels, or of those of a family."""
    tests = [
        f"{file}::{test.name}"
        for file in sorted((laws.REPOSITORY / "tests" / "ops" / family).rglob("test_*.py"))
        for test in ast.parse(file.read_text()).body
        if isinstance(test, ast.FunctionDef)
        and test.name.startswith("test_")
        and any(asks in ast.unparse(test) for asks in ("shared_memory(", "check_fits("))
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(os.cpu_count()), *tests]
    if subprocess.run(command, cwd=laws.REPOSITORY).returncode:
        sys.exit("tests failed, and nothing is recorded")


def _write(file: Path, content: object) -> None:
    text = json.dumps(content, indent=1, sort_keys=True) + "\n"
    old = file.read_text() if file.exists() else ""
    if text != old:
        file.write_text(text)
        print(f"{'changed' if old else 'new':<8} {file.name}")


def _remove_others() -> None:
    for file in laws.GOLDEN.glob("*.json"):
        if file.stem not in {*laws.names(), laws.TOGETHER, MEMORY}:
            file.unlink()
            print(f"{'removed':<8} {file.name}")


if __name__ == "__main__":
    main()
