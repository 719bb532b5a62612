"""Build Megatron's TileLang kernels with aggressive merging of their shared memory.

What: With `CPPMEGA_SMEM_MERGE=1` at apply, `tilelang_jit`, through which every TileLang kernel of
    Megatron is built, adds `TL_ENABLE_AGGRESSIVE_SHARED_MEMORY_MERGE: True` to the pass configs.
Why: sm_120 and sm_121 give a block 99 KiB of dynamic shared memory (sm_90: 227), and a kernel that
    wants more does not start. Of the nine TileLang kernels of 0.19.2 only the sparse MLA backward
    asks for its buffers to share their places (read in the wheel, and recorded by the check `shared_memory_flag`).
Upstream: Not sent: upstream tunes these kernels for sm_90 and sm_100, which do not need it.
Remove: when `tilelang_jit` or every kernel sets it.
Numerics: none (bitwise): the pass places buffers, it does not touch what is computed. Read in the
    description of the pass; kernels with and without it were not compared on a GPU.
"""

from cppmega.edits import inserting
from cppmega.page import Edit, Patch, Source

TARGET = (
    "megatron/core/transformer/experimental_attention_variant/ops/tilelang_utils.py:tilelang_jit"
)

PATCH = Patch(
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
    feature=(TARGET,),
    when=lambda args: getattr(args, "dsa_kernel_backend", None) == "tilelang",
    gate="CPPMEGA_SMEM_MERGE",
    provides={"shared_memory_merge": (True,)},
)


def fixed_upstream(source: Source) -> bool:
    return "TL_ENABLE_AGGRESSIVE_SHARED_MEMORY_MERGE" in source.text(TARGET)


def verify() -> None:
    import importlib
    import pkgutil
    import sys
    from unittest import mock

    folder = "megatron.core.transformer.experimental_attention_variant.ops"
    built = {}

    def jit(func=None, *, pass_configs=None, **ignored):
        def build(kernel):
            built[kernel.__name__] = pass_configs or {}
            return kernel

        return build if func is None else build(func)

    # A stand-in for TileLang that notes what it is asked for: the real one needs a GPU's driver.
    tilelang = mock.MagicMock(jit=jit, __path__=[])
    language = mock.MagicMock(prim_func=lambda function: function)
    sys.modules |= {"tilelang": tilelang, "tilelang.language": language}
    tilelang.language = language
    flag = tilelang.PassConfigKey.TL_ENABLE_AGGRESSIVE_SHARED_MEMORY_MERGE
    for name in [name for name in sys.modules if name.startswith(f"{folder}.")]:
        del sys.modules[name]
    for module in pkgutil.iter_modules(importlib.import_module(folder).__path__):
        if module.name.startswith("tilelang_"):
            importlib.import_module(f"{folder}.{module.name}")
    assert len(built) >= 9, built
    lacking = [name for name, configs in built.items() if configs.get(flag) is not True]
    assert not lacking, lacking
    fast = tilelang.PassConfigKey.TL_ENABLE_FAST_MATH
    assert built["sparse_indexer_kl"] == {fast: True, flag: True}  # what it asked for is kept
