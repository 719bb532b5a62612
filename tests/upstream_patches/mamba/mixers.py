"""A small model with a Mamba mixer and a gated delta net, on the CPU, of any version.

Imported in the process that runs a tree, never by pytest itself; the page is armed already.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import tempfile
from collections.abc import Iterator
from typing import Any, Self
from unittest import mock

import torch
from megatron.core import dist_checkpointing
from megatron.core import optimizer as optimizers
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm import mamba_context_parallel, mamba_mixer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module, MegatronModule
from torch.nn import functional

from cppmega.guard import installed
from cppmega.proof.cpu_shims import keep_saves_here
from tests.upstream_patches.one_process import Stock
from tests.upstream_patches.optimizer.distributed_optimizer import Adam

keep_saves_here()
KEPT = (
    *("mixer.A_log", "mixer.D", "mixer.dt_bias"),
    *("delta.A_log", "delta.dt_bias"),
)
FORMS = {  # what einops is asked for
    "l b d -> b l d": lambda x, **sizes: x.transpose(0, 1),
    "b l d -> l b d": lambda x, **sizes: x.transpose(0, 1),
    "d 1 w -> d w": lambda x, **sizes: x.squeeze(1),
    "b (h p) -> b h p": lambda x, p, **sizes: x.unflatten(-1, (-1, p)),
    "b h p -> b (h p)": lambda x, **sizes: x.flatten(-2),
    "b h -> b h 1 1": lambda x, **sizes: x[..., None, None],
    "h -> h 1": lambda x, **sizes: x[..., None],
}
GIVEN: dict[str, Any] = {}
"""What the kernel of the last forward was called with."""


def kernel(
    zxBCdt: Any, weight: Any, bias: Any, dt_bias: Any, A: Any, D: Any,
    headdim: int, ngroups: int, **ignored: Any,
) -> Any:  # fmt: skip
    """Compute mamba_split_conv1d_scan_combined step by step."""
    GIVEN.update(dt_bias=dt_bias, A=A, D=D)
    inner = A.numel() * headdim
    state_size = (zxBCdt.size(-1) - 2 * inner - A.numel()) // 2
    z, xBC, dt = zxBCdt.float().split([inner, inner + 2 * state_size, A.numel()], dim=-1)
    past = functional.pad(xBC.transpose(1, 2), (weight.size(-1) - 1, 0))
    xBC = functional.silu(
        functional.conv1d(past, weight.float()[:, None], bias.float(), groups=weight.size(0))
    )
    x, B, C = xBC.transpose(1, 2).split([inner, state_size, state_size], dim=-1)
    x, dt = x.unflatten(-1, (-1, headdim)), functional.softplus(dt + dt_bias)
    state: Any = 0
    out = []
    for t in range(x.size(1)):
        step = dt[:, t, :, None, None]
        state = state * (step * A[:, None, None]).exp()
        state = state + step * x[:, t, ..., None] * B[:, t, None, None]
        out.append(((state * C[:, t, None, None]).sum(-1) + D[:, None] * x[:, t]).flatten(1))
    return (torch.stack(out, 1) * functional.silu(z)).to(zxBCdt.dtype)


def delta_net() -> Any:
    """Return the module of gated delta nets, with a stand-in for the kernel that they need here."""
    package = importlib.import_module("megatron.core.ssm.gated_delta_net")
    common = getattr(package, "common", package)  # a package from 0.19 on
    common.HAVE_FLA, common.l2norm = (
        True,
        lambda x: functional.normalize(x.float(), dim=-1).to(x.dtype),
    )
    return package


for module in (mamba_mixer, mamba_context_parallel):
    module.HAVE_MAMBA_SSM = module.HAVE_EINOPS = True
    module.rearrange = lambda x, form, **sizes: FORMS[form](x, **sizes)
mamba_mixer.mamba_split_conv1d_scan_combined = kernel
mamba_mixer.causal_conv1d_update = mamba_mixer.selective_state_update = None  # need a GPU
CONFIG = TransformerConfig(
    num_layers=1,
    hidden_size=16,
    num_attention_heads=1,
    bf16=True,
    params_dtype=torch.bfloat16,
    activation_func=functional.silu,
    deterministic_mode=True,
    mamba_num_heads=4,
    mamba_head_dim=8,
    mamba_state_dim=4,
    mamba_num_groups=1,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=4,
    linear_value_head_dim=4,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)


class Linear(torch.nn.Linear):
    """A module with the signature of Megatron's."""

    def __init__(self, size_in: int, size_out: int, **ignored: Any) -> None:
        super().__init__(size_in, size_out, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Any) -> Any:
        return super().forward(x), None


