"""Preflight checks, one per file, in the order in which they run."""

from __future__ import annotations

ORDER: tuple[str, ...] = (
    # on disk
    *("one_root", "shadowing", "being_patched", "receipt_whole", "patched_files", "foreign_edits"),
    *("patches", "proofs", "bytecode"),
    # the environment and the machine
    *("variables", "nan_gates", "debug_variables", "recipe_gates", "allocator"),
    *("recipe_complete", "stack_versions", "stack_pairs", "packages"),
    *("hosts", "network", "limits"),
    *("gpus", "gpus_free", "kernels", "gpu_memory", "shared_memory_flag", "kernel_parity"),
    # the launch, without a process
    *("owned_arguments", "data", "folders", "save_folder"),
    # a process like a rank
    *("imported_process", "live_proofs"),
    # the launch line, by the installed version's own parser
    *("unknown_arguments", "line_parses", "line_data", "checkpoint", "rules"),
)
"""Cheap checks come first where prerequisites allow: a mistyped path must not wait for torch."""
