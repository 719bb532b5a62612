"""No proof of an applied patch failed or is outdated, and the recipe's patches are all proved."""

from __future__ import annotations

from collections.abc import Iterator

from cppmega.errors import CppmegaError
from cppmega.overlay.verdict import DONE, Verdict
from cppmega.preflight.context import Context
from cppmega.preflight.findings import Remark, refuse

AFTER: tuple[str, ...] = ("one_root", "receipt_whole", "patches")


def check(context: Context) -> str:
    """Read the results of the last `cppmega verify` in the receipt.

    Raises:
        CppmegaError: `proof-failed`, `proof-stale`, `proof-missing`.
    """
    done = [v for v in context.plan.verdicts.values() if v.state in DONE]
    refuse(_lacking_proofs(context, done))
    passed = sum(v.proof == "passed" for v in done)
    summary = f"{passed} of {len(done)} applied patches are proved"
    if passed < len(done):
        return Remark(f"{summary}; cppmega verify proves the others, as far as this machine can")
    return summary


def _lacking_proofs(context: Context, done: list[Verdict]) -> Iterator[CppmegaError]:
    must = context.wanted_patches if context.training_machine and context.needs_gpu else ()
    stale = [verdict.name for verdict in done if verdict.proof == "stale"]
    if stale:
        yield CppmegaError(
            "proof-stale",
            f"{', '.join(stale)}: proved before they, or the overlay, were changed.",
            "The proofs apply to code that differs from what would train.",
            "cppmega verify",
        )
    for verdict in done:
        proved = context.receipt.proofs.get(verdict.name)
        detail = proved.detail if proved is not None else ""
        again = f"cppmega verify {verdict.name}"
        if verdict.proof == "failed":
            yield CppmegaError(
                "proof-failed",
                f"The proof of {verdict.name} failed: {detail}.",
                "The patch is in the file and does not do what it promises.",
                again,
            )
        elif verdict.proof == "unverified" and verdict.name in must:
            yield CppmegaError(
                "proof-missing",
                f"The recipe needs {verdict.name}, and it was never proved in this installation"
                + (f" ({detail})." if detail else "."),
                "A patch that is in the file may still do nothing.",
                again,
            )
