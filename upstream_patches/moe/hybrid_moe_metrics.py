"""Report the MoE losses of a hybrid model as a mean over its MoE layers.

What: `training_log` counts each MoE layer of a hybrid pattern once, and sizes the metric by the
    number of all layers, as the routers do.
Why: The count from the pattern includes the MTP depths, and `report` adds the depths again: with 22
    MoE layers and 2 depths that have one MoE layer each, every logged loss is 24/26 of the correct
    value (tested: 2.77 where every layer has 3). A pipeline stage without MoE also allocates a
    tensor that is too short, 26 values instead of 54: the reduction over the stages then aborts
    (gloo) or hangs.
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/6748 (main, August 2026; not released)
Remove: when `training_log` no longer passes the number of MoE layers as `num_layers`.
Numerics: none (bitwise); only the logged metrics change
"""

from cppmega.catalogue.megatron_args import has_experts
from cppmega.edits import in_order, replacing
from cppmega.page import Edit, Patch, Source

TARGET = "megatron/training/training.py:training_log"
STOCK = "itemgetter(Symbols.MOE)(get_hybrid_layer_counts(args.hybrid_layer_pattern))"

PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=TARGET,
            pins={
                "0.17.1": "ffacac9d3b9d8c2c",
                "0.18.2": "87dfa74531ee2682",
                "0.19.2": "78e81ed7583c25e3",
            },
            edit=in_order(
                replacing("args.moe_layer_freq", "moe_layer_freq"),
                replacing(
                    "layers = args.num_layers",
                    "layers, moe_layer_freq = args.num_layers, args.moe_layer_freq",
                ),
                replacing(
                    f"layers = {STOCK}",
                    f"""
                    # The count has the MTP depths in it, and one layer per depth is added to it.
                    moe_layers = {STOCK}
                    moe_layer_freq = [max(moe_layers, 1) - (args.mtp_num_layers or 0)]
                    # The length of the routers' metric tensors, less the depths.
                    layers = args.num_layers
                    """,
                ),
            ),
        ),
    ),
    reached="log",
    feature=("megatron/training/training.py:train_step",),
    when=has_experts,
)


def fixed_upstream(source: Source) -> bool:
    text = source.text(TARGET)
    return bool(text) and STOCK not in text


def verify() -> None:
    from unittest import mock

    import torch
    from megatron.core.transformer.moe import moe_utils
    from megatron.training import training

    from cppmega.proof import cpu_shims, stand_ins

    cpu_shims.init_distributed()

    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:  # 0.17
        record = moe_utils.save_to_aux_losses_tracker
    else:
        record = get_moe_metrics_tracker().record

    def logged(pattern, moe_layers):  # type: ignore[no-untyped-def]
        main, *depths = pattern.split("/")
        args = stand_ins.Arguments(
            0,
            hybrid_layer_pattern=pattern,
            num_layers=len(main),
            mtp_num_layers=len(depths) or None,
            num_experts=4,
            moe_layer_freq=1,
            moe_router_load_balancing_type=["aux_loss"],
            moe_z_loss_coeff=None,
            mtp_loss_scaling_factor=0.1,
            log_interval=1000,
        )
        for layer in moe_layers:  # as the routers do
            size = len(main) + len(depths)
            record("load_balancing_loss", torch.tensor(3.0), layer, size)
        total = {}
        with (
            stand_ins.quiet_training(training, args, is_hybrid_model=lambda _: True),
            mock.patch.object(torch.distributed, "all_reduce", lambda *_, **__: None),
        ):
            training.training_log({}, total, 0.1, 1, 1.0, False, 0, None, None, None, None)
        return total["load_balancing_loss"].item()

    # Every MoE layer has a loss of 3, so their mean is 3.
    assert logged("MEME/E/E", [2, 4, 1, 1]) == 3, "the MTP depths were counted twice"
    assert logged("MEME/ME", [2, 4, 2]) == 3
    assert logged("MEME", [2, 4]) == 3
