"""DSA layers choose the same keys and learn the same loss as Megatron's own, on every version."""

import pytest

from tests.support import patched, pristine
from tests.upstream_patches.dsa.dsa_layers import CASES, PARALLEL, answers, assert_same, same, stock


# 0.17.1 has the text of 0.18.2, and main and dev that of 0.19.2.
@pytest.mark.parametrize("version", ["0.16.1", "0.18.2", "0.19.2"])
def test_keys_losses_and_gradients_are_those_of_stock(version: str) -> None:
    theirs = stock(version)
    (ours,) = answers(patched(version, "dsa_indexer_kernels"), CASES)
    assert theirs.keys() == ours.keys()
    for name in theirs:
        assert_same(ours[name], theirs[name], name)
    for name in ("own mask", "mask with holes"):
        assert "not that of causal rows" in ours[name].pop("declined")[0]
        assert not ours[name]["reached"]
    assert ours["dense"]["reached"]
    assert not any(found.get("declined") for found in ours.values())
    # Without a loss there is nothing to compute: the first pass of a recompute chooses keys alone.
    assert len(ours["recomputed"]["chosen"]) == 2
    assert ours["recomputed"]["chosen"][0] == ours["recomputed"]["chosen"][1]


def test_the_kernels_compute_the_sparse_loss_of_keys_per_head_as_stock_does() -> None:
    code = "print(json.dumps(run(sparse=True, kernels=KERNELS)))"
    (theirs,) = answers(pristine("0.18.2"), code.replace("KERNELS", "False"))
    root = patched("0.18.2", "dsa_indexer_kernels")
    (ours,) = answers(root, code.replace("KERNELS", "True"), interpreted=True)
    assert ours["targets"] == 1 and not ours["declined"]
    assert_same(ours, theirs, "on interpreted kernels")


@pytest.mark.parametrize("version", ["0.18.2", "0.19.2"])
def test_tensor_parallel_ranks_choose_and_lose_alike(version: str) -> None:
    root = patched(version, "dsa_indexer_kernels")
    alone, *ranks = *answers(root, PARALLEL), *answers(root, PARALLEL, tensor=2)
    assert len(ranks) == 2
    for at, whole in enumerate(alone):
        for rank in ranks:
            assert rank[at]["chosen"] == whole["chosen"]
            assert same(rank[at]["loss"], whole["loss"])
            assert all(map(same, rank[at]["grads"][2:], whole["grads"][2:]))


def test_context_parallel_ranks_add_up_to_one() -> None:
    root = patched("0.19.2", "dsa_indexer_kernels")
    (alone,), ranks = answers(root, PARALLEL), answers(root, PARALLEL, context=2)
    theirs = answers(pristine("0.19.2"), PARALLEL, context=2)
    for at, whole in enumerate(alone):
        halves = [rank[at]["chosen"][0] for rank in ranks]
        assert sorted(halves[0] + halves[1]) == sorted(whole["chosen"][0])
        # Each rank has the mean over its rows, and there are as many on each.
        mean = [
            sum(values) / 2 for values in zip(*(rank[at]["loss"] for rank in ranks), strict=True)
        ]
        assert same(mean, whole["loss"])
        for rank, other in zip(ranks, theirs, strict=True):
            assert all(map(same, rank[at]["grads"], other[at]["grads"]))
