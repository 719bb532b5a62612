"""Every applied page supports the run and the checkpoint that it resumes from.

The code of a page may be wrong in some configuration, or fail there after hours. The page itself
declares that, given the arguments with the variables, and the tensors of the checkpoint.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping

from cppmega.checkpoints import files as checkpoint_files
from cppmega.checkpoints import tracker as checkpoint_tracker
from cppmega.errors import CppmegaError
from cppmega.host.containment import contained
from cppmega.page import Page
from cppmega.preflight.context import Context
from cppmega.preflight.findings import NotApplicable, refuse

AFTER: tuple[str, ...] = ("patches", "line_parses", "checkpoint")


def check(context: Context) -> str:
    """Ask every applied page that has a limit.

    Raises:
        CppmegaError: what a page's `refuses` returns; `bad-refuses`.
        NotApplicable: no page that is applied has one, or nothing that Megatron parses is launched.
    """
    args = context.megatron_args
    limited = list(_limited_pages(context))
    if not limited:
        raise NotApplicable("no applied patch has a limit")
    shapes = _resumed(context)
    refuse(error for page in limited for error in _refused(page, args, shapes))
    return ", ".join(page.name for page in limited)


def _limited_pages(context: Context) -> Iterator[Page]:
    for name, verdict in context.plan.verdicts.items():
        page = context.session.pages[name]
        if verdict.state in ("applied", "armed") and page.patch.refuses is not None:
            yield page


def _refused(
    page: Page, args: Namespace, shapes: Mapping[str, tuple[int, ...]]
) -> list[CppmegaError]:
    def failed(what: str) -> CppmegaError:
        return CppmegaError(
            "bad-refuses",
            f"`refuses` of {page.name} {what}.",
            "Whether the page supports this run is not known.",
            "correct the page; `refuses` gets arguments and shapes, and returns errors",
        )

    assert page.patch.refuses is not None
    with contained(failed):
        return [*page.patch.refuses(args, shapes)]


def _resumed(context: Context) -> Mapping[str, tuple[int, ...]]:
    """Names and shapes of the tensors that the run loads; none where it starts afresh."""
    load = context.launch_line.options.load
    if load is None or not checkpoint_tracker.exists(load):
        return {}
    return checkpoint_files.shapes(load)
