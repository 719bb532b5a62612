"""There is one megatron root, with core and training of the same version."""

from __future__ import annotations

from cppmega.preflight.context import Context


def check(context: Context) -> str:
    """Find the tree.

    Raises:
        CppmegaError: `no-megatron`, `several-megatrons`, `mixed-versions`, `linked-tree`,
            `two-distributions`.
    """
    session = context.session
    return f"megatron-core {session.read_tree().version} in {session.root}"
