"""Does an edit give the same text in every process, whatever order its sets have there?

`PYTHONHASHSEED` is set when a process starts, so this takes others: those that run the proofs.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cppmega.catalogue import loader as catalogue
from cppmega.errors import CppmegaError
from cppmega.overlay.compute import rewritten
from cppmega.overlay.plan import Plan
from cppmega.tree.installed import sha256

Texts = Mapping[str, str]
"""Path -> hash of what becomes of the file, or why nothing does."""


def order(plan: Plan) -> dict[str, Any]:
    """What another process needs to make the patched files: the files, and who edits them."""
    pages = {page.name: page for work in plan.work.values() for page, _ in work.edits}
    return {
        "pages": [
            {"name": page.name, "path": page.path, "catalogue": page.catalogue}
            for page in pages.values()
        ],
        "files": [
            {
                "path": path,
                "data": base64.b64encode(plan.views[path].pristine or b"").decode(),
                "steps": [
                    [page.name, next(i for i, e in enumerate(page.patch.edits) if e is edit)]
                    for page, edit in work.edits
                ],
            }
            for path, work in plan.work.items()
        ],
    }


def execute(given: Mapping[str, Any]) -> dict[str, str]:
    """The hashes of the files as this process makes them."""
    from cppmega.rewriting.rewrite import Step, rewrite

    found = {}
    try:
        pages = {
            entry["name"]: catalogue.load_page(
                entry["name"], Path(entry["path"]), entry["catalogue"]
            )
            for entry in given["pages"]
        }
        for file in given["files"]:
            steps = [
                Step.of(pages[name], pages[name].patch.edits[index])
                for name, index in file["steps"]
            ]
            found[file["path"]] = "not made"
            data = rewrite(base64.b64decode(file["data"]), file["path"], steps).data
            found[file["path"]] = sha256(data)
    except CppmegaError as error:
        return {**found, "error": str(error)}
    return found


def differing(plan: Plan, others: Iterable[Texts]) -> Iterator[str]:
    """The pages that edit a file which other processes make another text of."""
    here = {path: sha256(rewritten(plan, path)[0]) for path in plan.work}
    for path, work in plan.work.items():
        if any(texts.get(path) != here[path] for texts in others):
            yield from (page.name for page, _ in work.edits)
