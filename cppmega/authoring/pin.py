"""`cppmega pin`: add a fingerprint to a page, after every law has passed on that version's text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cppmega.authoring import pin_source
from cppmega.authoring.laws import LAWS, broken, check, law, session_of
from cppmega.errors import CppmegaError
from cppmega.host import durable
from cppmega.overlay import plan as planning
from cppmega.overlay import receipt
from cppmega.overlay.plan import Plan
from cppmega.overlay.survey import MISSING
from cppmega.overlay.verdict import NEEDED
from cppmega.page import Page
from cppmega.proof.needs import missing_needs
from cppmega.tree.installed import Tree
from cppmega.tree.resolve import is_version, requirement


@dataclass(frozen=True, slots=True)
class Choice:
    """A set of edits of the page that a tree may need."""

    like: tuple[str, ...]
    """The versions that have this set of edits."""
    edits: Mapping[str, int]
    """Target -> index of the edit."""


class Pinned(msgspec.Struct, rename={"path": "page"}):
    """The pins that were added to a page."""

    name: str
    version: str
    path: str
    added: dict[str, str]
    """Target -> fingerprint; empty if the version was already pinned."""
    like: str = ""
    proof: str = "passed"
    notes: list[str] = []


@dataclass
class Candidate:
    """A page with the new pins that has passed every law except the last."""

    choice: Choice
    page: Page
    data: bytes
    """The page's new text."""
    result: dict[str, bytes]
    """Path -> text of the patched file."""


def pin(
    page: Page,
    version: str,
    tree: Tree,
    scratch: Path,
    say: Callable[[str], None],
    *,
    like: str = "",
    unverified: bool = False,
) -> Pinned:
    """Pin the text of a tree as that of a version.

    Args:
        page: the page to extend.
        version: the version to pin.
        tree: the tree with the text of that version.
        scratch: an empty folder.
        say: reports progress.
        like: use the edits that the page has for this version; required if several fit.
        unverified: accept that the proof cannot run on this machine.

    Raises:
        CppmegaError: `law-...` names the law that fails; `ambiguous-edit`, `nothing-to-do`,
            `label-taken`, `needs-missing`, `pins-not-found`. Nothing is written in these cases.
    """
    plan = _plan(page, tree)
    texts = {t: _text(plan, page, t) for t in dict.fromkeys(e.target for e in page.patch.edits)}
    choices = _choices(page, plan, texts, like)
    if len(choices) == 1 and not _added(page, choices[0], texts, version):
        return Pinned(page.name, version, page.path, {}, like)
    missing = _missing_needs(page, unverified)
    candidates = _candidates(page, version, plan, texts, choices, scratch, say)
    chosen = _proved(candidates, tree, say, run=not missing)
    wanted = _added(page, chosen.choice, texts, version)
    done = Pinned(
        page.name,
        version,
        page.path,
        {page.patch.edits[index].target: text for index, text in wanted.items()},
        chosen.choice.like[-1],
        "unverified" if missing else "passed",
    )
    if missing:
        done.notes.append(f"the proof did not run: it needs {', '.join(missing)}")
    done.notes += _warnings_of_changes(page, version, tree, chosen.choice, say)
    _write(Path(page.path), chosen.data)
    return done


def _plan(page: Page, tree: Tree) -> Plan:
    gates = {page.patch.gate: "1"} if page.patch.gate else {}
    plan = planning.make(tree, receipt.load(tree), {page.name: page}, environment=gates)
    verdict, distribution = plan.verdicts[page.name], page.patch.distributions[0]
    if verdict.state in ("upstreamed", "not-applicable"):
        raise CppmegaError(
            "nothing-to-do",
            f"{page.name} is {verdict.state} on {distribution} {tree.version_of(distribution)}: "
            f"{verdict.detail}.",
            "A pin declares that the text has the bug. Nothing was written.",
            f"cppmega explain {page.name}",
        )
    for edit in page.patch.edits:
        view = plan.views[edit.path]
        if view.foreign or view.orphaned:
            raise CppmegaError(
                "not-pristine",
                f"{edit.path} in {tree.root} differs from upstream's.",
                "The fingerprint would be that of a local edit. Nothing was written.",
                f"cppmega pin {page.name} VERSION, without --from, takes the text from the wheel",
            )
    return plan


