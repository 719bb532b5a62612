"""Edits that add hyper-connections to Megatron's configuration, layers, stacks and MTP depths."""

from __future__ import annotations

from cppmega.edits import appending, in_order, inserting, replacing
from cppmega.page import Edit, left_alone

CORE = "megatron/core"
LAST_OF_MTP = f"{CORE}/model_parallel_config.py:ModelParallelConfig.mtp_standalone"
CHECK = f"{CORE}/transformer/transformer_config.py:TransformerConfig.__post_init__"
LAYER = f"{CORE}/transformer/transformer_layer.py:TransformerLayer.forward"
BUILT = f"{CORE}/transformer/transformer_layer.py:TransformerLayer.__init__"
CAPTURED = f"{CORE}/transformer/transformer_layer.py:TransformerLayer._te_cuda_graph_"
UNDER_GRAPHS = (
    f"{CORE}/transformer/transformer_layer.py:TransformerLayer._get_submodules_under_cudagraphs"
)
STATIC_INPUTS = f"{CORE}/transformer/module.py:GraphableMegatronModule.get_layer_static_inputs"
GRAPHABLE = f"{CORE}/transformer/cuda_graphs.py:_layer_is_graphable"
SAMPLES = f"{CORE}/transformer/cuda_graphs.py:TECudaGraphHelper._get_sample_arguments"
BLOCK = f"{CORE}/transformer/transformer_block.py:TransformerBlock."
STACK = f"{CORE}/models/hybrid/hybrid_block.py:HybridStack."
DEPTH = f"{CORE}/transformer/multi_token_prediction.py:MultiTokenPredictionLayer."
DEPTHS = f"{CORE}/transformer/multi_token_prediction.py:MultiTokenPredictionBlock.forward"
SCHEDULES = f"{CORE}/pipeline_parallel/schedules.py:"
RECOMPUTATION = f"{CORE}/recompute.py:checkpointed_forward"
PRESENT = f"{DEPTH}get_inner_quantization_context"
"""New in 0.19.2; these edits are written for the layers and depths of 0.19 and main."""

FIELDS = '''
enable_mhc_connections: bool = field(
    default=False,
    metadata={
        "argparse_meta": {"arg_names": ["--enable-mhc-connections", "--enable-hyper-connections"]}
    },
)
"""Several residual streams with learned connections (mHC) in place of one."""
mhc_num_residual_streams: int = field(
    default=4,
    metadata={
        "argparse_meta": {
            "arg_names": ["--mhc-num-residual-streams", "--num-residual-streams"],
            "action": _CppmegaOneValue,
        }
    },
)
"""Residual streams of a model with mHC."""
mhc_sinkhorn_iterations: int = 20
"""Steps that make a mixing matrix of mHC nearly doubly stochastic."""
mhc_init_gating_factor: float = 0.01
"""Initial scale of the part of mHC's weights that depends on the token."""
mhc_recompute_layer_num: Optional[int] = None
"""Layers of a block whose streams are recomputed together; unset: all layers of a stage."""
use_fused_mhc: bool = False
"""Compute mHC with fused kernels; a run that cannot use them stops."""
'''

MODULES = """
{"core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "gdn_norm_out"}
"""

CHECKED = inserting(
    "from cppmega.features.mhc import options\n\noptions.check(self)",
    after="super().__post_init__()",
)

LAYERS = "from cppmega.features.mhc import layers as mhc_layers"
OF_DEPTHS = "from cppmega.features.mhc import depths as mhc_depths"


def _cppmega_attention(layer, args, kwargs):
    """Run the attention of a layer on what it reads of the streams."""
    from cppmega.features.mhc import layers as mhc_layers

    if args:
        args = (mhc_layers.input_of(layer, "self_attention", args[0]), *args[1:])
    else:
        read = mhc_layers.input_of(layer, "self_attention", kwargs["hidden_states"])
        kwargs = {**kwargs, "hidden_states": read}
    with mhc_layers.around(layer, "self_attention"):
        return layer._forward_attention(*args, **kwargs)


