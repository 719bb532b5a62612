"""With full recomputation a hybrid stack runs twice, and the results are bitwise the same."""

import pytest

from tests.support import patched, pristine, python

RUN = "from tests.upstream_patches.mamba import test_mamba_stack_full_recompute as t; t.{}()"


def check() -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    from tests.upstream_patches import stacks

    stacks.start()
    full = {"recompute_granularity": "full"}
    methods = {  # of six layers
        ("uniform", 1): [2] * 6,
        ("uniform", 4): [2] * 6,
        ("block", 0): [1] * 6,
        ("block", 4): [2, 2, 2, 2, 1, 1],
    }
    once, plain = stacks.train(stacks.build())
    names = list(stacks.build().state_dict())
    assert once == [1] * 6
    for (method, number), expected in methods.items():
        config = {**full, "recompute_method": method, "recompute_num_layers": number}
        stack = stacks.build(**config)
        calls, result = stacks.train(stack)
        assert calls == expected, (method, number, calls)
        assert stacks.same(plain, result)
        assert list(stack.state_dict()) == names

    uniform = {**full, "recompute_method": "uniform", "recompute_num_layers": 2}
    # The packed-sequence parameters come along (the mixer doubles its output for them).
    packed = PackedSeqParams(qkv_format="sbhd")
    _, expected = stacks.train(stacks.build(), packed_seq_params=packed)
    calls, result = stacks.train(stacks.build(**uniform), packed_seq_params=packed)
    assert calls == [2] * 6 and stacks.same(expected, result) and not stacks.same(plain, result)
    # A frozen embedding: what has no gradient at its input is not recomputed, and still learns.
    _, expected = stacks.train(stacks.build(), needs_grad=False)
    calls, result = stacks.train(stacks.build(**uniform), needs_grad=False)
    assert calls == [1, 1, 2, 2, 2, 2] and stacks.same(expected, result)
    block = {**full, "recompute_method": "block", "recompute_num_layers": 2}
    calls, result = stacks.train(stacks.build(**block), needs_grad=False)
    assert calls == [1, 2, 2, 1, 1, 1] and stacks.same(expected, result)
    # Evaluation, and selective recompute.
    assert stacks.train(stacks.build(**uniform).eval())[0] == [1] * 6
    assert stacks.train(stacks.build(recompute_granularity="selective"))[0] == [1] * 6
    stack = stacks.build(**uniform)
    stack.is_mtp_layer = True  # its MTP layer has a checkpoint around it
    assert stacks.train(stack)[0] == [1] * 6


def check_stock() -> None:
    from tests.upstream_patches import stacks

    stacks.start()
    full = {"recompute_granularity": "full", "recompute_method": "uniform"}
    assert stacks.train(stacks.build(recompute_num_layers=1, **full))[0] == [1] * 6


@pytest.mark.parametrize("version", ["0.16.1", "0.17.1"])
def test_layers_run_twice_and_no_bit_changes(version: str) -> None:
    done = python(patched(version, "mamba_stack_full_recompute"), RUN.format("check"))
    assert done.returncode == 0, done.stderr


def test_stock_accepts_the_option_and_does_nothing() -> None:
    done = python(pristine("0.17.1"), RUN.format("check_stock"))
    assert done.returncode == 0, done.stderr