def _text(plan: Plan, page: Page, target: str) -> str:
    """Return the fingerprint of a target from the survey."""
    edit = next(edit for edit in page.patch.edits if edit.target == target)
    return plan.survey.fingerprint(plan.survey.read(edit.path), edit)


def _choices(page: Page, plan: Plan, texts: Mapping[str, str], like: str) -> list[Choice]:
    """Return the sets of edits that the tree may need.

    A known text determines its edit; for an unknown one, the edits of any version with the same
    targets are candidates.
    """
    known = {
        (edit.target, text): index
        for index, edit in enumerate(page.patch.edits)
        for text in edit.pins.values()
    }
    versions = dict.fromkeys(v for edit in page.patch.edits for v in edit.pins)
    if like and like not in versions:
        raise CppmegaError(
            "pins-not-found",
            f"{page.name} pins {', '.join(versions)}, and not {like}.",
            "There is no edit to use. Nothing was written.",
            f"cppmega explain {page.name}",
        )
    likes: dict[tuple[tuple[str, int], ...], list[str]] = {}
    problems: list[str] = []
    for version in sorted(versions, key=_age):
        row = {e.target: i for i, e in enumerate(page.patch.edits) if version in e.pins}
        lacking = [f"{t} {_why_not(texts[t])}" for t in row if not _is_text(texts[t])]
        problems += lacking
        if not lacking and like in ("", version):
            row = {t: known.get((t, texts[t]), index) for t, index in row.items()}
            likes.setdefault(tuple(sorted(row.items())), []).append(version)
    choices = [Choice(tuple(like_), dict(row)) for row, like_ in likes.items()]
    if plan.verdicts[page.name].state in NEEDED:
        # The text is known already, and the engine would apply the largest set of known edits.
        all_known = [c for c in choices if all((t, texts[t]) in known for t in c.edits)]
        choices = sorted(all_known, key=lambda choice: len(choice.edits))[-1:] or choices
    if not choices:
        detail = "; ".join(dict.fromkeys(problems)) or plan.verdicts[page.name].detail
        raise broken("known target", f"{detail}.", f"cppmega explain {page.name}")
    return choices


def _is_text(text: str) -> bool:
    return text != MISSING and not text.startswith(("?", "!"))


def _why_not(text: str) -> str:
    if text == MISSING:
        return "is missing"
    return f"is defined {text[1:]} times" if text.startswith("?") else f"cannot be read: {text[1:]}"


def _age(version: str) -> tuple[bool, list[int]]:
    """Sort key: releases by number, after the names of branches."""
    return is_version(version), [int(n) for n in re.findall(r"\d+", version)[:3]]


def _added(page: Page, choice: Choice, texts: Mapping[str, str], version: str) -> dict[int, str]:
    """Return the pins that a choice lacks: index of the edit -> fingerprint."""
    for edit in page.patch.edits:
        pinned = edit.pins.get(version)
        if pinned is not None and pinned != texts[edit.target]:
            raise CppmegaError(
                "label-taken",
                f"{page.name} pins {edit.target} as {pinned} for {version}; in this tree it is "
                f"{texts[edit.target] or 'missing'}.",
                "A version has exactly one text. Nothing was written.",
                "choose another name for the version, or correct the page",
            )
    return {
        index: texts[target]
        for target, index in choice.edits.items()
        if version not in page.patch.edits[index].pins
    }


