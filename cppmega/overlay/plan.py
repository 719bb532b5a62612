"""Plan all pages on one tree: a verdict for each page, and the edits for each file.

The result depends only on the pristine text and the active pages; patched text is never patched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from cppmega.catalogue import gates
from cppmega.catalogue.revision import changed, engine_revision
from cppmega.host import console
from cppmega.overlay.diagnose import Diagnosis, FileView, diagnose, view
from cppmega.overlay.receipt import Loaded, PatchedPage, Receipt, Written
from cppmega.overlay.survey import Survey
from cppmega.overlay.verdict import DONE, NEEDED, Proof, Verdict
from cppmega.page import Edit, Page
from cppmega.tree.installed import Tree, sha256


@dataclass(frozen=True, slots=True)
class Work:
    """The edits of one file: its pages in order, each with the edit that fits this tree."""

    path: str
    edits: tuple[tuple[Page, Edit], ...]

    @property
    def page_revisions(self) -> list[str]:
        """`page@revision` for each edit, as the receipt stores them."""
        return [f"{page.name}@{page.revision}" for page, _ in self.edits]


@dataclass
class Plan:
    """The verdicts on one tree, and the edits to make."""

    tree: Tree
    loaded: Loaded
    pages: Mapping[str, Page]
    survey: Survey
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    work: dict[str, Work] = field(default_factory=dict)
    views: dict[str, FileView] = field(default_factory=dict)
    edits: dict[str, tuple[Edit, ...]] = field(default_factory=dict)
    before: dict[str, Mapping[str, str]] = field(default_factory=dict)
    """Page -> target -> fingerprint of the pristine text."""
    gates: dict[str, str] = field(default_factory=dict)
    excluded: Mapping[str, str] = field(default_factory=dict)
    """Excluded page -> reason."""
    only: list[str] = field(default_factory=list)
    """The pages of `--only`; empty: every page."""
    kinds: list[str] = field(default_factory=list)
    """Those of `--kind`."""

    @property
    def failures(self) -> list[Verdict]:
        """Verdicts that stop an apply."""
        return [v for v in self.verdicts.values() if v.failed]

    @property
    def finished(self) -> bool:
        """Whether no page is in a failure state or pending."""
        return not any(v.blocks for v in self.verdicts.values())

    def up_to_date(self, path: str) -> bool:
        """Whether, by the receipt, a file already has the text that its edits produce."""
        entry = self.loaded.receipt.files.get(path)
        file = self.views[path]
        return (
            entry is not None
            and file.patched
            and self.loaded.receipt.engine == engine_revision()
            and entry.steps == self.work[path].page_revisions
            and entry.after == sha256(file.current or b"")
            and not changed(entry.runs)
        )

    def written(self, data: Mapping[str, bytes], receipt: Receipt) -> Plan:
        """Return the plan of the same tree after its files and its receipt were written.

        Reads nothing: the transaction has already read the files back.

        Args:
            data: path -> bytes of the files that were written.
        """
        done = replace(self, loaded=Loaded(receipt, exists=True), views=dict(self.views))
        for path in {*data, *receipt.files}:
            file = self.views[path]
            current = data.get(path, file.current)
            patched = path in receipt.files
            done.views[path] = replace(file, current=current, patched=patched, story="")
        kept = {name: v for name, v in self.verdicts.items() if name in self.pages}
        done.verdicts = {
            name: _with_proof(done, _done_or_pending(done, name) if v.state in NEEDED else v)
            for name, v in kept.items()
        }
        return done


def make(
    tree: Tree,
    loaded: Loaded,
    pages: Mapping[str, Page],
    *,
    excluded: Mapping[str, str] | None = None,
    environment: Mapping[str, str],
    interrupted: Mapping[str, Sequence[Written]] | None = None,
    earlier: Survey | None = None,
) -> Plan:
    """Diagnose every page and collect the work; writes nothing and rewrites nothing.

    Args:
        excluded: excluded pages -> reason.
        interrupted: the writes that unfinished transactions made or were about to make, by path.
        earlier: an earlier survey of this process, whose answers are reused by content hash.
    """
    cached = loaded.receipt.survey if loaded.receipt.engine == engine_revision() else {}
    survey = Survey(tree, dict(cached))
    if earlier is not None:
        survey.cache |= earlier.cache | earlier.used
        survey.parsed = earlier.parsed
    plan = Plan(tree, loaded, pages, survey, excluded=dict(sorted((excluded or {}).items())))
    plan.gates = gates.values(pages.values(), environment)
    paths = {edit.path for page in pages.values() for edit in page.patch.edits}
    depended = (f for p in pages.values() for f in (*p.patch.feature, *p.patch.builds_on))
    paths |= {target.partition(":")[0] for target in depended}
    for path in sorted(paths | set(loaded.receipt.files) | set(interrupted or {})):
        plan.views[path] = view(tree, loaded, path, interrupted or {})
    changed_here = {p: v for p, v in plan.views.items() if v.patched or v.foreign}
    survey.pristine = {p: v.pristine for p, v in changed_here.items() if v.pristine}
    diagnoses: dict[str, Diagnosis] = {}
    for name in console.each("comparing", sorted(pages)):
        page = pages[name]
        off = _off(page, plan.excluded, environment)
        if off is not None:
            plan.verdicts[name] = off
            continue
        diagnosis = diagnose(page, tree, loaded, survey, plan.views)
        if diagnosis.verdict is not None:
            plan.verdicts[name] = diagnosis.verdict
        else:
            diagnoses[name] = diagnosis
            plan.edits[name] = diagnosis.edits
            plan.before[name] = diagnosis.before or {}
    _refuse_vanished(plan)
    order = in_order(pages)
    plan.verdicts.update(_conflicts(plan.edits, pages, order))
    needed = [name for name in order if name in diagnoses and name not in plan.verdicts]
    _collect_work(plan, needed)
    for name in needed:
        plan.verdicts[name] = _done_or_pending(plan, name)
    for name in sorted(set(loaded.receipt.pages) - set(pages)):
        gone = loaded.receipt.pages[name]
        plan.verdicts[name] = Verdict(
            name,
            gone.kind,
            "pending",
            next(iter(gone.targets), ""),
            "it is applied, but no longer in the catalogue; the next apply removes it",
        )
    plan.verdicts = {name: _with_proof(plan, v) for name, v in sorted(plan.verdicts.items())}
    return plan


def _off(page: Page, excluded: Mapping[str, str], environment: Mapping[str, str]) -> Verdict | None:
    target = page.patch.edits[0].target
    if page.name in excluded:
        return Verdict(page.name, page.patch.kind, "off", target, excluded[page.name])
    if not gates.is_on(page, environment):
        detail = f"set {page.patch.gate}=1 to turn it on"
        return Verdict(page.name, page.patch.kind, "off", target, detail)
    return None


def _refuse_vanished(plan: Plan) -> None:
    """Make patches that were applied before, and have nothing to patch now, failures.

    A feature that upstream renamed looks like one that it removed, and the bug would train on.
    """
    before = plan.loaded.receipt.once_applied
    vanished = ("not-applicable", "unported")
    gone = {n: v for n, v in plan.verdicts.items() if v.state in vanished and n in before}
    words = "".join(f" --without {name}" for name in gone)
    for name, verdict in gone.items():
        plan.verdicts[name] = replace(
            verdict,
            state="unported",
            served=before[name],
            detail=f"{verdict.detail}, but the patch applied to megatron-core {before[name]}",
            next=f"port it, if the bug is still there (cppmega explain {name}); if nothing is left "
            f"to fix, say so once: python -m cppmega.apply_patches{words}",
        )


def in_order(pages: Mapping[str, Page]) -> list[str]:
    """Sort names so that every page comes after the pages in its `after`; else alphabetically."""
    order: list[str] = []

    def visit(name: str) -> None:
        if name not in order:
            for earlier in sorted(pages[name].patch.after):
                if earlier in pages and name not in pages[earlier].patch.after:
                    visit(earlier)
            if name not in order:
                order.append(name)

    for name in sorted(pages):
        visit(name)
    return order


def comes_after(pages: Mapping[str, Page], later: str, earlier: str) -> bool:
    """Whether `later` declares, directly or through others, that it follows `earlier`."""
    pending, seen = list(pages[later].patch.after), set()
    while pending:
        name = pending.pop()
        if name == earlier:
            return True
        if name not in seen and name in pages:
            seen.add(name)
            pending.extend(pages[name].patch.after)
    return False


def _conflicts(
    edits: Mapping[str, Sequence[Edit]], pages: Mapping[str, Page], order: Sequence[str]
) -> dict[str, Verdict]:
    """Find pages that edit one symbol, or a class and its method, without a declared order."""
    verdicts: dict[str, Verdict] = {}
    claims: dict[str, list[tuple[str, Edit]]] = {}
    for name, edit in [(one, edit) for one in order for edit in edits.get(one, ())]:
        earlier = claims.setdefault(edit.path, [])
        for other, theirs in earlier:
            if other == name or not _overlap(edit, theirs):
                continue
            if comes_after(pages, name, other) ^ comes_after(pages, other, name):
                continue
            for page, rival, target in ((name, other, edit.target), (other, name, theirs.target)):
                detail = f"{rival} edits it too, and their order is undeclared or contradictory"
                command = f'add after=("{rival}",) to one of the two pages'
                kind = pages[page].patch.kind
                verdict = Verdict(page, kind, "conflict", target, detail, next=command)
                verdicts.setdefault(page, verdict)
        earlier.append((name, edit))
    return verdicts


def _overlap(a: Edit, b: Edit) -> bool:
    outer, inner = sorted((a, b), key=lambda edit: len(edit.symbol))
    if outer.symbol == inner.symbol:
        return True
    below = inner.symbol.removeprefix(outer.symbol + ".")
    if below == inner.symbol:
        return False
    # A subclass does not affect what it does not override.
    return outer.kind != "class-swap" or below.partition(".")[0] in ("__init__", *outer.overrides)


def _collect_work(plan: Plan, names: Sequence[str]) -> None:
    by_file: dict[str, list[tuple[Page, Edit]]] = {}
    for name in names:
        for edit in plan.edits[name]:
            if edit.kind == "source":
                by_file.setdefault(edit.path, []).append((plan.pages[name], edit))
    plan.work = {path: Work(path, tuple(edits)) for path, edits in sorted(by_file.items())}


def _done_or_pending(plan: Plan, name: str) -> Verdict:
    page, edits = plan.pages[name], plan.edits[name]
    targets = tuple(edit.target for edit in edits)
    sources = [edit for edit in edits if edit.kind == "source"]
    in_files = all(plan.up_to_date(edit.path) for edit in sources)
    listed = plan.loaded.receipt.pages.get(name)
    same = listed is not None and listed.revision == page.revision
    if in_files and same:
        return Verdict(
            name, page.patch.kind, "applied" if sources else "armed", targets[0], targets=targets
        )
    detail = "" if plan.loaded.receipt.files or not plan.loaded.problem else plan.loaded.problem
    if listed is not None:
        detail = _what_changed(plan, page, listed, sources)
    return Verdict(name, page.patch.kind, "pending", targets[0], detail, targets=targets)


def _what_changed(plan: Plan, page: Page, listed: PatchedPage, sources: Sequence[Edit]) -> str:
    """Explain why a page that the receipt lists is pending."""
    files = plan.loaded.receipt.files
    if plan.loaded.problem:
        return ""  # reported once, for the receipt
    runs = [files[edit.path].runs for edit in sources if edit.path in files]
    other = {name for reached in runs for name in changed(reached)}
    other |= {name for name, code in listed.reached.items() if page.reached.get(name) != code}
    if other:
        return f"code that it reaches changed since it was applied: {', '.join(sorted(other))}"
    if listed.revision != page.revision:
        return "the page changed since it was applied"
    if any(not plan.views[edit.path].patched for edit in sources):
        return "the receipt says applied, but the file is pristine again (reinstalled?)"
    if plan.loaded.receipt.engine != engine_revision():
        return "it was applied by another version of cppmega"
    return ""


def _with_proof(plan: Plan, verdict: Verdict) -> Verdict:
    if verdict.state not in NEEDED or verdict.name not in plan.pages:
        return verdict
    return replace(verdict, proof=proof_of(plan, verdict))


def proof_of(plan: Plan, verdict: Verdict) -> Proof:
    """The result of the last `cppmega verify` of a page, by the receipt."""
    known = plan.loaded.receipt.proofs.get(verdict.name)
    if known is None:
        return "unverified"
    page = plan.pages[verdict.name]
    fresh = known.revision == page.revision and known.digest == plan.loaded.receipt.digest
    if not fresh or verdict.state not in DONE:
        return "stale"
    proof: Proof = "unverified"
    if known.proof in ("passed", "failed"):
        proof = "passed" if known.proof == "passed" else "failed"
    return proof
