"""Use FP8 for the GEMMs of the routed experts only.

What: With `CPPMEGA_SELECTIVE_FP8_MOE=1` at apply, `get_fp8_context` returns a context with FP8
    disabled to every caller, for weights and for GEMMs, and `MoELayer` enables it only around its
    routed experts. In layers that `first_last_layers_bf16` keeps in bf16, the experts stay in bf16
    too.
Why: Megatron's contexts wrap complete layers: attention, Mamba mixers, latent and shared experts,
    and all of MTP run in FP8 together with the experts, and only the first and last layers can be
    excluded. An earlier overlay assigned another `get_fp8_context` after six modules had copied the
    name: it had no effect and was measured as neutral. It also returned `nullcontext`, which leaves
    FP8 enabled inside MTP's context, and used the layer number, which restarts at 1 inside an MTP
    stack.
Upstream: Not sent: upstream would need a config option such as `fp8_experts_only`.
Remove: when a config option runs only the experts in FP8.
Numerics: changes results: GEMMs outside of the routed experts run in the parameters' dtype. Delayed
    scaling, CUDA graphs of Transformer Engine and `use_grouped_gemm_for_*` are rejected: the first
    needs one context around the complete pass, and the others enter FP8 without `get_fp8_context`.
"""

from typing import Any

from cppmega.catalogue.megatron_args import has_experts
from cppmega.edits import adding_parameter, in_order, inserting
from cppmega.page import Edit, Patch, Source

CONTEXT = "megatron/core/fp8_utils.py:get_fp8_context"
BUILD = "megatron/core/transformer/moe/moe_layer.py:MoELayer.__init__"
ROUTED = "megatron/core/transformer/moe/moe_layer.py:MoELayer.routed_experts_compute"


class _CppmegaBuilding:
    """Whether upstream would run the layers that are being built, one inside another, in FP8."""

    in_fp8 = []  # noqa: RUF012

    def __init__(self, in_fp8, weights):
        self.here, self.weights = in_fp8, weights

    def __enter__(self):
        self.in_fp8.append(self.here)
        self.weights.__enter__()

    def __exit__(self, *error):
        self.in_fp8.pop()
        self.weights.__exit__(*error)


def _cppmega_no_fp8(config, layer_no, is_init):
    """FP8 switched off, also inside an FP8 context; the experts in there switch it on again."""
    fused = ("use_grouped_gemm_for_dense_mlp", "use_grouped_gemm_for_shared_expert")
    refused = [name for name in fused if getattr(config, name, False)]
    if config.fp8_recipe == "delayed":
        refused.append("fp8_recipe=delayed")
    if getattr(config, "cuda_graph_impl", None) == "transformer_engine":
        refused.append("cuda_graph_impl=transformer_engine")
    if refused:
        raise ValueError(
            f"CPPMEGA_SELECTIVE_FP8_MOE cannot keep FP8 to the experts with {', '.join(refused)}"
        )
    te = transformer_engine.pytorch  # noqa: F821
    if is_init:
        in_fp8 = not is_first_last_bf16_layer(config, layer_no)  # noqa: F821
        off = te.fp8_model_init(enabled=False) if config.fp8_param else nullcontext()  # noqa: F821
        return _CppmegaBuilding(in_fp8, off)
    # With the recipe of the run: without one, a TE that is asked for it would say delayed scaling.
    return te.fp8_autocast(enabled=False, fp8_recipe=get_fp8_recipe(config))  # noqa: F821


def _cppmega_experts_fp8(layer, is_init=False):
    """The FP8 context of the routed experts of a layer."""
    from contextlib import nullcontext

    from megatron.core import fp8_utils  # it imports us

    if is_init:
        # By the context and not by the layer number, which MTP counts from 1 again. MTP's own
        # context has FP8 on and upstream's inner ones do not switch it off.
        around = fp8_utils._CppmegaBuilding.in_fp8
        layer._cppmega_experts_in_fp8 = any(around) or not around
    if not (layer.config.fp8 and fp8_utils.HAVE_TE and layer._cppmega_experts_in_fp8):
        return nullcontext()
    return fp8_utils.get_fp8_context(layer.config, is_init=is_init, experts=True)


def _around_experts(head: str, wanted: str) -> Any:
    """Return an edit that puts the only statement that contains `wanted` below a `with`."""

    def edit(node: Any) -> Any:
        import libcst as cst

        module = cst.Module([])
        body = list(node.body.body)
        at = [n for n, statement in enumerate(body) if wanted in module.code_for_node(statement)]
        assert len(at) == 1, f"{wanted} is in {len(at)} statements"
        held = body[at[0]]
        lead, held = held.leading_lines, held.with_changes(leading_lines=())
        around = cst.ensure_type(cst.parse_statement(f"{head}\n    pass\n"), cst.With)
        block = cst.IndentedBlock([held])
        body[at[0]] = around.with_changes(leading_lines=lead, body=block)
        return node.with_changes(body=node.body.with_changes(body=body))

    return edit