def _cppmega_mlp(layer, hidden_states, *args, **kwargs):
    """Run the MLP of a layer on what it reads of the streams."""
    from cppmega.features.mhc import layers as mhc_layers

    read = mhc_layers.input_of(layer, "mlp", hidden_states)
    with mhc_layers.around(layer, "mlp"):
        return mhc_layers.left_open(layer, layer._forward_mlp(read, *args, **kwargs))


EXPANDED = f"{LAYERS}\n\nhidden_states = mhc_layers.expanded(self, hidden_states)"
CONTRACTED = "hidden_states, cppmega_streams = mhc_layers.contracted(self, hidden_states)"
HANDED_ON = (
    "from cppmega.features.mhc import connections\n\n"
    "connections.hand_on(hidden_states, cppmega_streams)"
)
SAVED = f"{LAYERS}\n\nmhc_layers.with_head_saved(self, sharded_state_dict, prefix, metadata)"

WIDTHS_IN = {
    "get_tensor_shapes": {
        "0.19.0": "30136c352c056184",
        "0.19.2": "30136c352c056184",
        "main-d98e8a64": "30136c352c056184",
    },
    "forward_backward_pipelining_with_interleaving": {
        "0.19.0": "56b388e50bf065ef",
        "0.19.2": "56b388e50bf065ef",
        "main-d98e8a64": "dd6dfc426c287684",
    },
}
"""Where a schedule states the width of what stages exchange."""

WHOLE = replacing(
    "isinstance(layer, TransformerLayer)",
    "isinstance(getattr(layer, 'inner_layer', layer), TransformerLayer)",
)
"""A wrapper takes the same arguments as the layer inside it, and returns the same."""

ATTENTION = replacing(
    "self._forward_attention(*args, **kwargs)", "_cppmega_attention(self, args, kwargs)"
)
INNER = "layer = getattr(layer, 'inner_layer', layer)"
"""A wrapper is captured where the layer inside it would be, with the same further inputs."""

RNG = """
if self.config.sequence_parallel:
    rng_context = tensor_parallel.get_cuda_rng_tracker().fork()
else:
    rng_context = nullcontext()
"""
UNWRAPPED = """
if isinstance(hidden_states, WrappedTensor):
    hidden_states = hidden_states.unwrap()
"""

OWN = (
    "self.config.enable_mhc_connections and self.pre_process",
    "self.training and self.mhc_recompute_enabled",
    "self.config.enable_mhc_connections and self.has_final_layernorm_in_this_stage()",
)
"""Conditions under which a block of main serves its own class of layers with streams."""
OWN_EXPANSION = f"""
if {OWN[0]}:
    hidden_states = HyperConnectionModule.input_expand(
        hidden_states, self.mhc_num_residual_streams
    )
"""
WITHOUT_STREAMS = """
if config.enable_mhc_connections and not self.supports_mhc_connections:
    raise ValueError(
        f"{type(self).__name__} does not implement mHC residual streams. Build the "
        "decoder with HyperConnectionTransformerLayer when "
        "enable_mhc_connections=True."
    )
"""
REFUSED = (
    """
    if self.enable_mhc_connections and self.mtp_num_layers is not None:
        raise ValueError(
            "enable_mhc_connections is not compatible with Multi-Token Prediction (MTP). "
            "Please disable MTP (set mtp_num_layers=None) when using hyper connections."
        )
    """,
    """
    if self.enable_mhc_connections and self.recompute_granularity == "full":
        raise NotImplementedError(
            "enable_mhc_connections is not yet compatible with full activation recompute. "
            "Use selective recompute with 'mhc' in recompute_modules, or disable "
            "activation recompute."
        )
    """,
    """
    if self.pipeline_model_parallel_size > 1:
        raise NotImplementedError(
            "enable_mhc_connections does not support pipeline_model_parallel_size > 1 "
            "yet. Inter-stage activations are n-stream ([s, b, n*C]) while pipeline "
            "p2p buffers are sized from hidden_size, so the shapes disagree. Use "
            "pipeline_model_parallel_size=1 until mHC pipeline support lands."
        )
    """,
)
"""What main's own layers with streams do not support; `mhc_layers.connected` says it of them."""

