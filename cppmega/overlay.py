"""The verbs: apply, status, diff and revert on one tree."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cppmega import __version__, catalogue, gates, receipt, transaction
from cppmega import plan as planning
from cppmega.errors import CppmegaError
from cppmega.page import Page
from cppmega.plan import Plan, engine_revision
from cppmega.receipt import PatchedFile, PatchedPage, Receipt
from cppmega.state import DONE, FAILURES, NEEDED, Verdict
from cppmega.transaction import Change
from cppmega.tree import REINSTALL, Tree, find_root, sha256

Say = Callable[[str], None]

NOT_WHOLE = FAILURES | {"pending"}
"""States with which a run must not start."""

_STACK = ("torch", "transformer-engine", "triton", "tilelang", "liger-kernel", "mamba-ssm")


def _silent(message: str) -> None:
    """Progress that nobody asked for."""


@dataclass
class Session:
    """One tree and its catalogues; every verb starts here."""

    root: Path | None = None
    catalogues: Sequence[Path] | None = None
    """Folders given by `--patches`; None: those that the receipt remembers."""
    say: Say = _silent
    pages: dict[str, Page] = field(init=False)

    def __post_init__(self) -> None:
        self.root = self.root if self.root is not None else find_root()
        self.tree.check()
        remembered = [Path(p) for p in receipt.load(self.tree).receipt.catalogues]
        if self.catalogues is None and remembered:
            self.say("also patching from " + ", ".join(map(str, remembered)) + " (the receipt)")
        chosen = remembered if self.catalogues is None else self.catalogues
        self.catalogues = [folder.resolve() for folder in chosen]
        self.pages = catalogue.load(self.catalogues)

    @property
    def tree(self) -> Tree:
        """A fresh look at the files: a verb that writes looks again under the lock."""
        assert self.root is not None
        return Tree(self.root)

    def plan(self, excluded: Iterable[str] | None, environment: Mapping[str, str]) -> Plan:
        """Diagnose the tree as it stands."""
        tree = self.tree
        loaded = receipt.load(tree)
        return planning.make(
            tree,
            loaded,
            self.pages,
            excluded=loaded.receipt.excluded if excluded is None else excluded,
            environment=environment,
            interrupted=transaction.interrupted(tree),
        )


@dataclass
class Outcome:
    """What a verb found or did."""

    plan: Plan
    digest: str
    changed: list[str] = field(default_factory=list)
    """Files written (or, with `check`, that would be)."""
    receipt_changed: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def verdicts(self) -> list[Verdict]:
        """One per page, by name."""
        return list(self.plan.verdicts.values())

    @property
    def ok(self) -> bool:
        """Everything is as it must be."""
        return self.plan.finished and not self.notes


def status(session: Session) -> Outcome:
    """The state of every page; writes nothing.

    Gates are those of the last apply, where there was one: that is what is in the files.
    """
    tree = session.tree
    loaded = receipt.load(tree)
    gates.check(session.pages.values())
    environment = {**os.environ, **loaded.receipt.gates}
    plan = session.plan(None, environment)
    notes = [loaded.problem] if loaded.problem else []
    if transaction.interrupted(tree):
        notes.append("an apply or revert was interrupted; run it again to finish or undo it")
    return Outcome(plan, loaded.receipt.digest if plan.finished else "", notes=notes)


def apply(
    session: Session,
    *,
    only: Sequence[str] = (),
    check: bool = False,
    environment: Mapping[str, str] = os.environ,
) -> Outcome:
    """Make the tree f(pristine, active pages), or change nothing at all.

    Args:
        only: the active set; empty: every page.
        check: compute everything, write nothing.

    Raises:
        CppmegaError: anything that makes writing unsafe. Pages in a failure state are no
            exception: they are in the outcome, and nothing was written.
    """
    for name in only:
        catalogue.get(session.pages, name)
    gates.check(session.pages.values(), environment)
    excluded = set(session.pages) - set(only) if only else set()
    return _make_it_so(session, excluded, environment, check)


def revert(session: Session, names: Sequence[str] = ()) -> Outcome:
    """Take pages out, all of them or some, restoring the exact pristine bytes.

    Raises:
        CppmegaError: `foreign-edit`, where somebody edited a patched file since; `unknown-page`.
    """
    loaded = receipt.load(session.tree)
    for name in names:
        if name not in loaded.receipt.pages:
            catalogue.get(session.pages, name)
    if names:
        excluded = {*loaded.receipt.excluded, *names}
        environment = {**os.environ, **loaded.receipt.gates}
        return _make_it_so(session, excluded, environment, check=False)
    if not (receipt.folder(session.tree) / "receipt.json").exists() and not transaction.interrupted(
        session.tree
    ):
        session.say("nothing is applied")
        return Outcome(session.plan(set(session.pages), {}), "")
    with transaction.locked(session.tree, session.say):
        plan = session.plan(set(session.pages), {})
        changes = dict(_restored(plan, keep=set()))
        transaction.sweep(plan.tree, plan.views)
        transaction.commit(plan.tree, changes, None)
    return Outcome(session.plan(set(session.pages), {}), "", sorted(changes))


def diff(session: Session, name: str | None, environment: Mapping[str, str]) -> str:
    """Unified diff from the pristine text to the text with every active page, or with one page."""
    excluded: set[str] | None = None
    if name is not None:
        catalogue.get(session.pages, name)
        excluded = set(session.pages) - {name}
    plan = session.plan(excluded, environment)
    _refuse(plan, [v for v in plan.failures if name in (None, v.name)])
    pieces: list[str] = []
    for path, work in plan.work.items():
        pristine = plan.views[path].pristine
        assert pristine is not None
        data, _ = _rewritten(plan, path)
        if work.edits:
            pieces.extend(
                difflib.unified_diff(
                    pristine.decode(errors="replace").splitlines(keepends=True),
                    data.decode(errors="replace").splitlines(keepends=True),
                    f"a/{path}",
                    f"b/{path}",
                )
            )
    return "".join(pieces)


def _refuse(plan: Plan, failures: Sequence[Verdict]) -> None:
    for verdict in failures:
        raise CppmegaError(
            f"patch-{verdict.state}",
            f"{verdict.name}: {verdict.target}: {verdict.detail}.",
            "There is no text to show the change on.",
            verdict.next or f"cppmega explain {verdict.name}",
        )


def _make_it_so(
    session: Session, excluded: set[str], environment: Mapping[str, str], check: bool
) -> Outcome:
    plan = session.plan(excluded, environment)
    if plan.failures:
        return Outcome(plan, "")
    if not _needs_writing(session, plan):
        return Outcome(plan, plan.loaded.receipt.digest)
    if check:
        changes, _, digest = _changes(session, plan)
        return Outcome(plan, digest, sorted(changes), receipt_changed=True)
    with transaction.locked(session.tree, session.say):
        plan = session.plan(excluded, environment)  # the tree may have changed while we waited
        if plan.failures:
            return Outcome(plan, "")
        changes, new, digest = _changes(session, plan)
        if plan.loaded.problem:
            session.say(f"{plan.loaded.problem}; writing a new one")
        transaction.sweep(plan.tree, plan.views)
        for path in transaction.interrupted(plan.tree):
            transaction.drop_bytecode(plan.tree.root / path)
        transaction.commit(plan.tree, changes, new)
    after = session.plan(excluded, environment)
    return Outcome(after, digest, sorted(changes), True)


def _needs_writing(session: Session, plan: Plan) -> bool:
    """Cheap: true unless the receipt proves that there is nothing to do."""
    old = plan.loaded.receipt
    done = {v.name for v in plan.verdicts.values() if v.state in DONE}
    return (
        not plan.loaded.exists
        or bool(plan.loaded.problem)
        or not plan.finished
        or bool(transaction.interrupted(plan.tree))
        or old.gates != plan.gates
        or old.excluded != plan.excluded
        or old.engine != engine_revision()
        or old.catalogues != [str(folder) for folder in session.catalogues or []]
        or set(old.pages) != done
        or any(path not in plan.work for path in old.files)
    )


def _changes(session: Session, plan: Plan) -> tuple[dict[str, Change], bytes, str]:
    """Compute every file in memory, and the receipt that goes with them."""
    new = Receipt(
        tool=__version__,
        engine=engine_revision(),
        identity=plan.tree.identity,
        megatron=plan.tree.version,
        gates=plan.gates,
        excluded=plan.excluded,
        catalogues=[str(folder) for folder in session.catalogues or []],
        stack=_stack(),
        proofs=plan.loaded.receipt.proofs,
    )
    changes = dict(_restored(plan, keep=set(plan.work)))
    after: dict[str, str] = {}
    for path, work in plan.work.items():
        file = plan.views[path]
        assert file.pristine is not None
        data, prints = _rewritten(plan, path)
        after |= prints
        new.files[path] = PatchedFile(sha256(file.pristine), sha256(data), file.origin, work.steps)
        if data != file.current:
            changes[path] = Change(data, file.pristine)
    for name, edits in plan.edits.items():
        if plan.verdicts[name].state not in NEEDED:
            continue
        runtime = all(edit.kind != "source" for edit in edits)
        new.pages[name] = PatchedPage(
            revision=plan.pages[name].revision,
            state="armed" if runtime else "applied",
            kind=plan.pages[name].patch.kind,
            targets={
                edit.target: {
                    "before": plan.before[name][edit.target],
                    "after": after.get(edit.target, "runtime"),
                }
                for edit in edits
            },
        )
    new.digest = overlay_digest(new)
    new.survey = dict(sorted(plan.survey.used.items()))
    return changes, new.dump(), new.digest


def _rewritten(plan: Plan, path: str) -> tuple[bytes, dict[str, str]]:
    """New bytes of a file and the fingerprints of its targets."""
    from cppmega.rewrite import Step, rewrite

    file, work = plan.views[path], plan.work[path]
    assert file.pristine is not None
    steps = [Step(p.name, edit, p.patch.reached != "never") for p, edit in work.edits]
    done = rewrite(file.pristine, path, steps)
    return done.data, {f"{path}:{symbol}": fp for symbol, fp in done.after.items()}


def _restored(plan: Plan, keep: set[str]) -> Iterator[tuple[str, Change]]:
    """Files that earlier applies wrote and that no active page edits any more."""
    ours: dict[str, object] = {**plan.loaded.receipt.files, **transaction.interrupted(plan.tree)}
    for path in sorted(set(ours) - keep):
        file = plan.views[path]
        if file.ours and file.pristine is not None:
            yield path, Change(file.pristine, file.pristine)
        elif file.foreign:
            raise CppmegaError(
                "foreign-edit",
                f"{path} was edited by somebody else after we patched it.",
                "Restoring the original would lose that edit.",
                "save the edit, then " + REINSTALL.format(version=plan.tree.version),
            )


def overlay_digest(new: Receipt) -> str:
    """One hash of what is applied: no path of the machine, no time."""
    lines = [f"file {path} {entry.after}" for path, entry in new.files.items()]
    for name, page in new.pages.items():
        lines.append(f"page {name} {page.state}")
        lines += [f"target {name} {t} {p['before']} {p['after']}" for t, p in page.targets.items()]
        if page.state == "armed" or "runtime" in str(page.targets):
            lines.append(f"runtime {name} {page.revision}")
    lines += [f"gate {name}={value}" for name, value in new.gates.items()]
    return sha256("\n".join(sorted(lines)).encode())[:16]


def _stack() -> dict[str, str]:
    """Versions of the packages that train, read from their metadata, not by importing them."""
    from importlib import metadata

    found = {}
    for name in _STACK:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
