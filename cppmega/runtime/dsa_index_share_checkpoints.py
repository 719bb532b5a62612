"""Load checkpoints between models whose DSA layers share keys and models whose layers do not.

Shared layers have no indexer. Weights that a checkpoint has for one are skipped, with one warning
that names them. Indexers for which a checkpoint has no weights are an error: they would remain
untrained.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

from cppmega.rules.dsa_sharing import indexed_layers, not_saved


def compare(asked: Iterable[str], saved: Callable[[], Iterable[str]]) -> None:
    """Compare the tensors that a rank requests from a distributed checkpoint with its contents.

    Args:
        asked: names of this rank's tensors.
        saved: returns the names of the checkpoint's tensors; called only for models with DSA.

    Raises:
        CppmegaError: `dsa-indexer-not-saved`.
    """
    asked = list(asked)
    mine = indexed_layers(asked)
    if not mine:
        return
    held = indexed_layers(saved())
    if missing := [layer for layer in mine if layer not in held]:
        raise not_saved(missing, held)
    shared = (layer for layer in held if layer not in mine)
    _warn_of_skipped([at for at in shared if any(name.startswith(f"{at}.") for name in asked)])


def _warn_of_skipped(layers: list[str]) -> None:
    if layers and _warns_for_replicas():
        warnings.warn(
            f"dsa_index_share_checkpoints: the checkpoint's weights of the indexers of "
            f"{', '.join(layers)} are left out, because these layers share keys",
            stacklevel=3,
        )


def _warns_for_replicas() -> bool:
    """Whether this rank warns on behalf of all ranks that hold the same layers."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return True
    data = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return bool(data == 0 == parallel_state.get_tensor_model_parallel_rank())


def watch_loading(stack: Any) -> None:
    """Make `load_state_dict` of a stack of layers check the indexers of its DSA layers."""
    if getattr(stack.config, "experimental_attention_variant", None) == "dsa":
        stack._register_load_state_dict_pre_hook(_check_state, with_module=True)


def _attentions(stack: Any) -> dict[str, Any]:
    """The DSA layers of a stack, by name."""
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention

    return {name: part for name, part in stack.named_modules() if isinstance(part, DSAttention)}


def _check_state(stack: Any, state: MutableMapping[str, Any], prefix: str, *rest: Any) -> None:
    """Remove the indexer weights of Shared layers from a state, and refuse one that lacks others.

    torch does not tell hooks whether the load is strict, and Megatron's loader repeats a failed
    strict load non-strictly. A state is therefore refused if it has indexers but lacks some of this
    stack's; a state without any was saved without DSA, and is left to torch.
    """
    held = indexed_layers(state)
    missing, skipped = [], []
    for name, attention in _attentions(stack).items():
        layer = f"{prefix}{name}".removesuffix(".core_attention")
        if attention.indexer is not None:
            missing += [] if layer in held else [layer]
        elif layer in held:
            skipped.append(layer)
            for key in [key for key in state if key.startswith(f"{layer}.core_attention.indexer.")]:
                del state[key]
    if missing and held:
        raise not_saved(missing, held)
    _warn_of_skipped(skipped)
