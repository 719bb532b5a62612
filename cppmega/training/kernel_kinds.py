"""Classify a profile's kernels by the kernel's name and the operators that launched it.

The first rule that fits decides. Names are those of CUPTI: `void at::native::...<...>(...)` from
torch and Transformer Engine, the Python name from Triton, `nvjet_...` and `sm90_xmma_...` from
cuBLAS, the function's name and `_kernel` from TileLang. cppmega's own kernels are named by their
family, their folder in `cppmega.ops`. A name that matches no rule is of the kind `other`, whose
kernels a profile lists by name.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

from cppmega.runs.profile import OTHER
from cppmega.training.trace import Trace, Work

COMMUNICATION = "communication"
MEMORY = "memory copies and fills"
OWN = "cppmega: "
"""How the kinds of cppmega's kernels begin."""
OPTIMIZER = "optimizer"
PRODUCTS = "products"
HEADS = "products of the heads"
_AROUND = {
    "cppmega::embedding_rows": "pointwise",
    "cppmega::m2rnn": "m2rnn",
    "cppmega::packed_conv": "packed_conv",
    "cppmega::router_gating": "pointwise",
    "cppmega::table_rows": "ngram_hash",
}
"""Beginning of an operator's name -> its family, where other families launch the kernel, too."""
_KERNEL = re.compile(r"^@(?:triton|gluon)\.jit.*\n(?:^@.*\n)*def (\w+_kernel)\(", re.MULTILINE)
_OWN_HEADS = r"^(DeferredScalar|InBackward)(Backward)?$"
"""Nodes of `linear_cross_entropy_autograd`."""
_MEGATRON_LINEAR = r"^LinearWithGradAccumulationAndAsyncCommunication(Backward)?$"
_TRANSFORMER_ENGINE = re.compile(r"^_(LayerNorm|Grouped)?(Linear|MLP)(Backward)?$")
_PRODUCT = (
    r"nvjet|gemm|gemv|cutlass|cublas|splitKreduce|_xmma_|dot_kernel|reduce_1Block_kernel|"
    r"triton_tem_"
)
_COPIES = "copies, casts, concatenations"
_ELEMENTWISE = "elementwise"
_EXPERTS = "products of the experts"
_INDEXING = "indexing and permutation"
_REDUCTIONS = "reductions and norms"
_SORTING = "sorting and top-k"

_KERNELS: tuple[tuple[str, str, str], ...] = (
    # kind, pattern of the kernel's name, pattern of an operator around it
    (COMMUNICATION, r"^nccl|nvshmem|userbuffers|deep_ep", ""),
    (OPTIMIZER, r"multi_tensor_apply|FusedAdam|[aA]dam_", ""),
    (MEMORY, r"^Memcpy |^Memset |FillFunctor", ""),
    ("attention", r"flash|fmha|sdpa|fused_attn|AttentionKernel|compute_dot_do_o|convert_dq_", ""),
    (
        "TileLang",
        r"^(main|tl_\w+|clean_logits\w*|preprocess\w*|postprocess\w*|sparse_mla\w*)_kernel(_\d+)?$",
        "",
    ),
    (
        "state-space scans",
        r"causal_conv1d|selective_scan|mamba|"
        r"^_?(bmm_chunk|chunk_(cumsum|scan|state)|state_passing)_",
        "",
    ),
    (_EXPERTS, _PRODUCT, r"Grouped(Linear|MLP|Gemm)|grouped_(gemm|mm)"),
    (_EXPERTS, r"[gG]roup(ed)?_?(gemm|Gemm|GEMM|mm|Problem)", ""),
    (PRODUCTS, _PRODUCT, ""),
    (_SORTING, r"[tT]op_?[kK]|[rR]adix|bitonicSort|MergeSort|segmented_sort|DigitC", ""),
    (
        _REDUCTIONS,
        r"reduce_kernel|[sS]oft_?[mM]ax|normalization::|(rms|layer|batch|group|weight|l2)_?norm|"
        r"(RMS|Layer|Batch|Group|L2)Norm|RowwiseMoments|GammaBeta|tensor_kernel_scan|DeviceScan|"
        r"DeviceReduce|cumsum|nll_loss|cross_entropy|triton_(per|red)_",
        "",
    ),
    (
        _COPIES,
        r"(direct|float16|bfloat16|float8\w*)_copy_kernel|CatArrayBatched|CopyFunctor|transpose_|"
        r"_transpose|cast_(kernel|only)|_cast_",
        "",
    ),
    (
        _INDEXING,
        r"(?<!elementwise_kernel_with_)index|scatter_gather|vectorized_gather|embedding|permut|"
        r"row_id_map|sort_chunks|chunk_sort|multihot|flip_kernel|[sS]catter|[gG]ather_|roll_cuda|"
        # the gradient of an embedding
        r"compute_grad_weight|krn_partial|partial_segments|fill_reverse_indices|unique_by_key",
        "",
    ),
    (
        _ELEMENTWISE,
        r"elementwise|triton_poi_|^fused_|swiglu|gelu|silu|relu|gated_act|dropout|triu_tril|rope|"
        r"rotary",
        "",
    ),
)
_COMPILED = tuple((kind, re.compile(name), re.compile(inside)) for kind, name, inside in _KERNELS)


