"""The commands on a tree as functions: `cppmega.apply` and `cppmega.status`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cppmega.errors import CppmegaError
from cppmega.overlay import verbs
from cppmega.overlay.verbs import Outcome


def apply(
    root: Path | None = None,
    *,
    patches: Sequence[Path] = (),
    only: Sequence[str] = (),
    without: Sequence[str] = (),
    kinds: Sequence[str] = (),
    check: bool = False,
) -> Outcome:
    """Apply every patch to an installed Megatron, or change nothing.

    Args:
        root: the folder that holds megatron/; None: the one that Python would import.
        patches: further catalogues, in addition to those that were applied before.
        only: the pages to apply; empty: all.
        without: pages to leave out.
        kinds: the kinds of pages to apply (`fix`, `speed`, `feature`); empty: all but pages of
            kind speed that do not compute stock's bits.
        check: compute everything, and write nothing.

    Returns:
        The state of every page, the files that changed, and the overlay's digest.

    Raises:
        CppmegaError: `not-applied`: a page does not fit this tree, and nothing was written; and
            whatever makes writing unsafe.
    """
    session = verbs.Session(root, [*map(Path, patches)] or None)
    outcome = verbs.apply(session, only=only, without=without, kinds=kinds, check=check)
    if failures := outcome.plan.failures:
        raise CppmegaError(
            "not-applied",
            f"{', '.join(one.name for one in failures)}: {failures[0].detail}.",
            "Training would start without patches that were asked for, so nothing was written.",
            failures[0].next or "cppmega status",
        )
    return outcome


def status(root: Path | None = None, *, patches: Sequence[Path] = ()) -> Outcome:
    """Determine the state of every page on an installed Megatron; nothing is written.

    Args:
        root: the folder that holds megatron/; None: the one that Python would import.
        patches: further catalogues, in addition to those that were applied before.

    Returns:
        The state of every page; `ok` is False if one of them is not as it must be.

    Raises:
        CppmegaError: there is no Megatron, or its files cannot be read.
    """
    return verbs.status(verbs.Session(root, [*map(Path, patches)] or None))
