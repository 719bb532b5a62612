"""fp32 parameters of Mamba mixers and gated delta nets: conversions, forward, DDP, checkpoints."""

from types import SimpleNamespace

import pytest

from cppmega.catalogue import loader as catalogue
from tests.support import VERSIONS, patched, pristine, python

NAME = "float16_keep_fp32"

ARMED = """
from pathlib import Path
from unittest import mock

import torch
from cppmega.catalogue import loader as catalogue
from cppmega.proof import cpu_shims
from cppmega.guard import swaps

page = catalogue.load()["float16_keep_fp32"]
swaps.arm(page, [edit for edit in page.patch.edits if VERSION in edit.pins])
cpu_shims.init_distributed()

from megatron.core.optimizer import distrib_optimizer, layer_wise_optimizer, optimizer
from megatron.core.transformer.module import Float16Module
from tests.upstream_patches.mamba import mixers
from tests.upstream_patches.optimizer.distributed_optimizer import on_cpu
from tests.upstream_patches.mamba.mixers import KEPT, Run, assert_same_run, build, kept, same
from tests.upstream_patches.one_process import Stock

rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
stock = Stock(Path(STOCK))
"""

CONVERSIONS = """
wrapped, model, drawn = build(0)
others = {p.dtype for name, p in model.named_parameters() if name not in KEPT}
assert others == {torch.bfloat16}, others
held = model.mixer.cp  # it keeps references of its own
same(kept(model), drawn)
same({"mixer.A_log": held.get_A_log(), "mixer.D": held.get_D()}, drawn)
for convert in (
    lambda: wrapped.bfloat16(),
    lambda: model.half(),
    lambda: model.mixer.to(torch.bfloat16),
    lambda: model.delta.to("cpu", torch.bfloat16),
):
    convert()
    same(kept(model), drawn)
    assert model.mixer.in_proj.weight.dtype in (torch.bfloat16, torch.float16)
    assert model.delta.in_proj.weight.dtype in (torch.bfloat16, torch.float16)
model.bfloat16()

# A gradient stays with its parameter.
model.mixer.A_log.grad = torch.full((4,), 1 / 3)
wrapped.bfloat16()
assert torch.equal(model.mixer.A_log.grad, torch.full((4,), 1 / 3))
model.zero_grad()
assert set(wrapped.state_dict()) == set(build(0, stock=True)[0].state_dict())

# Conversions that lose nothing still happen, and so do moves.
model.double()
assert model.mixer.A_log.dtype == model.delta.A_log.dtype == torch.float64
model.float()
same(kept(model), drawn)
assert model.mixer.to("meta").D.is_meta and model.mixer.D.dtype == torch.float32
wrapped, model, drawn = build(0)

# Stock rounds A_log; what rounding does to the decay.
_, rounded, _ = build(0, stock=True)
same(kept(rounded), drawn, torch.bfloat16)
assert not torch.equal(rounded.mixer.A_log.float(), drawn["mixer.A_log"])

# A module that is no mixer is left to stock.
alien = torch.nn.Module()
alien.A_log = torch.nn.Parameter(torch.rand(3))
Float16Module(mixers.CONFIG, alien)
assert alien.A_log.dtype == torch.bfloat16

# Forward and backward, with gradients in fp32, and one step of decoding.
x = torch.randn(6, 2, 8).bfloat16()
model(x).float().square().sum().backward()
A, D = drawn["mixer.A_log"], drawn["mixer.D"]
assert torch.equal(mixers.GIVEN["A"], -A.exp()) and torch.equal(mixers.GIVEN["D"], D)
for parameter in kept(model).values():
    assert parameter.grad.dtype == torch.float32 and parameter.grad.abs().min() > 0
token = torch.randn(1, 1, 16).bfloat16()
shapes = model.mixer.mamba_state_shapes_per_request()
states = [torch.zeros(1, *shape, dtype=torch.bfloat16) for shape in shapes]
with torch.no_grad():
    decoded = model.mixer._decode(token, *states)[0]
    torch.testing.assert_close(decoded, model.mixer(token)[0], rtol=0.05, atol=0.02)

# The decay of a delta net follows what bf16 has no number for.
with torch.no_grad():
    was = model.delta(token, None)[0]
    model.delta.A_log.add_(2**-10)
    assert not torch.equal(model.delta.A_log.bfloat16().float(), model.delta.A_log)
swaps.check()

# How DDP divides parameters, with shared embeddings and all sizes of buckets.
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

generator = torch.Generator().manual_seed(0)
for case in range(40):
    sizes = torch.randint(1, 700, (9,), generator=generator).tolist()
    network = torch.nn.ParameterList([torch.zeros(n, dtype=torch.bfloat16) for n in sizes])
    for place in ((), (0,), (4,), (8,), (0, 1))[case % 5]:
        network[place].shared_embedding = True
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=case % 4 > 0,
        bucket_size=(None, 1, 500, 2000)[case % 4],
    )
    with on_cpu():
        (buffer,) = DistributedDataParallel(mixers.CONFIG, ddp_config, network).buffers
    sizes, places = distrib_optimizer.bucket_places(
        list(network), None if not case % 4 else ddp_config.bucket_size
    )
    assert sizes == [bucket.numel_unpadded for bucket in buffer.buckets], case
    for param, (start, _, bucket) in buffer.param_index_map.items():
        assert places[param] == (bucket, start - buffer.buckets[bucket].offset), case
"""

