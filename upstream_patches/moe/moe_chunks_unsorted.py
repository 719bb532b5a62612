"""Compute experts on tokens in the order in which they arrive.

What: `MoEAlltoAllTokenDispatcher` does not sort tokens by expert after they were exchanged, nor
    sort the results back. A rank alone has them in order already. With several ranks, the grouped
    products of `TEGroupedMLP` have a group for each expert and each rank that sent tokens, where
    they are plain products in 16 bits; other experts, and quantized ones, are sorted as before.
Why: Sorting copies every routed token, there and back, forward and backward: 46 of 2,833 ms in a
    step of NAM56R on two H200, and as much per token on one, where the order does not change. The
    experts of a rank alone take 5.3 in place of 6.4 ms with tokens of two ranks, and 5.2 in place
    of 6.4 with those of one, forward and backward (`experts_glue_h200`). A cut with five layers of
    experts trains 1.3 % faster on two H200 with this page and `expert_gelu_kernel` together.
Upstream: Not sent: Megatron's other experts need one group per expert.
Remove: when upstream sends tokens in an order that experts compute in.
Numerics: reorders sums of the experts' weight gradients with several ranks; bitwise on one
"""

from typing import Any

from cppmega.catalogue.megatron_args import has_experts
from cppmega.edits import in_order, inserting, replacing
from cppmega.page import Edit, Patch, Source

DISPATCHER = "megatron/core/transformer/moe/token_dispatcher.py:MoEAlltoAllTokenDispatcher"
ARRIVED = f"{DISPATCHER}.dispatch_postprocess"
LEAVING = f"{DISPATCHER}.combine_preprocess"
COPIES = f"{DISPATCHER}._maybe_dtoh_and_synchronize"
LAYER = "megatron/core/transformer/moe/moe_layer.py:MoELayer.routed_experts_compute"
EXPERTS = "megatron/core/extensions/transformer_engine.py:TEGroupedLinear.forward"
IMPORTS = ("from cppmega.runtime import moe_chunks_unsorted as _cppmega_chunks",)


def exchanges(args: Any) -> bool:
    """Whether the dispatcher that sorts tokens exchanges them, for several experts of a rank."""
    return (
        has_experts(args)
        and getattr(args, "moe_token_dispatcher_type", None) == "alltoall"
        and args.num_experts > getattr(args, "expert_model_parallel_size", 1)
        and not getattr(args, "moe_pad_expert_input_to_capacity", False)
    )


_SORTS = replacing(
    "self.num_local_experts > 1",
    "self.num_local_experts > 1 and not _cppmega_chunks.keeps_order(self)",
)

PATCH = Patch(
    purpose="speed",
    edits=(
        Edit(
            target=ARRIVED,
            pins={
                "0.15.3": "f5749c5a2feb8b23",
                "0.16.1": "f5749c5a2feb8b23",
                "0.17.1": "f5749c5a2feb8b23",
                "0.18.2": "047ac1e0d047d596",
                "0.19.2": "047ac1e0d047d596",
            },
            edit=in_order(
                _SORTS,
                inserting(
                    "tokens_per_expert = _cppmega_chunks.splits(self, tokens_per_expert)",
                    before="self.tokens_per_expert = None",
                ),
            ),
            imports=IMPORTS,
        ),
        Edit(
            target=LEAVING,
            pins={
                "0.15.3": "da8805905eaa42fd",
                "0.16.1": "da8805905eaa42fd",
                "0.17.1": "da8805905eaa42fd",
                "0.18.2": "da8805905eaa42fd",
                "0.19.2": "da8805905eaa42fd",
            },
            edit=_SORTS,
            imports=IMPORTS,
            mark="",
        ),
        Edit(
            target=COPIES,
            pins={
                "0.15.3": "e2f2a43e8cab1f9f",
                "0.16.1": "eca56933e1ebfefe",
                "0.17.1": "eca56933e1ebfefe",
                "0.18.2": "eca56933e1ebfefe",
                "0.19.2": "eca56933e1ebfefe",
            },
            edit=inserting(
                "_cppmega_chunks.counts(self, maybe_move_tensor_to_cpu, on_side_stream)",
                before="if self.num_local_experts > 1 and not self.config.moe_permute_fusion:",
            ),
            imports=IMPORTS,
            mark="",
        ),
        Edit(
            target=LAYER,
            pins={
                "0.15.3": "8fb599f25c826be3",
                "0.16.1": "b0ed8bfb92efbee5",
                "0.17.1": "982b3aeaaa7b0dfc",
                "0.18.2": "e4a379bd118284d2",
                "0.19.2": "1bdea62be903bcbb",
            },
            edit=inserting(
                "_cppmega_chunks.decide(self.token_dispatcher, self.experts, hidden_states)",
                before="""
                dispatched_input, tokens_per_expert, permuted_probs = (
                    self.token_dispatcher.dispatch_postprocess(hidden_states, probs)
                )
                """,
            ),
            imports=IMPORTS,
            mark="",
        ),
        Edit(
            target=EXPERTS,
            pins={
                "0.15.3": "c083515c445df921",
                "0.16.1": "4d02673a6f4f348b",
                "0.17.1": "4d02673a6f4f348b",
                "0.18.2": "4d02673a6f4f348b",
                "0.19.2": "4d02673a6f4f348b",
            },
            edit=inserting(
                """
                chunks = _cppmega_chunks.products(self, x, m_splits)
                if chunks is not None:
                    return chunks, None
                """,
                before="""
                _is_first_microbatch = (
                    None if self.disable_parameter_transpose_cache else self.is_first_microbatch
                )
                """,
            ),
            imports=IMPORTS,
            mark="",
        ),
    ),
    reached="forward",
    when=exchanges,
    after=("selective_fp8_moe", "te_plain_layers"),
)