class Kinds:
    """The kinds of the kernels of one trace."""

    def __init__(self, trace: Trace) -> None:
        launchers = {name for work in trace.work for name in work.inside}
        heads = [_OWN_HEADS]
        if any(_TRANSFORMER_ENGINE.search(name) for name in launchers):
            heads.append(_MEGATRON_LINEAR)  # all other layers are those of Transformer Engine
        self._heads = re.compile("|".join(heads))
        self._known: dict[tuple[str, tuple[str, ...]], str] = {}

    def of(self, work: Work) -> str:
        """The kind of a kernel."""
        key = (work.span.name, work.inside)
        if key not in self._known:
            self._known[key] = self._find(*key)
        return self._known[key]

    def in_background(self, work: Work) -> bool:
        """Whether the time of a kernel counts only while nothing else runs."""
        return self.of(work) in (COMMUNICATION, MEMORY)

    def _find(self, name: str, inside: tuple[str, ...]) -> str:
        if families := own_kernels().get(name):
            return OWN + _family(families, inside).replace("_", " ")
        kind = _by_rule(name, inside)
        in_head = kind == PRODUCTS and any(self._heads.search(one) for one in inside)
        return HEADS if in_head else kind


def _by_rule(name: str, inside: tuple[str, ...]) -> str:
    if any(one.startswith("Optimizer.") for one in inside):
        return OPTIMIZER
    fitting = (
        kind
        for kind, pattern, around in _COMPILED
        if pattern.search(name) and _around(around, inside)
    )
    return next(fitting, OTHER)


def _around(pattern: re.Pattern[str], inside: tuple[str, ...]) -> bool:
    return not pattern.pattern or any(pattern.search(one) for one in inside)


def _family(families: tuple[str, ...], inside: tuple[str, ...]) -> str:
    """The family of a kernel of cppmega: its operator's, else the first that has its name."""
    around = (
        of for operator in inside for begin, of in _AROUND.items() if operator.startswith(begin)
    )
    return next(around, families[0])


@cache
def own_kernels() -> dict[str, tuple[str, ...]]:
    """The names of the Triton kernels of `cppmega.ops` -> the families that have one, DSA first."""
    families: dict[str, set[str]] = {}
    for folder in files("cppmega.ops").iterdir():
        for file in folder.iterdir() if folder.is_dir() else ():
            if file.name.endswith(("_triton.py", "_gluon.py")):
                for name in _KERNEL.findall(file.read_text()):
                    families.setdefault(name, set()).add(folder.name)
    return {
        name: tuple(sorted(of, key=lambda one: (one[:4] != "dsa_", one)))
        for name, of in families.items()
    }