class Norm(torch.nn.LayerNorm):
    """A module with the signature of Megatron's."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps, dtype=torch.bfloat16)


class Model(MegatronModule):  # type: ignore[misc]
    """Both mixers between an embedding and an output layer."""

    has_delta_net = True

    def __init__(self) -> None:
        super().__init__(CONFIG)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        self.embedding = torch.nn.Linear(8, 16)
        self.norm = torch.nn.LayerNorm(16)
        parts = mamba_mixer.MambaMixerSubmodules(Linear, Linear)
        self.mixer = mamba_mixer.MambaMixer(CONFIG, parts, 16, rmsnorm=False, pg_collection=groups)
        self.delta = None
        if self.has_delta_net:
            net = delta_net()
            linear = net.GatedDeltaNetSubmodules(Linear, Norm, Linear)
            self.delta = net.GatedDeltaNet(CONFIG, linear, layer_number=1, pg_collection=groups)
        self.output = torch.nn.Linear(16, 4)

    def forward(self, x: Any) -> Any:
        x = self.norm(self.embedding(x))
        x = x + self.mixer(x)[0]
        return self.output(x if self.delta is None else x + self.delta(x, None)[0])


def build(seed: int, stock: bool = False) -> tuple[Any, Model, dict[str, Any]]:
    """Return the wrapped model, the model, and the initial values of its kept parameters."""
    torch.manual_seed(seed)
    model = Model()
    init = installed.entries()[0].original if stock else Float16Module.__init__
    drawn = {name: value.detach().clone() for name, value in kept(model).items()}
    with mock.patch.object(Float16Module, "__init__", init):
        return Float16Module(CONFIG, model), model, drawn


def kept(model: Any) -> dict[str, Any]:
    """Return the parameters that the page keeps in fp32."""
    return {name: p for name, p in model.named_parameters() if name in KEPT}


def same(found: dict[str, Any], wanted: dict[str, Any], dtype: Any = torch.float32) -> None:
    """Whether both have the same values, in that dtype."""
    for name, value in found.items():
        assert value.dtype == dtype, (name, value.dtype)
        assert torch.equal(value, wanted[name].to(dtype)), name


@contextlib.contextmanager
def stock_optimizers(stock: Stock) -> Iterator[None]:
    """Let Megatron's factory create optimizers of the unpatched classes."""
    distributed = stock.module("megatron.core.optimizer.distrib_optimizer")
    plain = stock.module("megatron.core.optimizer.optimizer")
    distributed.Adam, distributed.HAVE_APEX_OR_TE = Adam, True
    names = ("DistributedOptimizer", "Float16OptimizerWithFloat16Params")
    classes = [getattr(m, name) for m, name in zip((distributed, plain), names, strict=True)]
    with mock.patch.multiple(optimizers, **dict(zip(names, classes, strict=True))):
        yield


def all_gather(tensors: list[Any], mine: Any, group: Any) -> None:
    """Gather like NCCL: ranks may send different sizes, and receive what they allocated."""
    sent: list[Any] = [None] * len(tensors)
    torch.distributed.all_gather_object(sent, mine, group=group)
    for place, tensor in zip(tensors, sent, strict=True):
        if (place.shape, place.dtype) != (tensor.shape, tensor.dtype):
            raise ValueError(f"room for {place.shape} of {place.dtype}, got {tensor}")
        place.copy_(tensor)


