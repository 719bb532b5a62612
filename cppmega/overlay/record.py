"""What was applied, in the few words that a checkpoint and a manifest keep of it.

The digest says that two overlays differ; the pages with their revisions and the hashes of their
texts say what differs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import msgspec

from cppmega.overlay.receipt import Prints, Receipt
from cppmega.tree import accepted

NONE = "none"
"""Digest of a tree that nothing was applied to."""

Record = dict[str, Any]

_OTHER_KIND = (
    "one of the two digests was made by an earlier cppmega and does not cover the kernels, so only "
    "the patched texts were compared"
)


def of(receipt: Receipt, edits: accepted.Edits | None = None) -> Record:
    """Digest, megatron version, gates, each page's revision and text hash, the code reached.

    Args:
        edits: accepted edits of files that are not patched; they name the code as the pages do.
    """
    reached = [page.reached for page in receipt.pages.values()]
    reached += [file.runs for file in receipt.files.values()]
    return {
        "digest": accepted.name_of_code(receipt.digest or NONE, edits or {}),
        "edits": dict(sorted((edits or {}).items())),
        "megatron": receipt.megatron,
        "gates": dict(receipt.gates),
        "pages": {
            name: {"revision": page.revision, "text": _hash(page.targets)}
            for name, page in sorted(receipt.pages.items())
        },
        "code": {name: code for group in reached for name, code in sorted(group.items())},
    }


def dump(record: Mapping[str, Any]) -> str:
    """One line, for a place that holds nothing but text."""
    return json.dumps(record, separators=(",", ":"), sort_keys=True)


def parse(text: object) -> Record | None:
    """What `dump` wrote; None for anything else: a checkpoint of an earlier cppmega, or of none."""
    try:
        found = json.loads(str(text))
    except ValueError:
        return None
    return found if isinstance(found, dict) and "digest" in found else None


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One sentence for everything that is not the same; empty: the same code."""
    if then["digest"] == now["digest"]:
        return []
    comparable = NONE in (then["digest"], now["digest"]) or ("code" in then) == ("code" in now)
    found = [] if comparable else [_OTHER_KIND]
    if then.get("megatron") != now.get("megatron"):
        found.append(f"megatron-core {then.get('megatron') or '?'} -> {now.get('megatron') or '?'}")
    old, new = then.get("pages", {}), now.get("pages", {})
    found += [f"patch added: {name}" for name in sorted(new.keys() - old.keys())]
    found += [f"patch removed: {name}" for name in sorted(old.keys() - new.keys())]
    for name in sorted(old.keys() & new.keys()):
        before, after = old[name], new[name]
        if comparable and before["revision"] != after["revision"]:
            found.append(
                f"patch changed: {name} (revision {before['revision']} -> {after['revision']})"
            )
        elif before["text"] != after["text"]:
            found.append(f"patch changed: {name} (same page on another text of Megatron)")
    code, newer = then.get("code", {}), now.get("code", {})
    both = sorted(code.keys() & newer.keys())
    found += [f"code changed: {name}" for name in both if code[name] != newer[name]]
    edits, others = then.get("edits", {}), now.get("edits", {})
    for path in sorted({*edits, *others}):
        if edits.get(path) != others.get(path):
            was, is_ = (kept.get(path, "none")[:12] for kept in (edits, others))
            found.append(f"accepted edit of {path}: {was} -> {is_}")
    gates, other = then.get("gates", {}), now.get("gates", {})
    for name in sorted({*gates, *other}):
        if gates.get(name, "0") != other.get(name, "0"):
            found.append(f"gate {name}: {gates.get(name, '0')} -> {other.get(name, '0')}")
    return found or ["the patches are the same, the files around them are not"]


def said_of_checkpoint(then: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str:
    """A line for the log of a run that goes on from a checkpoint; empty where nothing differs."""
    if then is None:
        return (
            "cppmega: the checkpoint does not say which overlay it was made under; "
            f"this run has {now['digest']}"
        )
    found = differences(then, now)
    if not found:
        return ""
    return (
        f"cppmega: the checkpoint was made under overlay {then['digest']}, this run has "
        f"{now['digest']}: {'; '.join(found)}"
    )


def _hash(targets: Mapping[str, Prints]) -> str:
    rows = json.dumps(msgspec.to_builtins(targets), sort_keys=True)
    return hashlib.sha256(rows.encode()).hexdigest()[:12]
