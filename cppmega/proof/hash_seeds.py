"""Compare the texts of patched files between processes with different hash seeds.

The order of a set depends on `PYTHONHASHSEED`, which is fixed when a process starts. An edit that
iterates over a set could write a different text on another machine. The processes that run the
proofs have different seeds, so they compute the texts as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from cppmega.catalogue import loader as catalogue
from cppmega.errors import CppmegaError
from cppmega.overlay.compute import rewritten
from cppmega.overlay.plan import Plan
from cppmega.proof.messages import FileOrder, PageOrder, TextOrder
from cppmega.tree.installed import sha256

Texts = Mapping[str, str]
"""Path -> hash of the patched text, or why there is none."""


def order(plan: Plan) -> TextOrder:
    """Return what another process needs to patch the files: their bytes and the edits."""
    pages = {page.name: page for work in plan.work.values() for page, _ in work.edits}
    return TextOrder(
        tuple(PageOrder(page.name, page.path, page.catalogue) for page in pages.values()),
        tuple(
            FileOrder(
                path,
                plan.views[path].pristine or b"",
                tuple(
                    (page.name, next(i for i, e in enumerate(page.patch.edits) if e is edit))
                    for page, edit in work.edits
                ),
            )
            for path, work in plan.work.items()
        ),
    )


def execute(ordered: TextOrder) -> dict[str, str]:
    """Return the hashes of the texts that this process computes."""
    from cppmega.rewriting.rewrite import Step, rewrite

    texts = {}
    try:
        pages = {
            page.name: catalogue.load_page(page.name, Path(page.path), page.catalogue)
            for page in ordered.pages
        }
        for file in ordered.files:
            steps = [
                Step.of(pages[name], pages[name].patch.edits[index]) for name, index in file.edits
            ]
            texts[file.path] = "not computed"
            texts[file.path] = sha256(rewrite(file.data, file.path, steps).data)
    except CppmegaError as error:
        return {**texts, "error": str(error)}
    return texts


def differing(plan: Plan, others: Iterable[Texts]) -> Iterator[str]:
    """Yield the pages that edit a file for which other processes computed a different text."""
    here = {path: sha256(rewritten(plan, path).data) for path in plan.work}
    for path, work in plan.work.items():
        if any(texts.get(path) != here[path] for texts in others):
            yield from (page.name for page, _ in work.edits)
