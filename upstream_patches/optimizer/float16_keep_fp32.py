"""Keep A_log, D and dt_bias of Mamba mixers and gated delta nets in fp32.

What: `Float16Module`, and every later `.bfloat16()`, `.half()` or `.to(dtype)`, keeps these
    parameters of each `MambaMixer`, and A_log and dt_bias of each `GatedDeltaNet`, in fp32. The
    optimizers save them where stock does, so that checkpoints can be resumed in both directions,
    with and without the page, in every `torch_dist` format, and the next step is that of an
    uninterrupted run. The layer-wise optimizer (Muon) gathers each dtype separately, and DDP
    reduces and gathers the fp32 buffer of a virtual stage separately.
Why: The mixers compute with these parameters in fp32, but `Float16Module` rounds them (dt_bias, and
    both parameters of a delta net, are created in bf16): at initialization the decay A is off by up
    to 0.8 %, and dt after training by up to 1.6 % (computed on CPU). With both fp32 and bf16
    parameters, the optimizers up to 0.19 cannot save ("Optimizer shape (4,) does not match model
    shape (8,)"), the distributed optimizer cannot load its default format, nor save it if a rank
    has no part of the fp32 buffer, the layer-wise optimizer gathers two dtypes as one, and so does
    DDP in all virtual stages but the first: on gloo, their weights are garbage (all seen on CPU).
    The page fixes these as well. The fully reshardable checkpoints of stock have shifted fp32
    copies if there are several buckets; the page then keeps the weights.
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/5929 (the marker, on main) and
    https://github.com/NVIDIA/Megatron-LM/pull/5835 (the order, on dev); neither marks the mixers.
Remove: when both mixers mark their parameters with `mark_keep_in_fp32` (main has it, for other
    modules) and DistributedOptimizer.__init__ fixes the order of mixed groups, as on dev.
    Checkpoints must then be `--dist-ckpt-optim-fully-reshardable`, because upstream divides its
    buckets by dtype.
Numerics: changes results: the forward pass uses unrounded A_log, D and dt_bias. Under
    `--use-torch-fsdp2`, which shards parameters of one dtype together, they are rounded as in
    stock, with a warning. The preflight rejects `--use-precision-aware-optimizer` (FusedAdam saves
    a copy of an fp32 parameter that it never steps), and checkpoints of earlier versions of the
    page, which saved these parameters separately. With the legacy `--ckpt-format torch`, the state
    of the distributed optimizer can be loaded with the page only if it was saved with it.
"""

from collections.abc import Iterator
from typing import Any

from cppmega.catalogue.megatron_args import layer_pattern
from cppmega.edits import inserting
from cppmega.page import Edit, Patch, Source
from cppmega.rules.rule import Part, Rule, unsupported

from ._mixed_optimizer.edits import EDITS, ORDER

MIXERS = {
    "megatron.core.ssm.mamba_mixer": "MambaMixer",
    "megatron.core.ssm.gated_delta_net": "GatedDeltaNet",
}
KEPT = ("A_log", "D", "dt_bias")
"""A gated delta net has the first and the last."""
WRAPPER = "megatron/core/transformer/module.py:Float16Module.__init__"
MIXER = "megatron/core/ssm/mamba_mixer.py:MambaMixer.__init__"
DELTA_NETS = (
    "megatron/core/ssm/gated_delta_net/common.py:_GDNBase.__init__",
    "megatron/core/ssm/gated_delta_net.py:GatedDeltaNet.__init__",
)
FSDP = (
    "megatron/core/distributed/torch_fully_sharded_data_parallel.py:"
    "TorchFullyShardedDataParallel.__init__"
)


def keep_mixers(init):  # type: ignore[no-untyped-def]
    import functools
    import sys
    import types

    import torch

    @functools.wraps(init)
    def __init__(self, config, module):  # type: ignore[no-untyped-def]  # noqa: N807
        # If the module was not imported, the model has no such mixers.
        imported = [(sys.modules.get(module), name) for module, name in MIXERS.items()]
        mixers = tuple(getattr(there, name) for there, name in imported if there is not None)
        for mixer in module.modules():
            if isinstance(mixer, mixers):
                # On the mixer, where every conversion of a model around it arrives.
                mixer._apply = types.MethodType(_apply, mixer)
                for parameter in kept_parameters(mixer):
                    parameter.data = parameter.data.float()
                    parameter.stock_dtype = torch.float16 if config.fp16 else torch.bfloat16
        init(self, config, module)

    return __init__


def kept_parameters(mixer):  # type: ignore[no-untyped-def]
    """Return the parameters of a mixer that stay in fp32."""
    found = (mixer._parameters.get(name) for name in KEPT)
    return [parameter for parameter in found if parameter is not None]


