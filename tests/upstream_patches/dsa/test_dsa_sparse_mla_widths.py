"""The sparse MLA with other widths matches the unfused path; with 576 and 512, stock bitwise."""

from __future__ import annotations

import json

from tests.support import patched, pristine, python

VERSION = "0.19.2"
PAGE = "dsa_sparse_mla_widths"
OPS = "megatron/core/transformer/experimental_attention_variant/ops"
UNKNOWN = ((320, 256), (160, 96), (96, 64), (128, 128), (192, 64), (576, 448))

CHECKS = """
import json, sys, types, warnings
from importlib import import_module
from unittest import mock

import torch

from cppmega.calls import allowing
from cppmega.guard import installed

tilelang = mock.MagicMock(jit=lambda function=None, **_: function or tilelang.jit, __path__=[])
tilelang.language.prim_func = lambda function: function
sys.modules |= {"tilelang": tilelang, "tilelang.language": tilelang.language}
built = []  # (heads, width of values, of the rotated part) of every kernel

# The kernels' contract in plain PyTorch: lse in powers of two, delta from outside, dkv added up.
def scores(q, kv, indices, scale):
    rows = torch.arange(len(q))[:, None, None]
    keys = kv[:, :, 0].float()[rows, indices[:, :, 0].clamp(min=0).long()]
    x = torch.einsum("bshd,bskd->bshk", q.float(), keys) * scale
    return keys, x.masked_fill(indices < 0, -float("inf"))

def forward_kernel(heads, dim, tail_dim, topk, kv_group, sm_scale, block_I, **options):
    built.append((heads, dim, tail_dim))
    def kernel(q, kv, indices):
        assert q.shape[2:] == (heads, dim + tail_dim) and indices.size(-1) == topk
        keys, x = scores(q, kv, indices, sm_scale)
        lse = x.logsumexp(-1)
        lse = torch.where(lse.isfinite(), lse, 0)
        out = torch.einsum("bshk,bskd->bshd", (x - lse[..., None]).exp(), keys[..., :dim])
        return out.to(q.dtype), lse / 0.6931471805599453
    return kernel

def backward_kernel(heads, dim, tail_dim, topk, kv_group, sm_scale, max_block_h):
    built.append((heads, dim, tail_dim))
    def kernel(q, kv, do, indices, lse, delta, dkv):
        assert q.size(-1) == dim + tail_dim and do.shape[2:] == (heads, dim)
        keys, x = scores(q, kv, indices, sm_scale)
        p = (x - lse[..., None] * 0.6931471805599453).exp()
        dp = torch.einsum("bshd,bskd->bshk", do.float(), keys[..., :dim])
        ds = p * (dp - delta[..., None]) * sm_scale
        dkeys = torch.einsum("bshk,bshd->bskd", ds, q.float())
        dkeys[..., :dim] += torch.einsum("bshk,bshd->bskd", p, do.float())
        for sums, at, part in zip(dkv[:, :, 0], indices[:, :, 0], dkeys):
            sums.index_add_(0, at[at >= 0].long(), part[at >= 0])
        return torch.einsum("bshk,bskd->bshd", ds, keys).to(q.dtype)
    return kernel

def modules(folder):
    forward = import_module(f"{folder}.tilelang_sparse_mla_fwd")
    backward = import_module(f"{folder}.tilelang_sparse_mla_bwd")
    forward._get_sparse_mla_fwd_kernel = forward_kernel
    backward._get_bwd_kernel = backward_kernel
    backward._get_preprocess_kernel = lambda h, d: lambda o, do: (o.float() * do.float()).sum(-1)
    backward._get_postprocess_kernel = lambda dim, tail_dim, kv_group: lambda dkv: dkv.bfloat16()
    hooks, mla = import_module(f"{folder}.tilelang_dsa"), import_module(f"{folder}.sparse_mla")
    hooks.SparseMLA = mla.SparseMLA  # stock's hooks import Megatron's, which is the patched one
    return hooks.fused_sparse_mla_absorbed, mla.SparseMLA

# Stock beside the patched modules, in a package of its own: imports are relative there.
sys.modules["stock"] = types.ModuleType("stock")
sys.modules["stock"].__path__ = [STOCK]
VARIANT = "megatron.core.transformer.experimental_attention_variant"
stock_hook, stock_mla = modules("stock")
hook, mla = modules(f"{VARIANT}.ops")
unfused = import_module(f"{VARIANT}.dsa")._unfused_absorbed_dsa_fn
torch.manual_seed(0)

def inputs(query, heads=16, batch=1, length=70, topk=64):
    q, kv = (torch.randn(length, batch, n, query).bfloat16() for n in (heads, 1))
    indices = torch.rand(batch, length, length).tril_().topk(topk).indices
    indices = indices.masked_fill(indices > torch.arange(length)[:, None], -1)
    indices[:, [0, 7]] = -1  # rows without keys
    return q.requires_grad_(), kv.requires_grad_(), indices

def results(function, q, kv, *rest):
    out = function(q, kv, *rest)
    out = out if torch.is_tensor(out) else out[0]
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return out, *torch.autograd.grad(out, (q, kv), grad)

# Declined, as before: widths that no GPU has run, no bf16, heads and keys that make no whole tile.
declined = [(inputs(query), width) for query, width in
            UNKNOWN]
declined += [(inputs(128, heads=24), 64), (inputs(128, topk=63), 64)]
q, kv, indices = inputs(128)
declined += [((q.float(), kv.float(), indices), 64)]
q, kv, indices = inputs(128)
declined += [((q.half(), kv.half(), indices), 64), (inputs(128, topk=50), 64)]
with allowing("dsa_sparse_mla_widths"), warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    answers = {"declined": [hook(*given, 0.1, width) is None for given, width in declined]}
answers["said"] = [str(warning.message).partition("because ")[2] for warning in said]
torch.use_deterministic_algorithms(True)
with allowing("dsa_sparse_mla_widths"), warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    new = (128, 64), (192, 128)
    answers["deterministic"] = [hook(*inputs(a), 0.1, b) is None for a, b in new]
answers["deterministic said"] = [str(warning.message).partition("because ")[2] for warning in said]
torch.use_deterministic_algorithms(False)
answers["marks of declined calls"] = sorted(installed.reached())

# At 576 and 512 whoever stands in for the kernels is called with stock's four arguments.
class FourArguments:
    @staticmethod
    def apply(q, kv, indices, scale):
        return q[..., :512], None

with mock.patch.object(import_module(f"{VARIANT}.ops.tilelang_dsa"), "SparseMLA", FourArguments):
    q, kv, indices = inputs(576)
    answers["four arguments"] = torch.equal(hook(q, kv, indices, 0.1, 512), q[..., :512])

# Taken: the values and gradients of the unfused path in fp32.
taken = {}
for query, width in ((128, 64), (192, 128), (576, 512)):
    for heads, batch in ((8, 1), (8, 2), (16, 2), (32, 1)):
        q, kv, indices = inputs(query, heads, batch)
        assert width == 512 or stock_hook(q, kv, indices, 0.1, width) is None
        built.clear()
        got = results(hook, q, kv, indices, 0.1, width)
        assert set(built) == {(max(heads, 16), width, 64)}, built
        assert got[0].shape == (70, batch, heads, width) and not got[0][[0, 7]].any()
        want = results(lambda q, kv: unfused(q.float(), kv.float(), indices, 0.1, width), q, kv)
        pairs = zip(("out", "dq", "dkv"), got, want)
        taken |= {f"{query} {heads} {batch} {what}": float((a - b).norm() / b.norm())
                  for what, a, b in pairs}
answers["taken"] = taken
answers["marks of taken calls"] = sorted(installed.reached())

# 576 and 512 are stock's, through the hook and by a call that gives no width, batched and not.
same = []
for heads, batch in ((8, 2), (32, 1)):
    given = *inputs(576, heads, batch), 0.1, 512
    same.append([torch.equal(*both) for both in zip(results(hook, *given),
                                                    results(stock_hook, *given))])
q, kv, indices = inputs(576, 32)
for shape in (lambda x: x.transpose(0, 1).contiguous(), lambda x: x[:, 0].contiguous()):
    chosen = indices.transpose(0, 1).unsqueeze(2).int()
    given = shape(q), shape(kv), shape(chosen), 0.1
    same.append([torch.equal(*both) for both in zip(results(mla.apply, *given),
                                                    results(stock_mla.apply, *given))])
answers["same as stock"] = same
print(json.dumps(answers))
"""


