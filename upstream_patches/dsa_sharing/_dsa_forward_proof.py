"""Proofs on CPU that DSA layers attend to the keys of the forward pass that they run in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Keys = dict[str, list[list[Any]]]
"""For each layer's name, the keys that its calls attended to, in order."""
RECOMPUTED = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def keys_used(model: Any, layers: Mapping[str, Any]) -> Keys:
    """Run the forward of two microbatches, and then the backward of both.

    Args:
        model: one of `small_models`.
        layers: its layers by name, a letter and the number of the layer: number 1 is Full and would
            select different keys when it is recomputed, number 2 is Shared.
    """
    from unittest import mock

    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.experimental_attention_variant import dsa

    used: Keys = {}
    running: list[str] = []
    attend = dsa.unfused_dsa_fn

    def noting(query: Any, key: Any, value: Any, keys: Any, *rest: Any, **named: Any) -> Any:
        used.setdefault(running[-1], []).append(keys.tolist())
        return attend(query, key, value, keys, *rest, **named)

    for name, layer in layers.items():
        layer.self_attention = _attention(name, model.config, running)
    with (
        mock.patch.object(random, "_get_cuda_rng_state", return_value=None),
        mock.patch.object(random, "_set_cuda_rng_state"),
        mock.patch.object(dsa, "unfused_dsa_fn", noting),
    ):
        for loss in [_loss(model, seed) for seed in (0, 1)]:
            loss.backward()
    return used


def _attention(name: str, model_config: Any, running: list[str]) -> Any:
    import torch

    from .._dsa_layer import indexer, layer

    core = layer(None, None, None, topk=2, dsa_indexer_loss_coeff=0.0)
    if not hasattr(model_config, "of_dsa"):
        model_config.of_dsa = core.config  # one for all layers, as in a model
    core.config, core.index_share = model_config.of_dsa, True
    core.layer_number, core.source_layer = int(name[1]), 1
    core.skip_topk = core.layer_number != 1
    calls = []

    def projected(x: Any, *ignored: Any) -> Any:
        calls.append(x)
        again = len(calls) > 2  # after a forward of both microbatches
        return x.unsqueeze(2), -x if again else x, torch.ones(*x.shape[:2], 1)

    core.indexer = None if core.skip_topk else indexer(projected, 2, core.pg_collection)

    class Attention(torch.nn.Module):
        def forward(self, hidden_states: Any, **ignored: Any) -> Any:
            from megatron.core.transformer.enums import AttnMaskType

            running.append(name)
            x = hidden_states.unflatten(-1, (2, -1))
            causal = AttnMaskType.causal
            return core(x, x, x, None, hidden_states, hidden_states, attn_mask_type=causal), None

    return Attention()


def _loss(model: Any, seed: int) -> Any:
    import torch

    from cppmega.proof import small_models

    torch.manual_seed(seed)
    tokens = torch.randint(small_models.V, (small_models.B, small_models.S))
    given = {"input_ids": tokens, "labels": tokens, "attention_mask": None}
    return model(**small_models.arguments(model, **given)).sum()


def assert_kept(used: Keys) -> None:
    """Assert that a recomputed layer attends to the keys of its own forward pass."""
    for name, (first, second, *again) in used.items():
        assert first != second, "both microbatches select the same keys"
        assert again == [first, second], f"{name} is recomputed with keys of another forward pass"


def assert_released() -> None:
    """Assert that no `Forward` remains after the backward of all microbatches."""
    import gc

    from cppmega.features.dsa.forward import Forward

    gc.collect()
    assert not any(isinstance(thing, Forward) for thing in gc.get_objects()), "a `Forward` leaks"


def assert_bound_by_te() -> None:
    """Assert that a function given to `te_checkpoint` finds its forward pass when it is rerun."""
    import sys
    from types import ModuleType
    from unittest import mock

    from megatron.core.extensions import transformer_engine as extension

    from cppmega.features.dsa import forward as dsa_forward

    package = "transformer_engine"
    names = (package, f"{package}.pytorch", f"{package}.pytorch.distributed")
    stand_ins: dict[str, Any] = {name: ModuleType(name) for name in names}
    stand_ins[names[-1]].checkpoint = lambda function, *args, **named: function
    with (
        mock.patch.dict(sys.modules, stand_ins),
        mock.patch.object(extension, "HAVE_TE", True),
        mock.patch.object(extension, "is_te_min_version", return_value=True),
        dsa_forward.forward() as here,
    ):
        again = extension.te_checkpoint(dsa_forward.current, False, None, None)
    assert again() is here, "te_checkpoint recomputes outside of the forward pass"