def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
    """Move the parameters like `torch.nn.Module._apply`, without rounding the kept ones."""
    import torch

    parameters = kept_parameters(self)
    kept = [t for parameter in parameters for t in (parameter, parameter.grad) if t is not None]

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        new = fn(tensor)
        if new.dtype in (torch.float16, torch.bfloat16) and any(tensor is t for t in kept):
            return tensor.to(new.device)
        return new

    return type(self)._apply(self, convert, recurse)


def round_kept(module):  # type: ignore[no-untyped-def]
    """Round what is kept, as stock does: FSDP2 shards parameters of one dtype together."""
    for mixer in module.modules():
        for name, param in mixer.named_parameters(recurse=False):
            if hasattr(param, "stock_dtype"):
                param.data = param.data.to(param.stock_dtype)
                del param.stock_dtype
                mixer.__dict__.pop("_apply", None)
                warnings.warn(  # noqa: F821
                    f"float16_keep_fp32: FSDP2 takes one dtype, so {name} is rounded",
                    stacklevel=2,
                )


def has_mixers(args: Any) -> bool:
    """Whether the run has parameters that stock would round."""
    if not (getattr(args, "bf16", False) or getattr(args, "fp16", False)):
        return False
    if getattr(args, "experimental_attention_variant", None) == "gated_delta_net":
        return True
    if pattern := layer_pattern(args):
        return not set("MGR").isdisjoint(pattern)
    return bool(getattr(args, "is_hybrid_model", False))  # 0.16 without a pattern: all Mamba


def _saved_apart(run: Any) -> Iterator[dict[str, str]]:
    """Tensors of checkpoints that earlier versions of this page have saved."""
    if not has_mixers(run) or run.no_load_optim:
        return
    moments, saved = "optimizer.state.exp_avg.", run.saved
    weights = [n.removeprefix(moments) for n in saved if n.startswith(moments) and n.endswith(KEPT)]
    copies = ("fp32_param", "param")
    found = {
        "resume once with the cppmega that saved it and --dist-ckpt-optim-fully-reshardable, save, "
        "and resume from that": [n for n in saved if ".dtype_(torch.float32, " in n],
        "train on with the cppmega that saved it, or --no-load-optim": [
            moments + weight
            for weight in weights
            if not {f"optimizer.state.{key}.{weight}" for key in copies} & set(saved)
        ],
    }
    yield from ({"way_out": way, "first": names[0]} for way, names in found.items() if names)


KEPT_FP32 = Part(
    "parameters that float16_keep_fp32 keeps in fp32",
    has_mixers,
    "cppmega revert float16_keep_fp32",
)

PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=WRAPPER,
            pins={
                "0.15.3": "fa45c696e9bef19f",
                "0.16.1": "d246b07b2b33a70c",
                "0.17.1": "d246b07b2b33a70c",
                "0.18.2": "d246b07b2b33a70c",
                "0.19.2": "d246b07b2b33a70c",
                "main-d98e8a64": "38bc9073cf010b2e",
                "dev-d48bd6be": "38bc9073cf010b2e",
            },
            edit=keep_mixers,
            kind="method-wrap",
        ),
        Edit(
            target=FSDP,
            pins={
                "0.15.3": "e72e19e0f619a613",
                "0.16.1": "e72e19e0f619a613",
                "0.17.1": "e72e19e0f619a613",
                "0.18.2": "e72e19e0f619a613",
                "0.19.2": "7613289739392c7a",
                "main-d98e8a64": "7613289739392c7a",
                "dev-d48bd6be": "e72e19e0f619a613",
            },
            edit=inserting(
                "round_kept(module)", after="super().__init__(config=config, module=module)"
            ),
            imports=("import warnings",),
            helpers=(round_kept,),
            mark="",
        ),
        *EDITS,
    ),
    reached="startup",
    when=has_mixers,
    rules=(
        *unsupported(
            KEPT_FP32,
            {
                "--use-precision-aware-optimizer": (
                    "FusedAdam updates such a parameter but not its own fp32 copy of it, and "
                    "checkpoints contain that copy."
                )
            },
        ),
        Rule(
            concerns=KEPT_FP32.name,
            name="checkpoint-of-another-layout",
            when=_saved_apart,
            what="The checkpoint holds {first}: an earlier float16_keep_fp32 saved the parameters "
            "that it keeps in fp32 separately from the others, unlike stock.",
            why="Every rank would fail when it loads it: a key is missing, or a shape differs.",
            cure="{way_out}",
        ),
    ),
)


def fixed_upstream(source: Source) -> bool:
    mixer = source.text(MIXER)
    nets = [net for net in map(source.text, DELTA_NETS) if net]
    marked = all(_marks(mixer, name) for name in KEPT) and all(
        _marks(net, name) for net in nets for name in ("A_log", "dt_bias")
    )
    # dev already fixes the order in __init__
    init = source.text(ORDER.rpartition(".")[0] + ".__init__")
    return marked and "model_param_group_index_map[" in init


