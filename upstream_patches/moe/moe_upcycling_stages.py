"""Convert the dense model of every virtual stage when a dense model is upcycled to experts.

What: `upcycle_state_dict` passes the two models of a virtual stage in the order that the conversion
    expects, as it does for a single stage.
Why: It passes the state dict of the dense stage as the MoE model and the MoE stage as the dense
    model: with virtual pipeline stages, upcycling fails ("'collections.OrderedDict' object has no
    attribute 'named_modules'"; tested on 0.16.1 to 0.19.2).
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/5442 (main, August 2026; not released)
Remove: when both calls of `_convert_to_moe_state_dict` have the same order.
Numerics: none (bitwise); these runs used to fail
"""

from cppmega.catalogue.megatron_args import has_experts
from cppmega.edits import replacing
from cppmega.page import Edit, Patch, Source

TARGET = "megatron/core/transformer/moe/upcycling_utils.py:upcycle_state_dict"
STOCK = "dense_model[i].state_dict(), moe_model[i]"

PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=TARGET,
            pins={
                "0.15.3": "11b8804a4f3ddf91",
                "0.16.1": "11b8804a4f3ddf91",
                "0.17.1": "11b8804a4f3ddf91",
                "0.18.2": "11b8804a4f3ddf91",
                "0.19.2": "11b8804a4f3ddf91",
                "dev-d48bd6be": "11b8804a4f3ddf91",
            },
            edit=replacing(
                f"_convert_to_moe_state_dict({STOCK})",
                "_convert_to_moe_state_dict(moe_model[i], dense_model[i])",
            ),
        ),
    ),
    reached="startup",
    when=lambda args: (
        has_experts(args)
        and bool(getattr(args, "moe_use_upcycling", False))
        and bool(getattr(args, "virtual_pipeline_model_parallel_size", None))
    ),
)


def fixed_upstream(source: Source) -> bool:
    text = source.text(TARGET)
    return bool(text) and STOCK not in text


def verify() -> None:
    from functools import partial
    from unittest import mock

    import torch
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.moe.upcycling_utils import upcycle_state_dict

    from cppmega.proof import small_models

    dense = [small_models.gpt(add_bias_linear=False) for _ in range(2)]
    spec = partial(gpt_layer_specs.get_gpt_layer_local_spec, num_experts=2)
    with mock.patch.object(gpt_layer_specs, "get_gpt_layer_local_spec", spec):
        moe = [small_models.gpt(num_moe_experts=2, add_bias_linear=False) for _ in range(2)]
    for stage in dense:
        for number, parameter in enumerate(stage.parameters()):
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
    whole = upcycle_state_dict(moe, dense)
    assert whole.keys() == {"model0", "model1"}
    for stage in range(2):
        alone = upcycle_state_dict([moe[stage]], [dense[stage]])["model"]
        converted = whole[f"model{stage}"]
        assert converted.keys() == alone.keys() == moe[stage].state_dict().keys()
        weights = [name for name in alone if name.endswith("weight")]
        assert len(weights) > 4 and all(converted[name].equal(alone[name]) for name in weights)
