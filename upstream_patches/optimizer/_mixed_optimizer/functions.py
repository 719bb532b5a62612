# ruff: noqa: F821
"""Functions that become part of Megatron's optimizer files.

Those files import the other names that these functions use.
"""

from __future__ import annotations


def kept_apart(buffers):
    """Divide buffers into the others and those of parameters kept in fp32."""
    kept = [b for b in buffers if any(hasattr(param, "stock_dtype") for param in b.params)]
    others = [buffer for buffer in buffers if buffer not in kept]
    return [part for part in (others, kept) if part]


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


def loaded_copy(param, weight, copy):
    """Return the fp32 copy of a parameter, or its weight where that was not rounded from the copy.

    If stock has several buckets, copies in its fully reshardable checkpoints are shifted.
    """
    if not hasattr(param, "stock_dtype"):
        return copy
    weight, copy = weight.detach(), copy.to(weight)
    rounds_to_it = copy.to(param.stock_dtype) == weight.to(param.stock_dtype)
    return torch.where(rounds_to_it, copy, weight)


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
