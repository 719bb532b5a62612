"""Wait for the up projection of DSA's attention before it is read.

What: `AbsorbedMLASelfAttention` calls the hooks that Megatron's DDP has put before the call of
    `linear_kv_up_proj` when it reads that module's weight.
Why: With `--overlap-param-gather`, DDP gathers parameters while the forward pass runs, and waits
    for them in a hook before their module is called. This module is never called: its weight is
    absorbed into query and output. It may be read before it has arrived, with what other ranks own
    still as in the step before. That it mostly has arrived is due to its bucket, which other
    modules share and wait for. With a bucket of its own, the next step of an interleaved pipeline
    fails with an AssertionError in `start_param_sync`. DSA has used this class since 0.19; its
    fused experts call such hooks in the same way.
Upstream: Not sent: noticed in November 2026; main (d98e8a64) and dev (d48bd6be) read it so, too
Remove: when `_get_kv_up_weights`, or its callers, wait for the weight or call the module.
Numerics: none (bitwise) without `--overlap-param-gather`; with it, the weight is always this step's
"""

from typing import Any

from cppmega.catalogue.megatron_args import absorbs_dsa
from cppmega.edits import in_order, inserting
from cppmega.page import Edit, Patch, Source

TARGET = (
    "megatron/core/transformer/experimental_attention_variant/absorbed_mla.py:"
    "AbsorbedMLASelfAttention._get_kv_up_weights"
)
IMPORTS = ("from cppmega.features.arrived import arrived as _cppmega_arrived",)
_WAITS = inserting(
    "_cppmega_arrived(self.linear_kv_up_proj)  # DDP may still gather its weight",
    before="assert self.linear_kv_up_proj.weight.size(0) == expected_rows",
)


def gathers_meanwhile(args: Any) -> bool:
    """Whether the run's DSA layers read parameters that may not have arrived."""
    return absorbs_dsa(args) and bool(getattr(args, "overlap_param_gather", False))


PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=TARGET,
            pins={"0.19.2": "a7f121cd4f77c6b2", "main-d98e8a64": "a7f121cd4f77c6b2"},
            edit=_WAITS,
            imports=IMPORTS,
        ),
        Edit(
            target=TARGET,
            pins={"dev-d48bd6be": "0e2fe524e9f5c4f5"},
            edit=in_order(
                _WAITS,
                inserting(
                    """
                    # Keys and values have a module each.
                    _cppmega_arrived(self.linear_k_up_proj)
                    _cppmega_arrived(self.linear_v_up_proj)
                    """,
                    before="""
                    k_up_weight = self.linear_k_up_proj.weight.view(
                        self.num_attention_heads_per_partition,
                        self.config.qk_head_dim,
                        self.config.kv_lora_rank,
                    )
                    """,
                ),
            ),
            imports=IMPORTS,
        ),
    ),
    reached="forward",
    feature=(
        "megatron/core/transformer/experimental_attention_variant/absorbed_mla.py:_apply_absorbed_v_up_projection",
    ),
    when=gathers_meanwhile,
)


def fixed_upstream(source: Source) -> bool:
    return "_forward_pre_hooks" in source.text(TARGET)


def verify() -> None:
    from types import SimpleNamespace

    import torch
    from megatron.core.transformer.experimental_attention_variant import absorbed_mla

    layer = absorbed_mla.AbsorbedMLASelfAttention.__new__(absorbed_mla.AbsorbedMLASelfAttention)
    torch.nn.Module.__init__(layer)
    layer.config = SimpleNamespace(qk_head_dim=2, v_head_dim=2, kv_lora_rank=3)
    layer.num_attention_heads_per_partition = 1
    arrived = torch.arange(12.0).view(4, 3)

    def gathered(values: torch.Tensor) -> torch.nn.Module:
        """Return a module whose weight arrives when it is called."""
        module = torch.nn.Linear(3, len(values), bias=False)
        module.register_forward_pre_hook(lambda *_: module.weight.detach().copy_(values))
        return module

    layer.linear_kv_up_proj = gathered(arrived)
    layer.linear_k_up_proj, layer.linear_v_up_proj = gathered(arrived[:2]), gathered(arrived[2:])
    for layer._uses_combined_kv_up_projection in (True, False):  # only dev asks
        read = torch.cat(layer._get_kv_up_weights(), dim=1)
        assert torch.equal(read, arrived[None]), "a weight is read before it has arrived"
