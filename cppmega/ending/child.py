"""A process that a guarded one has started: it holds the same overlay, or ends."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from cppmega import guard
from cppmega.ending import judge as run_end
from cppmega.errors import CppmegaError
from cppmega.rank import run_ledger


def join_or_die() -> None:
    """Hold the same overlay as the parent, or end with the reason.

    Steps that this process takes are checked like those of any rank.
    """
    run_ledger.join_or_forget(os.environ, guard.OVERLAY, guard.ROOT)
    if not os.environ.get(guard.OVERLAY):
        return
    try:
        held = guard.start(Path(os.environ[guard.ROOT]), inherited=True)
        if held.receipt.digest != os.environ[guard.OVERLAY]:
            raise CppmegaError(
                "overlay-differs",
                f"{guard.where()}: this child process finds overlay {held.receipt.digest}, "
                f"its parent holds {os.environ[guard.OVERLAY]}.",
                "Workers and trainer would run different code.",
                "let nobody patch the tree while a run is under way",
            )
    except CppmegaError as error:
        run_ledger.write("refused", where=guard.where(), error=error.as_json())
        print(error.render(), file=sys.stderr, flush=True)
        os._exit(1)  # site would print any exception and go on
    run_ledger.write("holds")
    run_end.watch_ranks()
