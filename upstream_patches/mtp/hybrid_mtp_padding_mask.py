"""Pass the padding mask to the MTP heads of a hybrid model.

What: `HybridModel.forward` passes `padding_mask` to the MTP block, as it does to the decoder. With
    sequence parallelism, the depths roll the mask of all tokens, and their layers get the rank's
    part of it, unless the caller has already divided the mask.
Why: MTP accepts the mask and rolls it along with the tokens. `GPTModel` passes it and `HybridModel`
    does not, so the MoE routers of the MTP depths count padding as tokens, both in their auxiliary
    losses and in the loads that update the expert bias (tested: 8 of 2 x 8 tokens were padding, and
    an MTP router counted all 16). `MambaModel` of 0.17 drops the mask as well, but its MTP block
    does not accept one yet. With sequence parallelism, stock trains a model whose decoder is dense
    and ignores the mask, so the mask of all tokens may arrive here.
Upstream: Not sent: found by reading; dev passes the mask, main does not; neither
    divides it.
Remove: when `HybridModel.forward` passes `padding_mask` to `self.mtp`, and the MTP layers divide it
    among the ranks with sequence parallelism.
Numerics: changes results of runs that pass a padding mask and have MoE in their MTP depths
"""

from cppmega.catalogue.megatron_args import has_mtp, layer_pattern
from cppmega.edits import adding_argument, inserting
from cppmega.page import Edit, Patch, Source, left_alone

TARGET = "megatron/core/models/hybrid/hybrid_model.py:HybridModel.forward"
MTP = "megatron/core/transformer/multi_token_prediction.py"
LAYER = f"{MTP}:MultiTokenPredictionLayer._proj_and_transformer_layer"

DIVIDED = inserting(
    """
    if (
        padding_mask is not None
        and self.config.sequence_parallel
        and padding_mask.shape[1] != hidden_states.shape[0]
    ):
        padding_mask = scatter_to_sequence_parallel_region(
            padding_mask.transpose(0, 1).contiguous(), group=self.tp_group
        ).transpose(0, 1)
    """,
    before="""
    if self.config.sequence_parallel:
        rng_context = tensor_parallel.get_cuda_rng_tracker().fork()
    else:
        rng_context = nullcontext()
    """,
)

PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=TARGET,
            pins={
                "0.18.2": "f0c6ad11370a6a8a",
                "0.19.2": "cc72c3a7ee6033e9",
                "main-d98e8a64": "11cd0a6566dfd959",
            },
            edit=adding_argument("self.mtp", "padding_mask=padding_mask"),
        ),
        Edit(
            target=LAYER,
            pins={
                "0.18.2": "958a8991c4021ac3",
                "0.19.2": "958a8991c4021ac3",
                "main-d98e8a64": "958a8991c4021ac3",
            },
            edit=DIVIDED,
            mark="",  # GPT models call it as well
        ),
        # The mask gets to the depths of dev, and is divided nowhere.
        Edit(target=TARGET, pins={"dev-d48bd6be": "2ebaeee3af243e7a"}, edit=left_alone),
        Edit(target=LAYER, pins={"dev-d48bd6be": "8e0540b47cf09dea"}, edit=DIVIDED),
    ),
    reached="forward",
    feature=("megatron/core/models/hybrid/hybrid_model.py:HybridModel",),
    when=lambda args: bool(layer_pattern(args)) and has_mtp(args),
    after=("mhc_connections",),
)


def fixed_upstream(source: Source) -> bool:
    call = source.text(TARGET).partition("self.mtp(")[2].partition("if not self.post_process")[0]
    divided = "scatter_to_sequence_parallel_region(padding_mask" in source.text(LAYER)
    return "padding_mask=padding_mask" in call and divided


def verify() -> None:
    from unittest import mock

    import torch
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer import multi_token_prediction

    from cppmega.proof import cpu_shims
    from cppmega.proof.stand_ins import Arguments

    cpu_shims.shim()

    def mtp(*, hidden_states, padding_mask=None, **_):  # type: ignore[no-untyped-def]
        if padding_mask is None:
            return hidden_states
        return hidden_states.masked_fill(padding_mask.t(), 0)

    model = Arguments(
        config=Arguments(moe_n_hash_layers=0),
        decoder=lambda *, hidden_states, **_: hidden_states,
        mtp=mtp,
        mtp_process=True,
        post_process=False,
    )
    padding = torch.tensor([[False, True, False, True]])
    out = HybridModel.forward(
        model, None, None, None, decoder_input=torch.ones(4, 1), padding_mask=padding
    )
    assert out.flatten().tolist() == [1, 0, 1, 0], "the MTP block did not get the padding mask"

    # The second of two ranks, with all tokens in the mask, or with its own only.
    rows = torch.tensor([[False, True, False, True], [False, False, True, True]])
    scatter = mock.patch.object(
        multi_token_prediction,
        "scatter_to_sequence_parallel_region",
        lambda whole, group: whole.chunk(2)[1],
    )
    layer = Arguments(
        config=Arguments(sequence_parallel=True, fp8=None),
        mtp_layer_pattern="E",
        mtp_model_layer=mtp,
        _concat_embeddings=lambda hidden_states, decoder_input: hidden_states,
        _postprocess=lambda hidden_states: hidden_states.t().tolist(),
    )
    for given in (rows, rows[:, 2:]):
        with scatter:
            out = multi_token_prediction.MultiTokenPredictionLayer._proj_and_transformer_layer(
                layer, torch.ones(2, 2), None, padding_mask=given
            )
        assert out == [[1, 0], [0, 0]], "a layer gets the mask of other ranks' tokens"
