"""No applied page meets a run, or a checkpoint, that it cannot serve.

A page that is always on may meet a configuration in which its code is wrong, or dies after hours.
It says so itself, over the arguments and the tensors from which the run resumes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace

from cppmega.checkpoints import files as checkpoint_files
from cppmega.checkpoints import tracker as checkpoint_tracker
from cppmega.errors import CppmegaError
from cppmega.page import Page
from cppmega.preflight.context import Context
from cppmega.preflight.findings import NotApplicable, refuse

AFTER: tuple[str, ...] = ("patches", "line_parses", "checkpoint")


def check(context: Context) -> str:
    """Ask every applied page that has a limit.

    Raises:
        CppmegaError: what the page answers.
        NotApplicable: no page that is applied has one, or nothing that Megatron parses is launched.
    """
    args = SimpleNamespace(**context.megatron_args)
    asked = list(_limited(context))
    if not asked:
        raise NotApplicable("no applied patch has a limit")
    shapes = _resumed(context)
    refuse(error for page in asked for error in _refused(page, args, shapes))
    return ", ".join(page.name for page in asked)


def _limited(context: Context) -> Iterator[Page]:
    for name, verdict in context.plan.verdicts.items():
        page = context.session.pages[name]
        if verdict.state in ("applied", "armed") and page.patch.refuses is not None:
            yield page


def _refused(
    page: Page, args: SimpleNamespace, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[CppmegaError]:
    assert page.patch.refuses is not None
    yield from page.patch.refuses(args, shapes)


def _resumed(context: Context) -> Mapping[str, tuple[int, ...]]:
    """Names and shapes of the tensors that the run loads; none where it starts afresh."""
    load = context.line.options.load
    if load is None or not checkpoint_tracker.exists(load):
        return {}
    return checkpoint_files.shapes(load)