def _marks(text: str, name: str) -> bool:
    return f"self.{name} = mark_keep_in_fp32(" in text or f"mark_keep_in_fp32(self.{name})" in text


def verify() -> None:
    from types import SimpleNamespace
    from unittest import mock

    import torch
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.distributed import param_and_grad_buffer as ddp
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
    from megatron.core.ssm.mamba_mixer import MambaMixer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    parameter = torch.nn.Parameter
    mixers = {MambaMixer: KEPT}
    try:
        from megatron.core.ssm.gated_delta_net import GatedDeltaNet

        mixers[GatedDeltaNet] = ("A_log", "dt_bias")
    except ImportError:  # 0.15 has no delta nets
        pass
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, bf16=True)
    for cls, kept in mixers.items():
        mixer = cls.__new__(cls)  # its __init__ needs mamba_ssm, or fla
        torch.nn.Module.__init__(mixer)
        mixer.in_proj = torch.nn.Linear(4, 4)
        drawn = {name: torch.full((4,), 1 / 3) for name in kept}
        for name in kept:
            setattr(mixer, name, parameter(drawn[name].clone()))
        wrapped = Float16Module(config, torch.nn.Sequential(mixer))
        for _ in range(2):  # after Float16Module, and after the same conversion once more
            assert mixer.in_proj.weight.dtype == torch.bfloat16
            for name in kept:
                assert getattr(mixer, name).dtype == torch.float32, f"{name} is rounded"
                assert torch.equal(getattr(mixer, name), drawn[name])
            wrapped.bfloat16()

    norm, a_log = parameter(torch.ones(8, dtype=torch.bfloat16)), parameter(torch.ones(4))
    buffers = [{p.dtype: [{"param_map": {p: {}}}]} for p in (norm, a_log)]
    build = DistributedOptimizer._build_optimizer_group_ranges
    order, _ = build([{"params": [norm, a_log]}], buffers)
    assert order == {a_log: (0, 0), norm: (0, 1)}, "states would be loaded from the wrong parameter"
    a_log.stock_dtype = torch.bfloat16

    both = [
        SimpleNamespace(
            param_dtype=p.dtype,
            params=[p],
            buckets=[SimpleNamespace(params_list=[p])],
            ddp_config=SimpleNamespace(use_distributed_optimizer=False),
            data_parallel_group=None,
            data_parallel_world_size=1,
        )
        for p in (norm, a_log)
    ]
    with mock.patch.object(ddp, "_ParamAndGradBucketGroup", lambda buckets, *_: buckets):
        groups = ddp.partition_buckets(both, force_single_bucket_group=True)
    assert list(map(len, groups)) == [1, 1], "two dtypes would be reduced as one"

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
    keys = [tensor.key for tensor in state["fp32_from_fp16_params"][0]]
    assert keys == ["optimizer.state.fp32_param.A", "optimizer.state.fp32_param.n"], keys

    # One bucket: A (4 elements), followed by n (8 elements, aligned to 64).
    half = (torch.bfloat16, torch.bfloat16)
    owned = [{"param_map": {p: {"param": SimpleNamespace(start=0)}}} for p in (norm, a_log)]
    start, end = {"gbuf_local_start": 0}, {"gbuf_local_end": 0}
    distributed = SimpleNamespace(
        data_parallel_group=SimpleNamespace(rank=lambda: 0, size=lambda: 1),
        data_parallel_group_idx=0,
        distributed_optimizer_instance_id=0,
        ddp_config=SimpleNamespace(
            grad_reduce_in_fp32=False, pad_buckets_for_high_nccl_busbw=False
        ),
        model_chunks=[SimpleNamespace(parameters=lambda: [norm, a_log], bucket_size=None)],
        buffers=[
            SimpleNamespace(param_dtype=p.dtype, grad_dtype=p.dtype, params=[p])
            for p in (norm, a_log)
        ],
        gbuf_ranges=[{half: [owned[0]]}, {(torch.float, torch.float): [owned[1]]}],
        get_parameter_state_dp_reshardable=lambda: {
            0: {half: [[{"param": main, **start, **end}]]},
            1: {(torch.float, torch.float): [[{"param": a_log, **start, **end}]]},
        },
    )
    state = DistributedOptimizer.sharded_param_state_dp_reshardable(distributed, {})
    saved = [one[0][0]["param"] for i in (0, 1) for one in state[i].values()]
    bucket = f"optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_{half}.bucket_idx_0.param"
    assert [t.key for t in saved] == [bucket] * 2, "saved under a key that stock does not read"
    places = [(t.global_offset, t.global_shape) for t in saved]
    assert places == [((64,), (72,)), ((0,), (72,))], places