FSDP2 = """
import sys
import warnings

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed import torch_fully_sharded_data_parallel as fsdp2
from torch.distributed import DeviceMesh

on_the_host = mock.Mock(from_group=lambda group, _: DeviceMesh.from_group(group, "cpu"))


def sharded(cls, rounding):
    wrapped, model, drawn = build(0, rounding)
    with on_cpu(), mock.patch.object(sys.modules[cls.__module__], "DeviceMesh", on_the_host):
        whole = cls(mixers.CONFIG, DistributedDataParallelConfig(), wrapped)
        model.bfloat16()
        whole(torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(0))).sum().backward()
    # The Mamba mixer keeps references to its parameters from before, and their gradients.
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {name: g.full_tensor() for name, g in gradients.items() if g is not None}


with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    ours = sharded(fsdp2.TorchFullyShardedDataParallel, rounding=False)
assert "A_log is rounded" in "".join(str(one.message) for one in said)
unpatched = stock.module(fsdp2.__name__).TorchFullyShardedDataParallel
theirs = sharded(unpatched, rounding=True)
assert {gradient.dtype for gradient in ours.values()} == {torch.bfloat16}
assert {"delta.A_log", "delta.dt_bias"} < set(ours) == set(theirs), set(ours)
for name, gradient in ours.items():
    assert torch.equal(gradient, theirs[name]), name
try:
    sharded(unpatched, rounding=False)
except AssertionError as error:
    assert "uniform" in str(error), error
else:
    raise SystemExit("FSDP2 takes parameters of two dtypes")
"""

