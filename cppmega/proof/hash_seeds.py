"""Compare the texts of patched files between processes with different hash seeds.

The order of a set depends on `PYTHONHASHSEED`, which is fixed when a process starts. An edit that
iterates over a set could write a different text on another machine. So interpreters with different
seeds compute the texts as well; they import neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cppmega.catalogue import loader as catalogue
from cppmega.errors import CppmegaError
from cppmega.overlay.plan import Plan
from cppmega.proof.messages import FileOrder, PageOrder, TextOrder
from cppmega.proof.proof_process import Worker
from cppmega.tree.installed import sha256

Texts = Mapping[str, str]
"""Path -> hash of the patched text, or why there is none."""
SEEDS = ("1", "2", "3")


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


class Comparison:
    """The texts of a plan's files, as processes with different hash seeds compute them."""

    def __init__(self, plan: Plan) -> None:
        self._plan, ordered = plan, order(plan)
        self._workers = [
            Worker(str(plan.tree.root), "stock", [], {"PYTHONHASHSEED": seed}, ordered=ordered)
            for seed in (SEEDS if plan.work else ())
        ]

    def differing(self, patched: Path | None) -> set[str]:
        """Return the pages that edit a file of which some text differs.

        Args:
            patched: the tree on which the proofs ran, if any did.
        """
        plan, texts = self._plan, [self._texts_of(worker) for worker in self._workers]
        if patched is not None:
            done = [p for p in plan.work if patched != plan.tree.root or plan.up_to_date(p)]
            texts.append({path: sha256((patched / path).read_bytes()) for path in done})
        unsteady = [p for p in plan.work if len({t[p] for t in texts if p in t}) > 1]
        return {page.name for path in unsteady for page, _ in plan.work[path].edits}

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.close()

    def _texts_of(self, worker: Worker) -> Texts:
        for _ in worker.answers():
            pass  # it computes texts, and proves nothing
        if worker.texts is None:
            raise CppmegaError(
                "texts-not-computed",
                f"A process that computes the patched texts ended early: {worker.last}.",
                "It is unknown whether an edit writes the same text on every machine.",
                "run `cppmega verify` again, where processes can start",
            )
        return worker.texts
