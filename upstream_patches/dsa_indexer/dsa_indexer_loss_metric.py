"""Report the mean indexer loss over the DSA layers, for every pipeline layout.

What: The logged "indexer loss" is the mean over the DSA layers that saved a loss, including MTP
    layers. Pipeline stages without a DSA layer take part in the reduction. The groups to reduce
    over are kept from one logging step to the next.
Why: The sum was divided by the number of all layers (52 for NAM56R, of which 9 are DSA: the curve
    is 5.8 times too low). An MTP layer shared a slot with a decoder layer or, on 0.16, indexed past
    the last slot and raised IndexError. A stage without DSA returned early and left the other
    stages waiting in the pipeline all-reduce. Each was seen on CPU with two gloo ranks, on 0.16.1
    to 0.19.2. The first logging step cleared the groups to reduce over, and a layer that is
    replayed from a CUDA graph does not set them again: each context-parallel rank then logged its
    own part (found by reading). The dev branch fixed the hang and the slots; it still divides by
    the number of all layers, except for DeepSeek-V4, and a last stage without DSA logs the value of
    a single context-parallel rank.
Upstream: Not sent: the dev branch has a partial fix in different code.
Remove: when `track_indexer_metrics` divides by the number of layers that have an indexer.
Numerics: none (bitwise); only the logged metric changes. With pipeline parallelism the host waits
    for the device once more per step (not on dev)
"""

# ruff: noqa: F821
from textwrap import indent

from cppmega.edits import body_of, in_order, inserting, replacing
from cppmega.page import Edit, Patch, Source

HELPER = (
    "megatron/core/transformer/experimental_attention_variant/dsa.py:DSAIndexerLossLoggingHelper"
)


def _cppmega_grow_indexer_tracker(tracker, slots):
    """Give the tracker at least `slots` slots; what is large enough stays where it is."""
    if "values" in tracker and "counts" not in tracker:  # somebody filled in the values by hand
        tracker["counts"] = (tracker["values"] != 0).to(tracker["values"].dtype)
    for name in ("values", "counts"):
        old = tracker.get(name)
        if old is None or old.numel() < slots:
            tracker[name] = torch.zeros(slots, device=torch.cuda.current_device())
            if old is not None:
                tracker[name][: old.numel()] = old


def save_loss_to_tracker(loss, layer_number, num_layers, reduce_group=None, avg_group=None):
    # Skip indexer loss logging if layer_number is None.
    if layer_number is None:
        return

    tracker = DSAIndexerLossLoggingHelper.tracker
    # An MTP layer has a number of its own: that of a decoder layer, or one past the last of them.
    _cppmega_grow_indexer_tracker(tracker, max(num_layers, layer_number))
    tracker["values"][layer_number - 1] += loss.detach()
    tracker["counts"][layer_number - 1] += 1
    tracker["reduce_group"] = reduce_group
    tracker["avg_group"] = avg_group


def clean_loss_in_tracker():
    tracker = DSAIndexerLossLoggingHelper.tracker
    for name in ("values", "counts"):
        if name in tracker:
            tracker[name].zero_()
    # The groups stay: a layer that is replayed from a CUDA graph does not name them again.


def reduce_loss_in_tracker():
    tracker = DSAIndexerLossLoggingHelper.tracker
    all_reduce, average = torch.distributed.all_reduce, torch.distributed.ReduceOp.AVG
    # Before the pipeline: a stage without a DSA layer knows none of these groups.
    if tracker.get("reduce_group") is not None:
        all_reduce(tracker["values"], group=tracker["reduce_group"])
    if tracker.get("avg_group") is not None:
        all_reduce(tracker["values"], group=tracker["avg_group"], op=average)

    pipeline = parallel_state.get_pipeline_model_parallel_group()
    slots = tracker["values"].numel() if "values" in tracker else 0
    if pipeline.size() > 1:
        # Every stage must take part, with the same number of slots, or the others wait forever.
        slots = torch.tensor([slots], device=torch.cuda.current_device())
        all_reduce(slots, group=pipeline, op=torch.distributed.ReduceOp.MAX)
        slots = int(slots)
    if slots == 0:
        return
    _cppmega_grow_indexer_tracker(tracker, slots)
    all_reduce(tracker["values"], group=pipeline)
    all_reduce(tracker["counts"], group=pipeline)
    all_reduce(
        tracker["values"],
        group=parallel_state.get_data_parallel_group(with_context_parallel=False),
        op=average,
    )


LAYERS_WITH_A_LOSS = """\
# A layer saves one loss per microbatch, and `loss_scale` is one over their number.
# Two layers may share a slot, so the slots in use are only a lower bound.
counts = tracker.get("counts", indexer_loss_values != 0)
{name} = torch.maximum((counts > 0).sum(), counts.sum() * loss_scale)
{name} = {name}.clamp(min=1)
"""


def _edit(method, pins, edit):
    return Edit(
        target=f"{HELPER}.{method}",
        pins=pins,
        edit=edit,
        helpers=(_cppmega_grow_indexer_tracker,),
    )


