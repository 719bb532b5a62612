"""Run DSA's indexer without the fast_hadamard_transform package.

What: `rotate_activation` falls back to a differentiable Hadamard transform from `cppmega.ops` when
    `fast_hadamard_transform` cannot be imported; otherwise the package is still used. On CUDA it is
    a single kernel: 0.14 ms for queries of shape `[4096, 8, 32, 128]`, compared with 4.8 ms for one
    launch per stage (benchmarks/results/hadamard_h200.md).
Why: Without the package, the first forward pass through a DSA layer raises AssertionError, and no
    release on the package index can be installed: there are no wheels, and each of the five sdists
    (1.0.0.post1 to 1.1.0) lacks its C++ and CUDA sources (seen on 0.16.1 to 0.19.2).
Upstream: Not sent: the package's releases have to be fixed; upstream installs it from git.
Remove: when Megatron no longer needs the package, or the index has a release that installs.
Numerics: none (bitwise): the same fp32 sums in the same order as in the package's kernel, rounded
    once (derived from the kernel's source; the two were not run side by side).
"""

from typing import Any

from cppmega.catalogue.megatron_args import uses_dsa
from cppmega.edits import in_order, replacing
from cppmega.page import Edit, Patch, Source

TARGET = "megatron/core/transformer/experimental_attention_variant/dsa.py:rotate_activation"


def rotates(args: Any) -> bool:
    """Whether the run's DSA indexers rotate their activations (optional since 0.19)."""
    return uses_dsa(args) and bool(getattr(args, "dsa_indexer_rotate_activation", True))


PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=TARGET,
            pins={
                "0.16.1": "f717e71c6759c41d",
                "0.17.1": "f717e71c6759c41d",
                "0.18.2": "f717e71c6759c41d",
                "0.19.2": "f717e71c6759c41d",
            },
            edit=in_order(
                replacing(
                    "assert hadamard_transform is not None, "
                    "'fast_hadamard_transform is not installed.'",
                    """
                    # The package computes the same sums in the same order.
                    transform = hadamard_transform
                    if transform is None:
                        from cppmega.ops.pointwise.hadamard import walsh_hadamard as transform
                    """,
                ),
                replacing(
                    "hadamard_transform(x, scale=hidden_size ** -0.5)",
                    "transform(x, scale=hidden_size**-0.5)",
                ),
            ),
        ),
    ),
    reached="forward",
    feature=("megatron/core/transformer/experimental_attention_variant/dsa.py:DSAIndexer",),
    when=rotates,
)


def fixed_upstream(source: Source) -> bool:
    file = source.file(TARGET.partition(":")[0])
    return "def rotate_activation" in file and "fast_hadamard_transform" not in file


def verify() -> None:
    from unittest import mock

    import torch
    from megatron.core.transformer.experimental_attention_variant import dsa

    x = torch.randn(3, 128, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(3, 128, dtype=torch.bfloat16)
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(7):
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    with mock.patch.object(dsa, "hadamard_transform", None):  # even if it can be imported
        y = dsa.rotate_activation(x)
        y.backward(grad)
    for ours, given in ((y, x), (x.grad, grad)):
        exact = given.double() @ matrix * 128**-0.5
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.double(), exact, rtol=2**-8, atol=1e-5)
