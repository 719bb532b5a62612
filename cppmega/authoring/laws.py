"""The laws on one page and one text, as `cppmega pin` checks them; `verify` is checked apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cppmega.errors import CppmegaError
from cppmega.overlay import verbs as overlay
from cppmega.overlay.plan import Plan
from cppmega.overlay.verbs import Session
from cppmega.overlay.verdict import DONE
from cppmega.page import Page

LAWS = (
    "header",
    "known target",
    "edit",
    "only targets changed",
    "undefined names",
    "second pass",
    "reversible",
)
"""Those on the text, in the order in which they are checked; `verify` comes last."""

_LAW_OF_ERROR = {
    "target-absent": "known target",
    "target-ambiguous": "known target",
    "target-shares-its-lines": "known target",
    "edit-reaches-beyond-its-target": "only targets changed",
    "undefined-name": "undefined names",
}
"""Which law an error of the engine is about; the others are about the edit itself."""


@contextmanager
def law(name: str) -> Iterator[None]:
    """Whatever goes wrong inside is a violation of that law, or of the law it is known to be of."""
    try:
        yield
    except CppmegaError as error:
        if error.name.startswith("law-") or error.name == "pins-not-found":
            raise
        raise broken(_LAW_OF_ERROR.get(error.name, name), error.what, error.next) from error


def broken(name: str, what: str, command: str) -> CppmegaError:
    return CppmegaError(
        "law-" + name.replace(" ", "-"),
        f"The law `{name}` fails: {what}",
        "A text that is pinned is patched without asking again. Nothing was written.",
        command,
    )


def check(page: Page, plan: Plan, root: Path) -> dict[str, bytes]:
    """Apply, apply again and revert on a tree that holds the page's files and nothing else."""
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
        verdict = overlay.apply(session, environment=gates).plan.verdicts[page.name]
        if verdict.state not in DONE:
            what = f"{verdict.target} is {verdict.state}: {verdict.detail}."
            raise broken("known target", what, f"cppmega explain {page.name}")
        result = {path: (root / path).read_bytes() for path in pristine}
    with law("second pass"):
        again = overlay.apply(session, environment=gates)
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
    session = Session(root, ())
    session.pages = {page.name: page}
    return session
