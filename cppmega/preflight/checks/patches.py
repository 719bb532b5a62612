"""Every patch of the catalogue is in the state a run may start with, and the recipe's are in."""

from __future__ import annotations

from collections.abc import Iterator

from cppmega.catalogue import gates
from cppmega.errors import CppmegaError, did_you_mean
from cppmega.overlay.verbs import NOT_WHOLE
from cppmega.overlay.verdict import MEANING, Verdict, summary
from cppmega.preflight.context import Context
from cppmega.preflight.findings import refuse
from cppmega.training.requirements import IN_THE_CODE

AFTER: tuple[str, ...] = ("one_root", "receipt_whole", "patched_files")


def check(context: Context) -> str:
    """Ask for the state of each, with the gates of the last apply.

    Raises:
        CppmegaError: `patch-missing` and `patch-unknown` for one that the recipe names,
            `patch-STATE` for one in a state of failure or still to be applied, `gate-differs`.
    """
    refuse(_found(context))
    gates.check_applied(
        context.session.pages.values(), context.receipt.gates, context.environ, "this environment"
    )
    return summary(context.plan.verdicts.values())


def _found(context: Context) -> Iterator[CppmegaError]:
    verdicts = context.plan.verdicts
    for name in context.wanted_patches:
        if name not in verdicts:
            assert context.recipe is not None
            yield CppmegaError(
                "patch-unknown",
                f"Recipe {context.recipe.name} needs the patch {name}, and no catalogue has a page "
                "of that name." + did_you_mean(name, verdicts),
                "What the recipe relies on would not be there.",
                "cppmega list; a page of your own: python -m cppmega.apply_patches --patches DIR",
            )
            continue
        state = verdicts[name].state
        if state not in IN_THE_CODE and state not in NOT_WHOLE:
            assert context.recipe is not None
            yield CppmegaError(
                "patch-missing",
                f"Recipe {context.recipe.name} needs the patch {name}; in {context.session.root} "
                f"it is {state}.",
                "The run would stop later, or train something else than it says.",
                "python -m cppmega.apply_patches",
            )
    alike: dict[tuple[str, str, str], list[Verdict]] = {}
    for verdict in verdicts.values():
        if verdict.state in NOT_WHOLE:
            said = (verdict.state, verdict.detail, verdict.next)
            alike.setdefault(said, []).append(verdict)
    for first, *others in alike.values():  # after an upgrade all of them are pending for one reason
        yield CppmegaError(
            f"patch-{first.state}",
            f"{first.name} is {first.state} ({MEANING[first.state]}): {first.target}"
            + (f": {first.detail}" if first.detail else "")
            + (f"; so are {', '.join(other.name for other in others)}" if others else ""),
            "Every rank would refuse to start: the overlay is not whole.",
            first.next or "python -m cppmega.apply_patches",
        )
