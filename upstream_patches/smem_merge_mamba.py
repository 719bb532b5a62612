"""Build mamba_ssm's TileLang kernels with aggressive merging of their shared memory.

What: With `CPPMEGA_SMEM_MERGE=1` at apply, the six TileLang kernels of Mamba-3's MIMO scan, forward
    and backward, packed or not, carry `TL_ENABLE_AGGRESSIVE_SHARED_MEMORY_MERGE: True`.
Why: sm_120 and sm_121 give a block 99 KiB of dynamic shared memory (sm_90: 227), and a kernel that
    wants more does not start. None of the six asks for its buffers to share their places (read in
    2.3.2.post1, and recorded by the check `shared_memory_flag`).
Upstream: Not sent: upstream tunes these kernels for sm_90, which does not need it.
Remove: when the kernels set it themselves.
Numerics: none (bitwise): the pass places buffers, it does not touch what is computed. Read in the
    description of the pass; kernels with and without it were not compared on a GPU.
"""

from typing import Any

from cppmega.edits import replacing
from cppmega.page import Edit, Patch, Source

FOLDER = "mamba_ssm/ops/tilelang/mamba3"
CONFIGS = """
        tilelang.PassConfigKey.TL_DISABLE_TMA_LOWER: True,
        tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True,
        tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
"""
MERGE = "tilelang.PassConfigKey.TL_ENABLE_AGGRESSIVE_SHARED_MEMORY_MERGE: True,"


def _kernel(file: str, name: str, released: str, main: str) -> Any:
    return Edit(
        target=f"{FOLDER}/mamba3_mimo_{file}.py:{name}",
        pins={"2.3.2.post1": released, "main-e9594ce1": main},
        edit=replacing(f"{{{CONFIGS}    }}", f"{{{CONFIGS}        {MERGE}\n    }}"),
        distribution="mamba-ssm",
    )


PATCH = Patch(
    edits=(
        _kernel("fwd", "mamba_mimo_fwd", "1f740adda80781a9", "b9d6dc60bc358801"),
        _kernel("bwd", "mamba_mimo_bwd_fwd", "51b780962a7a46cf", "7f560995b3519886"),
        _kernel("bwd", "mamba_mimo_bwd_bwd", "7ab89fb8ca005aed", "fcc05a2f14e983c6"),
        _kernel("fwd_varlen", "mamba_mimo_fwd", "5bcf9be274c93583", "fa73d16eacecf3d2"),
        _kernel("bwd_varlen", "mamba_mimo_bwd_fwd", "41f9137bb127802a", "a2305e5736963efa"),
        _kernel("bwd_varlen", "mamba_mimo_bwd_bwd", "e77cc862484e0159", "a54e8af4b86cb743"),
    ),
    reached="never",  # TileLang reads the text of a kernel: a mark inside would be compiled
    feature=(f"{FOLDER}/mamba3_mimo_fwd.py:mamba_mimo_fwd",),
    gate="CPPMEGA_SMEM_MERGE",
    provides={"shared_memory_merge": (True,)},
)


def fixed_upstream(source: Source) -> bool:
    return all(MERGE.rstrip(",") in source.text(edit.target) for edit in PATCH.edits)


def verify() -> None:
    import importlib
    import sys
    from importlib.machinery import ModuleSpec
    from pathlib import Path
    from types import ModuleType
    from unittest import mock

    built = {}

    def jit(func=None, *, pass_configs=None, **ignored):
        def build(kernel):
            built[kernel.__module__, kernel.__name__] = pass_configs or {}
            return kernel

        return build if func is None else build(func)

    # A stand-in for TileLang that notes what it is asked for, and packages without their
    # `__init__`: those import compiled extensions, which need a GPU's driver.
    def stand_in(name, **given):
        spec = ModuleSpec(name, None)
        sys.modules[name] = mock.MagicMock(__path__=[], __spec__=spec, **given)
        return sys.modules[name]

    tilelang = stand_in("tilelang", jit=jit)
    for name in ("language", "profiler", "autotuner"):
        setattr(tilelang, name, stand_in(f"tilelang.{name}"))
    tilelang.autotuner.autotune = lambda *args, **kwargs: lambda kernel: kernel
    for name in ("triton", "triton.testing", "einops"):
        stand_in(name)
    root = next(path for path in map(Path, sys.path) if (path / FOLDER).is_dir())
    for package in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.tilelang", FOLDER):
        name = package.replace("/", ".")
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(root / name.replace(".", "/"))]
    for name in ("mamba3_mimo_utils", "grouped_head_reduction"):  # Triton kernels
        stand_in(f"mamba_ssm.ops.triton.mamba3.{name}")
    for file in ("fwd", "fwd_varlen", "bwd", "bwd_varlen"):
        importlib.import_module(f"{FOLDER.replace('/', '.')}.mamba3_mimo_{file}")
    flag = tilelang.PassConfigKey.TL_ENABLE_AGGRESSIVE_SHARED_MEMORY_MERGE
    fast = tilelang.PassConfigKey.TL_ENABLE_FAST_MATH
    assert len(built) == 6, built
    for name, configs in built.items():
        assert configs.get(flag) is True and configs[fast] is True, name
