"""A process started like a rank imports the patched tree, with every runtime patch in place.

Nothing there holds the original of a replaced name, and no function runs code that differs from
its file.
"""

from __future__ import annotations

from cppmega.errors import CppmegaError
from cppmega.host import interpreter
from cppmega.preflight.context import Context
from cppmega.preflight.findings import Problems

AFTER: tuple[str, ...] = (
    *("one_root", "shadowing", "receipt_whole", "patched_files", "foreign_edits", "patches"),
    *("variables", "debug_variables", "hosts"),
)
"""Each of these reports its own reason for a broken import, so that it is reported only once."""


def check(context: Context) -> Problems:
    """Import what a rank imports, in the environment of the launch.

    Yields:
        What `guard.start`, `files.judge`, `modules.check` and `swaps.check` find, `other-root`,
        `import-failed`, `patch-not-installed`.

    Raises:
        CppmegaError: `process-ended`, `process-hangs`, `package-missing`.
    """
    root = context.session.read_tree().root
    interpreter.require_torch(root, "cppmega preflight", or_below=True)
    yield from map(CppmegaError.from_json, context.process.problems)
    return f"a separate process imports {context.process.imported}"
