"""Only the Mamba layers run twice, and the results are bitwise the same."""

import pytest

from tests.support import VERSIONS, patched, python

RUN = "from tests.upstream_patches import test_mamba_layer_recompute as t; t.check()"


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
