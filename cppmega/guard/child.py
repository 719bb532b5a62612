"""A process that a guarded one has started: it has the same overlay, or ends."""

from __future__ import annotations

import os
import sys

from cppmega.errors import CppmegaError
from cppmega.guard import end as run_end
from cppmega.guard import ledger, ranks
from cppmega.guard import session as guard
from cppmega.host import env


def join_or_die() -> None:
    """Join with the same overlay as the parent, or end with the reason.

    Steps that this process takes are checked like those of any rank.
    """
    ledger.join_or_forget(os.environ, env.OVERLAY.name, env.ROOT.name, env.PYTHON.name)
    overlay, root = env.OVERLAY.read(), env.ROOT.read()
    if not overlay:
        return
    try:
        held = guard.start(root, inherited=True)
        if held.receipt.digest != overlay:
            raise CppmegaError(
                "overlay-differs",
                f"{ranks.where()}: this child process finds overlay {held.receipt.digest}, "
                f"its parent holds {overlay}.",
                "Workers and trainer would run different code.",
                "do not patch the tree while a run is under way",
            )
    except CppmegaError as error:
        ledger.write("refused", where=ranks.where(), error=error.as_json())
        print(error.render(), file=sys.stderr, flush=True)
        os._exit(1)  # site would print any exception and continue
    ledger.write("holds")
    run_end.watch_ranks()
