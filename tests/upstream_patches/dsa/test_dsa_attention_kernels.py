"""DSA layers attend as Megatron's own do: outputs and gradients, on every version."""

import pytest
import torch

from cppmega.ops import dsa_attention
from cppmega.ops.common.device import gpu_of
from cppmega.proof.stand_ins import Arguments
from tests.support import patched, pristine
from tests.support.rules import broken
from tests.upstream_patches.dsa.dsa_layers import (
    CASES,
    PARALLEL,
    answers,
    assert_same,
    patch_of,
    same,
    stock,
)

ATTENTION, INDEXER = "dsa_attention_kernels", "dsa_indexer_kernels"


# 0.17.1 has the text of 0.18.2, and main and dev that of 0.19.2.
@pytest.mark.parametrize(
    ("version", "pages"),
    [
        ("0.16.1", (ATTENTION, INDEXER)),
        ("0.18.2", (ATTENTION,)),
        ("0.18.2", (ATTENTION, INDEXER)),
        ("0.19.2", (ATTENTION, INDEXER)),
    ],
)
def test_outputs_and_gradients_are_those_of_stock(version: str, pages: tuple[str, ...]) -> None:
    theirs = stock(version)
    (ours,) = answers(patched(version, *pages), CASES)
    assert theirs.keys() == ours.keys()
    for name in theirs:
        assert_same(ours[name], theirs[name], name)
        assert ATTENTION in ours[name]["reached"], name
        assert not any(ATTENTION in said for said in ours[name]["declined"]), name


def test_tensor_and_context_parallel_ranks_attend_as_those_of_stock() -> None:
    root = patched("0.19.2", ATTENTION, INDEXER)
    for ranks in ({"tensor": 2}, {"context": 2}):
        theirs, ours = (answers(tree, PARALLEL, **ranks) for tree in (pristine("0.19.2"), root))
        assert len(theirs) == len(ours) == 2
        for one, other in zip(ours, theirs, strict=True):
            for mine, its in zip(one, other, strict=True):
                assert ATTENTION in mine["reached"]
                assert same(mine["out"], its["out"])
                assert all(map(same, mine["grads"], its["grads"]))


@pytest.mark.parametrize(
    ("widths", "backend"),
    [
        ((64, 64), "none"),
        ((512, 64), "tilelang"),
        ((513, 64), "none"),
        ((64, 129), "tilelang"),
        ((513, 64), "cudnn"),
    ],
)
def test_the_preflight_names_the_widths_that_the_kernels_decline(
    widths: tuple[int, int], backend: str
) -> None:
    latent, rotary = widths
    given = {"experimental_attention_variant": "dsa", "dsa_kernel_backend": backend}
    given |= {"num_attention_heads": 64, "tensor_model_parallel_size": 2, "num_layers": 2}
    given |= {"kv_lora_rank": latent, "qk_pos_emb_head_dim": rotary}
    gpu = gpu_of(torch.device("cpu"))
    declined = dsa_attention.absorbed_obstacle(32, latent + rotary, latent, gpu) is not None

    def of_page(**more: bool) -> int:
        return sum(ATTENTION in error.what for error in broken(ATTENTION, **given, **more))

    assert of_page(bf16=True) == (declined and backend != "cudnn")
    assert of_page(bf16=False) == (0 if backend == "cudnn" else 1 + declined)


@pytest.mark.parametrize("width", [256, 257])
def test_the_preflight_names_the_widths_per_head(width: int) -> None:
    widths = {"qk_head_dim": width - 64, "qk_pos_emb_head_dim": 64, "v_head_dim": 64}
    # Up to 0.18, no argument names a backend.
    args = {"experimental_attention_variant": "dsa", "kv_lora_rank": 512, "num_layers": 2}
    found = broken(ATTENTION, **args, **widths, bf16=False, fp16=True)
    assert bool(found) == (dsa_attention.per_head_obstacle(width, 64) is not None)


@pytest.mark.parametrize(
    ("sizes", "reaches"),
    [
        ({"dsa_kernel_backend": "none"}, True),
        ({"dsa_kernel_backend": "cudnn"}, False),
        ({"dsa_kernel_backend": "tilelang"}, True),
    ],
)
def test_a_run_must_reach_the_page_unless_cudnn_attends(
    sizes: dict[str, object], reaches: bool
) -> None:
    given = {"experimental_attention_variant": "dsa", "kv_lora_rank": 512, "dsa_indexer_topk": 64}
    given |= {"num_attention_heads": 64, "tensor_model_parallel_size": 2, "qk_pos_emb_head_dim": 64}
    when = patch_of(ATTENTION).when
    assert when is not None and when(Arguments(**given | sizes)) == reaches
    assert not when(Arguments(**given | sizes | {"experimental_attention_variant": None}))
