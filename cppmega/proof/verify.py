"""Run every page's proof three times: on the patched tree, on stock, and on a do-nothing mutant.

The proof must pass on the first and fail on the other two. Each tree gets its own process, and each
page a fork of that process, so that no proof can depend on what an earlier one left behind.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cppmega.catalogue import loader as catalogue
from cppmega.catalogue.loader import BUILTIN
from cppmega.errors import CppmegaError
from cppmega.host import console
from cppmega.overlay import receipt, transaction
from cppmega.overlay.plan import Plan, comes_after
from cppmega.overlay.receipt import ProvedPage
from cppmega.overlay.verbs import Session
from cppmega.overlay.verdict import DONE, NEEDED, Proof, Verdict
from cppmega.page import Page
from cppmega.proof import hash_seeds, proof_file, proof_process
from cppmega.proof.messages import SIDES, PageOrder, ProofRun, Side
from cppmega.proof.needs import missing_needs, uses_gpu
from cppmega.proof.proof_process import Worker
from cppmega.proof.scratch_tree import build

_ON_STOCK = "it passes on stock: the patch is not needed, or the proof does not reach it"
_ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "PYTHONHASHSEED": "1"}
"""On a machine with a GPU, Megatron takes its CPU paths only if the GPU is hidden."""
PYTHON = sys.executable
"""What runs the proofs of pages that need no GPU."""
_OTHER_CODE = ("AttributeError", "NameError", "TypeError")
"""Errors of a proof on code whose names and signatures differ from those it was written for."""


@dataclass(frozen=True, slots=True)
class Proved:
    """The verdict on one page."""

    name: str
    proof: Proof
    detail: str
    runs: Mapping[str, ProofRun]

    def as_json(self) -> dict[str, Any]:
        """One entry of `--json`."""
        runs = {
            side: {"result": run.result, "detail": run.detail, "seconds": round(run.seconds, 3)}
            for side, run in self.runs.items()
        }
        return {"name": self.name, "proof": self.proof, "detail": self.detail, "runs": runs}


_EXPECTED: Mapping[Side, str] = {
    "patched": "patched code, where they must pass",
    "stock": "stock, where they must fail unless upstream has the fix",
    "mutant": "mutants whose edits do nothing, where they must fail",
}
"""What a proof runs on, and its expected result there."""


def verify(
    session: Session,
    names: Sequence[str] = (),
    record: list[Path] | None = None,
    *,
    store: bool = True,
) -> list[Proved]:
    """Prove the pages that the tree needs, and record the proofs in the receipt of a patched tree.

    Applied pages are proved on the tree itself. Pending pages are proved on a scratch copy, and
    their proofs are not recorded. Pages that declare themselves upstreamed must pass on stock.

    Args:
        names: prove only these pages; without names, pages in a failure state fail as well.
        record: keep proofs that need more than a CPU with their pages; receives the files written.
        store: whether the results go into the receipt.

    Raises:
        CppmegaError: a named page is not needed here, or the tree is in a bad state;
            `not-recorded`, `nothing-to-do`.
    """
    with contextlib.ExitStack() as ends:
        scratch = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="cppmega-verify-")))
        loaded = receipt.load(session.read_tree())
        if names:
            session.load_for(names)
        asked = [catalogue.get(session.pages, name) for name in names]
        gates = dict(loaded.receipt.gates)
        gates |= {page.patch.gate: "1" for page in asked if page.patch.gate}
        excluded = _unconcerned(session.pages, names, loaded.receipt.pages) if names else None
        plan = session.plan(excluded, {**os.environ, **gates})
        pages, retired = _chosen(plan, names), _retired(plan, names)
        missing = {page.name: missing_needs(page.patch.needs) for page in [*pages, *retired]}
        runnable = [page for page in pages if not missing[page.name]]
        on_stock = [page for page in retired if not missing[page.name]]
        runs: dict[str, dict[str, ProofRun]] = {page.name: {} for page in [*pages, *retired]}
        edited = {edit.path for page in pages for edit in plan.edits[page.name]}
        compared = replace(plan, work={p: w for p, w in plan.work.items() if p in edited})
        applied = all(plan.verdicts[page.name].state in DONE for page in runnable)
        texts = ends.enter_context(contextlib.closing(hash_seeds.Comparison(compared)))
        sides = dict[Side, _Proving]()
        for side in sorted(SIDES, key=lambda side: side != "stock"):  # the quickest to make first
            chosen = [*runnable, *on_stock] if side == "stock" else runnable
            if not chosen:
                continue
            root = plan.tree.root
            if side != "patched" or not applied:
                root = scratch / side
                build(plan, root, side, edited)
            sides[side] = _Proving(root, side, plan, chosen, session.say)
            ends.callback(sides[side].close)
        for side in filter(sides.__contains__, SIDES):
            session.say(f"verify: proofs on {_EXPECTED[side]}: {len(sides[side].pages)}")
            for name, run in sides[side].answers():
                runs[name][side] = run
        unsteady = texts.differing(sides["patched"].root if runnable else None)
    proved = [
        _judge(plan, page, missing[page.name], runs[page.name], page.name in unsteady)
        for page in pages
    ]
    if store and applied and loaded.exists and not loaded.problem:
        _record(session, plan, proved)
    proved += [of_retired(page, missing[page.name], runs[page.name]) for page in retired]
    proved += [] if names else [_of_failure(verdict) for verdict in plan.failures]
    if record is not None:
        record.extend(_kept(plan, pages, proved))
    return sorted(proved, key=lambda one: one.name)


def upstreamed(plan: Plan, say: Callable[[str], None]) -> dict[str, Proved]:
    """Run the proofs of pages that declare themselves upstreamed, on the unpatched tree."""
    pages = _retired(plan, ())
    missing = {page.name: missing_needs(page.patch.needs) for page in pages}
    runnable = [page for page in pages if not missing[page.name]]
    with tempfile.TemporaryDirectory(prefix="cppmega-verify-") as scratch:
        root = Path(scratch) / "stock"
        if runnable:
            build(plan, root, "stock")
        runs = dict(_Proving(root, "stock", plan, runnable, say).answers())
    sides = {page.name: {"stock": runs[page.name]} for page in runnable}
    return {p.name: of_retired(p, missing[p.name], sides.get(p.name, {})) for p in pages}


def live(session: Session, plan: Plan) -> dict[str, ProofRun]:
    """Run the proofs on the patched tree only; writes nothing.

    Pages with needs that this machine does not meet are left out.
    """
    pages = [page for page in _chosen(plan, ()) if not missing_needs(page.patch.needs)]
    return dict(_Proving(plan.tree.root, "patched", plan, pages, session.say).answers())


def _unconcerned(
    pages: dict[str, Page], names: Sequence[str], applied: Collection[str]
) -> dict[str, str]:
    """Return the pages without which the named ones are proved.

    These are neither applied nor expected by a named page. Shipped pages edit none of the same
    files; the user's own may be unfinished.
    """
    files = {edit.path for name in names for edit in catalogue.get(pages, name).patch.edits}
    return {
        name: "not verified now"
        for name, page in pages.items()
        if name not in {*names, *applied}
        and (page.catalogue != BUILTIN or files.isdisjoint(e.path for e in page.patch.edits))
        and not any(comes_after(pages, one, name) for one in names)
    }


def _chosen(plan: Plan, names: Sequence[str]) -> list[Page]:
    for name in names:
        verdict = plan.verdicts[name]
        if verdict.state not in NEEDED | {"upstreamed"}:
            detail = f": {verdict.detail}" if verdict.detail else ""
            raise CppmegaError(
                "nothing-to-do",
                f"{name} is {verdict.state} on megatron-core {plan.tree.version}{detail}.",
                "There is no patched code to prove.",
                "cppmega status",
            )
    needed = [name for name, v in plan.verdicts.items() if v.state in NEEDED and name in plan.pages]
    return [plan.pages[name] for name in needed if not names or name in names]


def _retired(plan: Plan, names: Sequence[str]) -> list[Page]:
    """Return the pages that declare that upstream has their fix; none of their edits fits."""
    retired = [name for name, v in plan.verdicts.items() if v.state == "upstreamed"]
    chosen = [plan.pages[name] for name in retired if not names or name in names]
    plan.edits |= {page.name: () for page in chosen}
    return chosen


class _Proving:
    """The proofs on one side: all CPU pages in one worker, each GPU page in a worker of its own."""

    def __init__(
        self,
        root: Path,
        side: Side,
        plan: Plan,
        pages: Sequence[Page],
        say: Callable[[str], None],
    ) -> None:
        self.root, self.pages = root, pages
        self._answered = 0
        self._side, self._plan, self._say = side, plan, say
        self._on_gpu = [page for page in pages if uses_gpu(page)]
        orders = [_ordered(plan, page) for page in pages if page not in self._on_gpu]
        self._worker = Worker(str(root), side, orders, _ON_CPU, python=PYTHON) if orders else None

    def answers(self) -> Iterator[tuple[str, ProofRun]]:
        """Yield the result of every page."""
        if self._worker is not None:
            yield from self._said(self._worker)
        for page in self._on_gpu:
            order = [_ordered(self._plan, page)]
            yield from self._said(Worker(str(self.root), self._side, order, {}, forks=False))

    def close(self) -> None:
        """End the worker of the CPU pages."""
        if self._worker is not None:
            self._worker.close()

    def _said(self, worker: Worker) -> Iterator[tuple[str, ProofRun]]:
        for name, run in worker.answers():
            self._answered += 1
            at = console.position(self._answered, len(self.pages))
            self._say(f"verify: {self._side:<7} {at} {run.result:<7} {name}")
            yield name, run


def _ordered(plan: Plan, page: Page) -> PageOrder:
    fitting = plan.edits[page.name]
    indices = tuple(
        index for index, edit in enumerate(page.patch.edits) if any(edit is one for one in fitting)
    )
    return PageOrder(page.name, page.path, page.catalogue, indices)


def of_retired(page: Page, missing: Sequence[str], runs: Mapping[str, ProofRun]) -> Proved:
    """Return the verdict on a page that declares that upstream has its fix."""
    by_text = "upstreamed by its text, not proved"
    if missing:
        return Proved(page.name, "unverified", f"{by_text}: needs {', '.join(missing)}", {})
    run = runs["stock"]
    if run.result in ("unable", "not-run") or run.error in _OTHER_CODE:
        return Proved(page.name, "unverified", f"{by_text}: {run.detail}", runs)
    if run.result == "passed":
        return Proved(page.name, "passed", "upstreamed: the unpatched code passes", runs)
    detail = f"it declares itself upstreamed, but the unpatched code fails: {run.detail}"
    return Proved(page.name, "failed", detail, runs)


def _of_failure(verdict: Verdict) -> Proved:
    """Return the verdict on a page that cannot be proved, because its target is in a bad state."""
    return Proved(verdict.name, "failed", f"{verdict.state}: {verdict.detail}", {})


def _judge(
    plan: Plan, page: Page, missing: Sequence[str], runs: Mapping[str, ProofRun], unsteady: bool
) -> Proved:
    if unsteady:
        detail = "the text of its file depends on PYTHONHASHSEED"
        return Proved(page.name, "failed", detail, runs)
    if missing:
        proof, detail = proof_file.judged(plan, page)
        if proof == "unverified":
            detail = "; ".join(filter(None, [f"needs {', '.join(missing)}", detail]))
        return Proved(page.name, proof, detail, {})
    for side in SIDES:
        if runs[side].result == "unable":
            detail = f"it cannot run with what is installed here: {runs[side].detail}"
            return Proved(page.name, "unverified", detail, runs)
        if runs[side].result == "not-run":
            return Proved(page.name, "failed", f"{side}: {runs[side].detail}", runs)
    if runs["patched"].result != "passed":
        return Proved(page.name, "failed", f"on patched code: {runs['patched'].detail}", runs)
    if runs["stock"].result != "failed":
        return Proved(page.name, "failed", _ON_STOCK, runs)
    if runs["mutant"].result != "failed":
        detail = "it passes on a mutant whose edit does nothing: it proves no behavior"
        return Proved(page.name, "failed", detail, runs)
    return Proved(page.name, "passed", f"stock fails: {runs['stock'].detail}", runs)


def _kept(plan: Plan, pages: Sequence[Page], proved: Sequence[Proved]) -> list[Path]:
    """Record the proofs that ran here and need more than a CPU, next to their pages."""
    wrong = {one.name for one in proved if one.proof in ("failed", "stale")}
    wrong |= {verdict.name for verdict in plan.failures}
    if wrong:
        raise CppmegaError(
            "not-recorded",
            f"{', '.join(sorted(wrong))}: not proved, or in a bad state in this tree.",
            "Machines that cannot repeat a proof rely on its record.",
            "cppmega verify, and fix what it reports",
        )
    made_here = {one.name for one in proved if one.runs and one.proof == "passed"}
    return proof_file.record(plan, [page for page in pages if page.name in made_here])


def _record(session: Session, plan: Plan, proved: Sequence[Proved]) -> None:
    """Record the proofs in the receipt, under the lock."""
    with transaction.locked(session.read_tree(), session.say):
        loaded = receipt.load(session.read_tree())
        if loaded.receipt.digest != plan.loaded.receipt.digest:
            return  # another apply has run meanwhile, and the proofs are not about its result
        for one in proved:
            page = plan.pages[one.name]
            variables = proof_process.recorded_environment({} if uses_gpu(page) else _ON_CPU)
            loaded.receipt.proofs[one.name] = ProvedPage(
                proof=one.proof,
                revision=page.revision,
                digest=loaded.receipt.digest,
                detail=one.detail,
                environment=variables if one.runs else {},
            )
        transaction.commit(session.read_tree(), {}, loaded.receipt)
