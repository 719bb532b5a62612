"""Build mamba_ssm's TileLang kernels with aggressive shared-memory merging.

What: With `CPPMEGA_SMEM_MERGE=1` at apply, the six TileLang kernels of Mamba-3's MIMO scan, forward
    and backward, packed or not, set `TL_ENABLE_AGGRESSIVE_SHARED_MEMORY_MERGE: True`.
Why: sm_120 and sm_121 provide 99 KiB of dynamic shared memory per block (sm_90: 227), and a kernel
    that needs more cannot be launched. None of the six requests that its buffers share memory (read
    in 2.3.2.post1).
Upstream: Not sent: upstream tunes these kernels for sm_90, which does not need it.
Remove: when the kernels set it themselves.
Numerics: none (bitwise): the pass places buffers and does not change what is computed. This follows
    from the documentation of the pass; kernels with and without it were not compared on a GPU.
"""

from cppmega.edits import replacing
from cppmega.page import Edit, Patch, Source

from ._mamba3_kernels import DISTRIBUTION, FOLDER, loaded

CONFIGS = """
        tilelang.PassConfigKey.TL_DISABLE_TMA_LOWER: True,
        tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True,
        tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
"""
MERGE = "tilelang.PassConfigKey.TL_ENABLE_AGGRESSIVE_SHARED_MEMORY_MERGE: True,"


def _kernel(file: str, name: str, pins: dict[str, str]) -> Edit:
    return Edit(
        target=f"{FOLDER}/mamba3_mimo_{file}.py:{name}",
        pins=pins,
        edit=replacing(f"{{{CONFIGS}    }}", f"{{{CONFIGS}        {MERGE}\n    }}"),
        distribution=DISTRIBUTION,
    )


PATCH = Patch(
    purpose="feature",
    edits=(
        _kernel(
            "fwd",
            "mamba_mimo_fwd",
            {"2.3.2.post1": "1f740adda80781a9", "main-e9594ce1": "b9d6dc60bc358801"},
        ),
        _kernel(
            "bwd",
            "mamba_mimo_bwd_fwd",
            {"2.3.2.post1": "51b780962a7a46cf", "main-e9594ce1": "7f560995b3519886"},
        ),
        _kernel(
            "bwd",
            "mamba_mimo_bwd_bwd",
            {"2.3.2.post1": "7ab89fb8ca005aed", "main-e9594ce1": "fcc05a2f14e983c6"},
        ),
        _kernel(
            "fwd_varlen",
            "mamba_mimo_fwd",
            {"2.3.2.post1": "5bcf9be274c93583", "main-e9594ce1": "fa73d16eacecf3d2"},
        ),
        _kernel(
            "bwd_varlen",
            "mamba_mimo_bwd_fwd",
            {"2.3.2.post1": "41f9137bb127802a", "main-e9594ce1": "a2305e5736963efa"},
        ),
        _kernel(
            "bwd_varlen",
            "mamba_mimo_bwd_bwd",
            {"2.3.2.post1": "e77cc862484e0159", "main-e9594ce1": "a54e8af4b86cb743"},
        ),
    ),
    reached="never",  # TileLang compiles a kernel's source, which would include a mark
    feature=("mamba_ssm/modules/mamba3.py:Mamba3",),
    gate="CPPMEGA_SMEM_MERGE",
    provides={"shared_memory_merge": (True,)},
)


def fixed_upstream(source: Source) -> bool:
    return all(MERGE.rstrip(",") in source.text(edit.target) for edit in PATCH.edits)


def verify() -> None:
    tilelang, _ = loaded("fwd", "fwd_varlen", "bwd", "bwd_varlen")
    flag, fast = "TL_ENABLE_AGGRESSIVE_SHARED_MEMORY_MERGE", "TL_ENABLE_FAST_MATH"
    assert len(tilelang.kernels) == 6, tilelang.kernels
    for kernel in tilelang.kernels:
        configs = kernel.options["pass_configs"]
        assert configs.get(flag) is True and configs[fast] is True, kernel
