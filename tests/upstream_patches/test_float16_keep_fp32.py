"""fp32 parameters of Mamba mixers: conversions, forward, DDP, both optimizers, checkpoints."""

from types import SimpleNamespace

import pytest

from cppmega import catalogue
from tests.support import VERSIONS, patched, pristine, python

NAME = "float16_keep_fp32"

MODEL = """
import contextlib
import os
from unittest import mock

import torch
import torch.nn.functional as F
from cppmega import catalogue, cpu, runtime
from torch.overrides import TorchFunctionMode

page = catalogue.load()["float16_keep_fp32"]
runtime.arm(page, [edit for edit in page.patch.edits if VERSION in edit.pins])
cpu.init_distributed()

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm import mamba_context_parallel, mamba_mixer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module, MegatronModule

KEPT = ("A_log", "D", "dt_bias")
FORMS = {  # what einops is asked for
    "l b d -> b l d": lambda x, **sizes: x.transpose(0, 1),
    "b l d -> l b d": lambda x, **sizes: x.transpose(0, 1),
    "d 1 w -> d w": lambda x, **sizes: x.squeeze(1),
    "b (h p) -> b h p": lambda x, p, **sizes: x.unflatten(-1, (-1, p)),
    "b h p -> b (h p)": lambda x, **sizes: x.flatten(-2),
    "b h -> b h 1 1": lambda x, **sizes: x[..., None, None],
    "h -> h 1": lambda x, **sizes: x[..., None],
}
GIVEN = {}


def kernel(zxBCdt, weight, bias, dt_bias, A, D, headdim, ngroups, **ignored):
    # What mamba_split_conv1d_scan_combined computes, step by step.
    GIVEN.update(dt_bias=dt_bias, A=A, D=D)
    inner = A.numel() * headdim
    state_size = (zxBCdt.size(-1) - 2 * inner - A.numel()) // 2
    z, xBC, dt = zxBCdt.float().split([inner, inner + 2 * state_size, A.numel()], dim=-1)
    past = F.pad(xBC.transpose(1, 2), (weight.size(-1) - 1, 0))
    xBC = F.silu(F.conv1d(past, weight.float()[:, None], bias.float(), groups=weight.size(0)))
    x, B, C = xBC.transpose(1, 2).split([inner, state_size, state_size], dim=-1)
    x, dt = x.unflatten(-1, (-1, headdim)), F.softplus(dt + dt_bias)
    state, out = 0, []
    for t in range(x.size(1)):
        step = dt[:, t, :, None, None]
        state = state * (step * A[:, None, None]).exp()
        state = state + step * x[:, t, ..., None] * B[:, t, None, None]
        out.append(((state * C[:, t, None, None]).sum(-1) + D[:, None] * x[:, t]).flatten(1))
    return (torch.stack(out, 1) * F.silu(z)).to(zxBCdt.dtype)


for module in (mamba_mixer, mamba_context_parallel):
    module.HAVE_MAMBA_SSM = module.HAVE_EINOPS = True
    module.rearrange = lambda x, form, **sizes: FORMS[form](x, **sizes)
mamba_mixer.mamba_split_conv1d_scan_combined = kernel
mamba_mixer.causal_conv1d_update = mamba_mixer.selective_state_update = None  # need a GPU


class Linear(torch.nn.Linear):
    def __init__(self, size_in, size_out, **ignored):
        super().__init__(size_in, size_out, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        return super().forward(x), None


class Model(MegatronModule):
    def __init__(self, config):
        super().__init__(config)
        self.embedding = torch.nn.Linear(8, 16)
        self.norm = torch.nn.LayerNorm(16)
        self.mixer = mamba_mixer.MambaMixer(
            config, mamba_mixer.MambaMixerSubmodules(Linear, Linear), 16, rmsnorm=False,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
        self.output = torch.nn.Linear(16, 4)

    def forward(self, x):
        x = self.norm(self.embedding(x))
        return self.output(x + self.mixer(x)[0])


config = TransformerConfig(
    num_layers=1, hidden_size=16, num_attention_heads=1, bf16=True, params_dtype=torch.bfloat16,
    mamba_num_heads=4, mamba_head_dim=8, mamba_state_dim=4, mamba_num_groups=1,
)


def build(seed, stock=False):
    torch.manual_seed(seed)
    model = Model(config)
    init = runtime.installed()[0].original if stock else Float16Module.__init__
    drawn = {name: getattr(model.mixer, name).detach().clone() for name in KEPT}
    with mock.patch.object(Float16Module, "__init__", init):
        return Float16Module(config, model), model, drawn


def kept(model):
    return {name: getattr(model.mixer, name) for name in KEPT}


def same(found, wanted, dtype=torch.float32):
    for name in KEPT:
        assert found[name].dtype == dtype, (name, found[name].dtype)
        assert torch.equal(found[name], wanted[name].to(dtype)), name
"""

