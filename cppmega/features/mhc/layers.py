"""Megatron's layers and stacks with hyper-connections, for the page mhc_connections.

A layer of a hybrid stack is wrapped, as in 0.20, so the keys of its parameters begin with
`inner_layer.`. A layer of a GPT model keeps its keys, and its two sites are attributes of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.module import GraphableMegatronModule
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor

from cppmega.errors import CppmegaError
from cppmega.features.mhc import connections as mhc
from cppmega.features.mhc import options
from cppmega.features.mhc import recompute as mhc_recompute
from cppmega.sizes.megatron_args import graph_parts

SITES = {
    "self_attention": ("self_attn_bda", "self_attention_hyper_connection"),
    "mlp": ("mlp_bda", "mlp_hyper_connection"),
}
"""Sub-layer of a TransformerLayer -> its bias-dropout-add, and the name of its site."""

UPSTREAMS = "supports_mhc_connections"
"""The attribute by which main knows its own layers with streams."""
GRAPHS = "cudagraph_manager"
"""The attribute that holds a layer's local CUDA graphs, if it is captured."""


class HyperConnectionHybridLayer(GraphableMegatronModule):  # type: ignore[misc]
    """A layer of a hybrid stack with a site around it; it is called like the layer itself.

    Where the layer is captured in a CUDA graph, the graph is the wrapper's, and holds the site. A
    graph that ends before the experts is that of the layer.
    """

    def __init__(self, config: Any, layer: Any) -> None:
        super().__init__(config)
        self.inner_layer = layer
        self.layer_number = layer.layer_number
        self.hyper_connection = mhc.HyperConnectionModule(config)
        if hasattr(layer, "tp_group"):
            self.tp_group = layer.tp_group
        self._bias: list[Tensor | None] = []
        if isinstance(layer, MambaLayer):
            layer.mamba_bda = self._without_write
        else:
            setattr(layer, _only_output(layer), self.hyper_connection.bias_dropout_add)
        if hasattr(layer, GRAPHS):
            setattr(self, GRAPHS, getattr(layer, GRAPHS))
            delattr(layer, GRAPHS)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        """Return what the layer returns, with streams in place of hidden states."""
        read = self.hyper_connection.read(hidden_states)
        with mhc_recompute.scope(self.hyper_connection):
            out = self.inner_layer(hidden_states=read, **kwargs)
        if not isinstance(self.inner_layer, MambaLayer):
            return out
        (bias,) = self._bias
        write = self.hyper_connection.bias_dropout_add(self.training, False)
        return write((out, bias), read, self.inner_layer.hidden_dropout)

    def _without_write(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """Replace a Mamba layer's `mamba_bda`: the layer returns the mixer's output.

        `mamba_layer_recompute` runs the layer again in the backward pass, when its site is not
        open. The bias, a parameter, goes around its checkpoint, which cannot return one.
        """

        def output(out_with_bias: tuple[Tensor, Tensor | None], *ignored: Any) -> Tensor:
            out, bias = out_with_bias
            self._bias = [bias]
            return out

        return output

    def mamba_state_shapes_per_request(self) -> Any:
        """Return the shapes of the Mamba layer."""
        return self.inner_layer.mamba_state_shapes_per_request()

    def create_mcore_cudagraph_manager(self, config: Any) -> None:
        """Create nothing: the layer knows whether it is captured, and has its graphs already."""

    def _should_call_local_cudagraph(self, *args: Any, **kwargs: Any) -> bool:
        # No inference with graphs has been tested.
        infers = torch.is_inference_mode_enabled() or kwargs.get("inference_context") is not None
        return hasattr(self, GRAPHS) and not infers

    def get_layer_static_inputs(self, seq_length: int, micro_batch_size: int) -> Any:
        """Return those of the layer, with streams if the graph begins with them."""
        inputs = self.inner_layer.get_layer_static_inputs(seq_length, micro_batch_size)
        if not leaves_experts(self.inner_layer):
            inputs |= super().get_layer_static_inputs(seq_length, micro_batch_size)
        return inputs

    def _get_submodules_under_cudagraphs(self) -> Any:
        inner = leaves_experts(self.inner_layer)
        return self.inner_layer._get_submodules_under_cudagraphs() if inner else [self]

    def _te_cuda_graph_capture(self, *args: Any, **kwargs: Any) -> Any:
        if leaves_experts(self.inner_layer):
            return self.inner_layer._te_cuda_graph_capture(*args, **kwargs)
        out = self.forward(*args, **kwargs)
        return out[:1] if isinstance(out, tuple) else out  # a graph returns only tensors

    def _te_cuda_graph_replay(self, *args: Any, **kwargs: Any) -> Any:
        inner = self.inner_layer
        if leaves_experts(inner):
            for name in ("cuda_graphs", "cuda_graph_manual_hooks", "current_microbatch"):
                setattr(inner, name, getattr(self, name, 0))
            return self.forward(*args, **kwargs)
        out = super()._te_cuda_graph_replay(*args, **kwargs)
        return (*out, None) if isinstance(out, tuple) else out

    def _get_te_cuda_graph_replay_args(self, *args: Any, **kwargs: Any) -> Any:
        self.inner_layer.current_microbatch = getattr(self, "current_microbatch", 0)
        return self.inner_layer._get_te_cuda_graph_replay_args(*args, **kwargs)


def _only_output(layer: Any) -> str:
    """The attribute that holds the bias-dropout-add of the only sub-layer."""
    outputs = [bda for _, bda, _ in _sub_layers(layer)]
    if len(outputs) != 1:
        raise CppmegaError(
            "mhc-layer-unsupported",
            f"Layer {layer.layer_number} ({type(layer).__name__}) has {len(outputs)} sub-layers "
            "that add to the residual.",
            "A hyper-connection in a hybrid stack belongs to exactly one sub-layer.",
            "train without --enable-mhc-connections, or split the layer",
        )
    return outputs[0]


def _sub_layers(layer: Any) -> Iterator[tuple[str, str, str]]:
    """The name, bias-dropout-add and site of each sub-layer of a TransformerLayer."""
    if not isinstance(layer, TransformerLayer):
        return
    if not isinstance(layer.cross_attention, IdentityOp):
        raise CppmegaError(
            "mhc-layer-unsupported",
            f"Layer {layer.layer_number} has cross-attention.",
            "Hyper-connections around cross-attention exist neither here nor upstream.",
            "train without --enable-mhc-connections",
        )
    for name, (bda, site) in SITES.items():
        absent = (IdentityOp, IdentityFuncOp)
        if not isinstance(getattr(layer, name), absent):
            yield name, bda, site


def wrapped(layer: Any, config: Any) -> Any:
    """A layer of a hybrid stack, with its site if the configuration enables mHC."""
    if not getattr(config, "enable_mhc_connections", False):
        return layer
    return HyperConnectionHybridLayer(config, layer)


def has_upstreams(stack: Any) -> bool:
    """Whether a stack has main's own layers with streams, which a script's specification names.

    They keep main's definition of mHC, which is another model's.
    """
    return any(getattr(layer, UPSTREAMS, False) for layer in getattr(stack, "layers", ()))


def connected(layer: Any, config: Any) -> Any:
    """A layer of a GPT model, with its sites if the configuration enables mHC.

    Raises:
        CppmegaError: `mhc-layer-unsupported`.
    """
    if getattr(layer, UPSTREAMS, False):
        unsupported = {
            "MTP depths": config.mtp_num_layers,
            "full recomputation": config.recompute_granularity == "full",
            "pipeline stages": config.pipeline_model_parallel_size > 1,
        }
        if what := next((what for what, used in unsupported.items() if used), ""):
            raise CppmegaError(
                "mhc-layer-unsupported",
                f"Layer {layer.layer_number} ({type(layer).__name__}) does not support {what}.",
                "Megatron's own layers with several residual streams were written without.",
                "build the model with Megatron's other layers, around which cppmega puts streams",
            )
    elif getattr(config, "enable_mhc_connections", False):
        for _, bda, site in _sub_layers(layer):
            setattr(layer, site, mhc.HyperConnectionModule(config))
            setattr(layer, bda, getattr(layer, site).bias_dropout_add)
    return layer


def input_of(layer: Any, name: str, hidden_states: Tensor) -> Tensor:
    """The input of a sub-layer of a GPT layer: its site's aggregate, or the hidden states."""
    site = _site(layer, name)
    return hidden_states if site is None else site.read(hidden_states)


def around(layer: Any, name: str) -> contextlib.AbstractContextManager[Any]:
    """The context in which a sub-layer of a GPT layer runs."""
    return mhc_recompute.scope(_site(layer, name))


def _site(layer: Any, name: str) -> mhc.HyperConnectionModule | None:
    """The site of a sub-layer; main's own layers read and write theirs themselves."""
    return None if getattr(layer, UPSTREAMS, False) else getattr(layer, SITES[name][1], None)


def leaves_experts(layer: Any) -> bool:
    """Whether Transformer Engine's graph of a layer ends before its experts, in their sub-layer."""
    parts = graph_parts(layer.config)
    return getattr(layer, "is_moe_layer", False) and "moe_router" in parts and "moe" not in parts


def left_open(layer: Any, out: Any) -> Any:
    """The output of a GPT layer's MLP; where a graph ends before it, with what its site keeps."""
    site = _site(layer, "mlp")
    return [*out, *site.leave()] if site is not None and isinstance(out, list) else out


def reopen(layer: Any, outputs: list[Tensor]) -> None:
    """Remove from the outputs of a graph what `left_open` added, and continue its site."""
    site = _site(layer, "mlp")
    if site is not None and leaves_experts(layer):
        site.resume(*outputs[-3:])
        del outputs[-3:]


def captured_sites(layer: Any, submodules: Sequence[Any]) -> list[mhc.HyperConnectionModule]:
    """The sites of those sub-layers of a GPT layer that are captured, at least in part."""
    captured = {id(each) for each in submodules}
    found = []
    for name in SITES:
        part, site = getattr(layer, name), _site(layer, name)
        if site is not None and captured & {id(part), id(getattr(part, "router", part))}:
            found.append(site)
    return found


def width(layer: Any) -> int:
    """The width of the hidden states that a layer takes in a CUDA graph."""
    hidden: int = layer.config.hidden_size
    return options.width(layer.config) if sites(layer) else hidden


def sites(layer: Any) -> list[mhc.HyperConnectionModule]:
    """The hyper-connections of a layer, in the order in which it uses them."""
    names = ("hyper_connection", *(site for _, site in SITES.values()))
    found = (getattr(layer, name, None) for name in names)
    return [site for site in found if site is not None]


def expanded(stack: Any, hidden_states: Tensor) -> Tensor:
    """The streams at the start of a stack; in the first stage each equals the hidden states."""
    config = stack.config
    if not getattr(config, "enable_mhc_connections", False) or has_upstreams(stack):
        return hidden_states
    of_layers = [sites(layer) for layer in stack.layers]
    mhc_recompute.begin(of_layers, config, stack.training)
    if not stack.pre_process or getattr(stack, "is_mtp_layer", False):
        return hidden_states  # already the streams, of the previous stage or of the depth
    streams = mhc.expand(hidden_states, config.mhc_num_residual_streams)
    block = next((site.block for of_layer in of_layers for site in of_layer), None)
    if block is not None:
        kept = hidden_states.detach()
        block.know(streams, lambda: mhc.expand(kept, config.mhc_num_residual_streams))
    return streams


def with_head(stack: Any, ends: bool) -> None:
    """Add the contraction to a stack in which the streams end."""
    enabled = getattr(stack.config, "enable_mhc_connections", False)
    if ends and enabled and not has_upstreams(stack):
        mhc.add_head(stack, stack.config)


def contracted(stack: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
    """Hidden states for the final norm, and the streams if MTP depths read them."""
    if not getattr(stack.config, "enable_mhc_connections", False) or has_upstreams(stack):
        return hidden_states, None
    inner = getattr(stack, "mtp_model_layer", stack)  # in an MTP depth: a stack or a layer
    found = [site for layer in getattr(inner, "layers", [inner]) for site in sites(layer)]
    if getattr(stack, mhc.HEAD[0], None) is None:
        if not getattr(stack, "is_mtp_layer", False):  # otherwise its depth contracts
            mhc_recompute.end(found)
        return hidden_states, None
    depths = bool(stack.config.mtp_num_layers)
    out = mhc.contract(stack, hidden_states, found[-1].block if found else None)
    mhc_recompute.end(found)
    return out, hidden_states if depths else None


def with_head_saved(stack: Any, saved: Any, prefix: str, metadata: Any) -> Any:
    """Add the contraction to a stack's sharded state dict, which lists only its modules."""
    head = {name: getattr(stack, name, None) for name in mhc.HEAD}
    if head[mhc.HEAD[0]] is not None:
        groups = ensure_metadata_has_dp_cp_group(metadata)
        saved |= make_sharded_tensors_for_checkpoint(
            head, prefix, tp_group=stack.tp_group, dp_cp_group=groups["dp_cp_group"]
        )
    return saved
