"""Recorded proofs of pages that need a GPU, in a file next to the pages.

`cppmega verify --record` writes the file on a machine with a GPU; it is committed and ships in the
wheel. A proof is about one text of Megatron, and is valid until the page or any code that it
reaches changes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cppmega.errors import CppmegaError
from cppmega.host import json_text
from cppmega.overlay.compute import reached_by, stack
from cppmega.overlay.plan import Plan
from cppmega.overlay.verdict import Proof
from cppmega.page import Page

NAME = "gpu_proofs.json"
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Subject:
    """The code that a proof is about."""

    revision: str
    """Hash of the page's code (`Page.revision`)."""
    runs: str
    """Hash of the modules that the patched text reaches, such as kernels."""
    text: str
    """Hash of Megatron's text of the targets."""

    @classmethod
    def of(cls, plan: Plan, page: Page) -> Subject:
        """Return the subject for a page that a tree needs."""
        runs, before = reached_by(plan, page.name), plan.before[page.name]
        return cls(page.revision, _hash(runs), _hash(before))


@dataclass(frozen=True, slots=True)
class RecordedProof:
    """One proof, and where it ran."""

    subject: Subject
    gpu: str
    date: str
    megatron: str
    stack: Mapping[str, str] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """Where the proof ran, for messages."""
        return f"on {self.gpu}, {self.date}, megatron-core {self.megatron}"


def path_for(page: Page) -> Path:
    """Return the file for the catalogue of a page."""
    page_file = Path(page.path)
    folder = page_file.parent.parent if page_file.stem == "__init__" else page_file.parent
    return folder / NAME


def judged(plan: Plan, page: Page) -> tuple[Proof, str]:
    """Return the verdict of a page's recorded proofs on the code of this tree, with a reason."""
    recorded = _read(path_for(page)).get(page.name, [])
    if not recorded:
        return "unverified", ""
    subject = Subject.of(plan, page)
    for one in recorded:
        if one.subject == subject:
            return "passed", f"proved {one.place}"
    for one in recorded:
        if one.subject.text == subject.text:
            what = "the page" if one.subject.revision != subject.revision else "code that it runs"
            return "stale", f"{what} changed since it was proved {one.place}"
    return "unverified", f"it was proved {recorded[-1].place}, for a different text of its targets"


def record(plan: Plan, proved: Sequence[Page]) -> list[Path]:
    """Record the proofs of those pages that need more than a CPU.

    Args:
        plan: the plan of the tree on which the proofs have just passed.
        proved: the pages that passed.

    Returns:
        The files that were written.

    Raises:
        CppmegaError: `nothing-to-do`, `write-failed`, `proofs-unreadable`.
    """
    pages = [page for page in proved if set(page.patch.needs) - {"cpu"}]
    if not pages:
        raise CppmegaError(
            "nothing-to-do",
            "None of the pages that were proved here needs more than a CPU.",
            "Proofs on a CPU are repeated on every machine, and are not recorded.",
            "run it on a machine with what a page needs: cppmega explain NAME shows it",
        )
    gpu, date = _gpu(), datetime.now(UTC).date().isoformat()
    for page in pages:
        _write(page, RecordedProof(Subject.of(plan, page), gpu, date, plan.tree.version, stack()))
    return sorted({path_for(page) for page in pages})


def _gpu() -> str:
    try:
        import torch
    except ImportError:
        return "no GPU"
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


def _write(page: Page, proof: RecordedProof) -> None:
    """Write a proof, in place of one for the same text if it exists."""
    path = path_for(page)
    proofs = _read(path)
    others = [one for one in proofs.get(page.name, []) if one.subject.text != proof.subject.text]
    proofs[page.name] = sorted([*others, proof], key=lambda one: (one.megatron, one.subject.text))
    rows = {name: [asdict(one) for one in proofs[name]] for name in sorted(proofs)}
    new = path.with_name(f".{NAME}.new")
    try:
        new.write_text(json.dumps({"schema": SCHEMA, "proofs": rows}, indent=1) + "\n")
        new.replace(path)
    except OSError as error:
        raise CppmegaError(
            "write-failed",
            f"{path} cannot be written: {error.strerror}.",
            "The proof would have to run again.",
            "run it from a checkout that you can write",
        ) from error


def _read(path: Path) -> dict[str, list[RecordedProof]]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    try:
        raw = json_text.loads(data)
        if raw["schema"] != SCHEMA:
            raise ValueError(f"its schema is {raw['schema']!r}, and this release reads {SCHEMA}")
        return {name: [_from_row(row) for row in rows] for name, rows in raw["proofs"].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CppmegaError(
            "proofs-unreadable",
            f"{path} cannot be read: {type(error).__name__}: {error}.",
            "It is unknown whether the pages that need a GPU were proved.",
            "upgrade cppmega if a later release wrote it; else "
            f"mv {path} {path}.damaged, and restore it (git checkout -- {path}) or record the "
            "proofs again",
        ) from None


def _from_row(row: Mapping[str, Any]) -> RecordedProof:
    return RecordedProof(**{**row, "subject": Subject(**row["subject"])})


def _hash(values: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(dict(values), sort_keys=True).encode()).hexdigest()[:16]