ENDED = (
    inserting(
        CONTRACTED,
        before="""
if self.final_layernorm is not None:
    hidden_states = apply_module(self.final_layernorm)(cast(Tensor, hidden_states))
    hidden_states = make_viewless_tensor(inp=hidden_states, requires_grad=True, keep_graph=True)
""",
    ),
    inserting(HANDED_ON, before="return hidden_states"),
)
"""What follows the layers of a block."""

EDITS = (
    Edit(
        target=LAST_OF_MTP,
        pins={
            "0.19.0": "675e8e63b6ccd55c",
            "0.19.2": "675e8e63b6ccd55c",
            "main-d98e8a64": "675e8e63b6ccd55c",
        },
        edit=inserting(FIELDS, before="mtp_standalone: bool = False"),
        imports=("from cppmega.features.mhc.options import OneValue as _CppmegaOneValue",),
        mark="",
    ),
    Edit(
        target=CHECK,
        pins={"0.19.0": "fe98182ec35d935a", "0.19.2": "fe98182ec35d935a"},
        edit=in_order(
            CHECKED,
            replacing(MODULES, MODULES.strip()[:-1] + ', "mhc"}'),
        ),
        mark="",
    ),
    Edit(
        target=CHECK,
        pins={"main-d98e8a64": "66a28f7c41a0845e"},
        edit=in_order(CHECKED, *(replacing(each, "") for each in REFUSED)),
        mark="",
    ),
    Edit(
        target=LAYER,
        pins={
            "0.19.0": "20223052f8f0c7b8",
            "0.19.2": "20223052f8f0c7b8",
            "main-d98e8a64": "1cf2de15d4c43c83",
        },
        edit=in_order(
            ATTENTION,
            replacing(
                """
self._forward_mlp(
    hidden_states,
    kwargs.get("inference_context", None),
    padding_mask=kwargs.get("padding_mask", None),
    packed_seq_params=kwargs.get("packed_seq_params", None),
)
""",
                """
_cppmega_mlp(
    self,
    hidden_states,
    kwargs.get("inference_context", None),
    padding_mask=kwargs.get("padding_mask", None),
    packed_seq_params=kwargs.get("packed_seq_params", None),
)
""",
            ),
        ),
        helpers=(_cppmega_attention, _cppmega_mlp),
        mark="",
    ),
    Edit(
        target=f"{CAPTURED}capture",
        pins={
            "0.19.0": "26d138562dd2a18d",
            "0.19.2": "26d138562dd2a18d",
            "main-d98e8a64": "26d138562dd2a18d",
        },
        edit=in_order(
            ATTENTION,
            replacing("self._forward_mlp(hidden_states)", "_cppmega_mlp(self, hidden_states)"),
        ),
        mark="",
    ),
    Edit(
        target=f"{CAPTURED}replay",
        pins={
            "0.19.0": "8cd62ae4fca43f62",
            "0.19.2": "8cd62ae4fca43f62",
            "main-d98e8a64": "8cd62ae4fca43f62",
        },
        edit=ATTENTION,
        mark="",
    ),
    Edit(
        target=f"{CAPTURED}replay_impl",
        pins={
            "0.19.0": "ebc8cde198daa9ea",
            "0.19.2": "0d0f7a0e5a0df7c9",
            "main-d98e8a64": "624c6c99dc4888ae",
        },
        edit=in_order(
            inserting(
                f"{LAYERS}\n\nmhc_layers.reopen(self, cuda_graph_output)",
                after="cuda_graph_output = list(super()._te_cuda_graph_replay(*args, **kwargs))",
            ),
            replacing(
                "self._forward_mlp(*cuda_graph_output)", "_cppmega_mlp(self, *cuda_graph_output)"
            ),
        ),
        mark="",
    ),
    Edit(
        target=UNDER_GRAPHS,
        pins={
            "0.19.0": "b4f8a5f14d9cbd6f",
            "0.19.2": "b4f8a5f14d9cbd6f",
            "main-d98e8a64": "b4f8a5f14d9cbd6f",
        },
        edit=inserting(
            f"{LAYERS}\n\nsubmodules += mhc_layers.captured_sites(self, submodules)",
            before="return submodules",
        ),
        mark="",
    ),
    Edit(
        target=STATIC_INPUTS,
        pins={
            "0.19.0": "7ed44a44b9b64349",
            "0.19.2": "7ed44a44b9b64349",
            "main-d98e8a64": "7ed44a44b9b64349",
        },
        edit=in_order(
            replacing("self.config.hidden_size", "cppmega_width"),
            inserting(
                f"{LAYERS}\n\ncppmega_width = mhc_layers.width(self)", before="static_inputs = {}"
            ),
        ),
        mark="",
    ),
    Edit(
        target=GRAPHABLE,
        pins={
            "0.19.0": "9e1b965c23d10f4a",
            "0.19.2": "9e1b965c23d10f4a",
            "main-d98e8a64": "9e1b965c23d10f4a",
        },
        edit=inserting(
            INNER, before="if not isinstance(layer, GraphableMegatronModule):\n    return False"
        ),
        mark="",
    ),
    Edit(
        target=SAMPLES,
        pins={
            "0.19.0": "489e8786fefaf925",
            "0.19.2": "489e8786fefaf925",
            "main-d98e8a64": "489e8786fefaf925",
        },
        edit=inserting(
            INNER,
            after="""
            static_inputs = layer.get_layer_static_inputs(self.seq_length, self.micro_batch_size)
            """,
        ),
        mark="",
    ),
    Edit(
        target=f"{BLOCK}_build_layers",
        pins={
            "0.19.0": "1f836061520765ba",
            "0.19.2": "1f836061520765ba",
            "main-d98e8a64": "1f836061520765ba",
        },
        edit=in_order(
            inserting(
                f"{LAYERS}\n\nmodule = mhc_layers.connected(module, layer_config)",
                before="return module",
            ),
            appending(f"{LAYERS}\n\nmhc_layers.with_head(self, self.final_layernorm is not None)"),
        ),
        mark="",
    ),
    Edit(
        target=f"{BLOCK}forward",
        pins={"0.19.0": "8bd5c18f5fb96ca1", "0.19.2": "8bd5c18f5fb96ca1"},
        edit=in_order(inserting(EXPANDED, before=RNG), *ENDED),
    ),
    Edit(
        target=f"{BLOCK}forward",
        pins={"main-d98e8a64": "dddd6e7c7dc03940"},
        edit=in_order(
            inserting(EXPANDED, before=OWN_EXPANSION),
            *ENDED,
            *(replacing(each, f"mhc_layers.has_upstreams(self) and {each}") for each in OWN),
        ),
    ),
    Edit(
        target=BUILT,
        pins={"0.19.0": "72485cc2212f8945", "0.19.2": "72485cc2212f8945"},
        edit=left_alone,
    ),
    Edit(
        target=BUILT,
        pins={"main-d98e8a64": "1f84b5bcbf4ddf9f"},
        edit=replacing(WITHOUT_STREAMS, ""),
        mark="",
    ),
    Edit(
        target=f"{BLOCK}sharded_state_dict",
        pins={
            "0.19.0": "0ac661a8a77d3f09",
            "0.19.2": "0ac661a8a77d3f09",
            "main-d98e8a64": "0ac661a8a77d3f09",
        },
        edit=inserting(SAVED, before="return sharded_state_dict"),
        mark="",
    ),
    Edit(
        target=f"{STACK}__init__",
        pins={
            "0.19.0": "1008fcf6068c752f",
            "0.19.2": "1008fcf6068c752f",
            "main-d98e8a64": "2d7b4b530606eec4",
        },
        edit=in_order(
            inserting(
                f"{LAYERS}\n\nlayer = mhc_layers.wrapped(layer, self.config)",
                before="self.layers.append(layer)",
            ),
            appending(
                f"{LAYERS}\n\n"
                "mhc_layers.with_head(self, self.post_process and not self.is_mtp_layer)"
            ),
        ),
        mark="",
    ),
    Edit(
        target=f"{STACK}forward",
        pins={
            "0.19.0": "50ac5b73f74c7aa0",
            "0.19.2": "50ac5b73f74c7aa0",
            "main-d98e8a64": "50ac5b73f74c7aa0",
        },
        edit=in_order(
            inserting(EXPANDED, after=UNWRAPPED),
            WHOLE,
            inserting(
                CONTRACTED,
                before="""
if self.post_process and self.post_layer_norm:
    hidden_states = self.final_norm(hidden_states)
""",
            ),
            inserting(HANDED_ON, before="return hidden_states"),
        ),
    ),
    Edit(
        target=f"{STACK}sharded_state_dict",
        pins={
            "0.19.0": "e4acb39aa0c97317",
            "0.19.2": "e4acb39aa0c97317",
            "main-d98e8a64": "e4acb39aa0c97317",
        },
        edit=inserting(SAVED, before="return sharded_state_dict"),
        mark="",
    ),
    Edit(
        target=RECOMPUTATION,
        pins={
            "0.19.0": "59fba895c79ae4b7",
            "0.19.2": "59fba895c79ae4b7",
            "main-d98e8a64": "59fba895c79ae4b7",
        },
        edit=WHOLE,
        mark="",
    ),
    *(
        Edit(
            target=SCHEDULES + name,
            pins=pins,
            edit=replacing("config.hidden_size", "_cppmega_width(config)"),
            imports=("from cppmega.features.mhc.options import width as _cppmega_width",),
            mark="",
        )
        for name, pins in WIDTHS_IN.items()
    ),
    Edit(
        target=f"{DEPTH}__init__",
        pins={
            "0.19.0": "918bfee08d9c0d2a",
            "0.19.2": "918bfee08d9c0d2a",
            "main-d98e8a64": "633b3a4038d10339",
        },
        edit=appending(f"{OF_DEPTHS}\n\nmhc_depths.connect(self, self.tp_group)"),
        mark="",
    ),
    Edit(
        target=f"{DEPTH}_concat_embeddings",
        pins={
            "0.19.0": "d48b7081981dba15",
            "0.19.2": "d48b7081981dba15",
            "main-d98e8a64": "7ba78581a5e3df8a",
        },
        edit=inserting(
            f"""
            if self.eh_proj is None:
                {OF_DEPTHS}

                return mhc_depths.joined(self, hidden_states, decoder_input)
            """,
            before="decoder_input = apply_module(self.enorm)(decoder_input)",
        ),
        mark="",
    ),
    Edit(
        target=f"{DEPTH}_proj_and_transformer_layer",
        pins={
            "0.19.0": "958a8991c4021ac3",
            "0.19.2": "958a8991c4021ac3",
            "main-d98e8a64": "958a8991c4021ac3",
        },
        # The next depth reads the streams, so the block postprocesses each depth's output itself.
        edit=replacing(
            "hidden_states = self._postprocess(hidden_states)",
            """
            if getattr(self, "hc_head_fn", None) is None:
                hidden_states = self._postprocess(hidden_states)
            """,
        ),
        mark="",
    ),
    Edit(
        target=f"{DEPTH}_postprocess",
        pins={
            "0.19.0": "b1da7b438da4b0a4",
            "0.19.2": "b1da7b438da4b0a4",
            "main-d98e8a64": "b1da7b438da4b0a4",
        },
        edit=inserting(
            f"{OF_DEPTHS}\n\nhidden_states = mhc_depths.ended(self, hidden_states)",
            before="hidden_states = apply_module(self.final_layernorm)(hidden_states)",
        ),
        mark="",
    ),
    Edit(
        target=DEPTHS,
        pins={
            "0.19.0": "6e08bac0e7079025",
            "0.19.2": "a84af2ded90d3f89",
            "main-d98e8a64": "0efa4646a6494f4c",
        },
        edit=in_order(
            inserting(
                f"{OF_DEPTHS}\n\ncppmega_streams = mhc_depths.streams_of(self, hidden_states)",
                before="offset = get_mtp_layer_offset(self.config, self.vp_stage)",
            ),
            inserting(
                """
                if cppmega_streams is not None:
                    hidden_states = cppmega_streams
                """,
                after="hidden_states = hidden_states_list[offset]",
            ),
            replacing(
                "hidden_states_list.append(hidden_states)",
                """
                hidden_states_list.append(
                    hidden_states
                    if cppmega_streams is None
                    else self.layers[layer_idx]._postprocess(hidden_states)
                )
                """,
            ),
        ),
        mark="",
    ),
)
