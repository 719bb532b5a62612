"""Edits of Megatron's optimizers for a model in which some parameters are fp32.

They fix the order of the states, and keep checkpoints in the format that stock writes and reads: a
parameter with a `stock_dtype` is saved where one of that dtype would be.
"""

from __future__ import annotations

from cppmega.edits import appending, in_order, inserting, replacing
from cppmega.page import Edit, left_alone

from .functions import (
    bucket_gaps,
    bucket_part,
    bucket_places,
    inner_params,
    keeps_fp32,
    kept_apart,
    loaded_copy,
    main_copies,
    of_one_dtype,
    send_kept,
    sharded_as_in_stock,
    share_kept,
    stock_buckets,
    stock_buffers,
    stock_sizes,
)

GROUPS = "megatron/core/distributed/param_and_grad_buffer.py:partition_buckets"
OPTIMIZER = "megatron/core/optimizer"
DISTRIBUTED = f"{OPTIMIZER}/distrib_optimizer.py:DistributedOptimizer."
ORDER = DISTRIBUTED + "_build_optimizer_group_ranges"
LOAD = DISTRIBUTED + "_set_main_param_and_optimizer_states"
SAVE_BUCKETS = DISTRIBUTED + "sharded_param_state_dp_reshardable"
LOAD_BUCKETS = DISTRIBUTED + "load_parameter_state_from_dp_reshardable"
LOAD_WHOLE = DISTRIBUTED + "load_parameter_state_from_fully_reshardable"
PLAIN = f"{OPTIMIZER}/optimizer.py:Float16OptimizerWithFloat16Params."
STATE, SAVE, RESTORE = (PLAIN + n for n in ("state_dict", "sharded_state_dict", "load_state_dict"))
LAYER_WISE = f"{OPTIMIZER}/layer_wise_optimizer.py:LayerWiseDistributedOptimizer."
GATHER, LOAD_LAYERS = LAYER_WISE + "allgather_params", LAYER_WISE + "load_state_dict"
OFFLOAD = (
    f"{OPTIMIZER}/cpu_offloading/hybrid_optimizer.py:"
    "HybridDeviceOptimizer._update_fp32_params_by_new_state"
)


def saving_edit(pins: dict[str, str], groups: int) -> Edit:
    edit = in_order(
        inserting(
            """
            # State ids count the inner optimizer's parameters, the fp32 ones among them.
            params, copied = inner_params(self)
            """,
            after="state_dict = self.state_dict()",
        ),
        replacing("self.float16_groups", "[params]", times=groups),
        replacing(
            "zip(state_group['params'], fp32_group)",
            "zip(filter(copied.__contains__, state_group['params']), fp32_group)",
        ),
    )
    return Edit(SAVE, pins, edit, helpers=(inner_params,))


def saving_as_main(is_main: str, pins: dict[str, str]) -> Edit:
    """Return the edit for releases that fix the order, and save only copies."""
    return Edit(SAVE, pins, replacing(is_main, f"{is_main} or hasattr(param, 'stock_dtype')"))


