"""Train DSA's indexer with the dense loss in the first steps, and with the sparse loss afterwards.

What: With `CPPMEGA_LEMYX_DSA=1` at apply, `DSAttention.forward` computes the indexer loss over all
    keys in the first `CPPMEGA_DSA_DENSE_LOSS_STEPS` steps (recipes: `dsa_dense_loss_steps`), and
    then over the selected keys, as `--dsa-indexer-use-sparse-loss` requests. The dense loss is that
    of `dsa_indexer_kernels`. Step N + 1 is the first with the sparse loss, and rank 0 prints this.
    `train_step` provides the step number, so that micro-batches, recomputations and a resumed run
    agree; a custom training loop calls `cppmega.features.dsa.loss_schedule.begin_step(iteration)`.
    Megatron's arguments, and therefore every checkpoint, contain the number of steps.
Why: The sparse loss covers only the keys that the indexer has selected: an untrained indexer learns
    nothing about the keys that it misses. DeepSeek-V3.2 began with the dense loss, but Megatron has
    only one loss for an entire run. The gate is named after lemyx's kernel, with which the earlier
    overlay computed these steps. That kernel is not used here: it needs as many index heads as
    attention heads, and minimizes a KL divergence per head, while Megatron's loss is that of the
    sum over the heads. DeepSeek also froze the model and attended to all keys in that stage;
    neither is done here.
Upstream: Not sent: upstream would need an argument for the number of steps.
Remove: when Megatron has an argument for the steps that train the indexer with the dense loss.
Numerics: changes results: in the first steps, the gradients of the indexer are bitwise those of a
    run without `--dsa-indexer-use-sparse-loss`. After them, nothing differs. Not run: the backend
    cudnn, which has its own dense loss. CUDA graphs are refused, because a captured step keeps its
    loss.
"""

from __future__ import annotations

from typing import Any

from cppmega.catalogue.megatron_args import uses_dsa
from cppmega.edits import inserting
from cppmega.errors import CppmegaError
from cppmega.features.dsa import loss_schedule as dsa_loss_schedule
from cppmega.page import Edit, Patch, Source

DSA = "megatron/core/transformer/experimental_attention_variant/dsa.py"
FORWARD = f"{DSA}:DSAttention.forward"
STEP = "megatron/training/training.py:train_step"

BEGIN_STEP = """
from cppmega.features.dsa.loss_schedule import begin_step

# Checkpoints hold the arguments, and the trainer compares them when it resumes.
args.cppmega_dsa_dense_loss_steps = begin_step(iteration)
"""
CONFIGURED = 'getattr(self.config, "dsa_indexer_use_sparse_loss", False)'
ASSIGNED = "sparse_indexer_loss = self.config.dsa_indexer_use_sparse_loss"


def _cppmega_uses_sparse_loss(config):
    """Whether the loss of this step is over the chosen keys."""
    from cppmega.features.dsa.loss_schedule import uses_sparse_loss

    return uses_sparse_loss(config)


def _scheduled_everywhere(node: Any) -> Any:
    """Use the step's loss also in the calls with a loss that `dsa_indexer_kernels` adds."""
    from cppmega.rewriting import node_edits

    swap = node_edits.ExpressionSwap(CONFIGURED, "_cppmega_uses_sparse_loss(self.config)")
    swapped = node_edits.swapped(node, swap)
    if not swap.found:
        raise node_edits.mismatch(f"there is no `{CONFIGURED}`")
    return swapped


