"""No stale bytecode is used in place of a patched file.

The code in a `.pyc` that Python would trust is compared with what the source compiles to.
"""

from __future__ import annotations

from cppmega.guard import expected, modules
from cppmega.preflight.context import Context
from cppmega.preflight.findings import refuse

AFTER: tuple[str, ...] = ("one_root", "receipt_whole", "patched_files")


def check(context: Context) -> str:
    """Compare the bytecode that this interpreter would use with every patched file.

    Raises:
        CppmegaError: `stale-bytecode`.
    """
    root = context.session.read_tree().root
    sources = [root / path for path in context.receipt.files]
    stale = [expected.of_source(source, source.read_bytes()).stale for source in sources]
    refuse(
        modules.stale_bytecode(cached, str(source))
        for cached, source in zip(stale, sources, strict=True)
        if cached
    )
    return f"no stale bytecode of {len(sources)} files"
