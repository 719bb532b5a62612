"""Add up the gradients of MLA's shared keys over tensor-parallel ranks.

What: Where every rank has the whole rotated part of MLA's keys, which all heads share, its gradient
    is summed over the ranks in the backward pass, in absorbed form (DSA), too.
Why: A rank's heads contribute only their part of the gradient. It is summed where sequence
    parallelism gathers the keys, and nowhere else: without sequence parallelism, and with a down
    projection that is divided among the ranks (local layers, or `--mla-down-proj-fusion`) also with
    it, `linear_kv_down_proj` and all layers below are given the gradient of one rank's heads. Where
    each rank has a copy of the projection, the copies drift apart. There is no error.
Upstream: https://github.com/NVIDIA/Megatron-LM/issues/1699 (open),
    https://github.com/NVIDIA/Megatron-LM/pull/6839 (open): for dev, without sequence parallelism
Remove: when `get_query_key_value_tensors` calls `copy_to_tensor_model_parallel_region`, or the
    like, for a key that it has not gathered.
Numerics: changes results of tensor-parallel runs with MLA: their gradients were incomplete
"""

from typing import Any

from cppmega.catalogue.megatron_args import has_mla
from cppmega.edits import in_order, inserting, replacing
from cppmega.page import Edit, Patch, Source

METHOD = "get_query_key_value_tensors"
MLA = f"megatron/core/transformer/multi_latent_attention.py:MLASelfAttention.{METHOD}"
ABSORBED = (
    "megatron/core/transformer/experimental_attention_variant/absorbed_mla.py:"
    f"AbsorbedMLASelfAttention.{METHOD}"
)
IMPORTS = (
    "from megatron.core.tensor_parallel.mappings import "
    "copy_to_tensor_model_parallel_region as _cppmega_summed_in_backward",
)


def _summed(group: str) -> str:
    return f"k_pos_emb = _cppmega_summed_in_backward(k_pos_emb{group})"


def _divided(group: str) -> Any:
    """After a down projection that is divided among the ranks."""
    return inserting(
        _summed(group),
        before="""
        if self.config.sequence_parallel:
            kv_compressed = scatter_to_sequence_parallel_region(kv_compressed)
        """,
    )


def _copied(ranks: str, group: str) -> Any:
    """After one of which each rank has a copy, unless the gathering sums the gradient."""
    gathers = f"""
if {ranks} > 1 and self.config.sequence_parallel:
    k_pos_emb = gather_from_sequence_parallel_region(k_pos_emb{group})
"""
    return replacing(gathers, f"{gathers}elif {ranks} > 1:\n    {_summed(group)}\n")


GROUP = ", group=self.tp_group"


def divides_heads(args: Any) -> bool:
    """Whether the heads of the run's MLA are divided among ranks."""
    return has_mla(args) and (getattr(args, "tensor_model_parallel_size", 1) or 1) > 1


PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=MLA,
            pins={"0.15.3": "819b6c6a854db700"},
            edit=in_order(
                _divided(""), _copied("parallel_state.get_tensor_model_parallel_world_size()", "")
            ),
            imports=IMPORTS,
        ),
        Edit(
            target=MLA,
            pins={
                "0.16.1": "261edcab79a3b514",
                "0.17.1": "f03fa5c0c2cf6e7a",
                "0.18.2": "6ec030b3cfdd777f",
                "0.19.2": "7518d58b95dcf9af",
            },
            edit=in_order(_divided(GROUP), _copied("get_pg_size(self.tp_group)", GROUP)),
            imports=IMPORTS,
        ),
        # Releases before 0.19 build no layer of this class; it demands sequence parallelism.
        Edit(
            target=ABSORBED,
            pins={"0.19.2": "4296584ee8e943f5"},
            edit=_divided(GROUP),
            imports=IMPORTS,
        ),
    ),
    reached="forward",
    when=divides_heads,
    after=("absorbed_mla_quantized_recompute", "mla_query_key_kernel"),
)


def fixed_upstream(source: Source) -> bool:
    return "copy_to_tensor_model_parallel_region" in source.text(MLA)


def verify() -> None:
    import importlib
    import importlib.util

    import torch

    from cppmega.proof import ranks, small_models

    mla, dsa = small_models.mla_attention, small_models.dsa_attention
    cases = [(mla, copied, gathers) for copied in (False, True) for gathers in (False, True)]
    specs = "megatron.core.models.gpt.experimental_attention_variant_module_specs"
    found = importlib.util.find_spec(specs) and importlib.import_module(specs)
    if hasattr(found, "AbsorbedMLASelfAttention"):
        cases += [(dsa, False, True), (dsa, True, True)]

    def work(rank):  # type: ignore[no-untyped-def]
        answers = []
        for kind, copied, gathers in cases:
            layer = kind(tensor_model_parallel_size=2, sequence_parallel=gathers)
            config = layer.config
            if copied:  # as by Transformer Engine's linear layers
                layer.linear_kv_down_proj = small_models.Projection(
                    32, config.kv_lora_rank + config.qk_pos_emb_head_dim, config=config
                )
            torch.manual_seed(1)
            hidden = torch.randn(4, 1, 32)
            if gathers:
                hidden = hidden.chunk(2)[rank]
            hidden = hidden.clone().requires_grad_()
            key = layer.get_query_key_value_tensors(hidden)[1]
            torch.manual_seed(2 + rank)
            loss = (key * torch.randn(key.shape)).sum()
            loss.backward()
            answers.append((loss.item(), (hidden * hidden.grad).sum().item()))
        return answers

    # Keys are linear in the hidden states, so the sum of all losses is their product with its
    # gradient: of each rank's copy, or of both parts of the sequence.
    for case, first, second in zip(cases, *ranks.on_two(work), strict=True):
        loss, gathers = first[0] + second[0], case[2]
        products = [first[1] + second[1]] if gathers else [first[1], second[1]]
        for product in products:
            assert abs(product - loss) < 1e-3, f"{case}: {product} is not {loss}"