PATCH = Patch(
    purpose="fix",
    edits=(
        _edit(
            "save_loss_to_tracker",
            {
                "0.16.1": "879894a0114ce2fb",
                "0.17.1": "879894a0114ce2fb",
                "0.18.2": "879894a0114ce2fb",
                "0.19.2": "879894a0114ce2fb",
            },
            body_of(save_loss_to_tracker),
        ),
        _edit(
            "clean_loss_in_tracker",
            {
                "0.16.1": "c06ff6c1c8b9cd86",
                "0.17.1": "c06ff6c1c8b9cd86",
                "0.18.2": "c06ff6c1c8b9cd86",
                "0.19.2": "c06ff6c1c8b9cd86",
            },
            body_of(clean_loss_in_tracker),
        ),
        _edit(
            "reduce_loss_in_tracker",
            {
                "0.16.1": "fd9f3cdb341be908",
                "0.17.1": "fd9f3cdb341be908",
                "0.18.2": "fd9f3cdb341be908",
                "0.19.2": "fd9f3cdb341be908",
            },
            body_of(reduce_loss_in_tracker),
        ),
        _edit(
            "track_indexer_metrics",
            {
                "0.16.1": "864d890809ae82dc",
                "0.17.1": "864d890809ae82dc",
                "0.18.2": "864d890809ae82dc",
                "0.19.2": "864d890809ae82dc",
            },
            replacing(
                "num_layers = indexer_loss_values.shape[0]",
                LAYERS_WITH_A_LOSS.format(name="num_layers"),
            ),
        ),
        # On dev, the stages agree on the slots once, and callers may pass the number of layers.
        _edit(
            "save_loss_to_tracker",
            {"dev-d48bd6be": "1d6f5702223dc908"},
            body_of(save_loss_to_tracker),
        ),
        _edit(
            "clean_loss_in_tracker",
            {"dev-d48bd6be": "720eb156fecb3646"},
            inserting(
                """
                if "counts" in tracker:
                    tracker["counts"].zero_()
                """,
                after="""
                if "values" in tracker:
                    tracker["values"].zero_()
                """,
            ),
        ),
        _edit(
            "reduce_loss_in_tracker",
            {"dev-d48bd6be": "fb0526277692ea03"},
            in_order(
                replacing(
                    """
                    if "values" not in tracker:
                        tracker["values"] = torch.zeros(size, device=torch.cuda.current_device())
                    elif tracker["values"].shape[0] < size:
                        grown = torch.zeros(
                            size, device=tracker["values"].device, dtype=tracker["values"].dtype
                        )
                        grown[: tracker["values"].shape[0]] = tracker["values"]
                        tracker["values"] = grown
                    """,
                    "_cppmega_grow_indexer_tracker(tracker, size)",
                ),
                replacing("torch.distributed.all_reduce(values, group=pp_group)", ""),
                inserting(
                    """
                    # After the others: a stage without a DSA layer knows none of these groups.
                    torch.distributed.all_reduce(values, group=pp_group)
                    torch.distributed.all_reduce(tracker["counts"], group=pp_group)
                    """,
                    before="""
                    torch.distributed.all_reduce(
                        values,
                        group=parallel_state.get_data_parallel_group(with_context_parallel=False),
                        op=torch.distributed.ReduceOp.AVG,
                    )
                    """,
                ),
            ),
        ),
        _edit(
            "track_indexer_metrics",
            {"dev-d48bd6be": "f43a6587d1fd8c49"},
            in_order(
                # `max` of a tensor would wait for the device.
                replacing("max(num_indexer_layers, 1)", "num_indexer_layers"),
                replacing(
                    """
                    if num_indexer_layers is None:
                        num_indexer_layers = indexer_loss_values.shape[0]
                    """,
                    "if num_indexer_layers is None:\n"
                    + indent(LAYERS_WITH_A_LOSS.format(name="num_indexer_layers"), " " * 4)
                    + "else:\n    num_indexer_layers = max(num_indexer_layers, 1)",
                ),
            ),
        ),
    ),
    reached="forward",
    when=lambda args: (getattr(args, "dsa_indexer_loss_coeff", None) or 0) > 0,
    feature=(HELPER,),
)


def fixed_upstream(source: Source) -> bool:
    track = source.text(f"{HELPER}.track_indexer_metrics")
    return bool(track) and "indexer_loss_values.shape[0]" not in track


def verify() -> None:
    from unittest import mock

    import torch
    from megatron.core.transformer.experimental_attention_variant import dsa

    helper, groups, logged = dsa.DSAIndexerLossLoggingHelper, mock.Mock(), {}
    groups.get_pipeline_model_parallel_group().size.return_value = 1
    with (
        mock.patch.object(dsa, "parallel_state", groups),
        mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
        mock.patch.object(torch.distributed, "all_reduce"),
        mock.patch.dict(helper.tracker, clear=True),
    ):
        # Two microbatches; decoder layers 5 and 9 of 52, and MTP layers with the numbers 5 and 53.
        for _ in range(2):
            for layer, loss in ((5, 1.0), (9, 2.0), (5, 3.0), (53, 6.0)):
                helper.save_loss_to_tracker(torch.tensor(loss), layer, 52)
        helper.track_indexer_metrics(0.5, 1, None, total_loss_dict=logged)
    assert logged["indexer loss"] == 3.0, logged
