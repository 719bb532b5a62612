"""Compute the new text of every file and the receipt for it, in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cppmega import __version__
from cppmega.catalogue import loader as catalogue
from cppmega.catalogue import revision
from cppmega.errors import CppmegaError
from cppmega.host import console, packages
from cppmega.overlay import receipt, remembered
from cppmega.overlay.diagnose import restoring
from cppmega.overlay.plan import Plan, comes_after
from cppmega.overlay.receipt import PatchedFile, PatchedPage, Prints, Receipt
from cppmega.overlay.transaction import FileChange, interrupted
from cppmega.overlay.verdict import NEEDED
from cppmega.rewriting import code_text
from cppmega.tree.installed import sha256

if TYPE_CHECKING:
    from cppmega.rewriting.rewrite import Rewritten

_STACK = ("torch", "transformer-engine", "triton", "tilelang", "liger-kernel", "mamba-ssm")


def changes_of(plan: Plan, catalogues: Sequence[Path]) -> tuple[dict[str, FileChange], Receipt]:
    """Compute the files to write and their receipt, in memory."""
    new = Receipt(
        tool=__version__,
        engine=revision.engine_revision(),
        identity=plan.tree.identity,
        megatron=plan.tree.version,
        gates=plan.gates,
        excluded=list(plan.excluded),
        only=plan.only,
        kinds=plan.kinds,
        catalogues=[*map(catalogue.stored, catalogues)],
        catalogue_hashes=remembered.pins(catalogues),
        stack=stack(),
        proofs=plan.loaded.receipt.proofs,
    )
    changes = dict(restored(plan, keep=set(plan.work)))
    after: dict[str, str] = {}
    for path in console.each("patching", plan.work):
        work, file = plan.work[path], plan.views[path]
        assert file.pristine is not None
        done = rewritten(plan, path)
        after |= {f"{path}:{symbol}": fingerprint for symbol, fingerprint in done.after.items()}
        new.files[path] = PatchedFile(
            sha256(file.pristine),
            sha256(done.data),
            file.origin,
            work.page_revisions,
            done.inserted,
            revision.reached(done.imports),
        )
        if done.data != file.current:
            changes[path] = FileChange(done.data, file.pristine)
    for name, edits in plan.edits.items():
        if plan.verdicts[name].state not in NEEDED:
            continue
        runtime = all(edit.kind != "source" for edit in edits)
        new.pages[name] = PatchedPage(
            revision=plan.pages[name].revision,
            state="armed" if runtime else "applied",
            kind=plan.pages[name].patch.kind,
            targets={
                edit.target: Prints(
                    before=plan.before[name][edit.target],
                    after=after.get(edit.target, "runtime"),
                )
                for edit in edits
            },
            text=plan.pages[name].text,
            reached=dict(plan.pages[name].reached),
        )
    resolved = {name for name, v in plan.verdicts.items() if v.state == "upstreamed"}
    by_name = set(plan.only) if plan.only or plan.kinds else set(plan.excluded)
    resolved |= {*new.pages, *(set(plan.excluded) & by_name)}
    new.served = {k: v for k, v in plan.loaded.receipt.once_applied.items() if k not in resolved}
    new.digest = overlay_digest(new)
    new.survey = dict(sorted(plan.survey.used.items()))
    new.code = code_text.known()
    return changes, new


def rewritten(plan: Plan, path: str) -> Rewritten:
    """Compute the text of a file with the edits of every active page."""
    from cppmega.rewriting.rewrite import Step, rewrite

    file, work = plan.views[path], plan.work[path]
    assert file.pristine is not None
    steps = [Step.of(page, edit) for page, edit in work.edits]
    return rewrite(file.pristine, path, steps, plan.survey.parse(file.pristine, path))


def reached_by(plan: Plan, name: str) -> dict[str, str]:
    """Find the modules of this package that the new texts of one page reach."""
    from cppmega.rewriting.rewrite import Step, rewrite

    modules: dict[str, str] = {}
    for path, work in plan.work.items():
        file = plan.views[path]
        names = {page.name for page, _ in work.edits}
        # Its edits may expect the text that the pages before it produce.
        wanted = {name, *(other for other in names if comes_after(plan.pages, name, other))}
        if name in names and file.pristine is not None:
            steps = [Step.of(page, edit) for page, edit in work.edits if page.name in wanted]
            parsed = plan.survey.parse(file.pristine, path)
            modules |= revision.reached(rewrite(file.pristine, path, steps, parsed).imports)
    return modules


def restored(plan: Plan, keep: set[str]) -> Iterator[tuple[str, FileChange]]:
    """Yield the original of every patched file that no active page edits any more."""
    files = plan.loaded.receipt.files
    for path in sorted({*files, *interrupted(plan.tree)} - keep):
        file = plan.views[path]
        if file.patched and file.pristine is not None:
            yield path, FileChange(file.pristine, file.pristine)
        elif file.orphaned and file.story:
            raise CppmegaError(
                "patched-text-committed",
                f"{path}: {file.story}.",
                "Upstream's text is in an earlier commit, which cppmega cannot choose for you.",
                restoring(plan.tree, file),
            )
        elif path in files and files[path].after == sha256(file.current or b""):
            raise CppmegaError(
                "original-missing",
                f"The original of {path} is missing from {receipt.FOLDER}/originals.",
                "Without it, the exact upstream bytes cannot be restored.",
                restoring(plan.tree, file),
            )
        elif file.foreign:
            raise CppmegaError(
                "foreign-edit",
                f"{path} was edited after cppmega patched it.",
                "Restoring the original would lose that edit.",
                restoring(plan.tree, file),
            )


def overlay_digest(new: Receipt) -> str:
    """Hash the code that a run executes; paths, times and comments do not count.

    The hash covers upstream's text of every file, the inserted code, the text of every target, and
    the modules of this package that the new texts and the pages reach.
    """
    lines = []
    for path, entry in new.files.items():
        lines.append(f"file {path} {entry.before} {entry.inserted}")
        lines += [f"runs {path} {module} {code}" for module, code in entry.runs.items()]
    for name, page in new.pages.items():
        lines.append(f"page {name} {page.state}")
        lines += [f"reaches {name} {module} {code}" for module, code in page.reached.items()]
        lines += [f"target {name} {t} {p.before} {p.after}" for t, p in page.targets.items()]
        if any(prints.after == "runtime" for prints in page.targets.values()):
            lines.append(f"runtime {name} {page.revision}")
    lines += [f"gate {name}={value}" for name, value in new.gates.items()]
    return sha256("\n".join(sorted(lines)).encode())[:16]


def stack() -> dict[str, str]:
    """Versions of the training stack, read from package metadata without importing anything."""
    versions = {name: packages.version(name) for name in _STACK}
    return {name: version for name, version in versions.items() if version is not None}
