"""Keep A_log, D and dt_bias of Mamba mixers in fp32.

What: `Float16Module`, and every later `.bfloat16()`, `.half()` or `.to(dtype)`, leaves these three
    parameters of each `MambaMixer` in fp32; the optimizers save and load them in their own place.
Why: the mixer creates A_log and D in fp32 and computes with all three in fp32, but `Float16Module`
    rounds them (dt_bias is created in bf16): at the initial values the decay A is off by up to
    0.8 %, and dt, once trained, by up to 1.6 % (computed on CPU). With fp32 parameters among bf16
    ones the optimizers up to 0.19 cannot save ("Optimizer shape (4,) does not match model shape
    (8,)") and the distributed one cannot load its default format (both seen on CPU, on 0.16.1 and
    0.19.2), so the page mends them too.
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/5929 (the marker, on main) and
    https://github.com/NVIDIA/Megatron-LM/pull/5835 (the order, on dev); none marks the mixer.
Remove: when MambaMixer marks the three with `mark_keep_in_fp32` (main has it, for other modules)
    and DistributedOptimizer.__init__ mends the order of mixed groups, as on dev.
Numerics: changes results: the forward uses unrounded A_log, D and dt_bias.
"""

from typing import Any

from cppmega.edits import in_order, inserting, replacing
from cppmega.page import Edit, Patch, Source, left_alone

KEPT = ("A_log", "D", "dt_bias")
WRAPPER = "megatron/core/transformer/module.py:Float16Module.__init__"
MIXER = "megatron/core/ssm/mamba_mixer.py:MambaMixer.__init__"
OPTIMIZER = "megatron/core/optimizer"
ORDER = f"{OPTIMIZER}/distrib_optimizer.py:DistributedOptimizer._build_optimizer_group_ranges"
LOAD = f"{OPTIMIZER}/distrib_optimizer.py:DistributedOptimizer._set_main_param_and_optimizer_states"
SAVE = f"{OPTIMIZER}/optimizer.py:Float16OptimizerWithFloat16Params.sharded_state_dict"
OFFLOAD = (
    f"{OPTIMIZER}/cpu_offloading/hybrid_optimizer.py:"
    "HybridDeviceOptimizer._update_fp32_params_by_new_state"
)
RELEASES = ("0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2")
GIT = ("main-d98e8a64", "dev-d48bd6be")


def keep_mixers(init):  # type: ignore[no-untyped-def]
    import functools
    import sys
    import types

    @functools.wraps(init)
    def __init__(self, config, module):  # type: ignore[no-untyped-def]  # noqa: N807
        mamba = sys.modules.get("megatron.core.ssm.mamba_mixer")  # not imported: no mixers
        for mixer in module.modules() if mamba is not None else ():
            if isinstance(mixer, mamba.MambaMixer):
                # On the mixer, where every conversion of a model around it arrives.
                mixer._apply = types.MethodType(_apply, mixer)
                for name in KEPT:
                    parameter = getattr(mixer, name)
                    parameter.data = parameter.data.float()
        init(self, config, module)

    return __init__


def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
    """`torch.nn.Module._apply` that moves the kept parameters, and does not round them."""
    import torch

    parameters = [getattr(self, name) for name in KEPT]
    kept = [t for parameter in parameters for t in (parameter, parameter.grad) if t is not None]

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        new = fn(tensor)
        if new.dtype in (torch.float16, torch.bfloat16) and any(tensor is t for t in kept):
            return tensor.to(new.device)
        return new

    return type(self)._apply(self, convert, recurse)


def inner_params(optimizer):  # type: ignore[no-untyped-def]
    """Model parameters in the order of the inner optimizer, and which of them have a main copy."""
    model_param = {
        id(main): param
        for params, mains in zip(
            optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True
        )
        for param, main in zip(params, mains, strict=True)
    }
    inner = [param for group in optimizer.optimizer.param_groups for param in group["params"]]
    copied = {index for index, param in enumerate(inner) if id(param) in model_param}
    return [model_param.get(id(param), param) for param in inner], copied


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


def rounds_mamba(args: Any) -> bool:
    if not (getattr(args, "bf16", False) or getattr(args, "fp16", False)):
        return False
    for name in ("hybrid_layer_pattern", "hybrid_override_pattern"):  # the second until 0.16
        if getattr(args, name, None):
            return "M" in getattr(args, name)
    return bool(getattr(args, "is_hybrid_model", False))  # 0.16 without a pattern: all Mamba


