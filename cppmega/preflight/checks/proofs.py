"""The proof of every active patch passes now, and none in the receipt failed or is outdated."""

from __future__ import annotations

from collections.abc import Iterator

from cppmega.errors import CppmegaError
from cppmega.overlay.verdict import DONE, Verdict
from cppmega.preflight.context import Context
from cppmega.preflight.findings import NotRun, Problems, Remark
from cppmega.proof import verify

AFTER: tuple[str, ...] = ("one_root", "receipt_whole", "patched_files", "patches")
_TO_RUN = ("variables", "debug_variables", "hosts", "limits", "imported_process")
"""What must hold before a proof can run here; the receipt is read without."""
_USELESS = "The patch is in the file and does not do what it promises."


def check(context: Context) -> Problems:
    """Run the proofs on the code that would train, and read the last `cppmega verify`.

    A failure in the receipt is repeated: its cause may be gone, such as a full disk, memory, or a
    variable that an earlier release let into proofs. The result is not stored: the preflight writes
    nothing.

    Yields:
        `proof-failed`, `proof-stale`, `proof-missing`.

    Raises:
        NotRun: proofs cannot run here before another check holds.
    """
    done = [v for v in context.plan.verdicts.values() if v.state in DONE]
    yield from _lacking(context, done)
    waits = [name for name in _TO_RUN if name in context.unsound]
    if waits:
        raise NotRun(f"{waits[0]} does not hold")
    runs = verify.live(context.session, context.plan)
    unable = [name for name, run in runs.items() if run.result == "unable"]
    broken = [name for name, run in runs.items() if run.result not in ("passed", "unable")]
    for name in broken:
        yield CppmegaError(
            "proof-failed",
            f"The proof of {name} does not pass on the code that would train: {runs[name].detail}",
            _USELESS,
            f"cppmega verify {name}",
        )
    failed = [v.name for v in done if v.proof == "failed" and v.name not in broken]
    proved = verify.verify(context.session, failed, store=False) if failed else ()
    for one in proved:
        if one.proof not in ("passed", "unverified"):
            yield CppmegaError(
                "proof-failed",
                f"The proof of {one.name} failed: {_detail(context, one.name)}. Repeated now it is "
                f"{one.proof}: {one.detail}.",
                _USELESS,
                f"cppmega verify {one.name}",
            )
    passes = [one.name for one in proved if one.proof == "passed"]
    passed = sum(v.proof == "passed" for v in done) + len(passes)
    parts = [f"{len(runs) - len(unable)} proofs pass on the code that would train"]
    if unable:
        told = "; ".join(f"{name}: {runs[name].detail}" for name in unable)
        parts.append(f"{len(unable)} cannot run with what is installed here ({told})")
    parts.append(
        f"cppmega verify, which runs them on stock and on mutants, too, has proved {passed} of "
        f"{len(done)} applied patches"
    )
    if passes:
        parts.append(
            f"the last cppmega verify of {' '.join(passes)} failed, and now it passes: "
            f"cppmega verify {' '.join(passes)} stores that"
        )
    elif passed < len(done):
        parts.append("it proves the others, as far as this machine can")
    return Remark("; ".join(parts)) if unable or passes or passed < len(done) else "; ".join(parts)


def _detail(context: Context, name: str) -> str:
    proved = context.receipt.proofs.get(name)
    return proved.detail if proved is not None else ""


def _lacking(context: Context, done: list[Verdict]) -> Iterator[CppmegaError]:
    """Proofs that are outdated, and those that the recipe needs and that were never run here."""
    stale = [verdict.name for verdict in done if verdict.proof == "stale"]
    if stale:
        yield CppmegaError(
            "proof-stale",
            f"{', '.join(stale)}: proved before they, or the overlay, were changed.",
            "The proofs apply to code that differs from what would train.",
            "cppmega verify",
        )
    must = context.wanted_patches if context.training_machine and context.needs_gpu else ()
    for name in (verdict.name for verdict in done if verdict.proof == "unverified"):
        proved = context.receipt.proofs.get(name)
        # One that was started lacks what it uses: its patch was not found wrong, and repeating it
        # would not help.
        if name in must and not (proved is not None and proved.environment):
            detail = _detail(context, name)
            yield CppmegaError(
                "proof-missing",
                f"The recipe needs {name}, and it was never proved in this installation"
                + (f" ({detail})." if detail else "."),
                "A patch that is in the file may still do nothing.",
                f"cppmega verify {name}",
            )
