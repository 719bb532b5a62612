"""Export every fix to a checkout of Megatron-LM, run each test, and record what came out.

    python scripts/export_all.py CHECKOUT [NAME...]    # needs black and isort of its pyproject.toml

Only the fixes that are named are exported again. The branches stay in the checkout.
docs/upstream.md shows the record (scripts/catalogue_readme.py).
"""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

from exports_page import record_file

from cppmega.authoring.export import Exported, export
from cppmega.catalogue import loader as catalogue
from cppmega.errors import CppmegaError
from cppmega.tree.installed import Tree


def main(checkout: Path, names: list[str]) -> None:
    base = git(checkout, "rev-parse", "HEAD").decode().strip()
    rows: dict[str, dict[str, str]] = {}
    if names:
        rows = json.loads(record_file().read_text())["pages"]
    with tempfile.TemporaryDirectory() as scratch:
        with tarfile.open(fileobj=BytesIO(git(checkout, "archive", base, "megatron"))) as archive:
            archive.extractall(scratch, filter="data")
        for name, page in sorted(catalogue.load().items()):
            if names and name not in names:
                continue
            if page.patch.purpose != "fix" or page.patch.distributions != ("megatron-core",):
                continue
            try:
                done = export(page, Tree(checkout))
            except CppmegaError as error:
                rows[name] = {"state": error.name, "why": shortened(error.what, name, checkout)}
            else:
                rows[name] = tested(done, checkout, Path(scratch)) | {"page": page.text}
            print(name, rows[name], flush=True)
    version = Tree(checkout).version
    record = {"base": base[:10], "version": version, "pages": dict(sorted(rows.items()))}
    record_file().write_text(json.dumps(record, indent=1) + "\n")


def shortened(what: str, name: str, checkout: Path) -> str:
    """What an error says, without the name of the page and of this machine's folder."""
    for start in (f"{name} cannot be exported: ", f"{name} is "):
        what = what.removeprefix(start)
    return what.replace(f" in {checkout}", "").rstrip(".")


def tested(done: Exported, checkout: Path, tree: Path) -> dict[str, str]:
    """Run the test of a commit with its edit and without it."""
    status = []
    for commit in (done.commit, f"{done.commit}^"):
        for path in done.files:
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            of = done.commit if path == done.test else commit
            (tree / path).write_bytes(git(checkout, "show", f"{of}:{path}"))
        command = (sys.executable, "-m", "pytest", "-q", "--noconftest", "-c", os.devnull)
        ran = subprocess.run(
            [*command, f"--rootdir={tree}", "-p", "no:cacheprovider", done.test],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        status.append(ran.returncode)
    if status == [0, 1]:
        return {"state": "exported", "test": done.test}
    why = "its test fails there with the edit" if status[0] else "its test passes without the edit"
    return {"state": "not-proved", "why": why}


def git(checkout: Path, *words: str) -> bytes:
    return subprocess.run(["git", "-C", checkout, *words], capture_output=True, check=True).stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), sys.argv[2:])
