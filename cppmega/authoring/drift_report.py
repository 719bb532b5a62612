"""The output of `cppmega drift`: what changed, as a short diff, and what the user has to do."""

from __future__ import annotations

import shlex
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from cppmega.authoring.drift_result import MEANING, Drift, PageDrift, Side, TargetDrift
from cppmega.authoring.statements import StatementChange
from cppmega.host.console import ENVELOPE, Style, styled, terminal_width
from cppmega.host.wording import counted, listed
from cppmega.overlay.verdict import NEEDED
from cppmega.page import Page
from cppmega.tree.resolve import label_of, requirement

APPLY = "python -m cppmega.apply_patches"

_STYLES: dict[str, Style] = {
    "lost-again": "alarm",
    "newly-needed": "waiting",
    "upstreamed": "note",
    "same": "good",
}
_SIGNS = {"replaced": "!", "beside": "~", "elsewhere": " ", "unknown": " "}
LEGEND = "! upstream changed what our edit replaces   ~ it changed something next to it"
_WIDTH = 110
"""Characters of a summary in a verdict on a terminal."""
_UNSAFE = 6
"""Patches that need work which a verdict names."""
_LINES_KNOWN, _LINES = 8, 48
"""Maximum lines of a diff if the page knows the new text, and if it does not."""


def as_json(drift: Drift) -> dict[str, Any]:
    """Return the object that `--json` prints."""
    return {
        **ENVELOPE,
        "ok": drift.safe,
        "megatron": {"version": drift.new.tree.version, "root": str(drift.new.tree.root)},
        "old": _side_json(drift.old),
        "new": _side_json(drift.new),
        "unserved": [page.page.name for page in drift.unserved],
        "patches": [_page_json(page, drift) for page in drift.pages],
    }


def _side_json(side: Side) -> dict[str, str]:
    return {"given": side.requested, "version": side.tree.version, "root": str(side.tree.root)}


def _page_json(page: PageDrift, drift: Drift) -> dict[str, Any]:
    sentence, command = advice(page, drift)
    return {
        "name": page.page.name,
        "kind": page.page.patch.kind,
        "gate": page.page.patch.gate,
        "change": page.word,
        "safe": page.safe,
        "old": page.old.state,
        "new": page.new.state,
        "detail": page.new.detail,
        "proof": page.proof,
        "proved": page.proved,
        "recipes": list(page.recipes),
        "targets": msgspec.to_builtins(page.targets),
        "todo": sentence,
        "next": command,
    }


def advice(page: PageDrift, drift: Drift) -> tuple[str, str]:
    """Return what the user has to do about a patch, in one sentence, and the next command."""
    name, new = page.page.name, drift.new
    if page.word == "lost-again" and page.safe:
        return (
            f"upstream lost its own fix; apply adds ours after the upgrade. Tell upstream "
            f"({page.page.labels.get('Upstream', '')})"
        ), APPLY
    if page.word == "newly-needed":
        return "apply adds it after the upgrade", APPLY
    if page.word == "upstreamed":
        if page.proof is None:
            return (
                "apply would leave it out after the upgrade; --prove checks that this is right",
                "",
            )
        return "nothing; apply leaves it out after the upgrade", ""
    if page.word == "not-fixed":
        return (
            f"fixed_upstream() in {page.page.path} accepts a text without the fix: correct it, "
            "and add an Edit for that text"
        ), f"cppmega explain {name}"
    if page.word == "not-compared":
        return "nothing; compare two folders that hold that package to see it", ""
    if page.safe:
        return "nothing", ""
    if page.word == "foreign":
        return "restore upstream's file, then compare again", page.new.next
    if page.word == "conflict":
        return f"{page.new.next}: {page.new.detail}", f"cppmega explain {name}"
    if page.recipes:
        return (
            f"port it: add an Edit for the text of NEW to {page.page.path} and pin it; until then, "
            f"train {', '.join(page.recipes)} with {drift.old.label}"
            if page.old.state in NEEDED
            else f"port it: add an Edit for the text of NEW to {page.page.path} and pin it"
        ), f"cppmega explain {name}"
    if page.word == "unported":
        return (
            f"if the bug is still there, add an Edit for its place to {page.page.path} and pin it; "
            "if not, declare that in fixed_upstream(), or leave the patch out once"
        ), f"{APPLY} --without {name}"
    return _repair(page, pin_command(page.page, new))


