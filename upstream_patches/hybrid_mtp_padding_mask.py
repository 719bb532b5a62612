"""Pass the padding mask to the MTP heads of a hybrid model.

What: `HybridModel.forward` passes `padding_mask` to the MTP block, as it does to the decoder.
Why: MTP accepts the mask and rolls it along with the tokens. `GPTModel` passes it and `HybridModel`
    does not, so the MoE routers of the MTP depths count padding as tokens, both in their auxiliary
    losses and in the loads that update the expert bias (tested: 8 of 2 x 8 tokens were padding, and
    an MTP router counted all 16). `MambaModel` of 0.17 drops the mask as well, but its MTP block
    does not accept one yet. Not tested: sequence parallelism, where the routers see slices of the
    sequence.
Upstream: Not sent: found by reading; dev passes the mask, main does not.
Remove: when `HybridModel.forward` passes `padding_mask` to `self.mtp`.
Numerics: changes results of runs that pass a padding mask and have MoE in their MTP depths
"""

from cppmega.catalogue.megatron_args import has_mtp, layer_pattern
from cppmega.edits import adding_argument
from cppmega.page import Edit, Patch, Source

TARGET = "megatron/core/models/hybrid/hybrid_model.py:HybridModel.forward"

PATCH = Patch(
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
    ),
    reached="forward",
    feature=("megatron/core/models/hybrid/hybrid_model.py:HybridModel",),
    when=lambda args: bool(layer_pattern(args)) and has_mtp(args),
)


def fixed_upstream(source: Source) -> bool:
    call = source.text(TARGET).partition("self.mtp(")[2].partition("if not self.post_process")[0]
    return "padding_mask=padding_mask" in call


def verify() -> None:
    import torch
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    from cppmega.proof.stand_ins import Arguments

    def mtp(*, hidden_states, padding_mask=None, **_):  # type: ignore[no-untyped-def]
        return hidden_states if padding_mask is None else hidden_states.masked_fill(padding_mask, 0)

    model = Arguments(
        config=Arguments(),
        decoder=lambda *, hidden_states, **_: hidden_states,
        mtp=mtp,
        mtp_process=True,
        post_process=False,
    )
    padding = torch.tensor([False, True, False, True])
    out = HybridModel.forward(
        model, None, None, None, decoder_input=torch.ones(4), padding_mask=padding
    )
    assert out.tolist() == [1, 0, 1, 0], "the MTP block did not get the padding mask"