def test_the_hook_takes_the_widths_that_were_run_and_declines_the_others() -> None:
    stock = f"STOCK = {str(pristine(VERSION) / OPS)!r}\nUNKNOWN = {UNKNOWN}\n"
    done = python(patched(VERSION, PAGE), stock + CHECKS)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    assert answers["declined"] == [True] * 11
    widths = [f"queries of {a} with values of {b} were never run on a GPU" for a, b in UNKNOWN]
    assert answers["said"] == [
        *widths,
        "24 heads are not a power of two",
        "a top-k of 63 is not a multiple of 64",
        "the tensors are torch.float32, not bf16",
        "the tensors are torch.float16, not bf16",
        "a top-k of 50 is not a multiple of 64",
    ]
    assert answers["deterministic"] == [True, True]
    assert (
        answers["deterministic said"]
        == ["the deterministic mode is on, and dkv is added up by atomics"] * 2
    )
    assert answers["four arguments"]
    # A run whose calls are all declined must not count as one that went through the patch.
    assert answers["marks of declined calls"] == []
    assert answers["marks of taken calls"] == [PAGE]
    assert len(answers["taken"]) == 3 * 4 * 3
    wrong = {case: error for case, error in answers["taken"].items() if not error < 1e-2}
    assert not wrong
    assert answers["same as stock"] == [[True] * 3] * 4