PATCH = Patch(
    purpose="feature",
    edits=(
        Edit(
            target=FORWARD,
            pins={
                "0.19.2": "bc3bc02b6b7ddf0c",
                "main-d98e8a64": "bc3bc02b6b7ddf0c",
                "dev-d48bd6be": "eb952f1eec56daa5",
            },
            edit=inserting(
                """
                if use_indexer_loss:
                    sparse_indexer_loss = _cppmega_uses_sparse_loss(self.config)
                """,
                after=ASSIGNED,
            ),
            helpers=(_cppmega_uses_sparse_loss,),
        ),
        Edit(
            target=FORWARD,
            pins={
                "0.16.1": "1a94be7b8a955f97",
                "0.17.1": "e97cdc0c18dcc2d5",
                "0.18.2": "e97cdc0c18dcc2d5",
            },
            edit=_scheduled_everywhere,
            helpers=(_cppmega_uses_sparse_loss,),
        ),
        # Wheels of 0.16 have no training loop.
        Edit(
            target=STEP,
            pins={
                "0.17.1": "319de4887d04959a",
                "0.18.2": "727583f3be6ff2a3",
                "0.19.2": "5e68f1c62aa63acb",
                "main-d98e8a64": "9d3b6d398db41be5",
                "dev-d48bd6be": "53a34b483c06a850",
            },
            edit=inserting(BEGIN_STEP, after="args = get_args()"),
            mark="",
        ),
    ),
    after=("dsa_indexer_kernels", "dsa_index_share_holder"),
    reached="forward",
    when=uses_dsa,
    feature=("megatron/core/transformer/experimental_attention_variant/dsa.py:DSAttention",),
    gate=dsa_loss_schedule.GATE,
    variables=(dsa_loss_schedule.STEPS,),
    wanted_by=lambda recipe: recipe.dsa_dense_loss_steps > 0,
)


def fixed_upstream(source: Source) -> bool:
    return "warmup" in source.text(FORWARD)


def verify() -> None:
    import os
    from contextlib import suppress
    from unittest import mock

    import torch
    from megatron.core.transformer.enums import AttnMaskType

    from .._dsa_layer import layer

    torch.manual_seed(0)
    shapes = (6, 2, 2, 4), (6, 2, 4), (6, 2, 2)
    inputs = tuple(torch.randn(shape, requires_grad=True) for shape in shapes)
    query, key, value = (torch.randn(6, 2, 3, 4, requires_grad=True) for _ in range(3))
    x = torch.randn(6, 2, 8)

    def gradients(iteration, sparse=True, begin=dsa_loss_schedule.begin_step):
        begin(iteration)
        attention = layer(*inputs, 3, dsa_indexer_use_sparse_loss=sparse)
        output = attention(query, key, value, None, x, x, attn_mask_type=AttnMaskType.causal)
        return torch.autograd.grad(output.sum(), inputs)

    def same(one, other):
        return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))

    with mock.patch.dict(os.environ, {dsa_loss_schedule.STEPS: "2"}):
        dense, later = gradients(2, sparse=False), gradients(2)
        assert same(gradients(0), dense) and same(gradients(1), dense)
        assert same(gradients(3), later) and not same(dense, later)
        try:
            gradients(None)
        except CppmegaError as error:
            assert error.name == "dsa-dense-loss", error
        else:
            raise AssertionError("a layer trains although the step is unknown")
        with suppress(ImportError):  # a wheel of 0.16
            from megatron.training import training

            assert same(gradients(1, begin=lambda done: _train_step(training, done)), dense)
            assert same(gradients(2, begin=lambda done: _train_step(training, done)), later)


def _train_step(training: Any, iteration: int) -> None:
    """Begin one of Megatron's steps, which ends before its forward pass."""
    from contextlib import suppress
    from unittest import mock

    from cppmega.proof.stand_ins import Arguments

    args, machine = Arguments(), mock.Mock()
    machine.should_run_forward_backward.side_effect = InterruptedError
    with (
        mock.patch.multiple(
            training,
            get_args=lambda: args,
            get_timers=mock.Mock(),
            get_num_microbatches=lambda: 1,
            get_rerun_state_machine=lambda: machine,
        ),
        suppress(InterruptedError),
    ):
        training.train_step(None, None, [], None, None, None, None, iteration=iteration)
    assert args.cppmega_dsa_dense_loss_steps == 2, "checkpoints do not record the steps"
