"""Build Megatron's TileLang kernels with aggressive shared-memory merging.

What: With `CPPMEGA_SMEM_MERGE=1` at apply, `tilelang_jit`, with which Megatron builds every
    TileLang kernel, adds `TL_ENABLE_AGGRESSIVE_SHARED_MEMORY_MERGE: True` to the pass configs.
Why: sm_120 and sm_121 provide 99 KiB of dynamic shared memory per block (sm_90: 227), and a kernel
    that needs more cannot be launched. Of the nine TileLang kernels of 0.19.2, only the sparse MLA
    backward requests that its buffers share memory (read in the wheel).
Upstream: Not sent: upstream tunes these kernels for sm_90 and sm_100, which do not need it.
Remove: when `tilelang_jit` or every kernel sets it.
Numerics: none (bitwise): the pass places buffers and does not change what is computed. This follows
    from the documentation of the pass; kernels with and without it were not compared on a GPU.
"""

from cppmega.edits import inserting
from cppmega.page import Edit, Patch, Source

TARGET = (
    "megatron/core/transformer/experimental_attention_variant/ops/tilelang_utils.py:tilelang_jit"
)

PATCH = Patch(
    purpose="feature",
    edits=(
        Edit(
            target=TARGET,
            pins={"0.19.2": "56807dc76de4831c", "main-d98e8a64": "56807dc76de4831c"},
            edit=inserting(
                """
                # Last, so that no kernel can switch it off: it must fit into 99 KiB on sm_12x.
                kwargs["pass_configs"] = {
                    **(kwargs.get("pass_configs") or {}),
                    tilelang.PassConfigKey.TL_ENABLE_AGGRESSIVE_SHARED_MEMORY_MERGE: True,
                }
                """,
                before="return tilelang.jit(*args, **kwargs)",
            ),
        ),
    ),
    reached="forward",
    feature=(
        "megatron/core/transformer/experimental_attention_variant/ops/tilelang_utils.py:require_tilelang",
    ),
    when=lambda args: getattr(args, "dsa_kernel_backend", None) == "tilelang",
    gate="CPPMEGA_SMEM_MERGE",
    provides={"shared_memory_merge": (True,)},
)


def fixed_upstream(source: Source) -> bool:
    return "TL_ENABLE_AGGRESSIVE_SHARED_MEMORY_MERGE" in source.text(TARGET)


def verify() -> None:
    import importlib
    import pkgutil

    from cppmega.proof import stand_ins

    folder = "megatron.core.transformer.experimental_attention_variant.ops"
    flag, fast = "TL_ENABLE_AGGRESSIVE_SHARED_MEMORY_MERGE", "TL_ENABLE_FAST_MATH"
    tilelang = stand_ins.tilelang()
    stand_ins.forget(folder)
    for module in pkgutil.iter_modules(importlib.import_module(folder).__path__):
        if module.name.startswith("tilelang_"):
            importlib.import_module(f"{folder}.{module.name}")
    built = {kernel.name: kernel.options.get("pass_configs") or {} for kernel in tilelang.kernels}
    assert len(built) >= 9, built
    lacking = [name for name, configs in built.items() if configs.get(flag) is not True]
    assert not lacking, lacking
    assert built["sparse_indexer_kl"] == {fast: True, flag: True}  # its own configs are kept