def _repair(page: PageDrift, pin: str) -> tuple[str, str]:
    """Return what to do about an unknown text."""
    file = page.page.path
    moved = next((target for target in page.targets if target.word == "moved"), None)
    if moved is not None:
        place = moved.places[0]
        text = "the same text" if not moved.changes else "a different text"
        sentence = f"it is in {place} now, with {text}: add an Edit with that target to {file}, "
        sentence += "then pin it"
        if moved.changes:
            sentence += "; if it has the fix, declare that in fixed_upstream()"
        return sentence, pin
    gone = next((target for target in page.targets if target.word == "gone"), None)
    if gone is not None:
        like = f"inspect {gone.nearest[0].target}" if gone.nearest else "look for its replacement"
        return (
            f"{like}: if the bug is still there, add an Edit for it to {file} and pin it; if not, "
            "declare that in fixed_upstream() or `feature`"
        ), pin
    misfit = next((target for target in page.targets if target.fits is False), None)
    if misfit is not None:
        return f"write an Edit for the new text into {file} ({misfit.misfit}), then pin it", pin
    unknown = [target for target in page.targets if target.word == "changed" and not target.known]
    if any(change.meets == "replaced" for target in unknown for change in target.changes):
        return (
            f"the edit still fits, but upstream changed what it replaces (marked !): bring {file} "
            "up to date, then pin it"
        ), pin
    if unknown and all(target.fits for target in unknown):
        return "the edit still fits, and upstream changed other statements: pin the new text", pin
    return f"read the new text, make sure that {file} has an edit for it, and pin it", pin


def pin_command(page: Page, new: Side) -> str:
    """Return the command that pins the text of NEW."""
    (distribution, *_) = page.patch.distributions
    label = label_of(new.tree, distribution)
    command = f"cppmega pin {page.name} {label}"
    if new.requested != requirement(label, distribution):
        command += f" --from {shlex.quote(new.requested)}"
    return command


def verdict(drift: Drift) -> Iterator[str]:
    """Yield how many patches fare how, and the first of those that need work, in a line each."""
    counts = Counter(page.word for page in drift.pages)
    yield ", ".join(f"{count} {word}" for word, count in counts.items())
    unsafe = [page for page in drift.pages if not page.safe]
    for page in unsafe[:_UNSAFE]:
        said = " ".join(summary(page, drift).split())
        said = textwrap.shorten(said, _WIDTH, placeholder=" ...") if terminal_width() else said
        yield f"{_word(page)} {page.page.name}  {said}"
    if len(unsafe) > _UNSAFE:
        yield f"... {len(unsafe) - _UNSAFE} more"


def lines(drift: Drift) -> Iterator[str]:
    """Yield the lines of the report, without the closing line."""
    width = max((len(page.page.name) for page in drift.pages), default=0)
    quiet: dict[str, list[str]] = {}
    for page in drift.pages:
        if page.safe and page.word in ("same", "not-needed", "not-compared", "unported"):
            retired = page.new.state == "upstreamed"
            word = f"upstreamed{_proof(page)}" if retired else page.word
            quiet.setdefault(word, []).append(page.page.name)
            continue
        yield f"{_word(page)} {page.page.name:<{width}}  {summary(page, drift)}".rstrip()
        for target in page.targets:
            yield from target_lines(target, page)
        sentence, command = advice(page, drift)
        if sentence != "nothing":
            yield f"    to do: {sentence}"
        if command:
            yield f"    next:  {command}"
    for word, names in quiet.items():
        head, _, rest = word.partition(" ")
        listed = " ".join(filter(None, [rest, ", ".join(names)]))
        yield f"{styled(f'{head:<15}', _STYLES.get(head))} {listed}"


def _proof(page: PageDrift) -> str:
    """Return how it is known that NEW has the fix."""
    known = {None: "by text, not proved", "passed": "proved"}
    return f" ({known.get(page.proof, page.proved)})"


def _word(page: PageDrift) -> str:
    style = _STYLES.get(page.word) if page.safe else "bad"
    return styled(f"{page.word:<15}", "alarm" if "lost" in page.word else style)


def summary(page: PageDrift, drift: Drift) -> str:
    """Return what happened to a patch, in one sentence."""
    old, new = drift.old.label, drift.new.label
    if page.word == "lost-again":
        if page.safe:
            return f"UPSTREAM LOST ITS FIX AGAIN: {old} has it, {new} has the bug"
        return f"UPSTREAM MAY HAVE LOST ITS FIX: {old} has it, {new} is neither fixed nor known"
    if page.word == "changed" and page.safe:
        was = "" if page.old.state in NEEDED else f"; it did not know that of {old}"
        return "the page knows the new text" + was
    if page.word == "not-fixed":
        return page.proved
    if page.word == "upstreamed":
        return f"upstreamed{_proof(page)}; {page.new.detail or MEANING[page.word]}"
    if page.recipes:
        before = ", applied before" if page.old.state in NEEDED else ""
        return (
            f"{page.new.state} now{before}: {', '.join(page.recipes)} cannot be built; "
            f"{page.new.detail}"
        )
    if page.word == "not-applicable" or not page.safe:
        detail = page.new.detail or MEANING[page.word]
        if page.word == "moved" and page.new.state != "moved":
            detail = "the target has another name"
        if page.old.state == "upstreamed" and not page.safe:
            detail += f"; {old} has upstream's fix"
        return detail
    return MEANING[page.word]


