"""The laws that `cppmega pin` checks on one page and one text; `verify` is checked separately."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from cppmega.authoring.pin_source import PinsNotFoundError
from cppmega.errors import CppmegaError
from cppmega.overlay import verbs as overlay
from cppmega.overlay.plan import Plan
from cppmega.overlay.verbs import Session
from cppmega.overlay.verdict import DONE
from cppmega.page import PURPOSES, Page
from cppmega.rewriting.errors import OutsideTargetError, TargetError, UndefinedNameError

LAWS = (
    "header",
    "known target",
    "edit",
    "only targets changed",
    "undefined names",
    "second pass",
    "reversible",
)
"""The laws on the text, in the order in which they are checked; `verify` comes last."""

_LAW_OF_ERROR: Mapping[type[CppmegaError], str] = {
    TargetError: "known target",
    OutsideTargetError: "only targets changed",
    UndefinedNameError: "undefined names",
}
"""The law that an error of the engine violates; others violate the law that is being checked."""


class LawBrokenError(CppmegaError):
    """A page violates a law on the text that is to be pinned."""


@contextmanager
def law(name: str) -> Iterator[None]:
    """Turn errors into violations of a law, or of the law that the error is known to violate."""
    try:
        yield
    except (LawBrokenError, PinsNotFoundError):
        raise
    except CppmegaError as error:
        raise broken(_LAW_OF_ERROR.get(type(error), name), error.what, error.next) from error


def broken(name: str, what: str, command: str) -> LawBrokenError:
    """Return the error for a violated law."""
    return LawBrokenError(
        "law-" + name.replace(" ", "-"),
        f"The law `{name}` fails: {what}",
        "A pinned text is patched without further questions. Nothing was written.",
        command,
    )


def check(page: Page, plan: Plan, root: Path) -> dict[str, bytes]:
    """Apply, apply again and revert on a tree that holds only the page's files.

    Returns:
        path -> the patched text.

    Raises:
        LawBrokenError: `law-...`.
    """
    (root / "megatron" / "core").mkdir(parents=True)
    pristine = {}
    for path in {edit.path for edit in page.patch.edits}:
        data = plan.survey.read(path)
        if data is not None:
            pristine[path] = data
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(data)
    session = session_of(root, page)
    gates = {page.patch.gate: "1"} if page.patch.gate else {}
    with law("edit"):
        verdict = overlay.apply(session, kinds=PURPOSES, environment=gates).plan.verdicts[page.name]
        if verdict.state not in DONE:
            what = f"{verdict.target} is {verdict.state}: {verdict.detail}."
            raise broken("known target", what, f"cppmega explain {page.name}")
        result = {path: (root / path).read_bytes() for path in pristine}
    with law("second pass"):
        again = overlay.apply(session, kinds=PURPOSES, environment=gates)
        if again.changed or {path: (root / path).read_bytes() for path in pristine} != result:
            what = f"applying it again changes {', '.join(again.changed)}."
            raise broken("second pass", what, f"cppmega diff {page.name}")
    with law("reversible"):
        overlay.revert(session)
        changed = [path for path in pristine if (root / path).read_bytes() != pristine[path]]
        if changed:
            what = f"revert does not restore {', '.join(changed)}."
            raise broken("reversible", what, f"cppmega diff {page.name}")
    return result


def session_of(root: Path, page: Page) -> Session:
    """Return a session whose catalogue is one page."""
    session = Session(root, ())
    session.pages = {page.name: page}
    return session