CHECKPOINTS = """
def assert_loaded(run, values, states):
    for name, tensors in run.states().items():
        for key, tensor in tensors.items():
            assert torch.equal(tensor, states[name][key]), (run.kind, name, key)
    for name, value in run.values().items():
        is_whole = run.ddp.module.module.get_parameter(name).dtype == torch.float32
        wanted = states[name]["param"] if is_whole else values[name].to(value.dtype)
        assert torch.equal(value, wanted), (run.kind, name)


def stock_to_ours_and_back(kind, buckets):
    before = Run(1, kind, buckets, stock).step(1).step(2)
    assert ".stock_" in type(before.inner).__module__
    saved, values, states = before.save(), before.values(), before.states()
    ours = Run(7, kind, buckets).step(9).load(saved)
    assert_loaded(ours, values, states)
    again = ours.save()
    twin = Run(8, kind, buckets).step(9).adopt(values, states, steps=2)
    assert_same_run(ours.step(3), twin.step(3))
    back = Run(5, kind, buckets, stock).step(9).load(again)
    assert_same_run(back, before)
    assert_same_run(back.step(3), before.step(3))


def ours_to_stock_and_back(kind, buckets):
    run = Run(1, kind, buckets).step(1).step(2)
    for name, parameter in kept(run.model).items():
        assert parameter.dtype == parameter.main_grad.dtype == torch.float32
        assert not torch.equal(parameter, parameter.bfloat16().float()), name  # trained unrounded
    there = Run(7, kind, buckets, stock).step(9).load(run.save())
    assert_loaded(there, run.values(), run.states())
    home = Run(3, kind, buckets).step(9).load(there.save())
    assert_same_run(home, run)
    assert_same_run(home.step(3), run.step(3))
    assert run.misplaced() == []


with on_cpu():
    for kind, buckets in KINDS:
        stock_to_ours_and_back(kind, buckets)
        ours_to_stock_and_back(kind, buckets)
"""

LATER_CHUNKS = """
with on_cpu():
    for kind in ("", "fully_reshardable"):
        first, later = (
            Run(1, kind, is_later_chunk=is_later).step(1).step(2) for is_later in (False, True)
        )
        assert_same_run(first, later)
"""

SHIFTED_COPIES = """
with on_cpu():
    before = Run(1, "fully_reshardable", 300, stock).step(1).step(2)
    saved, values = before.save(), before.values()
    there = Run(7, "fully_reshardable", 300, stock).step(9).load(saved)
    ours = Run(7, "fully_reshardable", 300).step(9).load(saved)
    copies = there.states()
    shifted = [n for n in KEPT if not torch.equal(copies[n]["param"].bfloat16(), values[n])]
    assert shifted, "stock saved no wrong copy"
    for name, weight in kept(ours.model).items():
        assert torch.equal(weight.bfloat16(), values[name]), (name, shifted)
"""

UNPATCHED = """
# What the same parameters do to the unpatched optimizers.
distributed = distrib_optimizer.DistributedOptimizer
unpatched = stock.module(distrib_optimizer.__name__).DistributedOptimizer
name = "_build_optimizer_group_ranges"
with on_cpu(), mock.patch.object(distributed, name, unpatched.__dict__[name]):
    misplaced = [None] * world
    torch.distributed.all_gather_object(misplaced, Run(1, "dp_reshardable").step(1).misplaced())
    assert any(misplaced)
plain = optimizer.Float16OptimizerWithFloat16Params
unpatched = stock.module(optimizer.__name__).Float16OptimizerWithFloat16Params
methods = {name: getattr(unpatched, name) for name in ("state_dict", "sharded_state_dict")}
with on_cpu(), mock.patch.multiple(plain, **methods):
    try:
        Run(1, "").step(1).state()
    except (AssertionError, ValueError) as error:
        assert "does not match" in str(error), error
    else:
        raise SystemExit("stock saved its state")

# An offloaded fp32 parameter gets its loaded state into its copy on the host.
from megatron.core.optimizer.cpu_offloading import hybrid_optimizer

ours, on_host, loaded = (torch.nn.Parameter(torch.full((2,), float(x))) for x in range(3))
offloaded = mock.Mock(
    param_update_in_fp32=True, state={ours: {"master_param": loaded}}, param_to_fp32_param={},
    param_to_inner_param={ours: on_host},
)
hybrid_optimizer.HybridDeviceOptimizer._update_fp32_params_by_new_state(offloaded)
assert on_host.tolist() == [2.0, 2.0]
swaps.check()
"""

