"""Only the Mamba layers run twice, and the results are bitwise the same."""

import json
from typing import Any

import pytest

from tests.support import VERSIONS, patched, python

RUN = "from tests.upstream_patches.mamba import test_mamba_layer_recompute as t; t.check()"


def check() -> None:
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.ssm.mamba_layer import MambaLayer

    from tests.upstream_patches import stacks

    stacks.start()
    stack = stacks.build()
    calls, result = stacks.train(stack)
    assert calls == [2, 2, 1, 2, 1, 2]  # MM*M*M
    names = list(stack.state_dict())

    # The page's own way out: evaluation runs each layer once, so `full` in evaluation is stock.
    def plain(**given):
        stack = stacks.build()
        for layer in stack.layers:
            if isinstance(layer, MambaLayer):
                # As upstream runs it: full recompute says that somebody else recomputes.
                layer.config = type("Config", (), dict(vars(layer.config)))()
                layer.config.recompute_granularity = "full"
        calls, result = stacks.train(stack, **given)
        assert calls == [1] * 6
        assert list(stack.state_dict()) == names
        return result

    assert stacks.same(plain(), result)
    packed = PackedSeqParams(qkv_format="sbhd")
    calls, with_packs = stacks.train(stacks.build(), packed_seq_params=packed)
    assert calls == [2, 2, 1, 2, 1, 2] and not stacks.same(result, with_packs)
    assert stacks.same(plain(packed_seq_params=packed), with_packs)
    # A frozen embedding: the first layer has nothing to hang a checkpoint on, and still learns.
    calls, frozen = stacks.train(stacks.build(), needs_grad=False)
    assert calls == [1, 2, 1, 2, 1, 2] and stacks.same(plain(needs_grad=False), frozen)

    selective = stacks.build(recompute_granularity="selective")
    calls, also = stacks.train(selective)
    assert calls[0] == calls[1] == calls[3] == calls[5] == 2 and stacks.same(result, also)
    assert stacks.train(stacks.build().eval())[0] == [1] * 6
    with torch.no_grad():
        layer = stacks.build().layers[0]
        layer.mixer.register_forward_pre_hook(lambda *ignored: seen.append(1))
        seen: list[int] = []
        layer(torch.randn(4, 2, stacks.WIDTH))
    assert seen == [1]

    # Full recompute is upstream's from 0.18 on (before, it is another page's): never three times.
    full = {"recompute_granularity": "full", "recompute_method": "uniform"}
    calls, everything = stacks.train(stacks.build(recompute_num_layers=1, **full))
    assert calls in ([2] * 6, [1] * 6) and stacks.same(result, everything)

    # A copy survives a checkpoint of the weights.
    copy = stacks.build()
    torch.manual_seed(2)
    for parameter in copy.parameters():
        torch.nn.init.normal_(parameter)
    copy.load_state_dict(stack.state_dict())
    assert stacks.same(stacks.train(copy)[1], result)


@pytest.mark.parametrize("version", VERSIONS)
def test_mamba_layers_run_twice_and_no_bit_changes(version: str) -> None:
    done = python(patched(version, "mamba_layer_recompute"), RUN)
    assert done.returncode == 0, done.stderr


WITH_MHC = """
from tests.upstream_patches.mamba import test_mamba_layer_recompute as t; t.differences_with_mhc()
"""


def differences_with_mhc() -> None:
    """Print what recomputation changes in models with hyper-connections, by configuration."""
    import os
    from unittest import mock

    import torch
    from megatron.core.ssm import mamba_layer

    from cppmega.proof import small_models
    from cppmega.sizes import mixers as mixer_sizes
    from cppmega.sizes import stated as environment_sizes
    from tests.upstream_patches.mhc import mhc_models

    mhc_models.start()
    mixer = mixer_sizes.Mamba3(head_dim=4, state_dim=8, groups=2, rank=2, chunk=4)
    os.environ["CPPMEGA_MAMBA3"] = environment_sizes.text(mixer)
    os.environ["CPPMEGA_M2RNN"] = environment_sizes.text(mixer_sizes.M2RNN(key_dim=5, value_dim=3))
    recompute = mamba_layer._cppmega_recompute

    def once(layer: Any, forward: Any, hidden_states: Any, context: Any) -> Any:
        return forward(hidden_states)

    class Biased(torch.nn.Linear):
        def __init__(self, config: Any, d_model: int, **ignored: Any) -> None:
            super().__init__(d_model, d_model)

        def forward(self, x: Any, **ignored: Any) -> Any:
            return torch.nn.functional.linear(x, self.weight).tanh(), self.bias

    def own(**options: Any) -> Any:
        return small_models.hybrid(pattern="M*R-", **options)

    def biased(**options: Any) -> Any:
        with (
            mock.patch.dict(os.environ),
            mock.patch.object(mhc_models, "Mixer", Biased),
        ):
            del os.environ["CPPMEGA_MAMBA3"]
            return mhc_models.hybrid("M*M-", **options)

    def step(how: Any, make: Any, batches: int, **options: Any) -> Any:
        runs: list[Any] = []
        with mock.patch.object(mamba_layer, "_cppmega_recompute", how):
            model = make(**mhc_models.MHC, **options)
            for layer in model.decoder.layers:
                if isinstance(layer.inner_layer, mamba_layer.MambaLayer):
                    layer.inner_layer.mixer.register_forward_pre_hook(lambda *_: runs.append(1))
            given = [mhc_models.batch(seed) for seed in range(batches)]
            losses = [model(**small_models.arguments(model, **each)) for each in given]
            weight = torch.linspace(0.5, 2, losses[0].numel()).view_as(losses[0])
            for value in losses:  # all forwards first, as in a pipeline
                (value * weight).sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        return losses, gradients, len(runs)

    found = {}
    for make in (own, biased):
        for batches in (1, 2):
            for named, more in {"": {}, ", mhc": mhc_models.SELECTIVE}.items():
                kept, wanted, one = step(once, make, batches, **more)
                losses, gradients, two = step(recompute, make, batches, **more)
                differ = [name for name, g in wanted.items() if not torch.equal(g, gradients[name])]
                equal = all(map(torch.equal, kept, losses))
                found[f"{make.__name__}, {batches}{named}"] = [equal, differ, one, two]
    print(json.dumps(found))


def test_with_hyper_connections_no_bit_changes() -> None:
    pages = ("mhc_connections", "float16_keep_fp32", "own_mixers", "mamba_layer_recompute")
    done = python(patched("0.19.2", *pages), WITH_MHC)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 8
    for how, row in found.items():
        batches = int(how.split(", ")[1])
        assert row == [True, [], 2 * batches, 4 * batches], how
