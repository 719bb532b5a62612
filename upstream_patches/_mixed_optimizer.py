# ruff: noqa: F821
"""Edits of Megatron's optimizers for a model in which some parameters are fp32.

They mend the order of the states, and let a checkpoint be the one that stock writes and reads: a
parameter with a `stock_dtype` is saved where one of that type would be. The functions become part
of Megatron's files, which import the other names that they use.
"""

from __future__ import annotations

from cppmega.edits import appending, in_order, inserting, replacing
from cppmega.page import Edit, left_alone

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
RELEASES = ("0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2")
GIT = ("main-d98e8a64", "dev-d48bd6be")


def inner_params(optimizer):
    """Model parameters in the order of the inner optimizer, and for which a copy is saved."""
    model_param = {
        id(main): param
        for params, mains in zip(
            optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True
        )
        for param, main in zip(params, mains, strict=True)
    }
    inner = [param for group in optimizer.optimizer.param_groups for param in group["params"]]
    copied = {
        index
        for index, param in enumerate(inner)
        if id(param) in model_param or hasattr(param, "stock_dtype")
    }
    return [model_param.get(id(param), param) for param in inner], copied


def main_copies(optimizer, apart=False):
    """Per group the fp32 copies of parameters, and the parameters that stock would have to copy.

    These `apart` from the model where a checkpoint is loaded into what is here: it is loaded in
    place, and before the model is given its own, rounded parameters.
    """
    copies = {id(main) for group in optimizer.fp32_from_float16_groups for main in group}

    def copy(param):
        if not hasattr(param, "stock_dtype"):
            return param
        return param.detach().clone() if apart else param.detach()

    return [
        [copy(p) for p in group["params"] if id(p) in copies or hasattr(p, "stock_dtype")]
        for group in optimizer.optimizer.param_groups
    ]