CONVERSIONS = """
wrapped, model, drawn = build(0)
others = {p.dtype for name, p in model.named_parameters() if not name.endswith(KEPT)}
assert others == {torch.bfloat16}, others
held = model.mixer.cp  # it keeps references of its own
same(kept(model), drawn)
same({"A_log": held.get_A_log(), "D": held.get_D(), "dt_bias": held.get_dt_bias()}, drawn)
for convert in (
    lambda: wrapped.bfloat16(),
    lambda: model.half(),
    lambda: model.mixer.to(torch.bfloat16),
    lambda: model.mixer.to("cpu", torch.bfloat16),
):
    convert()
    same(kept(model), drawn)
    assert model.mixer.in_proj.weight.dtype in (torch.bfloat16, torch.float16)
model.bfloat16()

# A gradient stays with its parameter.
model.mixer.A_log.grad = torch.full((4,), 1 / 3)
wrapped.bfloat16()
assert torch.equal(model.mixer.A_log.grad, torch.full((4,), 1 / 3))
model.zero_grad()
assert set(wrapped.state_dict()) == set(build(0, stock=True)[0].state_dict())

# Conversions that lose nothing still happen, and so do moves.
model.double()
assert model.mixer.A_log.dtype == torch.float64
model.float()
same(kept(model), drawn)
assert model.mixer.to("meta").D.is_meta and model.mixer.D.dtype == torch.float32
wrapped, model, drawn = build(0)

# Stock rounds A_log; what rounding does to the decay.
_, stock, _ = build(0, stock=True)
same(kept(stock), drawn, torch.bfloat16)
assert not torch.equal(stock.mixer.A_log.float(), drawn["A_log"])

# A module that is no mixer is none of our business.
alien = torch.nn.Module()
alien.A_log = torch.nn.Parameter(torch.rand(3))
Float16Module(config, alien)
assert alien.A_log.dtype == torch.bfloat16

# Forward and backward, with gradients in fp32, and one step of decoding.
x = torch.randn(6, 2, 8).bfloat16()
model(x).float().square().sum().backward()
assert torch.equal(GIVEN["A"], -drawn["A_log"].exp()) and torch.equal(GIVEN["D"], drawn["D"])
same({**kept(model), "dt_bias": GIVEN["dt_bias"]}, drawn)
for parameter in kept(model).values():
    assert parameter.grad.dtype == torch.float32 and parameter.grad.abs().min() > 0
token = torch.randn(1, 1, 16).bfloat16()
shapes = model.mixer.mamba_state_shapes_per_request()
states = [torch.zeros(1, *shape, dtype=torch.bfloat16) for shape in shapes]
with torch.no_grad():
    decoded = model.mixer._decode(token, *states)[0]
    torch.testing.assert_close(decoded, model.mixer(token)[0], rtol=0.05, atol=0.02)
runtime.check()
"""

