"""Support full recomputation in a Mamba or hybrid stack.

What: `MambaStack.forward` runs its layers under activation checkpoints with
    `recompute_granularity=full`: in chunks of `recompute_num_layers` layers (`uniform`), or that
    many first layers one by one (`block`), as the stack of a GPT model does.
Why: Up to 0.17 the class does not support recomputation: the option is accepted and silently
    ignored, and every activation of every layer is kept (on CPU, each layer ran once with `full`
    where it must run twice).
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/4496 (in 0.18.0, where it is `HybridStack`)
Remove: when `MambaStack.forward` reads `recompute_granularity`, or no longer exists (0.18.0).
Numerics: none (bitwise); parameters keep their names
"""

from typing import Any

from cppmega.catalogue.megatron_args import layer_pattern, recomputes
from cppmega.page import Edit, Patch, Source

OLD_STACK = "megatron/core/ssm/mamba_block.py:MambaStack"
STACKS = (OLD_STACK, "megatron/core/models/hybrid/hybrid_block.py:HybridStack")
TARGET = f"{OLD_STACK}.forward"


def _cppmega_run_layers(stack, run, hidden_states):
    """Run a stack's layers, and under full recompute once more in the backward."""
    from functools import partial

    from megatron.core import parallel_state, tensor_parallel

    config, layers = stack.config, list(stack.layers)
    # An MTP layer checkpoints itself, its stack included.
    in_mtp = getattr(stack, "is_mtp_layer", False)
    if config.recompute_granularity != "full" or not stack.training or in_mtp:
        return run(layers, hidden_states)
    if config.recompute_method == "uniform":
        size, left = config.recompute_num_layers, len(layers)
    elif config.recompute_method == "block":
        size, left = 1, config.recompute_num_layers
    else:
        raise ValueError("Invalid activation recompute method.")

    for at in range(0, len(layers), size):
        forward = partial(run, layers[at : at + size])
        # Without a gradient for its input, the parameters of a checkpoint would get none either.
        if not left or not hidden_states.requires_grad:
            hidden_states = forward(hidden_states)
            continue
        left -= 1
        if config.fp8 or getattr(config, "fp4", None):
            from megatron.core.extensions.transformer_engine import te_checkpoint

            hidden_states = te_checkpoint(
                forward,
                config.distribute_saved_activations,
                tensor_parallel.random.get_cuda_rng_tracker,
                parallel_state.get_tensor_model_parallel_group(),
                hidden_states,
            )
        else:
            hidden_states = tensor_parallel.checkpoint(
                forward, config.distribute_saved_activations, hidden_states
            )
    return hidden_states


def _loop_into_function(node: Any) -> Any:
    """Turn `for layer in self.layers: ...` into a function of the layers and their input.

    Masks, rotary embeddings and packed-sequence parameters need no gradient: they remain in its
    closure, under the names that they have in each version.
    """
    import libcst as cst

    from cppmega.rewriting import node_edits

    found = 0
    loop_head = node_edits.shape(cst.parse_statement("for layer in self.layers: pass"))
    function = cst.parse_statement("def run(layers, hidden_states):\n    pass\n")
    last = node_edits.statements("return hidden_states")[0]
    call = "hidden_states = _cppmega_run_layers(self, run, hidden_states)"

    class Swap(cst.CSTTransformer):
        def leave_IndentedBlock(self, original_node: Any, updated_node: Any) -> Any:  # noqa: N802
            nonlocal found
            body = []
            for statement in updated_node.body:
                empty = cst.SimpleStatementSuite([cst.Pass()])
                is_loop = isinstance(statement, cst.For) and loop_head == node_edits.shape(
                    statement.with_changes(body=empty, leading_lines=())
                )
                if not is_loop:
                    body.append(statement)
                    continue
                found += 1
                loop = statement.with_changes(iter=cst.Name("layers"))
                block = cst.IndentedBlock([loop, last])
                body += [function.with_changes(body=block), *node_edits.statements(call)]
            return updated_node.with_changes(body=body)

    done = node.visit(Swap())
    if found != 1:
        raise node_edits.mismatch(f"the loop over the layers occurs {found} times")
    return done


PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=TARGET,
            pins={
                "0.15.3": "02811ad7a839403a",
                "0.16.1": "55f379e3bbe5c684",
                "0.17.1": "4b57784b860f9ea5",
            },
            edit=_loop_into_function,
            helpers=(_cppmega_run_layers,),
        ),
    ),
    reached="forward",
    when=lambda args: (
        recomputes(args) and bool(layer_pattern(args) or getattr(args, "is_hybrid_model", False))
    ),
)


def fixed_upstream(source: Source) -> bool:
    texts = [text for stack in STACKS if (text := source.text(f"{stack}.forward"))]
    return bool(texts) and all("recompute_granularity" in text for text in texts)


def verify() -> None:
    from types import SimpleNamespace
    from unittest import mock

    import torch
    from megatron.core.tensor_parallel import random

    try:
        from megatron.core.models.hybrid.hybrid_block import HybridStack as Stack
    except ImportError:
        from megatron.core.ssm.mamba_block import MambaStack as Stack

    class Layer(torch.nn.Linear):
        calls, layer_number = 0, 1

        def forward(self, hidden_states, **given):
            self.calls += 1
            return torch.nn.functional.dropout(super().forward(hidden_states).tanh(), 0.3)

    def train(**config):
        torch.manual_seed(0)
        stack = Stack.__new__(Stack)
        torch.nn.Module.__init__(stack)
        stack.layers = torch.nn.ModuleList(Layer(4, 4) for _ in range(5))
        stack.pre_process, stack.post_process, stack.post_layer_norm = True, False, False
        stack.num_layers_per_pipeline_rank = len(stack.layers)
        stack.config = SimpleNamespace(
            fp8=None, fp4=None, flash_decode=False, cuda_graph_impl="none", cuda_graph_scope=[]
        )
        stack.config.recompute_granularity, stack.config.distribute_saved_activations = None, False
        stack.config.enable_hyper_connections = False
        stack.config.__dict__.update(config)
        stack(torch.ones(2, 1, 4, requires_grad=True), None).sum().backward()
        grads = [parameter.grad for parameter in stack.parameters()]
        return [layer.calls for layer in stack.layers], torch.cat([g.flatten() for g in grads])

    with (
        mock.patch.object(random, "_get_cuda_rng_state", return_value=None),
        mock.patch.object(random, "_set_cuda_rng_state"),
    ):
        once, plain = train()
        full = {"recompute_granularity": "full", "recompute_num_layers": 2}
        uniform, chunks = train(recompute_method="uniform", **full)
        block, some = train(recompute_method="block", **full)
    assert (once, uniform, block) == ([1] * 5, [2] * 5, [2, 2, 1, 1, 1]), (once, uniform, block)
    assert torch.equal(plain, chunks) and torch.equal(plain, some)