def _missing_needs(page: Page, unverified: bool) -> Sequence[str]:
    missing = missing_needs(page.patch.needs)
    if missing and not unverified:
        raise CppmegaError(
            "needs-missing",
            f"The proof of {page.name} needs {', '.join(missing)}, which this machine lacks.",
            "The law `verify` cannot be checked here. Nothing was written.",
            "run it on a machine that has it, or pass --unverified and prove it there later",
        )
    return missing


def _candidates(
    page: Page,
    version: str,
    plan: Plan,
    texts: Mapping[str, str],
    choices: Sequence[Choice],
    scratch: Path,
    say: Callable[[str], None],
) -> list[Candidate]:
    """Return the choices that pass every law except the last one; equal results count once."""
    passed: list[Candidate] = []
    problem: CppmegaError | None = None
    for number, choice in enumerate(choices):
        try:
            with law("header"):
                wanted = _added(page, choice, texts, version)
                data = pin_source.with_pins(page, wanted, version)
                new = pin_source.copy_with(page, data, scratch)
            result = check(new, plan, scratch / f"tree-{number}")
        except CppmegaError as error:
            problem = error  # the newest edits come last, and their error is reported
            continue
        if all(result != other.result for other in passed):
            passed.append(Candidate(choice, new, data, result))
    if not passed:
        assert problem is not None
        raise problem
    say("laws that hold: " + ", ".join(LAWS))
    return passed


def _proved(
    candidates: Sequence[Candidate], tree: Tree, say: Callable[[str], None], *, run: bool
) -> Candidate:
    """Return the only candidate whose proof passes on that version's code."""
    from cppmega.proof import verify

    proofs = []
    for candidate in candidates:
        law_ = "verify" if run else "the same text under every hash seed"
        say(f"law {law_}: running with the edits of {candidate.choice.like[-1]}")
        session = session_of(tree.root, candidate.page)
        session.say = say
        proofs.extend(verify.verify(session, [candidate.page.name]))
    wrong = {"failed"} if not run else {"failed", "stale", "unverified"}
    passed = [c for c, p in zip(candidates, proofs, strict=True) if p.proof not in wrong]
    if not passed:
        name = candidates[0].page.name
        raise broken("verify", f"{proofs[-1].detail}.", f"cppmega verify {name}")
    if run:
        say("laws that hold: verify")
    if len(passed) > 1:
        likes = [candidate.choice.like[-1] for candidate in passed]
        raise CppmegaError(
            "ambiguous-edit",
            f"The edits for {' and for '.join(likes)} both fit this text and pass every law, and "
            "they give different code.",
            "Which one is intended cannot be determined automatically. Nothing was written.",
            f"the same command with --like {likes[-1]}",
        )
    return passed[0]


def _warnings_of_changes(
    page: Page, version: str, tree: Tree, choice: Choice, say: Callable[[str], None]
) -> list[str]:
    """Return a warning if upstream changed what the edit replaces, which no law detects."""
    from cppmega.authoring import drift
    from cppmega.tree import wheels

    like, distribution = choice.like[-1], page.patch.distributions[0]
    if like == version or not is_version(like):
        return []
    with suppress(CppmegaError):  # without that wheel there is nothing to compare
        old = Tree(wheels.unpacked(like, say, distribution))
        drifted = drift.compare((like, old), (version, tree), {page.name: page}).pages[0]
        lost = [
            target.target
            for target in drifted.targets
            if any(change.meets == "replaced" for change in target.changes)
        ]
        if lost:
            return [
                f"upstream changed what the edit replaces since {like}, in {', '.join(lost)}; read "
                f"it before you commit: cppmega drift {requirement(like, distribution)} "
                f"{requirement(version, distribution)}"
            ]
    return []


def _write(path: Path, data: bytes) -> None:
    mode = path.stat().st_mode
    try:
        durable.replace(path, data)
        path.chmod(mode)
    except OSError as error:
        raise CppmegaError(
            "folder-not-writable",
            f"{path} cannot be written: {error.strerror}.",
            "The pin was not added.",
            "copy the page into a folder of your own and pass it as --patches",
        ) from None
