"""Which CUDA graphs a run captures, from Megatron's arguments or a model's configuration.

Releases differ in the names of the options; one that is missing counts as not given. Values that
Megatron replaces when it checks its arguments are read as their replacements.
"""

from __future__ import annotations

_MODULES = ("cuda_graph_modules", "cuda_graph_scope_deprecated")  # from 0.18 on
_SCOPE = "cuda_graph_scope"  # until 0.17
_WHOLE_STEP = "full_iteration"


def cuda_graphs(args: object) -> str:
    """How CUDA graphs are captured: none, local, transformer_engine or full_iteration."""
    older = {"enable_cuda_graph": "local", "external_cuda_graph": "transformer_engine"}
    named = next((how for name, how in older.items() if getattr(args, name, False)), "none")
    given = str(getattr(args, "cuda_graph_impl", None) or named)
    given = named if given == "none" else given
    replaces = any(_WHOLE_STEP in _names(args, option) for option in _MODULES)
    if replaces or (given == "local" and _WHOLE_STEP in _names(args, _SCOPE)):
        return _WHOLE_STEP
    return given


def graph_parts(args: object) -> set[str]:
    """The named parts of layers that are captured one by one; empty: complete layers."""
    stated = (_names(args, option) for option in (*_MODULES, _SCOPE))
    return next((names for names in stated if names), set()) - {"full"}


def captures(args: object, part: str) -> bool:
    """Whether training captures a part of layers (attn, mlp, moe, mamba, ...) in CUDA graphs."""
    how, parts = cuda_graphs(args), graph_parts(args)
    if how in ("none", _WHOLE_STEP):
        return how == _WHOLE_STEP
    inference = getattr(args, "inference_cuda_graph_scope", None)
    # Local graphs of blocks of layers are those of inference; no training step uses them.
    of_blocks = how == "local" and getattr(inference, "name", inference) == "block"
    return part in parts if parts else not of_blocks


def _names(args: object, option: str) -> set[str]:
    given = getattr(args, option, None) or ()
    if isinstance(given, str):
        given = given.split(",")
    elif not isinstance(given, (list, tuple, set)):
        given = (given,)
    return {str(getattr(each, "name", each)) for each in given}