PATCH = Patch(
    edits=(
        Edit(
            target=WRAPPER,
            pins={"0.15.3": "fa45c696e9bef19f"}
            | dict.fromkeys(RELEASES[1:], "d246b07b2b33a70c")
            | dict.fromkeys(GIT, "38bc9073cf010b2e"),
            edit=keep_mixers,
            kind="method-wrap",
        ),
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
        saving_edit(dict.fromkeys(RELEASES[:-1], "c4eee9f7b8388000"), groups=1),
        saving_edit({RELEASES[-1]: "58f25c8e62c51a52"}, groups=2),
        Edit(SAVE, {GIT[0]: "a9e01e1cb16100dc", GIT[1]: "07e90954a959e1c2"}, left_alone),
        Edit(
            target=OFFLOAD,
            pins=dict.fromkeys(RELEASES, "d716bff95c060f14"),
            # A parameter that is fp32 already has no fp32 copy, but it may have one on the host.
            edit=replacing("self.param_to_fp32_param[param]", "self.param_to_inner_param[param]"),
        ),
        Edit(OFFLOAD, dict.fromkeys(GIT, "ae3de6a04d4492dd"), left_alone),
    ),
    reached="startup",
    feature=(WRAPPER, MIXER),
    when=rounds_mamba,
)


def fixed_upstream(source: Source) -> bool:
    mixer = source.text(MIXER)
    marked = all(
        f"self.{name} = mark_keep_in_fp32(" in mixer or f"mark_keep_in_fp32(self.{name})" in mixer
        for name in KEPT
    )
    # dev mends the order in __init__ already
    init = source.text(ORDER.rpartition(".")[0] + ".__init__")
    return marked and "model_param_group_index_map[" in init


def verify() -> None:
    import torch
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
    from megatron.core.ssm.mamba_mixer import MambaMixer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    parameter = torch.nn.Parameter
    mixer = MambaMixer.__new__(MambaMixer)  # its __init__ needs mamba_ssm
    torch.nn.Module.__init__(mixer)
    mixer.in_proj = torch.nn.Linear(4, 4)
    drawn = {name: torch.full((4,), 1 / 3) for name in KEPT}
    for name in KEPT:
        setattr(mixer, name, parameter(drawn[name].clone()))
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, bf16=True)
    wrapped = Float16Module(config, torch.nn.Sequential(mixer))
    for _ in range(2):  # after Float16Module, and after the same conversion once more
        assert mixer.in_proj.weight.dtype == torch.bfloat16
        for name in KEPT:
            assert getattr(mixer, name).dtype == torch.float32, f"{name} is rounded"
            assert torch.equal(getattr(mixer, name), drawn[name])
        wrapped.bfloat16()

    norm, a_log = parameter(torch.ones(8, dtype=torch.bfloat16)), parameter(torch.ones(4))
    buffers = [{p.dtype: [{"param_map": {p: {}}}]} for p in (norm, a_log)]
    build = DistributedOptimizer._build_optimizer_group_ranges
    order, _ = build([{"params": [norm, a_log]}], buffers)
    assert order == {a_log: (0, 0), norm: (0, 1)}, "states would be taken from the wrong parameter"

    optimizer = Float16OptimizerWithFloat16Params.__new__(Float16OptimizerWithFloat16Params)
    main = norm.detach().float()
    main.grad, a_log.grad = torch.ones(8), torch.ones(4)
    optimizer.optimizer = torch.optim.Adam([a_log, main])
    optimizer.optimizer.step()
    optimizer.grad_scaler = None
    optimizer.float16_groups, optimizer.fp32_from_float16_groups = [[norm]], [[main]]
    optimizer.fp32_from_fp32_groups = [[a_log]]
    model = {k: ShardedTensor.from_rank_offsets(k, p) for k, p in (("A", a_log), ("n", norm))}
    state = optimizer.sharded_state_dict(model)
    keys = [state["optimizer"]["state"][index]["exp_avg"].key for index in (0, 1)]
    assert keys == ["optimizer.state.exp_avg.A", "optimizer.state.exp_avg.n"], keys
    assert [t.key for t in state["fp32_from_fp16_params"][0]] == ["optimizer.state.fp32_param.n"]
