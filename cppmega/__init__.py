"""Patches for an installed Megatron-LM, and the proof that they are in the code that trains.

`cppmega.apply()` and `cppmega.status()` are the commands of these names; `cppmega.guard` is what a
training loop calls; `cppmega.kernels` needs none of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cppmega.overlay.verbs import Outcome

__version__ = "0.1.0"


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
    from cppmega.errors import CppmegaError
    from cppmega.overlay import verbs

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
    from cppmega.overlay import verbs

    return verbs.status(verbs.Session(root, [*map(Path, patches)] or None))


def __getattr__(name: str) -> Any:
    """Import `cppmega.guard` and `cppmega.kernels` where they are first used."""
    if name in ("guard", "kernels"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
