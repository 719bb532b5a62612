"""Every patch is in a state that a run may start with, and the recipe's patches are applied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cppmega.catalogue import gates
from cppmega.errors import CppmegaError, did_you_mean
from cppmega.overlay.diagnose import imported_from
from cppmega.overlay.verdict import MEANING, Verdict, summary
from cppmega.preflight.context import Context
from cppmega.preflight.findings import Problems
from cppmega.training.requirements import IN_THE_CODE, patch_missing

AFTER: tuple[str, ...] = ("one_root", "receipt_whole", "patched_files")


def check(context: Context) -> Problems:
    """Plan every patch, with the gates of the last apply.

    Yields:
        `patch-missing` and `patch-unknown` for one that the recipe names, `patch-STATE` for one in
        a state of failure or still to be applied.

    Raises:
        CppmegaError: `gate-differs`.
    """
    yield from _missing_patches(context)
    yield from _unsound_patches(context.plan.verdicts.values())
    gates.check_applied(
        context.session.pages.values(), context.receipt.gates, context.environ, "this environment"
    )
    return "; ".join([summary(context.plan.verdicts.values()), *_packages_elsewhere(context)])


def _packages_elsewhere(context: Context) -> Iterator[str]:
    """Packages that pages target, and that the run imports from another folder than Megatron's."""
    pages, tree = context.session.pages.values(), context.session.read_tree()
    for distribution in sorted({d for page in pages for d in page.patch.distributions}):
        place = imported_from(tree, distribution)
        if place is not None:
            yield f"{distribution} is not patched, because it is in {place}"


def _missing_patches(context: Context) -> Iterator[CppmegaError]:
    """Patches that the recipe needs and that are not in the code."""
    verdicts = context.plan.verdicts
    for name in context.wanted_patches:
        if name not in verdicts:
            assert context.recipe is not None
            yield CppmegaError(
                "patch-unknown",
                f"Recipe {context.recipe.name} needs the patch {name}, and no catalogue has a page "
                "of that name." + did_you_mean(name, verdicts),
                "The run would lack what the recipe relies on.",
                "cppmega list; a page of your own: python -m cppmega.apply_patches --patches DIR",
            )
            continue
        state = verdicts[name].state
        if state not in IN_THE_CODE and not verdicts[name].blocks:
            assert context.recipe is not None
            yield patch_missing(context.recipe, context.session, name, verdicts[name])


def _unsound_patches(verdicts: Iterable[Verdict]) -> Iterator[CppmegaError]:
    """Patches with which every rank would refuse to start, one error for each reason."""
    alike: dict[tuple[str, str, str], list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.blocks:
            reason = (verdict.state, verdict.detail, verdict.next)
            alike.setdefault(reason, []).append(verdict)
    for first, *others in alike.values():  # after an upgrade all of them are pending for one reason
        yield CppmegaError(
            f"patch-{first.state}",
            f"{first.name} is {first.state} ({MEANING[first.state]}): {first.target}"
            + (f": {first.detail}" if first.detail else "")
            + (f"; so are {', '.join(other.name for other in others)}" if others else ""),
            "Every rank would refuse to start: the overlay is incomplete.",
            first.next or "python -m cppmega.apply_patches",
        )
