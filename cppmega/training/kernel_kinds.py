"""Classify a profile's kernels by the kernel's name and the operators that launched it.

The first rule that fits decides. Names are those of CUPTI: `void at::native::...<...>(...)` from
torch and Transformer Engine, the Python name from Triton, `nvjet_...` and `sm90_xmma_...` from
cuBLAS, the function's name and `_kernel` from TileLang. On CPU, operators take the place of
kernels. A name that matches no rule is of the kind `other`, whose kernels a profile lists by name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
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
_DSA, _M2RNN, _MAMBA3, _NGRAMS = "DSA", "M2RNN", "Mamba-3", "n-gram hash"
_ROUTERS = "routers"
_HEADS = "losses of the heads"
_FAMILIES = {
    # Beginning of a folder's name in cppmega.ops, or of a file's, -> what its kernels compute.
    "bits": _DSA,
    "dsa_": _DSA,
    "hadamard": _DSA,
    "linear_cross_entropy": _HEADS,
    "m2rnn": _M2RNN,
    "mamba3": _MAMBA3,
    "mhc": "hyper-connections",
    "ngram_hash": _NGRAMS,
    "packed_conv": _M2RNN,
    "rope": "rotary embedding",
    "router_gating": _ROUTERS,
    "scaled": _HEADS,
    "split_columns": _MAMBA3,
}
_AROUND = {
    "cppmega::m2rnn": _M2RNN,
    "cppmega::packed_conv": _M2RNN,
    "cppmega::router_gating": _ROUTERS,
    "cppmega::table_rows": _NGRAMS,
}
"""Beginning of an operator's name -> what it computes, where kernels of DSA have the same name."""
_OWN_HEADS = r"^(DeferredScalar|Recompute)(Backward)?$"
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

_OPERATORS: dict[str, str] = {
    # Of torch on CPU: kind -> patterns of whole names, without the underscores around them.
    "attention": r"scaled_dot_product\w*",
    PRODUCTS: r"grouped_mm scaled_mm addmm addbmm addmv b?mm baddbmm dot linear matmul mv",
    OPTIMIZER: r"foreach_\w+",
    MEMORY: r"empty\w* fill full\w* new_\w+ ones\w* zeros?\w*",
    _SORTING: r"argsort sort topk",
    _REDUCTIONS: r"log_softmax\w* softmax\w* a?max a?min aminmax any all argmax argmin cumsum "
    r"cumprod linalg_vector_norm logsumexp mean median (native_)?\w+_norm\w* nll_\w+ norm prod std "
    r"sum var",
    _COPIES: r"to_copy cat clone constant_pad_nd contiguous copy pad stack to",
    _INDEXING: r"embedding\w* gather index\w* masked_select nonzero\w* repeat_interleave roll "
    r"scatter\w* searchsorted take bincount unique\w*",
    _ELEMENTWISE: r"\w*and \w*or neg abs add bitwise\w* bernoulli ceil clamp\w* cos diff div "
    r"dropout eq erf exp floor\w* ge gelu\w* gt isfinite isinf isnan le lerp log\w* lt masked_fill "
    r"maximum minimum mul ne normal pow rand\w* reciprocal relu rsqrt rsub sigmoid\w* sign silu\w* "
    r"sin sqrt sub tanh\w* threshold\w* tri[lu] uniform where addc\w+ arange",
    # Views and queries, which launch no computation.
    "views": r"unsafe_view reshape\w* view\w* alias as_strided chunk detach expand\w* flatten item "
    r"lift\w* local_scalar_dense movedim narrow permute resize resolve_\w+ result_type select\w* "
    r"set slice\w* split\w* squeeze swapaxes t transpose unbind unflatten unfold unsqueeze is_\w+ "
    r"has_\w+ set_data",
}
_WHOLE = {kind: re.compile("|".join(names.split())) for kind, names in _OPERATORS.items()}


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
            return OWN + _family(families, inside)
        kind = _by_rule(name, inside)
        in_head = kind == PRODUCTS and any(self._heads.search(one) for one in inside)
        return HEADS if in_head else kind


def _by_rule(name: str, inside: tuple[str, ...]) -> str:
    if name.startswith(("c10d::", "gloo::")):
        return COMMUNICATION
    if any(one.startswith("Optimizer.") for one in inside):
        return OPTIMIZER
    if name.startswith("aten::"):
        plain = name.removeprefix("aten::").strip("_")
        fitting = (kind for kind, pattern in _WHOLE.items() if pattern.fullmatch(plain))
    else:
        fitting = (
            kind
            for kind, pattern, around in _COMPILED
            if pattern.search(name) and _around(around, inside)
        )
    return next(fitting, OTHER)


def _around(pattern: re.Pattern[str], inside: tuple[str, ...]) -> bool:
    return not pattern.pattern or any(pattern.search(one) for one in inside)


def _family(families: frozenset[str], inside: tuple[str, ...]) -> str:
    """What a kernel of cppmega computes, of those that have its name."""
    if len(families) == 1:
        return next(iter(families))
    around = (
        of for operator in inside for begin, of in _AROUND.items() if operator.startswith(begin)
    )
    return next(around, _DSA)


@cache
def own_kernels() -> dict[str, frozenset[str]]:
    """The names of the Triton kernels of `cppmega.ops`, and what those of a name compute."""
    found: dict[str, frozenset[str]] = {}
    for folder in files("cppmega.ops").iterdir():
        for file in folder.iterdir() if folder.is_dir() else ():
            if file.name.endswith(("_triton.py", "_gluon.py")):
                for name in _kernels(file.read_text()):
                    family = _family_of(folder.name, file.name)
                    found[name] = found.get(name, frozenset()) | {family}
    return found


def _family_of(folder: str, file: str) -> str:
    names = (folder, file)
    return next(of for begin, of in _FAMILIES.items() if any(n.startswith(begin) for n in names))


def _kernels(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            decorators = {ast.unparse(one).partition("(")[0] for one in node.decorator_list}
            if {"triton.jit", "gluon.jit"} & {*decorators} and node.name.endswith("_kernel"):
                yield node.name