FOUR_RANKS = """
mixers.Model.has_delta_net = False  # three parameters for four ranks
with on_cpu(), mock.patch.object(torch.distributed, "all_gather", mixers.all_gather):
    run = Run(1, "layer_wise").step(1).step(2)
    lists = run.optimizer.dp_cp_params_list
    kinds = [{p.dtype for p in params} for params in lists]
    assert {torch.bfloat16} in kinds and {torch.bfloat16, torch.float32} in kinds, kinds
    assert_same_run(run, Run(1, "").step(1).step(2))
    stock_to_ours_and_back("layer_wise", None)
    ours_to_stock_and_back("layer_wise", None)

    # A rank without any of the fp32 buffer saves and loads, too.
    run = Run(1, "dp_reshardable").step(1).step(2)
    share = [None] * world
    has_some = any(name in KEPT for name, _, _ in run.owned())
    torch.distributed.all_gather_object(share, has_some)
    assert sorted(set(share)) == [False, True], share
    other = Run(7, "dp_reshardable").step(9).load(run.save())
    assert_same_run(other, run)

    unpatched = stock.module(layer_wise_optimizer.__name__).LayerWiseDistributedOptimizer
    name = "allgather_params"
    patched = layer_wise_optimizer.LayerWiseDistributedOptimizer
    said, raised = "", [None] * world
    with mock.patch.object(patched, name, getattr(unpatched, name)):
        try:
            Run(1, "layer_wise").step(1)
        except ValueError as error:
            said = str(error)
    torch.distributed.all_gather_object(raised, "room for" in said)
    assert any(raised), "stock gathers two dtypes at once"
"""


def passes(version: str, code: str, ranks: int = 1, **constants: object) -> None:
    """Run code on a version with only this page applied."""
    constants |= {"VERSION": version, "STOCK": str(pristine(version))}
    given = "".join(f"{name} = {value!r}\n" for name, value in constants.items())
    environment = {"TORCHDYNAMO_DISABLE": "1"}  # it would compile for minutes
    done = python(patched(version, NAME), given + ARMED + code, nproc=ranks, env=environment)
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.mark.megatron
@pytest.mark.parametrize("version", VERSIONS)
def test_conversions_and_buckets(version: str) -> None:
    passes(version, CONVERSIONS)


@pytest.mark.megatron
def test_fsdp2_trains_as_stock_does() -> None:
    passes("0.19.2", FSDP2)


OLDEST = [("dp_reshardable", 300)]
NEWEST = [("", None), ("fully_reshardable", None), ("dp_reshardable", None), *OLDEST]


# The optimizers changed little in between.
@pytest.mark.megatron
@pytest.mark.parametrize(("version", "kinds"), [("0.16.1", OLDEST), ("0.19.2", NEWEST)])
def test_checkpoints_of_stock_and_ours_are_the_same(
    version: str, kinds: list[tuple[str, int | None]]
) -> None:
    code = CHECKPOINTS + LATER_CHUNKS + SHIFTED_COPIES + UNPATCHED
    passes(version, code, ranks=2, KINDS=kinds)


@pytest.mark.megatron
def test_ranks_without_a_parameter_in_fp32() -> None:
    passes("0.19.2", CHECKPOINTS + FOUR_RANKS, ranks=4, KINDS=())


@pytest.mark.parametrize(
    ("arguments", "reached"),
    [
        ({"bf16": True, "hybrid_layer_pattern": "M*M-/M"}, True),
        ({"fp16": True, "hybrid_override_pattern": "M-"}, True),
        ({"bf16": True, "is_hybrid_model": True, "hybrid_override_pattern": None}, True),
        ({"bf16": True, "hybrid_layer_pattern": "G-G*"}, True),
        ({"bf16": True, "experimental_attention_variant": "gated_delta_net"}, True),
        ({"bf16": True, "experimental_attention_variant": "dsa"}, False),
        ({"bf16": True, "hybrid_layer_pattern": "D+E"}, False),
        ({"bf16": False, "fp16": False, "hybrid_layer_pattern": "M"}, False),
        ({"bf16": True}, False),
    ],
)
def test_when_a_run_must_reach_it(arguments: dict[str, object], reached: bool) -> None:
    page = catalogue.load()[NAME]
    assert page.patch.when is not None
    assert page.patch.when(SimpleNamespace(**arguments)) is reached