def fixed_upstream(source: Source) -> bool:
    text = source.text(ARRIVED)
    return bool(text) and "sort_chunks_by_idxs" not in text and "_cppmega_chunks" not in text


def verify() -> None:
    import contextlib
    import inspect
    import sys
    from types import SimpleNamespace
    from unittest import mock

    import torch
    from megatron.core.transformer.moe import experts as moe_experts
    from megatron.core.transformer.moe import moe_layer, token_dispatcher

    from cppmega.runtime import te_plain_layers as te_layers

    from ..te import _te_modules

    class GroupedLinear(torch.nn.Module):
        def forward(self, x, splits, **ignored):  # type: ignore[no-untyped-def]
            assert len(splits) == self.num_gemms, "these products have one group for each expert"
            parts = zip(x.split(splits), (self.weight0, self.weight1), strict=True)
            return torch.cat([part @ weight.t() for part, weight in parts])

    class RMSNorm(torch.nn.Module):
        pass

    te = _te_modules.extension(GroupedLinear=GroupedLinear, RMSNorm=RMSNorm)

    def products(a, b, out, *ignored, layout, m_splits, accumulate=False, **more):  # type: ignore[no-untyped-def]
        assert len(a) == len(b) == len(m_splits)
        if layout == "NT":
            for rows, given, total in zip(a, b, out, strict=True):
                total.copy_(given.t().to(total) @ rows.to(total) + accumulate * total)
        else:
            found = [x @ (w.t() if layout == "TN" else w) for w, x in zip(a, b, strict=True)]
            out[0].copy_(torch.cat(found))

    def linear(rows, columns):  # type: ignore[no-untyped-def]
        made = te.TEGroupedLinear.__new__(te.TEGroupedLinear)
        torch.nn.Module.__init__(made)
        settings = {
            **dict.fromkeys(("use_bias", "te_return_bias", "is_first_microbatch"), False),
            **dict.fromkeys(("disable_parameter_transpose_cache", "te_quant_params")),
            "config": SimpleNamespace(cpu_offloading=False),
            "fuse_wgrad_accumulation": True,
            "tp_size": 1,
            "num_gemms": 2,
        }
        for name, value in settings.items():
            setattr(made, name, value)
        for at in range(2):
            weight = torch.nn.Parameter(torch.randn(rows, columns, dtype=torch.bfloat16))
            weight.main_grad = torch.zeros(rows, columns)
            setattr(made, f"weight{at}", weight)
        return made

    def forward(self, x, tokens_per_expert, probs, **ignored):  # type: ignore[no-untyped-def]
        groups = tokens_per_expert.tolist()
        inner = self.linear_fc1(x, groups)[0].relu() * probs.unsqueeze(-1).to(x.dtype)
        return self.linear_fc2(inner, groups)[0], None

    def layer(chunks, sizes):  # type: ignore[no-untyped-def]
        kind = moe_experts.TEGroupedMLP
        own = kind.__new__(kind)
        torch.nn.Module.__init__(own)
        own.config = SimpleNamespace(fp8=None, fp4=None)
        own.linear_fc1, own.linear_fc2 = linear(6, 4), linear(4, 6)
        kind = token_dispatcher.MoEAlltoAllTokenDispatcher
        dispatcher = kind.__new__(kind)
        places = torch.arange(2 * chunks)
        settings = {
            **{"tp_size": 1, "ep_size": chunks, "num_local_experts": 2, "drop_and_pad": False},
            **dict.fromkeys(("shared_experts", "input_splits", "output_splits", "num_out_tokens")),
            "output_splits_tp": None,
            "config": SimpleNamespace(moe_permute_fusion=True),
            "num_global_tokens_per_local_expert": sizes,
            "sort_input_by_local_experts": places.view(-1, 2).T.ravel(),
            "restore_output_by_local_experts": places.view(2, -1).T.ravel(),
            "cuda_dtoh_point": "before_ep_alltoall",
            "cuda_sync_point": "no_sync",
            "cuda_dtoh_stream": mock.MagicMock(),
        }
        for name, value in settings.items():
            setattr(dispatcher, name, value)
        # As it is called before the exchange.
        dispatcher.tokens_per_expert = dispatcher._maybe_dtoh_and_synchronize(
            "before_ep_alltoall", sizes.sum(0)
        )
        kind = moe_layer.MoELayer
        made = kind.__new__(kind)
        torch.nn.Module.__init__(made)
        made.config = SimpleNamespace(
            overlap_dispatch_backward_with_experts_wgrad=False,
            fp8=None,  # for selective_fp8_moe, where that is on
        )
        made.token_dispatcher, made.experts = dispatcher, own
        return made

    def check(sizes, quantized):  # type: ignore[no-untyped-def]
        """Whether anything was sorted; values and gradients are those of each token's expert."""
        made = layer(len(sizes), sizes)
        made.experts.config.fp8 = "hybrid" if quantized else None
        order, tokens = [], int(sizes.sum())

        def sort(rows, split_sizes, sorted_idxs, probs=None, fused=False):  # type: ignore[no-untyped-def]
            order.append(sorted_idxs)
            places = torch.arange(len(rows)).split(split_sizes.tolist())
            place = torch.cat([places[at] for at in sorted_idxs.tolist()])
            return rows[place], None if probs is None else probs[place]

        x = torch.randn(tokens, 4, dtype=torch.bfloat16, requires_grad=True)
        probs = torch.rand(tokens, requires_grad=True)
        more = [None] * (len(inspect.signature(made.routed_experts_compute).parameters) - 2)
        with mock.patch.object(token_dispatcher, "sort_chunks_by_idxs", sort):
            out, _ = made.routed_experts_compute(x, probs, *more)
        upstream = torch.randn(tokens, 4, dtype=torch.bfloat16)
        out.backward(upstream)
        wide = [each.detach().double().requires_grad_() for each in (x, probs)]
        layers = made.experts.linear_fc1, made.experts.linear_fc2
        first, second = (
            [each.weight0.detach().double().requires_grad_() for each in layers],
            [each.weight1.detach().double().requires_grad_() for each in layers],
        )
        rows, done = [each.split(sizes.flatten().tolist()) for each in wide], []
        for at, (part, own) in enumerate(zip(*rows, strict=True)):
            one, two = second if at % 2 else first
            done.append((part @ one.t()).relu() * own[:, None] @ two.t())
        exact = torch.cat(done)
        exact.backward(upstream.double())
        torch.testing.assert_close(out.double(), exact, rtol=5e-2, atol=5e-2)
        for found, wanted in zip((x.grad, probs.grad), wide, strict=True):
            torch.testing.assert_close(found.double(), wanted.grad, rtol=5e-2, atol=1e-1)
        if not order:
            for each, *wanted in zip(layers, first, second, strict=True):
                for weight, own in zip((each.weight0, each.weight1), wanted, strict=True):
                    torch.testing.assert_close(
                        weight.main_grad.double(), own.grad, rtol=5e-2, atol=1e-1
                    )
        return bool(order)

    no = lambda: False  # noqa: E731
    states = SimpleNamespace(is_fp8_enabled=no, is_fp8_calibration=no)
    module = SimpleNamespace(FP8GlobalStateManager=states, is_cpu_offload_enabled=no)
    theirs = {
        te_layers._LINEAR: module,
        te_layers._PRODUCTS: SimpleNamespace(general_grouped_gemm=products),
    }
    stream = mock.Mock(return_value=contextlib.nullcontext())
    two = torch.tensor([[3, 1], [0, 4]])
    with (
        mock.patch.object(torch.Tensor, "is_cuda", True),
        mock.patch.object(torch.Tensor, "record_stream", mock.Mock()),
        mock.patch.multiple(torch.cuda, stream=stream, current_stream=mock.Mock()),
        mock.patch.dict(sys.modules, theirs),
        mock.patch.object(moe_experts.TEGroupedMLP, "forward", forward),
        mock.patch.object(te, "_get_fp8_autocast_for_quant_params", mock.MagicMock(), create=True),
    ):
        assert not check(two, False), "tokens of two ranks are sorted"
        assert not check(torch.tensor([[0, 0], [2, 3]]), False), "one rank sent none"
        assert not check(torch.tensor([[3, 4]]), False), "the tokens of one rank are sorted"
        assert check(two, True), "quantized products have one group for each expert"
        states.is_fp8_enabled = lambda: True
        assert check(two, True), "quantized products have one group for each expert"