EDITS = (
    Edit(
        target=GROUPS,
        pins={
            "0.15.3": "5eace838fcd5d553",
            "0.16.1": "5eace838fcd5d553",
            "0.17.1": "1a2d52bda668e6d3",
            "0.18.2": "dc48bd7e89684769",
            "0.19.2": "dc48bd7e89684769",
            "main-d98e8a64": "dc48bd7e89684769",
            "dev-d48bd6be": "3caa5b11af844efa",
        },
        # A group sends its buckets together, which takes one dtype.
        edit=inserting(
            """
            given = dict(locals())
            parts = kept_apart(buffers)
            if len(parts) > 1:
                divided = [partition_buckets(**{**given, "buffers": part}) for part in parts]
                return [group for groups in divided for group in groups]
            """,
            after="if len(buffers) == 0:\n    return []",
        ),
        helpers=(kept_apart,),
        mark="",
    ),
    Edit(
        target=ORDER,
        pins={
            "0.15.3": "14deb176c8a61d65",
            "0.16.1": "14deb176c8a61d65",
            "0.17.1": "14deb176c8a61d65",
            "0.18.2": "14deb176c8a61d65",
            "0.19.2": "14deb176c8a61d65",
            "main-d98e8a64": "14deb176c8a61d65",
            "dev-d48bd6be": "14deb176c8a61d65",
        },
        edit=inserting(
            """
            for group_index, group_range in enumerate(group_ranges):
                # As the groups of the optimizer will be: its states are found by this order.
                group_range["params"].sort(key=lambda param: param.dtype != torch.float32)
                for order, param in enumerate(group_range["params"]):
                    local_param_group_map[param] = (group_index, order)
            """,
            before="return local_param_group_map, group_ranges",
        ),
    ),
    Edit(
        target=LOAD,
        pins={
            "0.15.3": "73019c14cd7cf363",
            "0.16.1": "73019c14cd7cf363",
            "0.17.1": "c327f04d11887e39",
            "0.18.2": "c327f04d11887e39",
            "0.19.2": "c327f04d11887e39",
            "main-d98e8a64": "c327f04d11887e39",
            "dev-d48bd6be": "1aa5a9bb9c556b81",
        },
        # The shard of a parameter that is fp32 already is a view of it, and not detached.
        edit=replacing(
            "dst_tensors[key].copy_(tensors[key])",
            """
            dst_tensors[key].detach().copy_(
                loaded_copy(model_param, dst_tensors[key], tensors[key])
                if key == "param"
                else tensors[key]
            )
            """,
        ),
        helpers=(loaded_copy,),
    ),
    Edit(
        target=SAVE_BUCKETS,
        pins={
            "0.15.3": "e940ebdc3b9a331c",
            "0.16.1": "8bb44d203bd9df1f",
            "0.17.1": "8bb44d203bd9df1f",
            "0.18.2": "8bb44d203bd9df1f",
            "0.19.2": "8bb44d203bd9df1f",
            "main-d98e8a64": "8bb44d203bd9df1f",
            "dev-d48bd6be": "8bb44d203bd9df1f",
        },
        edit=inserting(
            """
            if keeps_fp32(self):
                return sharded_as_in_stock(self, state)
            """,
            after="state = self.get_parameter_state_dp_reshardable()",
        ),
        imports=("import math",),
        helpers=(
            *(bucket_places, stock_buffers, stock_buckets, stock_sizes, keeps_fp32),
            *(bucket_part, sharded_as_in_stock, bucket_gaps),
        ),
    ),
    Edit(
        target=LOAD_BUCKETS,
        pins={
            "0.15.3": "eb6e0b57379da733",
            "0.16.1": "eb6e0b57379da733",
            "0.17.1": "eb6e0b57379da733",
            "0.18.2": "eb6e0b57379da733",
            "0.19.2": "eb6e0b57379da733",
            "main-d98e8a64": "eb6e0b57379da733",
            "dev-d48bd6be": "eb6e0b57379da733",
        },
        edit=in_order(
            replacing(
                "self.per_bucket_numel_unpadded",
                "(stock_sizes(self) if keeps_fp32(self) else self.per_bucket_numel_unpadded)",
                times=2,
            ),
            appending("share_kept(self)"),
        ),
    ),
    Edit(
        target=LOAD_WHOLE,
        pins={
            "0.15.3": "584e2bd658b68a11",
            "0.16.1": "584e2bd658b68a11",
            "0.17.1": "584e2bd658b68a11",
            "0.18.2": "584e2bd658b68a11",
            "0.19.2": "584e2bd658b68a11",
            "main-d98e8a64": "584e2bd658b68a11",
            "dev-d48bd6be": "584e2bd658b68a11",
        },
        edit=appending("share_kept(self)"),
        helpers=(share_kept,),
    ),
    Edit(
        target=STATE,
        pins={
            "0.15.3": "d15bf436b79bcdf3",
            "0.16.1": "d15bf436b79bcdf3",
            "0.17.1": "d15bf436b79bcdf3",
            "0.18.2": "d15bf436b79bcdf3",
            "0.19.2": "d15bf436b79bcdf3",
            "main-d98e8a64": "d15bf436b79bcdf3",
            "dev-d48bd6be": "d15bf436b79bcdf3",
        },
        edit=replacing("self.fp32_from_float16_groups", "main_copies(self, apart=True)"),
        helpers=(main_copies,),
    ),
    Edit(
        target=RESTORE,
        pins={
            "0.15.3": "c280580929b5a79c",
            "0.16.1": "c280580929b5a79c",
            "0.17.1": "c280580929b5a79c",
            "0.18.2": "c280580929b5a79c",
            "0.19.2": "c280580929b5a79c",
            "main-d98e8a64": "c280580929b5a79c",
            "dev-d48bd6be": "da7a979e35e58b6a",
        },
        edit=replacing("self.fp32_from_float16_groups", "main_copies(self)"),
    ),
    saving_edit(
        {
            "0.15.3": "c4eee9f7b8388000",
            "0.16.1": "c4eee9f7b8388000",
            "0.17.1": "c4eee9f7b8388000",
            "0.18.2": "c4eee9f7b8388000",
        },
        groups=1,
    ),
    saving_edit({"0.19.2": "58f25c8e62c51a52"}, groups=2),
    saving_as_main(
        "id(param) in main_param_id_to_model_param", {"main-d98e8a64": "a9e01e1cb16100dc"}
    ),
    saving_as_main("id(param) not in fp32_param_ids", {"dev-d48bd6be": "07e90954a959e1c2"}),
    Edit(
        target=GATHER,
        pins={
            "0.16.1": "1f2f9dd40270e46e",
            "0.17.1": "cfdb21fc50d6eb34",
            "0.18.2": "cfdb21fc50d6eb34",
            "0.19.2": "bf54171c493c635d",
            "main-d98e8a64": "bf54171c493c635d",
            "dev-d48bd6be": "b8c1cb8ccfc8580f",
        },
        edit=replacing(
            "device = params_list[0][0].device\ndtype = params_list[0][0].dtype",
            """
            parts = of_one_dtype(params_list)
            if len(parts) != 1:
                for part in parts:
                    _allgather_helper(part, group)
                return
            device, dtype = next((p.device, p.dtype) for params in params_list for p in params)
            """,
        ),
        helpers=(of_one_dtype,),
    ),
    Edit(
        target=LOAD_LAYERS,
        pins={
            "0.16.1": "f377c4610849530d",
            "0.17.1": "f377c4610849530d",
            "0.18.2": "f377c4610849530d",
            "0.19.2": "f377c4610849530d",
            "main-d98e8a64": "f377c4610849530d",
            "dev-d48bd6be": "f12cf4e6b3b4536a",
        },
        edit=appending("send_kept(self)"),
        helpers=(send_kept,),
    ),
    Edit(
        target=OFFLOAD,
        pins={
            "0.15.3": "d716bff95c060f14",
            "0.16.1": "d716bff95c060f14",
            "0.17.1": "d716bff95c060f14",
            "0.18.2": "d716bff95c060f14",
            "0.19.2": "d716bff95c060f14",
        },
        # A parameter that is fp32 already has no fp32 copy, but it may have one on the host.
        edit=replacing("self.param_to_fp32_param[param]", "self.param_to_inner_param[param]"),
    ),
    Edit(
        OFFLOAD,
        {"main-d98e8a64": "ae3de6a04d4492dd", "dev-d48bd6be": "ae3de6a04d4492dd"},
        left_alone,
    ),
)