def bucket_places(params, bucket_size):
    """How DDP divides parameters: the size of each bucket, and of each its bucket and start."""
    sizes, places, end = [], {}, 0
    for param in reversed(params):
        alone = getattr(param, "shared_embedding", False)
        start = -(-end // 64) * 64
        if alone and end:
            sizes.append(start)
            start = 0
        places[param] = (len(sizes), start)
        end = start + param.nelement()
        if alone or (bucket_size is not None and end >= bucket_size):
            sizes.append(end)
            end = 0
    return ([*sizes, end] if end else sizes), places


def stock_buffers(optimizer):
    """Dtypes and division of the buffers that there are where no parameter is kept in fp32."""
    dtypes = {p: (b.param_dtype, b.grad_dtype) for b in optimizer.buffers for p in b.params}
    buffers = []
    for chunk in optimizer.model_chunks:
        grouped = {}
        for param in chunk.parameters():
            if param in dtypes:
                stock = getattr(param, "stock_dtype", None)
                reduced = torch.float if optimizer.ddp_config.grad_reduce_in_fp32 else stock
                key = dtypes[param] if stock is None else (stock, reduced)
                grouped.setdefault(key, []).append(param)
        for key, params in grouped.items():
            buffers.append((key, *bucket_places(params, chunk.bucket_size)))
    return buffers


def stock_buckets(optimizer):
    """Key in a checkpoint, size, and the starts of the parameters, of each of their buckets."""
    group = f"optimizer.distributed.dp_group_idx_{optimizer.data_parallel_group_idx}"
    for index, (dtypes, sizes, places) in enumerate(stock_buffers(optimizer)):
        for bucket, size in enumerate(sizes):
            starts = {param: start for param, (at, start) in places.items() if at == bucket}
            yield f"{group}.gbuf_idx_{index}.dtype_{dtypes}.bucket_idx_{bucket}", size, starts


def stock_sizes(optimizer, divisor=1):
    """Sizes of these buckets in the form of `per_bucket_numel`."""
    return [
        {dtypes: [-(-size // divisor) * divisor for size in sizes]}
        for dtypes, sizes, _ in stock_buffers(optimizer)
    ]


def keeps_fp32(optimizer):
    return any(hasattr(param, "stock_dtype") for b in optimizer.buffers for param in b.params)


def bucket_part(optimizer, key, tensor, size, start):
    """A part of a bucket, which is one tensor of the checkpoint."""
    return ShardedTensor(
        key,
        tensor,
        tensor.dtype,
        tensor.shape,
        (size,),
        (start,),
        axis_fragmentations=None,
        replica_id=(optimizer.distributed_optimizer_instance_id, 0, 0),
    )


def sharded_as_in_stock(optimizer, state):
    """The states under the keys, and in the places, that they have in stock.

    A rank has other parts of a bucket than it has there, which the checkpoint does not show.
    """
    rank, ranks = optimizer.data_parallel_group.rank(), optimizer.data_parallel_group.size()
    divisor = 2**16 if optimizer.ddp_config.pad_buckets_for_high_nccl_busbw else 128
    padded = stock_sizes(optimizer, math.lcm(ranks, divisor))
    for name, sizes in (
        ("per_bucket_numel", padded),
        ("per_bucket_numel_unpadded", stock_sizes(optimizer)),
    ):
        state[name] = ShardedObject(
            f"optimizer.distributed.dp_group_idx_{optimizer.data_parallel_group_idx}.{name}",
            sizes,
            (1,),
            (0,),
            replica_id=(optimizer.distributed_optimizer_instance_id, 0, rank),
        )
    places = {
        param: (key, size, start)
        for key, size, starts in stock_buckets(optimizer)
        for param, start in starts.items()
    }
    for index, ranges in enumerate(optimizer.gbuf_ranges):
        for dtypes, buckets in ranges.items():
            for bucket, states in zip(buckets, state[index][dtypes], strict=True):
                owned = bucket["param_map"].items()
                for (param, part), tensors in zip(owned, states, strict=True):
                    key, size, start = places[param]
                    del tensors["gbuf_local_start"], tensors["gbuf_local_end"]
                    kinds = {name: t.detach() for name, t in tensors.items() if name != "step"}
                    if hasattr(param, "stock_dtype"):  # not the model's, which is loaded later
                        kinds["param"] = kinds["param"].clone()
                    for name, tensor in kinds.items():
                        at = start + part["param"].start
                        tensors[name] = bucket_part(optimizer, f"{key}.{name}", tensor, size, at)
                    if "step" in tensors:  # it is saved with the groups
                        tensors["step"] = LocalNonpersistentObject(tensors["step"])
                    tensors["padding"] = LocalNonpersistentObject(False)
                if not states:  # what is empty is not there after a load
                    states.append({"padding": LocalNonpersistentObject(True)})
    if rank == 0:  # it has the first parameter, at least
        state["gaps"] = bucket_gaps(optimizer, kinds)
    return state


def bucket_gaps(optimizer, kinds):
    """Zeros between the parameters: a checkpoint must have the whole of each tensor."""
    return [
        {
            name: bucket_part(optimizer, f"{key}.{name}", like.new_zeros(end - start), size, start)
            for name, like in kinds.items()
        }
        for key, size, starts in stock_buckets(optimizer)
        for start, end in zip(
            [0, *(start + param.nelement() for param, start in starts.items())],
            [*starts.values(), size],
            strict=True,
        )
        if end > start
    ]


def share_kept(optimizer):
    """Give every rank the whole of what the others have loaded of parameters kept in fp32.

    A checkpoint of stock has the rounded parameters, and their fp32 copies in the optimizer.
    """
    for param in (param for buffer in optimizer.buffers for param in buffer.params):
        if hasattr(param, "stock_dtype"):
            whole = torch.zeros_like(param)
            if param in optimizer.model_param_group_index_map:
                owned = optimizer._get_model_param_range_map(param)["param"]
                loaded = optimizer._get_main_param_and_optimizer_states(param)["param"]
                whole.view(-1)[owned.start : owned.end].copy_(loaded.detach())
            torch.distributed.all_reduce(whole, group=optimizer.data_parallel_group)
            param.data.copy_(whole)


def of_one_dtype(params_list):
    """What each rank has, apart by dtype: one gathering has one dtype."""
    dtypes = dict.fromkeys(param.dtype for params in params_list for param in params)
    return [[[p for p in params if p.dtype == dtype] for params in params_list] for dtype in dtypes]


def send_kept(optimizer):
    """Give every rank the parameters kept in fp32, which their owners have loaded."""
    group = optimizer.pg_collection.dp_cp
    for owner, params in enumerate(optimizer.dp_cp_params_list or ()):
        for param in params:
            if hasattr(param, "stock_dtype"):
                source = torch.distributed.get_global_rank(group, owner)
                torch.distributed.broadcast(param.data, source, group)


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
    """Where upstream mends the order, it saves copies alone."""
    return Edit(SAVE, pins, replacing(is_main, f"{is_main} or hasattr(param, 'stock_dtype')"))


EDITS = (
    Edit(
        target=ORDER,
        pins=dict.fromkeys((*RELEASES, *GIT), "14deb176c8a61d65"),
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
        pins=dict.fromkeys(RELEASES[:2], "73019c14cd7cf363")
        | dict.fromkeys((*RELEASES[2:], GIT[0]), "c327f04d11887e39")
        | {GIT[1]: "1aa5a9bb9c556b81"},
        # The shard of a parameter that is fp32 already is a view of it, and not detached.
        edit=replacing(
            "dst_tensors[key].copy_(tensors[key])",
            "dst_tensors[key].detach().copy_(tensors[key])",
        ),
    ),
    Edit(
        target=SAVE_BUCKETS,
        pins=dict.fromkeys((*RELEASES, *GIT), "8bb44d203bd9df1f")
        | {RELEASES[0]: "e940ebdc3b9a331c"},
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
        pins=dict.fromkeys((*RELEASES, *GIT), "eb6e0b57379da733"),
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
        pins=dict.fromkeys((*RELEASES, *GIT), "584e2bd658b68a11"),
        edit=appending("share_kept(self)"),
        helpers=(share_kept,),
    ),
    Edit(
        target=STATE,
        pins=dict.fromkeys((*RELEASES, *GIT), "d15bf436b79bcdf3"),
        edit=replacing("self.fp32_from_float16_groups", "main_copies(self, apart=True)"),
        helpers=(main_copies,),
    ),
    Edit(
        target=RESTORE,
        pins=dict.fromkeys((*RELEASES, *GIT), "c280580929b5a79c") | {GIT[1]: "da7a979e35e58b6a"},
        edit=replacing("self.fp32_from_float16_groups", "main_copies(self)"),
    ),
    saving_edit(dict.fromkeys(RELEASES[:-1], "c4eee9f7b8388000"), groups=1),
    saving_edit({RELEASES[-1]: "58f25c8e62c51a52"}, groups=2),
    saving_as_main("id(param) in main_param_id_to_model_param", {GIT[0]: "a9e01e1cb16100dc"}),
    saving_as_main("id(param) not in fp32_param_ids", {GIT[1]: "07e90954a959e1c2"}),
    Edit(
        target=GATHER,
        pins={"0.16.1": "1f2f9dd40270e46e"}
        | dict.fromkeys(("0.17.1", "0.18.2"), "cfdb21fc50d6eb34")
        | dict.fromkeys((RELEASES[-1], GIT[0]), "bf54171c493c635d")
        | {GIT[1]: "b8c1cb8ccfc8580f"},
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
        pins=dict.fromkeys((*RELEASES[1:], GIT[0]), "f377c4610849530d")
        | {GIT[1]: "f12cf4e6b3b4536a"},
        edit=appending("send_kept(self)"),
        helpers=(send_kept,),
    ),
    Edit(
        target=OFFLOAD,
        pins=dict.fromkeys(RELEASES, "d716bff95c060f14"),
        # A parameter that is fp32 already has no fp32 copy, but it may have one on the host.
        edit=replacing("self.param_to_fp32_param[param]", "self.param_to_inner_param[param]"),
    ),
    Edit(OFFLOAD, dict.fromkeys(GIT, "ae3de6a04d4492dd"), left_alone),
)
