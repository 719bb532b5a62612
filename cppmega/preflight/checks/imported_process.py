"""In a process started like a rank: the patched tree is imported, every runtime patch is in place.

Nothing holds the original of a replaced name, and no function runs other code than its file has.
"""

from __future__ import annotations

from cppmega.errors import CppmegaError
from cppmega.preflight.context import Context
from cppmega.preflight.findings import refuse

AFTER: tuple[str, ...] = (
    *("one_root", "shadowing", "receipt_whole", "patched_files", "foreign_edits", "patches"),
    *("variables", "debug_variables", "network"),
)
"""Whatever breaks the import for a reason that they can name is said by them alone."""


def check(context: Context) -> str:
    """Import what a rank imports, in the environment of the launch.

    Raises:
        CppmegaError: what `guard.start`, `imported.check`, `provenance.look` and `runtime.check`
            find, `other-root`, `import-failed`, `patch-not-installed`, `process-ended`.
    """
    refuse(CppmegaError(**found) for found in context.process["process"])
    return f"a process of its own imports {context.process['imported']}"
