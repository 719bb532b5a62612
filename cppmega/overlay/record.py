"""A short record of what was applied, which checkpoints and manifests keep.

The digest shows that two overlays differ; the pages with their revisions and the hashes of their
texts show what differs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping

import msgspec
from msgspec import UNSET, UnsetType

from cppmega.host import json_text
from cppmega.overlay.receipt import Prints, Receipt
from cppmega.tree import accepted

NONE = "none"
"""Digest of a tree without patches."""

_OTHER_KIND = (
    "one of the two digests was computed by an earlier cppmega and does not cover the kernels, so "
    "only the patched texts were compared"
)


class PageRecord(msgspec.Struct, frozen=True):
    """One applied page."""

    revision: str
    text: str
    """Hash of the texts that it patched."""


class OverlayRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One overlay; records of earlier releases lack some fields."""

    digest: str
    edits: dict[str, str] | UnsetType = UNSET
    """Accepted edits of files that are not patched: path -> SHA-256."""
    fallbacks: tuple[str, ...] | UnsetType = UNSET
    """Pages whose declined calls Megatron's own code may compute."""
    megatron: str | UnsetType = UNSET
    gates: dict[str, str] | UnsetType = UNSET
    pages: dict[str, PageRecord] | UnsetType = UNSET
    code: dict[str, str] | UnsetType = UNSET
    """Kernels, modules and helpers that the applied pages reach: name -> hash."""


def record_of(
    receipt: Receipt, edits: accepted.Edits | None = None, fallbacks: Iterable[str] = ()
) -> OverlayRecord:
    """Summarise a receipt: the digest, the gates, the pages, and the code that they reach.

    Args:
        receipt: the receipt of the tree.
        edits: accepted edits of files that are not patched; they extend the digest.
        fallbacks: pages whose calls may be declined; they extend the digest, too.
    """
    fallbacks = tuple(sorted(fallbacks))
    reached = [page.reached for page in receipt.pages.values()]
    reached += [file.runs for file in receipt.files.values()]
    return OverlayRecord(
        digest=accepted.name_of_code(receipt.digest or NONE, edits or {}, fallbacks),
        edits=dict(sorted((edits or {}).items())),
        fallbacks=fallbacks or UNSET,
        megatron=receipt.megatron,
        gates=dict(receipt.gates),
        pages={
            name: PageRecord(page.revision, _hash(page.targets))
            for name, page in sorted(receipt.pages.items())
        },
        code={name: code for group in reached for name, code in sorted(group.items())},
    )


def dump(record: OverlayRecord) -> str:
    """Encode a record as one line of JSON."""
    return json.dumps(msgspec.to_builtins(record), separators=(",", ":"), sort_keys=True)


def parse(text: object) -> OverlayRecord | None:
    """Decode the text of `dump`; None for anything else, as in checkpoints of earlier releases."""
    try:
        return msgspec.convert(json_text.loads(str(text)), OverlayRecord)
    except ValueError:
        return None


def differences(then: OverlayRecord, now: OverlayRecord) -> list[str]:
    """One sentence for each difference; empty if the code is the same."""
    if then.digest == now.digest:
        return []
    same_kind = (then.code is UNSET) == (now.code is UNSET)
    comparable = same_kind or NONE in (then.digest, now.digest)
    lines = [] if comparable else [_OTHER_KIND]
    if then.megatron != now.megatron:
        lines.append(f"megatron-core {then.megatron or '?'} -> {now.megatron or '?'}")
    lines += _pages(then.pages or {}, now.pages or {}, comparable)
    code, newer = then.code or {}, now.code or {}
    both = sorted(code.keys() & newer.keys())
    lines += [f"code changed: {name}" for name in both if code[name] != newer[name]]
    edits, others = then.edits or {}, now.edits or {}
    for path in sorted({*edits, *others}):
        if edits.get(path) != others.get(path):
            was, is_ = (kept.get(path, "none")[:12] for kept in (edits, others))
            lines.append(f"accepted edit of {path}: {was} -> {is_}")
    allowed, since = set(then.fallbacks or ()), set(now.fallbacks or ())
    lines += [f"fallback no longer allowed: {name}" for name in sorted(allowed - since)]
    lines += [f"fallback allowed: {name}" for name in sorted(since - allowed)]
    gates, other = then.gates or {}, now.gates or {}
    for name in sorted({*gates, *other}):
        if gates.get(name, "0") != other.get(name, "0"):
            lines.append(f"gate {name}: {gates.get(name, '0')} -> {other.get(name, '0')}")
    return lines or ["the patches are the same, but the files around them differ"]


def _pages(
    then: Mapping[str, PageRecord], now: Mapping[str, PageRecord], comparable: bool
) -> Iterator[str]:
    yield from (f"patch added: {name}" for name in sorted(now.keys() - then.keys()))
    yield from (f"patch removed: {name}" for name in sorted(then.keys() - now.keys()))
    for name in sorted(then.keys() & now.keys()):
        before, after = then[name], now[name]
        if comparable and before.revision != after.revision:
            yield f"patch changed: {name} (revision {before.revision} -> {after.revision})"
        elif before.text != after.text:
            yield f"patch changed: {name} (same page on another text of Megatron)"


def remark_on_checkpoint(then: OverlayRecord | None, now: OverlayRecord) -> str:
    """Write a line for the log of a run that resumes from a checkpoint; "" if nothing differs."""
    if then is None:
        return (
            "cppmega: the checkpoint does not record the overlay under which it was saved; "
            f"this run has {now.digest}"
        )
    changes = differences(then, now)
    if not changes:
        return ""
    return (
        f"cppmega: the checkpoint was saved under overlay {then.digest}, this run has "
        f"{now.digest}: {'; '.join(changes)}"
    )


def _hash(targets: Mapping[str, Prints]) -> str:
    rows = json.dumps(msgspec.to_builtins(targets), sort_keys=True)
    return hashlib.sha256(rows.encode()).hexdigest()[:12]
