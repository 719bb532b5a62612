"""Let Liger's cross entropy reduce over the tensor-parallel group if Megatron passes none.

What: The function that `apply_liger_kernel_to_megatron(cross_entropy=True)` substitutes for
    `vocab_parallel_cross_entropy` uses Megatron's tensor-parallel group if it is called without a
    group, as the function that it replaces does.
Why: megatron-core up to 0.18 calls it without a group in every model without
    `--cross-entropy-loss-fusion`. liger-kernel 0.8.5 is the first release whose replacement is the
    function that Megatron calls, and it interprets a missing group as a single rank: with tensor
    parallelism every rank normalizes over its own part of the vocabulary, and a target on another
    rank counts as the largest logit. No error is raised. On two ranks, with three tokens and a
    vocabulary of eight, the losses were 1.88, 0.63, 2.62 on one rank and 0.95, 0.80, 3.43 on the
    other, instead of 3.13, 2.73, 2.81 on both (megatron-core 0.18.2, Liger's kernels in Triton's
    interpreter), and the gradients were wrong as well. From 0.19.0 on Megatron passes the group;
    other callers may still omit it. `cppmega.run` refuses Liger's functions in place of patched
    ones, so that a run with them omits `fused_cross_entropy_grad_dtype` and
    `cross_entropy_fusion_linear`, whose code Liger replaces.
Upstream: Not sent: no report of it was found.
Remove: when the function of `_patch_vocab_parallel_cross_entropy` looks up the group itself.
Numerics: changes results of runs with tensor parallelism whose caller passes no group
"""

from cppmega.edits import inserting
from cppmega.page import Edit, Patch, Source

TARGET = (
    "liger_kernel/megatron/monkey_patch.py:"
    "_patch_vocab_parallel_cross_entropy.liger_vocab_parallel_cross_entropy"
)

PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=TARGET,
            pins={"0.8.4": "afec66e8c8f0f2e0", "0.8.5": "afec66e8c8f0f2e0"},
            edit=inserting(
                """
                if tp_group is None:
                    from megatron.core.parallel_state import get_tensor_model_parallel_group

                    tp_group = get_tensor_model_parallel_group(check_initialized=False)
                """,
                before="""
                if label_smoothing is _LABEL_SMOOTHING_UNSET:
                    return default_ce(vocab_parallel_logits, target, tp_group=tp_group)
                """,
            ),
            distribution="liger-kernel",
        ),
    ),
    reached="never",  # Megatron's arguments do not show whether a script applies Liger's kernels
    # Up to 0.8.0 there is no function for tensor parallelism.
    feature=("liger_kernel/ops/vocab_parallel_cross_entropy.py:LigerVocabParallelCEFunction",),
    needs=("triton",),
)


def fixed_upstream(source: Source) -> bool:
    return "get_tensor_model_parallel_group" in source.text(TARGET)


def verify() -> None:
    import importlib
    from unittest import mock

    import torch
    from liger_kernel.megatron import cross_entropy, monkey_patch
    from megatron.core import parallel_state, tensor_parallel
    from torch.nn.functional import cross_entropy as reference

    logits = torch.tensor([[[1.0, -2.0, 0.5, 3.0]], [[0.0, 2.0, -1.0, 1.0]]])
    labels = torch.tensor([[1], [0]])  # both are on this rank, which has two of the four tokens
    whole = reference(logits[:, 0], labels[:, 0], reduction="none")
    alone = reference(logits[:, 0, :2], labels[:, 0], reduction="none")

    class Group:
        """A tensor-parallel group of two ranks; the other rank has the rest of the vocabulary."""

        def all_reduce(self, mine):  # type: ignore[no-untyped-def]
            return mine + logits[..., 2:].exp().sum(-1)

    class CrossEntropy:
        """Liger's cross entropy in plain torch: its kernels need a GPU."""

        def __init__(self, **options):  # type: ignore[no-untyped-def]
            self.options = options

        def __call__(self, local, target, tp_group=None):  # type: ignore[no-untyped-def]
            total = local.exp().sum(-1)
            total = total if tp_group is None else tp_group.all_reduce(total)
            return total.log() - local.gather(-1, target[..., None]).squeeze(-1)

    with mock.patch.object(cross_entropy, "LigerMegatronCrossEntropy", CrossEntropy):
        monkey_patch._patch_vocab_parallel_cross_entropy()
    loss = importlib.import_module(
        "megatron.core.tensor_parallel.cross_entropy"
    ).vocab_parallel_cross_entropy
    called = tensor_parallel.vocab_parallel_cross_entropy  # Liger's own from 0.8.5 on
    assert called is loss or called.__module__.startswith("megatron")
    group = Group()
    # Megatron has no group before it is initialized: then Liger computes as before, on one rank.
    for tensor_parallel_group, wanted in ((group, whole), (None, alone)):
        with mock.patch.object(
            parallel_state, "_TENSOR_MODEL_PARALLEL_GROUP", tensor_parallel_group
        ):
            for options in ({}, {"label_smoothing": 0.0}):
                ours = loss(logits[..., :2], labels, **options)[:, 0]
                assert torch.allclose(ours, wanted), f"the losses are {ours}, not {wanted}"
                given = loss(logits[..., :2], labels, tp_group=group, **options)[:, 0]
                assert torch.allclose(given, whole), "the group that was passed is not used"