CHECKPOINTS = """
import importlib.util
import tempfile

import megatron.core.optimizer as optimizers
from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import distrib_optimizer, optimizer
from megatron.core.optimizer.cpu_offloading import hybrid_optimizer

rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()


class OnCpu(TorchFunctionMode):
    # The optimizers ask for CUDA by name, and for the names of CUDA's tensor types.
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        result = function(*args, **kwargs)
        named = function is torch.Tensor.type and len(args) == 1
        return f"torch.cuda.{result[6:]}" if named else result


class Adam(torch.optim.Optimizer):
    # Like FusedAdam it counts steps per group: the distributed optimizer cannot load torch's.
    def __init__(self, params, lr, betas, **ignored):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                for key in ("exp_avg", "exp_avg_sq"):
                    self.state[p].setdefault(key, torch.zeros_like(p))
                mean, square = self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"]
                mean.lerp_(p.grad, 1 - group["betas"][0])
                square.lerp_(p.grad.square(), 1 - group["betas"][1])
                p -= group["lr"] / group["step"] * mean / (square.sqrt() + 1e-8)


optimizers.Adam = distrib_optimizer.Adam = Adam
optimizers.USING_PYTORCH_OPTIMIZER = False
distrib_optimizer.HAVE_APEX_OR_TE = True


class Run:
    def __init__(self, seed, distributed, stock=False):
        wrapped, self.model, self.drawn = build(seed, stock)
        ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=distributed)
        self.ddp = DistributedDataParallel(config, ddp_config, wrapped)
        options = optimizers.OptimizerConfig(
            optimizer="adam", lr=1e-2, bf16=True, params_dtype=torch.bfloat16,
            use_distributed_optimizer=distributed,
        )
        self.optimizer = optimizers.get_megatron_optimizer(options, [self.ddp])

    def step(self, seed):
        torch.manual_seed(2 * seed + rank)
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.ddp(torch.randn(5, 2, 8)).square().mean().backward()
        self.ddp.finish_grad_sync()
        assert self.optimizer.step()[0]
        return self

    def state(self, sharding, is_loading=False):
        model = self.model.sharded_state_dict()
        metadata = {"distrib_optim_sharding_type": sharding}
        return {
            "model": model,
            "optimizer": self.optimizer.sharded_state_dict(model, is_loading, metadata=metadata),
        }

    def save(self, sharding):
        where = [tempfile.mkdtemp()] if rank == 0 else [None]
        torch.distributed.broadcast_object_list(where)
        dist_checkpointing.save(self.state(sharding), where[0])
        return where[0]

    def load(self, where, sharding):
        loaded = dist_checkpointing.load(self.state(sharding, is_loading=True), where)
        self.model.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        return self

    def values(self):
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def owned(self):
        # Name, place and main copy, by the books of the distributed optimizer, on this rank.
        (inner,) = self.optimizer.chained_optimizers
        for name, p in self.model.named_parameters():
            if p in inner.model_param_group_index_map:
                place = inner._get_model_param_range_map(p)["param"]
                yield name, place, inner._get_main_param_and_optimizer_states(p)["param"].detach()

    def main_copies(self):
        return {name.rpartition(".")[2]: (place.start, main) for name, place, main in self.owned()}

    def misplaced(self):
        return [name for name, place, main in self.owned() if main.numel() != place.size]


def stock_file(name, path):
    spec = importlib.util.spec_from_file_location(f"megatron.core.optimizer.stock_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


OnCpu().__enter__()
for distributed, sharding in ((False, ""), (True, "fully_reshardable"), (True, "dp_reshardable")):
    run = Run(1, distributed)
    buffers = {(buffer.param_dtype, buffer.grad_dtype) for buffer in run.ddp.buffers}
    assert buffers == {(torch.bfloat16,) * 2, (torch.float32,) * 2}, buffers
    run.step(1).step(2)
    for name, parameter in kept(run.model).items():
        assert parameter.dtype == parameter.main_grad.dtype == torch.float32
        assert not torch.equal(parameter, run.drawn[name].float())
        assert not torch.equal(parameter, parameter.bfloat16().float()), name  # trained unrounded

    saved = run.save(sharding)
    other = Run(7, distributed).step(9).load(saved, sharding)
    for going_on in (False, True):
        if going_on:  # equal only if every state came back to its own parameter
            run.step(3), other.step(3)
        for name, value in other.values().items():
            assert torch.equal(value, run.values()[name]), (distributed, sharding, name)
    assert not distributed or run.misplaced() == []

# A checkpoint of a stock run: its fp32 main copies become the parameters.
stock = Run(1, True, stock=True).step(1).step(2)
trained = Run(7, True).load(stock.save("fully_reshardable"), "fully_reshardable")
shares = [None] * world
torch.distributed.all_gather_object(shares, stock.main_copies())
for name, parameter in kept(trained.model).items():
    rounded = getattr(stock.model.mixer, name)
    assert torch.equal(parameter.bfloat16(), rounded), (name, parameter, rounded)
    parts = [share[name] for share in shares if name in share]
    whole = torch.cat([part for _, part in sorted(parts, key=lambda part: part[0])])
    if name in trained.main_copies():  # this rank's share; the others get it with the next step
        start, part = trained.main_copies()[name]
        assert torch.equal(part, whole[start : start + len(part)]), (name, part, whole)
trained.step(3)

# What the same parameters do to the unpatched optimizers.
distrib = stock_file("distrib", STOCK + "/distrib_optimizer.py").DistributedOptimizer
unordered = distrib.__dict__["_build_optimizer_group_ranges"]
with mock.patch.object(
    distrib_optimizer.DistributedOptimizer, "_build_optimizer_group_ranges", unordered
):
    misplaced = [None] * world
    torch.distributed.all_gather_object(misplaced, Run(1, True).step(1).misplaced())
    assert any(misplaced)
plain = stock_file("plain", STOCK + "/optimizer.py").Float16OptimizerWithFloat16Params
with mock.patch.object(
    optimizer.Float16OptimizerWithFloat16Params, "sharded_state_dict", plain.sharded_state_dict
):
    try:
        Run(1, False).step(1).state("")
    except (AssertionError, ValueError) as error:
        assert "does not match" in str(error), error
    else:
        raise SystemExit("stock saved its state")

# An offloaded fp32 parameter gets its loaded state into its copy on the host.
ours, on_host, loaded = (torch.nn.Parameter(torch.full((2,), float(x))) for x in range(3))
offloaded = mock.Mock(
    param_update_in_fp32=True, state={ours: {"master_param": loaded}}, param_to_fp32_param={},
    param_to_inner_param={ours: on_host},
)
hybrid_optimizer.HybridDeviceOptimizer._update_fp32_params_by_new_state(offloaded)
assert on_host.tolist() == [2.0, 2.0]
runtime.check()
"""


