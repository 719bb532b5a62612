"""The proof of every active patch passes on the code that would train."""

from __future__ import annotations

from cppmega.errors import CppmegaError
from cppmega.preflight.context import Context
from cppmega.preflight.findings import NotApplicable, Remark, refuse
from cppmega.proof import verify

AFTER: tuple[str, ...] = (
    *("one_root", "receipt_whole", "patched_files", "patches"),
    *("variables", "debug_variables", "network", "limits", "imported_process"),
)


def check(context: Context) -> str:
    """Run the proofs now, each in its own process.

    Raises:
        CppmegaError: `proof-failed`.
        NotApplicable: no patch can be proved on this machine.
    """
    runs = verify.live(context.session, context.plan)
    unable = [name for name, run in runs.items() if run.result == "unable"]
    if len(runs) == len(unable):
        raise NotApplicable("no active patch has a proof that this machine can run")
    refuse(
        CppmegaError(
            "proof-failed",
            f"The proof of {name} does not pass on the code that would train: {run.detail}",
            "The patch is in the file and does not do what it promises.",
            f"cppmega verify {name}",
        )
        for name, run in runs.items()
        if run.result not in ("passed", "unable")
    )
    here = f"{len(runs) - len(unable)} proofs pass"
    if unable:
        told = "; ".join(f"{name}: {runs[name].detail}" for name in unable)
        return Remark(f"{here}, and {len(unable)} cannot run with what is installed here ({told})")
    return here
