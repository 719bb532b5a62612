"""A process that a guarded one has started: it has the same overlay, or ends."""

from __future__ import annotations

import os
import sys

from cppmega import guard
from cppmega.ending import judge as run_end
from cppmega.errors import CppmegaError
from cppmega.host import env
from cppmega.rank import roll_call, run_ledger


def join_or_die() -> None:
    """Join with the same overlay as the parent, or end with the reason.

    Steps that this process takes are checked like those of any rank.
    """
    run_ledger.join_or_forget(os.environ, env.OVERLAY.name, env.ROOT.name, env.PYTHON.name)
    overlay, root = env.OVERLAY.read(), env.ROOT.read()
    if not overlay:
        return
    try:
        held = guard.start(root, inherited=True)
        if held.receipt.digest != overlay:
            raise CppmegaError(
                "overlay-differs",
                f"{roll_call.where()}: this child process finds overlay {held.receipt.digest}, "
                f"its parent holds {overlay}.",
                "Workers and trainer would run different code.",
                "do not patch the tree while a run is under way",
            )
    except CppmegaError as error:
        run_ledger.write("refused", where=roll_call.where(), error=error.as_json())
        print(error.render(), file=sys.stderr, flush=True)
        os._exit(1)  # site would print any exception and continue
    run_ledger.write("holds")
    run_end.watch_ranks()