def layer_wise(model: Model, options: Any, stock: Stock | None) -> Any:
    """Assign complete parameters to ranks, as `--optimizer dist_muon` does."""
    there: Any = importlib.import_module("megatron.core.optimizer.layer_wise_optimizer")
    if stock is not None:
        there = stock.module(there.__name__)
        plain = stock.module("megatron.core.optimizer.optimizer")
        there.Float16OptimizerWithFloat16Params = plain.Float16OptimizerWithFloat16Params

    def init_state(optimizer: Any, config: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                for key in ("exp_avg", "exp_avg_sq"):
                    optimizer.state[p].setdefault(key, torch.zeros_like(p))

    group = {"params": list(model.parameters()), "wd_mult": 1.0, "lr_mult": 1.0}
    group["is_expert_parallel"] = False
    base = Adam([group], options.lr, (options.adam_beta1, options.adam_beta2))
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return there.LayerWiseDistributedOptimizer([base], options, groups, [init_state])


class Run:
    """A model under DDP and its optimizer.

    `kind` is the format in which the distributed optimizer is saved, "" for the optimizer that is
    not distributed, and "layer_wise" for the one that assigns complete parameters to ranks.
    `is_later_chunk`: DDP puts all buckets into one group, as in virtual stages but the first.
    """

    def __init__(
        self,
        seed: int,
        kind: str,
        buckets: int | None = None,
        stock: Stock | None = None,
        is_later_chunk: bool = False,
    ) -> None:
        self.kind = kind
        self.rank = torch.distributed.get_rank()
        wrapped, self.model, self.drawn = build(seed, stock is not None)
        config = DistributedDataParallelConfig(
            use_distributed_optimizer=self.is_sharded,
            overlap_grad_reduce=buckets is not None,
            bucket_size=buckets,
        )
        self.ddp = DistributedDataParallel(CONFIG, config, wrapped, is_later_chunk)
        options = optimizers.OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            clip_grad=0.0,  # the norm is summed in the order of the shards
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=self.is_sharded,
        )
        with contextlib.nullcontext() if stock is None else stock_optimizers(stock):
            if kind == "layer_wise":
                self.optimizer = layer_wise(self.model, options, stock)
            else:
                self.optimizer = optimizers.get_megatron_optimizer(options, [self.ddp])

    @property
    def is_sharded(self) -> bool:
        """Whether the optimizer is the distributed one."""
        return self.kind.endswith("reshardable")

    @property
    def inner(self) -> Any:
        """Return the only optimizer of the chain."""
        (inner,) = self.optimizer.chained_optimizers
        return inner

    def step(self, seed: int) -> Self:
        """Run a step on data drawn from `seed`, different on every rank."""
        torch.manual_seed(2 * seed + self.rank)
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.ddp(torch.randn(5, 2, 8)).square().mean().backward()
        self.ddp.finish_grad_sync()
        assert self.optimizer.step()[0]
        return self

    def state(self, is_loading: bool = False) -> dict[str, Any]:
        """Return the content of a checkpoint."""
        model = self.model.sharded_state_dict()
        metadata = {"distrib_optim_sharding_type": self.kind}
        optimizer = self.optimizer.sharded_state_dict(model, is_loading, metadata=metadata)
        return {"model": model, "optimizer": optimizer}

    def save(self) -> str:
        """Write a checkpoint, and return its folder."""
        where = [tempfile.mkdtemp()] if self.rank == 0 else [None]
        torch.distributed.broadcast_object_list(where)
        dist_checkpointing.save(self.state(), where[0])
        return str(where[0])

    def load(self, where: str) -> Self:
        """Load a checkpoint in the order of Megatron's trainer."""
        loaded = dist_checkpointing.load(self.state(is_loading=True), where)
        self.model.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        return self

    def values(self) -> dict[str, Any]:
        """Return a copy of the parameters."""
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def owned(self) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        """Yield name, slice and states of each parameter that this rank owns in part."""
        for name, p in self.model.named_parameters():
            main = getattr(p, "main_param", p)
            if not self.is_sharded and main in self.inner.optimizer.state:
                tensors = {"param": main, **self.inner.optimizer.state[main]}
                flat = {key: tensor.detach().view(-1) for key, tensor in tensors.items()}
                yield name, slice(0, p.numel()), flat
            elif self.is_sharded and p in self.inner.model_param_group_index_map:
                place = self.inner._get_model_param_range_map(p)["param"]
                found = self.inner._get_main_param_and_optimizer_states(p)
                tensors = {k: t.detach() for k, t in found.items()}
                yield name, slice(place.start, place.end), tensors

    def states(self) -> dict[str, dict[str, Any]]:
        """Return fp32 copy and moments of every parameter, from all ranks."""
        mine = [(name, place.start, copy.deepcopy(found)) for name, place, found in self.owned()]
        parts: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(parts, mine)
        whole: dict[str, dict[str, Any]] = {}
        for name, p in self.model.named_parameters():
            found = {start: tensors for part in parts for n, start, tensors in part if n == name}
            whole[name] = {
                key: torch.cat([found[start][key] for start in sorted(found)]).view(p.shape)
                for key in ("param", "exp_avg", "exp_avg_sq")
            }
        return whole

    def adopt(self, values: dict[str, Any], states: dict[str, Any], steps: int) -> Self:
        """Set the parameters and states by hand."""
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(states[name]["param"] if name in KEPT else values[name])
        for name, place, tensors in self.owned():
            for key, tensor in tensors.items():
                tensor.copy_(states[name][key].view(-1)[place])
        for group in self.inner.optimizer.param_groups:
            group["step"] = steps
        return self

    def misplaced(self) -> list[str]:
        """Return the parameters that are mapped to the fp32 copy of another one."""
        return [n for n, place, t in self.owned() if t["param"].numel() != place.stop - place.start]


def assert_same_run(one: Run, other: Run) -> None:
    """Assert that parameters, fp32 copies and moments are bitwise equal."""
    there, states = other.values(), other.states()
    for name, value in one.values().items():
        assert torch.equal(value, there[name]), name
    for name, tensors in one.states().items():
        for key, tensor in tensors.items():
            assert torch.equal(tensor, states[name][key]), (name, key)
