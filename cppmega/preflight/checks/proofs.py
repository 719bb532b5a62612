"""No proof of an applied patch failed or is outdated, and the recipe's patches are all proved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cppmega.errors import CppmegaError
from cppmega.overlay.receipt import ProvedPage
from cppmega.overlay.verdict import DONE, Verdict
from cppmega.preflight.context import Context
from cppmega.preflight.findings import Remark, refuse
from cppmega.proof import verify

AFTER: tuple[str, ...] = ("one_root", "receipt_whole", "patched_files", "patches")


def check(context: Context) -> str:
    """Read the results of the last `cppmega verify` in the receipt, and repeat those that failed.

    A failure may have had a cause that is gone: a full disk, memory, a variable that an earlier
    release let into proofs. The repeated result is not stored: the preflight writes nothing.

    Raises:
        CppmegaError: `proof-failed`, `proof-stale`, `proof-missing`.
    """
    done = [v for v in context.plan.verdicts.values() if v.state in DONE]
    repeated = _repeated([verdict.name for verdict in done if verdict.proof == "failed"], context)
    refuse(_lacking_proofs(context, done, repeated))
    passes = [name for name, now in repeated.items() if now.proof == "passed"]
    passed = sum(v.proof == "passed" for v in done) + len(passes)
    summary = f"{passed} of {len(done)} applied patches are proved"
    if passes:
        names = " ".join(passes)
        return Remark(
            f"{summary}; the last cppmega verify of {names} failed, and now it passes: "
            f"cppmega verify {names} stores that"
        )
    if passed < len(done):
        return Remark(f"{summary}; cppmega verify proves the others, as far as this machine can")
    return summary


def _repeated(failed: list[str], context: Context) -> dict[str, verify.Proved]:
    """The results of failed proofs now, by name."""
    if not failed:
        return {}
    proved = verify.verify(context.session, failed, store=False)
    return {one.name: one for one in proved}


def _was_tried(proved: ProvedPage | None) -> bool:
    """Whether a proof without a result was started: what is installed lacks what it uses.

    Its patch was not found wrong, and repeating the proof would not help.
    """
    return proved is not None and bool(proved.environment)


def _lacking_proofs(
    context: Context, done: list[Verdict], repeated: Mapping[str, verify.Proved]
) -> Iterator[CppmegaError]:
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
        now = repeated.get(verdict.name)
        if now is not None and now.proof not in ("passed", "unverified"):
            yield CppmegaError(
                "proof-failed",
                f"The proof of {verdict.name} failed: {detail}. Repeated now it is {now.proof}: "
                f"{now.detail}.",
                "The patch is in the file and does not do what it promises.",
                again,
            )
        elif verdict.proof == "unverified" and verdict.name in must and not _was_tried(proved):
            yield CppmegaError(
                "proof-missing",
                f"The recipe needs {verdict.name}, and it was never proved in this installation"
                + (f" ({detail})." if detail else "."),
                "A patch that is in the file may still do nothing.",
                again,
            )
