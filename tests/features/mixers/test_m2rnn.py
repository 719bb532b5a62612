"""The mixer of M2RNN in the installed megatron-core, on CPU."""

from __future__ import annotations

import json
from functools import cache

import pytest

from tests.support import pristine, python

PROGRAM = """
from cppmega.proof import cpu_shims
cpu_shims.init_distributed()
import itertools, tempfile
from types import SimpleNamespace
from unittest import mock
import torch
from megatron.core import dist_checkpointing
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from cppmega.features.mixers.m2rnn import M2RNNMixer
from cppmega.features.mixers.padded_columns import padded_columns
from cppmega.recipe import M2RNN
from cppmega.recipe import arithmetic
from cppmega.proof.cpu_shims import keep_saves_here

keep_saves_here()


def mixer(hidden=42, key=5, value=3, seed=1, columns=ColumnParallelLinear, sizes=None, **more):
    config = TransformerConfig(
        num_layers=1, hidden_size=hidden, num_attention_heads=2, use_cpu_initialization=True, **more
    )
    torch.manual_seed(seed)
    linear = MambaMixerSubmodules(columns, RowParallelLinear)
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
    return M2RNNMixer(config, linear, sizes or M2RNN(key, value), hidden, 1, groups)


def packs(*bounds):
    found = torch.tensor(bounds, dtype=torch.int32)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=found, cu_seqlens_kv=found)


def count():
    sizes = SimpleNamespace(hidden_size=4096, m2rnn=M2RNN())
    made = mixer(4096, M2RNN().key_dim, M2RNN().value_dim)
    assert made.heads == 51
    parameters = sum(p.numel() for p in made.parameters())
    assert parameters == arithmetic._m2rnn(sizes) == 10_779_702, parameters


def documents():
    made = mixer().double()  # A_log and dt_bias with it: only 16-bit types are kept away
    x = torch.randn(14, 1, 42, dtype=torch.float64)
    bounds = (0, 1, 3, 9, 12)  # and what is behind the last
    whole, bias = made(x, packed_seq_params=packs(*bounds))
    assert bias is None
    for start, end in itertools.pairwise((*bounds, 14)):
        alone, _ = made(x[start:end])
        torch.testing.assert_close(whole[start:end], alone, rtol=0, atol=1e-7)
    joined, _ = made(x)
    assert (whole[1:] - joined[1:]).abs().amax((1, 2)).min() > 1e-5, "the bound makes no difference"
    both = torch.cat((x, x.flip(0)), 1)
    torch.testing.assert_close(made(both)[0][:, :1], joined, rtol=0, atol=1e-7)


def gradients():
    made = mixer()
    out, _ = made(torch.randn(9, 2, 42))
    (out * torch.randn(out.shape)).sum().backward()
    for name, p in made.named_parameters():
        rows = p.grad.flatten(1) if p.ndim > 1 else p.grad[:, None]
        assert torch.isfinite(rows).all() and (rows != 0).any(1).all(), name


def clipped():
    x, upstream, found = torch.randn(9, 1, 42), 100 * torch.randn(9, 1, 42), []
    for sizes in (M2RNN(5, 3), M2RNN(5, 3, gradient_clipping=1.0), M2RNN(5, 3, 4, None)):
        made = mixer(sizes=sizes)
        out, _ = made(x)
        out.backward(upstream)
        found.append((out, made.transition.grad, made.D.grad))
    usual, at_1, free = found
    assert all(torch.equal(a, b) for a, b in zip(usual, at_1, strict=True))
    assert [torch.equal(a, b) for a, b in zip(usual, free, strict=True)] == [True, False, True]


def first_values():
    made = mixer(800)
    decay, step = made.A_log.exp(), torch.nn.functional.softplus(made.dt_bias)
    assert torch.isfinite(made.A_log).all() and 0 < decay.min() < 4 and 12 < decay.max() < 16.001
    assert 0.99e-3 < step.min() < 4e-3 and 0.03 < step.max() < 0.101
    assert torch.equal(made.transition, torch.eye(3).expand(100, 3, 3)) and (made.D == 1).all()


def zero_is_never_drawn():
    with mock.patch.object(torch, "rand_like", torch.zeros_like):
        assert torch.isfinite(mixer().A_log).all()


def precision():
    made = mixer(bf16=True, params_dtype=torch.bfloat16)
    before = made.A_log.detach().clone()
    wrapped = Float16Module(made.config, made)
    kept = {n for n, p in made.named_parameters() if p.dtype == torch.float32}
    assert kept == {"A_log", "dt_bias"}, kept
    wrapped.bfloat16()
    assert torch.equal(made.A_log, before) and not torch.equal(before, before.bfloat16().float())
    x = torch.randn(9, 1, 42).bfloat16()
    out, _ = made(x)
    exact, _ = made.float()(x.float())
    assert out.dtype == torch.bfloat16
    assert (out.float() - exact).norm() < 2e-2 * exact.norm()


def saved():
    one, other = mixer(), mixer(seed=2)
    x = torch.randn(9, 1, 42)
    assert not torch.equal(one(x)[0], other(x)[0])
    with tempfile.TemporaryDirectory() as folder:
        dist_checkpointing.save(one.sharded_state_dict("mixer."), folder)
        state = dist_checkpointing.load(other.sharded_state_dict("mixer."), folder)
        other.load_state_dict({name.removeprefix("mixer."): v for name, v in state.items()})
    assert torch.equal(one(x)[0], other(x)[0])


def padded():
    # Projections of 45 columns, and of 48.
    plain, wide = mixer(), mixer(columns=padded_columns(ColumnParallelLinear))
    assert isinstance(wide.in_proj, ColumnParallelLinear)
    assert wide.sharded_state_dict("m.").keys() == plain.sharded_state_dict("m.").keys()
    wide.load_state_dict(plain.state_dict())
    x = torch.randn(9, 2, 42)
    assert wide.in_proj(x)[0].shape[-1] == 48 and plain.in_proj(x)[0].shape[-1] == 45
    upstream = torch.randn(9, 2, 42)
    results = []
    for made in (plain, wide):
        out, _ = made(x)
        out.backward(upstream)
        results.append([out, *(p.grad for p in made.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    wide.config.delay_wgrad_compute = True  # the layer's own product
    assert wide.in_proj(x)[0].shape[-1] == 45
    torch.testing.assert_close(wide(x)[0], results[0][0])


import json, traceback
results = {}
for call in (
    count, documents, gradients, clipped, first_values, zero_is_never_drawn, precision, saved,
    padded,
):
    try:
        call()
        results[call.__name__] = "passed"
    except Exception:
        results[call.__name__] = traceback.format_exc()
print(json.dumps(results))
"""
"""One process for all, because importing megatron-core takes longer than they do."""


@cache
def results() -> dict[str, str]:
    """What each function of the program came to."""
    done = python(pristine("0.19.2"), PROGRAM)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("count", "documents", "gradients", "clipped", "first_values", "zero_is_never_drawn"),
        *("precision", "saved", "padded"),
    ],
)
def test_the_mixer(name: str) -> None:
    assert results()[name] == "passed", results()[name]
