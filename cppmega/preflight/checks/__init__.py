"""Preflight checks, one per file, in the order in which they run."""

from __future__ import annotations

ORDER: tuple[str, ...] = (
    # on disk
    *("one_root", "shadowing", "receipt_whole", "patched_files", "foreign_edits", "patches"),
    # the environment and the machine
    *("variables", "debug_variables", "gates", "recipe_complete", "stack", "packages"),
    *("hosts", "limits"),
    *("gpus", "kernels", "gpu_memory", "shared_memory_flag", "kernel_parity"),
    # the launch, without a process
    *("owned_arguments", "data", "folders"),
    # a process like a rank
    *("imported_process", "proofs"),
    # the launch line, by the installed version's own parser
    *("unknown_arguments", "line_parses", "line_data", "checkpoint", "rules"),
)
"""Cheap checks come first where prerequisites allow: a mistyped path must not wait for torch."""