# The optimizers changed little in between: the oldest on one rank, the newest on two.
@pytest.mark.parametrize(("version", "ranks"), [*zip(VERSIONS, (1, 0, 0, 2), strict=True)])
def test_on_the_real_mixer_and_optimizers(version: str, ranks: int) -> None:
    constants = {"VERSION": version, "STOCK": str(pristine(version) / "megatron/core/optimizer")}
    code = "".join(f"{name} = {value!r}\n" for name, value in constants.items())
    code += MODEL + CONVERSIONS + (CHECKPOINTS if ranks else "")
    done = python(patched(version, NAME), code, nproc=ranks or 1)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "reached"),
    [
        ({"bf16": True, "hybrid_layer_pattern": "M*M-/M"}, True),
        ({"fp16": True, "hybrid_override_pattern": "M-"}, True),
        ({"bf16": True, "is_hybrid_model": True, "hybrid_override_pattern": None}, True),
        ({"bf16": True, "hybrid_layer_pattern": "D+E"}, False),
        ({"bf16": False, "fp16": False, "hybrid_layer_pattern": "M"}, False),
        ({"bf16": True}, False),
    ],
)
def test_when_a_run_must_reach_it(arguments: dict[str, object], reached: bool) -> None:
    page = catalogue.load()[NAME]
    assert page.patch.when is not None
    assert page.patch.when(SimpleNamespace(**arguments)) is reached