PATCH = Patch(
    purpose="feature",
    edits=(
        Edit(
            target=f"{CONTEXT}#1",  # the definition with Transformer Engine
            pins={
                "0.15.3": "9cef16a49f0950d3",
                "0.16.1": "9cef16a49f0950d3",
                "0.17.1": "9cef16a49f0950d3",
                "0.18.2": "9cef16a49f0950d3",
                "0.19.2": "9cef16a49f0950d3",
                "main-d98e8a64": "9cef16a49f0950d3",
                "dev-d48bd6be": "9cef16a49f0950d3",
            },
            edit=in_order(
                adding_parameter("experts: bool = False"),
                inserting(
                    """
                    if config.fp8 and not experts:
                        return _cppmega_no_fp8(config, layer_no, is_init)
                    """,
                    before="need_fp8_context = config.fp8 if not is_init else config.fp8_param",
                ),
            ),
            helpers=(_CppmegaBuilding, _cppmega_no_fp8),
        ),
        Edit(
            target=BUILD,
            pins={
                "0.15.3": "a478253eb1e975ef",
                "0.16.1": "5707469a4fc5dd7a",
                "0.17.1": "08b0098bb6bbdf16",
                "0.18.2": "6192047c1712a490",
                "0.19.2": "6192047c1712a490",
                "main-d98e8a64": "6dd2bf57dfe8e35e",
                "dev-d48bd6be": "1418b388fd76b3f9",
            },
            edit=_around_experts("with _cppmega_experts_fp8(self, True):", "self.experts ="),
            helpers=(_cppmega_experts_fp8,),
        ),
        Edit(
            target=ROUTED,
            pins={
                "0.15.3": "8fb599f25c826be3",
                "0.16.1": "b0ed8bfb92efbee5",
                "0.17.1": "982b3aeaaa7b0dfc",
                "0.18.2": "e4a379bd118284d2",
                "0.19.2": "1bdea62be903bcbb",
                "main-d98e8a64": "1bdea62be903bcbb",
                "dev-d48bd6be": "221e90a8d9436587",
            },
            edit=_around_experts("with _cppmega_experts_fp8(self):", "expert_output, mlp_bias ="),
            helpers=(_cppmega_experts_fp8,),
        ),
    ),
    reached="forward",
    when=lambda args: bool(getattr(args, "fp8", None)) and has_experts(args),
    gate="CPPMEGA_SELECTIVE_FP8_MOE",
)


def fixed_upstream(source: Source) -> bool:
    return "fp8_experts_only" in source.text(CONTEXT)


def verify() -> None:
    import contextlib
    import importlib.machinery
    import inspect
    import sys
    from types import SimpleNamespace
    from unittest import mock

    import torch
    from megatron.core import fp8_utils, utils
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    from cppmega.proof import cpu_shims

    cpu_shims.init_distributed()
    on = {"gemms": False, "weights": False}

    def switch(what):
        @contextlib.contextmanager
        def context(enabled=True, fp8_recipe=None, fp8_group=None):
            before, on[what] = on[what], enabled
            yield
            on[what] = before

        return context

    # A stand-in that records the contexts: Transformer Engine needs a GPU.
    for name in ("", ".pytorch", ".pytorch.fp8", ".pytorch.tensor", ".pytorch.tensor.utils"):
        name = f"transformer_engine{name}"
        spec = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = mock.MagicMock(__path__=[], __spec__=spec, __version__="2.20.0")
    te = sys.modules["transformer_engine"]
    te.pytorch.fp8_autocast, te.pytorch.fp8_model_init = switch("gemms"), switch("weights")
    utils.is_te_min_version = lambda *asked, **ignored: True
    importlib.reload(fp8_utils)

    class Experts(torch.nn.Module):
        def __init__(self, *args, **kwargs):
            super().__init__()
            seen.append(on["weights"])

        def forward(self, x, *rest, **kwargs):
            seen.append(on["gemms"])
            return x, None

    config = TransformerConfig(
        num_layers=4,
        hidden_size=8,
        num_attention_heads=1,
        num_moe_experts=2,
        add_bias_linear=False,
        moe_token_dispatcher_type="allgather",
    )
    config.fp8, config.fp8_recipe, config.fp8_param = "hybrid", "tensorwise", True
    x, seen = torch.ones(2, 8), []
    with fp8_utils.get_fp8_context(config, 1, is_init=True):
        seen.append(on["weights"])
        groups = ProcessGroupCollection.use_mpu_process_groups()
        layer = MoELayer(config, MoESubmodules(experts=Experts), pg_collection=groups)
        seen.append(on["weights"])
    layer.token_dispatcher = SimpleNamespace(
        dispatch_postprocess=lambda x, probs: (x, [2, 0], probs),
        get_expert_zero_copy_buffers=lambda: (None, None),
        combine_preprocess=lambda x: x,
    )
    arguments = len(inspect.signature(layer.routed_experts_compute).parameters)
    with te.pytorch.fp8_autocast(), fp8_utils.get_fp8_context(config, 1):
        seen.append(on["gemms"])
        layer.routed_experts_compute(*[x] * arguments)
        seen.append(on["gemms"])
    assert seen == [False, True, False] * 2, seen
