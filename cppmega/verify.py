"""Run every page's proof three times: on the patched tree, on stock, and on a do-nothing mutant.

It must pass on the first and fail on the other two. Each tree gets a process of its own, and in it
each page a fork of its own, so that what one proof leaves behind cannot help the next.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from cppmega import mutant, python, receipt, transaction
from cppmega.errors import CppmegaError
from cppmega.imported import PACKAGES
from cppmega.overlay import Session
from cppmega.page import Page
from cppmega.plan import Plan
from cppmega.process import alone
from cppmega.rewrite import Step, rewrite
from cppmega.state import DONE, NEEDED, Proof

Side = Literal["patched", "stock", "mutant"]
SIDES: tuple[Side, ...] = ("patched", "stock", "mutant")
PROOFS = "gpu_proofs.json"
"""Beside the pages of a catalogue: proofs made where this machine has no hardware for them."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one proof did on one tree."""

    result: Literal["passed", "failed", "not-run"]
    detail: str
    seconds: float = 0.0


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


def verify(session: Session, names: Sequence[str] = ()) -> list[Proved]:
    """Prove the pages that the tree needs, and write the proofs into the receipt of a patched tree.

    Pages that are applied are proved on the tree itself; pages that are only pending, on a scratch
    copy of it, and then nothing is recorded.

    Raises:
        CppmegaError: a page asked for by name is not needed here, or the tree is in a bad state.
    """
    loaded = receipt.load(session.tree)
    excluded = loaded.receipt.excluded if not names else []
    gates = dict(loaded.receipt.gates)
    for name in names:
        gate = session.pages[name].patch.gate if name in session.pages else None
        gates |= {gate: "1"} if gate else {}
    plan = session.plan(excluded, {**os.environ, **gates})
    pages = _chosen(plan, names)
    missing = {page.name: missing_needs(page.patch.needs) for page in pages}
    runnable = [page for page in pages if not missing[page.name]]
    runs: dict[str, dict[str, Run]] = {page.name: {} for page in pages}
    applied = all(plan.verdicts[page.name].state in DONE for page in runnable)
    with tempfile.TemporaryDirectory(prefix="cppmega-verify-") as scratch:
        for side in SIDES if runnable else ():
            session.say(f"verify: {len(runnable)} pages on the {side} code")
            root = plan.tree.root
            if side != "patched" or not applied:
                root = Path(scratch) / side
                build(plan, root, side)
            for name, run in _run(root, side, plan, runnable, session.say):
                runs[name][side] = run
    proved = [_judge(page, missing[page.name], runs[page.name]) for page in pages]
    if applied and loaded.exists and not loaded.problem:
        _record(session, plan, proved)
    return proved


def live(session: Session, plan: Plan) -> dict[str, Run]:
    """Only the first third: does the code that would train now pass every proof? Writes nothing.

    Pages whose proof needs what this machine lacks are left out.
    """
    pages = [page for page in _chosen(plan, ()) if not missing_needs(page.patch.needs)]
    return dict(_run(plan.tree.root, "patched", plan, pages, session.say)) if pages else {}


def _chosen(plan: Plan, names: Sequence[str]) -> list[Page]:
    for name in names:
        verdict = plan.verdicts.get(name)
        if verdict is None or verdict.state not in NEEDED:
            state = verdict.state if verdict is not None else "unknown"
            raise CppmegaError(
                "nothing-to-verify",
                f"{name} is {state} on megatron-core {plan.tree.version}.",
                "There is no patched code to prove.",
                "cppmega status",
            )
    needed = [name for name, v in plan.verdicts.items() if v.state in NEEDED and name in plan.pages]
    return [plan.pages[name] for name in needed if not names or name in names]


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
    changed: dict[str, bytes] = {}
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
    root: Path, side: Side, plan: Plan, pages: Sequence[Page], say: Callable[[str], None]
) -> Iterator[tuple[str, Run]]:
    """Prove on one side: the pages of CPUs in one worker, each page of GPUs in one of its own."""
    on_gpu = [page for page in pages if _uses_gpu(page)]
    on_cpu = [page for page in pages if page not in on_gpu]
    # Where there is a GPU, Megatron's paths for CPUs are taken only if nobody can see it.
    yield from _worker(root, side, plan, on_cpu, say, {"CUDA_VISIBLE_DEVICES": ""})
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
) -> Iterator[tuple[str, Run]]:
    """Start a worker and read one JSON line per page."""
    if not pages:
        return
    order = {
        "root": str(root),
        "side": side,
        "forks": forks,
        "pages": [
            {
                "name": page.name,
                "path": page.path,
                "catalogue": page.catalogue,
                "edits": [
                    index
                    for index, edit in enumerate(page.patch.edits)
                    if any(edit is fitting for fitting in plan.edits[page.name])
                ],
            }
            for page in pages
        ],
    }
    seen = set()
    with tempfile.TemporaryFile("w+", errors="replace") as said:  # libraries warn as they like
        with subprocess.Popen(
            python.command("cppmega.verify_worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env={
                **alone(os.environ),
                **environment,
                "PYTHONDONTWRITEBYTECODE": "1",
                "OMP_NUM_THREADS": "1",
            },
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(BrokenPipeError), process.stdin:  # it ended; said below
                process.stdin.write(json.dumps(order))
            for line in process.stdout:
                answer = json.loads(line)
                name = answer.pop("name")
                seen.add(name)
                say(f"verify: {side:<7} {answer['result']:<7} {name}")
                yield name, Run(**answer)
        said.seek(0)
        last = (said.read().strip().splitlines() or ["it said nothing"])[-1]
    for page in pages:
        if page.name not in seen:
            ended = f"the {side} process ended with status {process.returncode}: {last[:400]}"
            yield page.name, Run("not-run", ended)


def _judge(page: Page, missing: Sequence[str], runs: Mapping[str, Run]) -> Proved:
    if missing:
        proof, detail = committed_proof(page)
        if proof == "unverified":
            detail = f"needs {', '.join(missing)}"
        return Proved(page.name, proof, detail, {})
    for side in SIDES:
        if runs[side].result == "not-run":
            return Proved(page.name, "failed", f"{side}: {runs[side].detail}", runs)
    if runs["patched"].result != "passed":
        return Proved(page.name, "failed", f"on patched code: {runs['patched'].detail}", runs)
    if runs["stock"].result != "failed":
        return Proved(page.name, "failed", "it passes on stock: the patch is not needed", runs)
    if runs["mutant"].result != "failed":
        detail = "it passes on a mutant whose edit does nothing: it proves no behaviour"
        return Proved(page.name, "failed", detail, runs)
    return Proved(page.name, "passed", f"stock: {runs['stock'].detail}", runs)


def committed_proof(page: Page) -> tuple[Proof, str]:
    """The proof that was made elsewhere and committed beside the page."""
    folder = Path(page.path).parent if Path(page.path).stem != "__init__" else None
    path = (folder or Path(page.path).parent.parent) / PROOFS
    try:
        known = json.loads(path.read_bytes()).get(page.name)
    except FileNotFoundError:
        known = None
    if known is None:
        return "unverified", ""
    said = f"on {known['gpu']}, {known['date']}"
    if known["revision"] != page.revision:
        return "stale", f"the page changed since it was proved {said}"
    return ("passed" if known["proof"] == "passed" else "failed"), f"proved {said}"


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