def target_lines(target: TargetDrift, page: PageDrift) -> Iterator[str]:
    """Yield what happened to one symbol, with a diff."""
    if page.word in ("upstreamed", "not-fixed") or (
        page.word == "not-applicable" and not target.nearest
    ):
        return
    if target.word == "same" and page.safe:
        return
    summaries: dict[str, str] = {
        "same": "the same text",
        "moved": f"now {' or '.join(target.places)}",
        "gone": "gone" + _nearest(target),
        "added": "edited in NEW only",
        "left": "edited in OLD only",
        "ambiguous": target.misfit,
        "unreadable": target.misfit,
    }
    known = f" (pinned: {target.known})" if target.known else ""
    if target.word == "changed" or target.changes:
        moved = f"{summaries['moved']}, " if target.word == "moved" else ""
        yield f"    {target.target}: {moved}{_counted(target.changes)}{known}"
        if target.fits is False:
            yield f"      our edit no longer fits: {target.misfit}"
        yield from _limited(target.changes, _LINES_KNOWN if page.safe else _LINES)
    else:
        yield f"    {target.target}: {summaries[target.word]}{known}"


def _nearest(target: TargetDrift) -> str:
    if not target.nearest:
        return "; nothing similar is left"
    like = [f"{match.target} ({match.likeness:.0%} alike)" for match in target.nearest]
    return "; nearest: " + ", ".join(like)


def _counted(changes: Sequence[StatementChange]) -> str:
    """Return a count such as `changed in 5 places: 2 in what our edit replaces`."""
    if not changes:
        return "the layout changed, and no statement"
    counts = {"replaced": 0, "beside": 0}
    for change in changes:
        if change.meets in counts:
            counts[change.meets] += 1
    places = f"changed in {counted(len(changes), 'place')}"
    if all(change.meets == "unknown" for change in changes):
        return places
    if not any(counts.values()):
        return f"{places}, none of them near our edit"
    parts = []
    if counts["replaced"]:
        parts.append(f"{counts['replaced']} in what our edit replaces")
    if counts["beside"]:
        parts.append(f"{counts['beside']} next to it")
    return f"{places}: {', '.join(parts)}"


def _limited(changes: Sequence[StatementChange], limit: int) -> Iterator[str]:
    """Yield the diff, what meets our edit first; if it is too long, count the rest."""
    ordered = sorted(changes, key=lambda change: change.meets == "elsewhere")
    diff = [line for change in ordered for line in _change_lines(change)]
    yield from diff[:limit]
    if len(diff) > limit:
        yield f"        ... {len(diff) - limit} more lines; --json has them all"


def _change_lines(change: StatementChange) -> Iterator[str]:
    yield f"        {styled(f'after: {change.after}' if change.after else 'first:', 'note')}"
    sign = _SIGNS[change.meets]
    yield from (styled(f"      {sign} - {text}", "bad") for text in change.old)
    yield from (styled(f"      {sign} + {text}", "good") for text in change.new)


def closing(drift: Drift) -> str:
    """Return the last line: whether the upgrade is safe."""
    new = drift.new.label
    unsafe = [page.page.name for page in drift.pages if not page.safe]
    also = ""
    for sentence, safe in (("upstream lost its fix again", True), ("may have lost its fix", False)):
        lost = [p.page.name for p in drift.pages if p.word == "lost-again" and p.safe is safe]
        also += f"; {sentence}: {listed(lost)}" if lost else ""
    if drift.unserved:
        names = listed([page.page.name for page in drift.unserved])
        verb = "patch does" if len(drift.unserved) == 1 else "patches do"
        also += f"; {len(drift.unserved)} {verb} not serve {new}: {names}"
    recipes = dict.fromkeys(recipe for page in drift.unserved for recipe in page.recipes)
    also += f"; {listed(list(recipes))} cannot be built there" if recipes else ""
    total = f"{sum(page.word != 'not-compared' for page in drift.pages)} patches"
    if unsafe:
        return f"not safe: {len(unsafe)} of {total} need work for {new}: {listed(unsafe)}{also}"
    return (
        f"safe: all {total} are known on {new}, or not needed there{also}; upgrade, then: {APPLY}"
    )
