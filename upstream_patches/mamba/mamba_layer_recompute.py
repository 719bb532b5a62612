"""Recompute the Mamba layers, and only these, in the backward pass.

What: With `CPPMEGA_MAMBA_RECOMPUTE=1` at apply, every `MambaLayer` keeps only its input and runs a
    second time in the backward pass. This has no effect with `recompute_granularity=full` (whose
    method `block` does not recompute the layers beyond `recompute_num_layers`, Mamba layers
    included), in evaluation, and in inference.
Why: Megatron recomputes either the complete layers of a hybrid model (`full`) or its attention, MLP
    and MoE parts (`selective`), but not the Mamba layers alone, whose projections and convolution
    hold most of the activations of a model with many Mamba layers. A layer then keeps one hidden
    state instead of all its intermediate tensors, at the cost of a second forward pass (the calls
    were counted on CPU, 0.15.3 to 0.19.2).
Upstream: Not sent: upstream would need a module name such as `recompute_modules=mamba`.
Remove: when `recompute_modules` supports Mamba layers.
Numerics: none (bitwise); parameters keep their names. Random numbers are replayed by Megatron's own
    checkpoint (Transformer Engine's under FP8 and FP4). Not run: FP8, FP4, and CUDA graphs that
    capture Mamba layers.
"""

from typing import Any

from cppmega.catalogue.megatron_args import layer_pattern
from cppmega.page import Edit, Patch, Source
from cppmega.rules.rule import Rule

TARGET = "megatron/core/ssm/mamba_layer.py:MambaLayer.forward"


def has_mamba(args: Any) -> bool:
    """Whether any layer is a `MambaLayer`; a hybrid model without a pattern has no other mixers."""
    pattern = layer_pattern(args)
    mixed = bool({"M", "R"} & {*pattern})
    return mixed or (not pattern and bool(getattr(args, "is_hybrid_model", False)))


def _cppmega_recompute(module, forward, hidden_states, inference_context):
    """Run `forward`, and in training once more in the backward instead of keeping what it made."""
    config = module.config
    if (
        not module.training
        or inference_context is not None
        or config.recompute_granularity == "full"  # already inside a checkpoint
        # Without a gradient for its input, the parameters of a checkpoint would get none either.
        or not (torch.is_grad_enabled() and hidden_states.requires_grad)  # noqa: F821
    ):
        return forward(hidden_states)

    from megatron.core import parallel_state, tensor_parallel

    # `distribute_saved_activations` would cut up the input, which the layer before may have saved.
    distribute = False
    if config.fp8 or getattr(config, "fp4", None):
        from megatron.core.extensions.transformer_engine import te_checkpoint

        return te_checkpoint(
            forward,
            distribute,
            tensor_parallel.random.get_cuda_rng_tracker,
            parallel_state.get_tensor_model_parallel_group(),
            hidden_states,
        )
    return tensor_parallel.checkpoint(forward, distribute, hidden_states)


def _body_into_function(node: Any) -> Any:
    """Turn everything after the handling of `inference_params` into a function of the input."""
    import libcst as cst

    from cppmega.rewriting import node_edits

    before = "inference_context = deprecate_inference_params(inference_context, inference_params)"
    first = node_edits.shape(node_edits.statements(before)[0])
    body = list(node.body.body)
    at = [node_edits.shape(statement) for statement in body].index(first) + 1
    function = cst.parse_statement("def forward(hidden_states):\n    pass\n")
    end = node_edits.statements(
        "return _cppmega_recompute(self, forward, hidden_states, inference_context)"
    )
    inner = function.with_changes(body=cst.IndentedBlock(body[at:]))
    return node.with_changes(body=node.body.with_changes(body=[*body[:at], inner, *end]))


PATCH = Patch(
    purpose="feature",
    edits=(
        Edit(
            target=TARGET,
            pins={
                "0.15.3": "827eb7757090cfaa",
                "0.16.1": "4f169b4f0c7c971d",
                "0.17.1": "6801a6c59ca952dc",
                "0.18.2": "6801a6c59ca952dc",
                "0.19.2": "6801a6c59ca952dc",
                "main-d98e8a64": "ecbb1d6b29c0fa83",
            },
            edit=_body_into_function,
            helpers=(_cppmega_recompute,),
        ),
    ),
    reached="forward",
    when=has_mamba,
    gate="CPPMEGA_MAMBA_RECOMPUTE",
    rules=(
        Rule(
            concerns="CPPMEGA_MAMBA_RECOMPUTE",
            name="argument-without-effect",
            when=lambda run: run.recompute_granularity == "full",
            what="CPPMEGA_MAMBA_RECOMPUTE has no effect with --recompute-granularity full.",
            why="Complete layers are recomputed, and the Mamba layers with them.",
            cure="unset CPPMEGA_MAMBA_RECOMPUTE and apply again, or --recompute-granularity "
            "selective",
        ),
    ),
)


def fixed_upstream(source: Source) -> bool:
    return "checkpoint" in source.text(TARGET)


def verify() -> None:
    from types import SimpleNamespace
    from unittest import mock

    import torch
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.ssm.mamba_layer import MambaLayer
    from megatron.core.tensor_parallel import random

    class Mixer(torch.nn.Linear):
        calls = 0

        def forward(self, x, inference_context=None, packed_seq_params=None):
            self.calls += 1
            return super().forward(x).exp(), None

    def train(granularity=None, training=True):
        torch.manual_seed(0)
        layer = MambaLayer.__new__(MambaLayer)
        torch.nn.Module.__init__(layer)
        layer.config = SimpleNamespace(
            params_dtype=torch.float32, fp32_residual_connection=False, bias_dropout_fusion=False
        )
        layer.config.fp8 = layer.config.fp4 = None
        layer.config.recompute_granularity = granularity
        layer.mixer, layer.norm, layer.layer_number = Mixer(4, 4), torch.nn.LayerNorm(4), 1
        layer.mamba_bda, layer.hidden_dropout = get_bias_dropout_add, 0.3
        layer.residual_in_fp32, layer.bias_dropout_add_exec_handler = False, torch.enable_grad
        layer.train(training)
        kept, x = [], torch.ones(3, 1, 4, requires_grad=True)
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
        with hooks:
            out = layer.forward(x)
        out.square().sum().backward()
        grads = torch.cat([p.grad.flatten() for p in (x, *layer.parameters())])
        return layer.mixer.calls, len(kept), grads

    with (
        mock.patch.object(random, "_get_cuda_rng_state", return_value=None),
        mock.patch.object(random, "_set_cuda_rng_state"),
    ):
        recomputed, full, evaluation = train(), train("full"), train(training=False)
    assert (recomputed[0], full[0], evaluation[0]) == (2, 1, 1), (recomputed, full, evaluation)
    assert recomputed[1] == 1 < full[1]  # only its input
    assert torch.equal(recomputed[2], full[2])
