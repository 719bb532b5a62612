"""Run every page's proof three times: on the patched tree, on stock, and on a do-nothing mutant.

It must pass on the first and fail on the other two. Each tree gets a process of its own, and in it
each page a fork of its own, so that what one proof leaves behind cannot help the next.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from cppmega.errors import CppmegaError
from cppmega.overlay import receipt, transaction
from cppmega.overlay.plan import Plan
from cppmega.overlay.verbs import Session
from cppmega.overlay.verdict import DONE, NEEDED, Proof, Verdict
from cppmega.page import Page
from cppmega.proof import hash_seeds, mutant, proof_file, proof_process
from cppmega.proof.proof_process import Run
from cppmega.rank.imported import PACKAGES
from cppmega.rewriting.rewrite import Step, rewrite

Side = Literal["patched", "stock", "mutant"]
_ON_STOCK = "it passes on stock: the patch is not needed, or the proof does not reach it"
_NOT_MADE_FOR_IT = ("AttributeError", "NameError", "TypeError")
"""How a proof ends on code that has other names and signatures than those it was written for."""
SIDES: tuple[Side, ...] = ("patched", "stock", "mutant")


@dataclass(frozen=True, slots=True)
class Proved:
    """The verdict on one page."""

    name: str
    proof: Proof
    detail: str
    runs: Mapping[str, Run]

    def as_json(self) -> dict[str, Any]:
        """One entry of `--json`."""
        runs = {
            side: {"result": run.result, "detail": run.detail, "seconds": round(run.seconds, 3)}
            for side, run in self.runs.items()
        }
        return {"name": self.name, "proof": self.proof, "detail": self.detail, "runs": runs}


def verify(
    session: Session, names: Sequence[str] = (), record: list[Path] | None = None
) -> list[Proved]:
    """Prove the pages that the tree needs, and write the proofs into the receipt of a patched tree.

    Pages that are applied are proved on the tree itself; pages that are only pending, on a scratch
    copy of it, and then the receipt keeps nothing. Pages that call themselves upstreamed must pass
    on stock. Without names, pages in a failure state fail here too.

    Args:
        record: keep proofs that need more than a CPU with their pages; receives the files written.

    Raises:
        CppmegaError: a page asked for by name is not needed here, or the tree is in a bad state;
            `not-recorded`, `nothing-to-record`.
    """
    loaded = receipt.load(session.tree)
    gates = dict(loaded.receipt.gates)
    for name in names:
        gate = session.pages[name].patch.gate if name in session.pages else None
        gates |= {gate: "1"} if gate else {}
    plan = session.plan({} if names else None, {**os.environ, **gates})
    pages, retired = _chosen(plan, names), _retired(plan, names)
    missing = {page.name: missing_needs(page.patch.needs) for page in [*pages, *retired]}
    runnable = [page for page in pages if not missing[page.name]]
    on_stock = [page for page in retired if not missing[page.name]]
    runs: dict[str, dict[str, Run]] = {page.name: {} for page in [*pages, *retired]}
    texts: list[hash_seeds.Texts] = []
    applied = all(plan.verdicts[page.name].state in DONE for page in runnable)
    with tempfile.TemporaryDirectory(prefix="cppmega-verify-") as scratch:
        for side in SIDES:
            chosen = [*runnable, *on_stock] if side == "stock" else runnable
            if not chosen:
                continue
            session.say(f"verify: {len(chosen)} pages on the {side} code")
            root = plan.tree.root
            if side != "patched" or not applied:
                root = Path(scratch) / side
                build(plan, root, side)
            for name, run in _run(root, side, plan, chosen, session.say, texts):
                runs[name][side] = run
    if not runnable:  # no proof runs, and the texts are made all the same
        list(_worker(plan.tree.root, "stock", plan, [], session.say, {}, texts=texts))
    unsteady = set(hash_seeds.differing(plan, texts))
    proved = [
        _judge(plan, page, missing[page.name], runs[page.name], page.name in unsteady)
        for page in pages
    ]
    if applied and loaded.exists and not loaded.problem:
        _record(session, plan, proved)
    proved += [of_retired(page, missing[page.name], runs[page.name]) for page in retired]
    proved += [] if names else [_of_failure(verdict) for verdict in plan.failures]
    if record is not None:
        record.extend(_kept(plan, pages, proved))
    return sorted(proved, key=lambda one: one.name)


def upstreamed(plan: Plan, say: Callable[[str], None]) -> dict[str, Proved]:
    """Do the pages that call themselves upstreamed pass on this tree, unpatched?"""
    pages = _retired(plan, ())
    missing = {page.name: missing_needs(page.patch.needs) for page in pages}
    runnable = [page for page in pages if not missing[page.name]]
    with tempfile.TemporaryDirectory(prefix="cppmega-verify-") as scratch:
        root = Path(scratch) / "stock"
        if runnable:
            build(plan, root, "stock")
        runs = dict(_run(root, "stock", plan, runnable, say))
    sides = {page.name: {"stock": runs[page.name]} for page in runnable}
    return {p.name: of_retired(p, missing[p.name], sides.get(p.name, {})) for p in pages}


def live(session: Session, plan: Plan) -> dict[str, Run]:
    """Only the first third: does the code that would train now pass every proof? Writes nothing.

    Pages whose proof needs what this machine lacks are left out.
    """
    pages = [page for page in _chosen(plan, ()) if not missing_needs(page.patch.needs)]
    return dict(_run(plan.tree.root, "patched", plan, pages, session.say)) if pages else {}


def _chosen(plan: Plan, names: Sequence[str]) -> list[Page]:
    for name in names:
        verdict = plan.verdicts.get(name)
        if verdict is None or verdict.state not in NEEDED | {"upstreamed"}:
            state = verdict.state if verdict is not None else "unknown"
            detail = f": {verdict.detail}" if verdict is not None and verdict.detail else ""
            raise CppmegaError(
                "nothing-to-verify",
                f"{name} is {state} on megatron-core {plan.tree.version}{detail}.",
                "There is no patched code to prove.",
                "cppmega status",
            )
    needed = [name for name, v in plan.verdicts.items() if v.state in NEEDED and name in plan.pages]
    return [plan.pages[name] for name in needed if not names or name in names]


def _retired(plan: Plan, names: Sequence[str]) -> list[Page]:
    """Pages that say that upstream has their fix; none of their edits fits."""
    found = [name for name, v in plan.verdicts.items() if v.state == "upstreamed"]
    chosen = [plan.pages[name] for name in found if not names or name in names]
    plan.edits |= {page.name: () for page in chosen}
    return chosen


def missing_needs(needs: Sequence[str]) -> list[str]:
    """Those needs of a page that this machine does not have."""
    import importlib.util

    lacking = []
    for need in needs:
        if need == "cpu":
            continue
        if need == "cuda" or need.startswith("sm_"):
            if not _gpu(need):
                lacking.append(need)
        elif importlib.util.find_spec({"te": "transformer_engine"}.get(need, need)) is None:
            lacking.append(need)
    return lacking


def _gpu(need: str) -> bool:
    import torch

    if not torch.cuda.is_available():
        return False
    major, minor = torch.cuda.get_device_capability()
    return need == "cuda" or need == f"sm_{major}{minor}"


def build(plan: Plan, root: Path, side: Side) -> None:
    """A tree of links to the real one, with the edited files as this side has them."""
    # Also where a page wrote that no longer does.
    changed = {p: v.pristine for p, v in plan.views.items() if v.ours and v.pristine is not None}
    for path, work in plan.work.items():
        file = plan.views[path]
        assert file.pristine is not None
        changed[path] = file.pristine
        if side != "stock":
            steps = [Step(p.name, e, p.patch.marks(e)) for p, e in work.edits]
            if side == "mutant":
                steps = _mutants(steps)
            changed[path] = rewrite(file.pristine, path, steps).data
    for package in PACKAGES:
        if (plan.tree.root / package).is_dir():
            _link(plan.tree.root / package, root / package, changed, package)


def _mutants(steps: Sequence[Step]) -> list[Step]:
    """One step per symbol, which carries the text of all its pages and does nothing."""
    by_symbol: dict[str, list[Step]] = {}
    for step in steps:
        by_symbol.setdefault(step.edit.symbol, []).append(step)
    return [
        replace(group[0], edit=mutant.of_sources([step.edit for step in group]))
        for group in by_symbol.values()
    ]


def _link(source: Path, to: Path, changed: Mapping[str, bytes], prefix: str) -> None:
    to.mkdir(parents=True)
    for entry in source.iterdir():
        path = f"{prefix}/{entry.name}"
        if entry.is_dir():
            if entry.name != "__pycache__":
                _link(entry, to / entry.name, changed, path)
        elif path in changed:
            (to / entry.name).write_bytes(changed[path])
        else:
            (to / entry.name).symlink_to(entry.absolute())


def _run(
    root: Path,
    side: Side,
    plan: Plan,
    pages: Sequence[Page],
    say: Callable[[str], None],
    texts: list[hash_seeds.Texts] | None = None,
) -> Iterator[tuple[str, Run]]:
    """Prove on one side: the pages of CPUs in one worker, each page of GPUs in one of its own."""
    on_gpu = [page for page in pages if _uses_gpu(page)]
    on_cpu = [page for page in pages if page not in on_gpu]
    # Where there is a GPU, Megatron's paths for CPUs are taken only if nobody can see it.
    yield from _worker(root, side, plan, on_cpu, say, {"CUDA_VISIBLE_DEVICES": ""}, texts=texts)
    for page in on_gpu:
        yield from _worker(root, side, plan, [page], say, {}, forks=False)


def _uses_gpu(page: Page) -> bool:
    return any(need == "cuda" or need.startswith("sm_") for need in page.patch.needs)


def _worker(
    root: Path,
    side: Side,
    plan: Plan,
    pages: Sequence[Page],
    say: Callable[[str], None],
    environment: Mapping[str, str],
    forks: bool = True,
    texts: list[hash_seeds.Texts] | None = None,
) -> Iterator[tuple[str, Run]]:
    """Have one process prove some pages."""
    if not pages and texts is None:
        return
    order = {
        "root": str(root),
        "side": side,
        "forks": forks,
        "texts": hash_seeds.order(plan) if texts is not None else None,
        "pages": [_ordered(plan, page) for page in pages],
    }
    # Every side sees its sets in another order; it is told by no proof, and by the texts.
    environment = {**environment, "PYTHONHASHSEED": str(1 + SIDES.index(side))}
    names = [page.name for page in pages]
    for name, run in proof_process.answers(
        order, names, environment, [] if texts is None else texts
    ):
        say(f"verify: {side:<7} {run.result:<7} {name}")
        yield name, run


def _ordered(plan: Plan, page: Page) -> dict[str, Any]:
    """A page as the worker finds it again, with the edits that fit the tree."""
    fitting = plan.edits[page.name]
    indices = [
        index for index, edit in enumerate(page.patch.edits) if any(edit is one for one in fitting)
    ]
    return {
        "name": page.name,
        "path": page.path,
        "catalogue": page.catalogue,
        "edits": indices,
    }


def of_retired(page: Page, missing: Sequence[str], runs: Mapping[str, Run]) -> Proved:
    """The verdict on a page that says that upstream has its fix: is it so?"""
    by_text = "upstreamed by its text, not proved"
    if missing:
        return Proved(page.name, "unverified", f"{by_text}: needs {', '.join(missing)}", {})
    run = runs["stock"]
    if run.result == "not-run" or run.detail.partition(":")[0] in _NOT_MADE_FOR_IT:
        return Proved(page.name, "unverified", f"{by_text}: {run.detail}", runs)
    if run.result == "passed":
        return Proved(page.name, "passed", "upstreamed: the unpatched code passes", runs)
    detail = f"it says upstreamed, and the unpatched code does not pass: {run.detail}"
    return Proved(page.name, "failed", detail, runs)


def _of_failure(verdict: Verdict) -> Proved:
    """A page that nothing can be proved of, because its target is not as it must be."""
    return Proved(verdict.name, "failed", f"{verdict.state}: {verdict.detail}", {})


def _judge(
    plan: Plan, page: Page, missing: Sequence[str], runs: Mapping[str, Run], unsteady: bool
) -> Proved:
    if unsteady:
        detail = "its file becomes another text under another PYTHONHASHSEED"
        return Proved(page.name, "failed", detail, runs)
    if missing:
        proof, detail = proof_file.judged(plan, page)
        if proof == "unverified":
            detail = "; ".join(filter(None, [f"needs {', '.join(missing)}", detail]))
        return Proved(page.name, proof, detail, {})
    for side in SIDES:
        if runs[side].result == "not-run":
            return Proved(page.name, "failed", f"{side}: {runs[side].detail}", runs)
    if runs["patched"].result != "passed":
        return Proved(page.name, "failed", f"on patched code: {runs['patched'].detail}", runs)
    if runs["stock"].result != "failed":
        return Proved(page.name, "failed", _ON_STOCK, runs)
    if runs["mutant"].result != "failed":
        detail = "it passes on a mutant whose edit does nothing: it proves no behaviour"
        return Proved(page.name, "failed", detail, runs)
    return Proved(page.name, "passed", f"stock: {runs['stock'].detail}", runs)


def _kept(plan: Plan, pages: Sequence[Page], proved: Sequence[Proved]) -> list[Path]:
    """Keep what was proved here and needs more than a CPU, with the pages."""
    wrong = {one.name for one in proved if one.proof in ("failed", "stale")}
    wrong |= {verdict.name for verdict in plan.failures}
    if wrong:
        raise CppmegaError(
            "not-recorded",
            f"{', '.join(sorted(wrong))}: not proved, or not as it must be in this tree.",
            "A record is believed on machines that cannot make the proof again.",
            "cppmega verify, and mend what it names",
        )
    made_here = {one.name for one in proved if one.runs and one.proof == "passed"}
    return proof_file.record(plan, [page for page in pages if page.name in made_here])


def _record(session: Session, plan: Plan, proved: Sequence[Proved]) -> None:
    """Keep the proofs in the receipt, under the lock."""
    with transaction.locked(session.tree, session.say):
        loaded = receipt.load(session.tree)
        if loaded.receipt.digest != plan.loaded.receipt.digest:
            return  # somebody applied something else meanwhile; the proofs are not of that
        for one in proved:
            loaded.receipt.proofs[one.name] = {
                "proof": one.proof,
                "revision": plan.pages[one.name].revision,
                "digest": loaded.receipt.digest,
                "detail": one.detail,
            }
        transaction.commit(session.tree, {}, loaded.receipt.dump())
