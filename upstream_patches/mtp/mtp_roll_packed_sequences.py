"""Shift MTP labels, masks and inputs within the documents of a pack, without waiting for the GPU.

What: `roll_tensor` finds each token's successor from the padded boundaries on the device, and under
    context parallelism exchanges all boundary tokens at once within the group. Tokens without a
    real successor (a document's last token, padding, the tail of the pack) become 0 and are not
    counted. Under context parallelism, boundaries of a rank's share instead of the whole pack, and
    a pack that was split as one sequence and not document by document, are rejected on the device,
    without waiting for it. On 0.15 this adds packed sequences to MTP, which rejects them there.
Why: `cu_seqlens_q_padded` is never read: 1 2 3 P 4 5 P P with q=[0,3,5] and padded=[0,4,8] becomes
    2 3 0 4 0 5 P P, so that a padding slot is trained on 4, token 4 on nothing, and token 5 on
    itself. 100 documents cost 1302 operators and 400 host syncs per roll; with the page they cost
    32 and none (counted on 0.19.2). In addition, tokens after the last boundary are counted, a
    local piece of 1 token raises IndexError, and the exchange uses the world's process group, with
    one pair of messages per document. The dev branch is correct without context parallelism; with
    it, it has all of the latter problems.
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/6205 (padding) and
    https://github.com/NVIDIA/Megatron-LM/pull/6746 (group); dev fixed CP=1. The assertion that the
    boundaries are global was requested in a review of
    https://github.com/NVIDIA/Megatron-LM/pull/2043.
Remove: when a release reads the padded boundaries, sends within the group and does not loop over
    the documents.
Numerics: changes results: MTP labels, masks and token counts of padded packs and of tails. Packs
    without padding and unpacked sequences stay bitwise the same.
"""

from __future__ import annotations

from textwrap import indent

from cppmega.catalogue.megatron_args import has_mtp
from cppmega.edits import adding_argument, adding_parameter, in_order, inserting, replacing
from cppmega.page import Edit, Patch, Source, left_alone

from ._mtp_roll import (
    ONE_EXCHANGE,
    PACKED,
    PACKED_ON_DEV,
    UNPACKED_ON_DEV,
    _cppmega_roll_documents,
    replacing_run,
)

FILE = "megatron/core/transformer/multi_token_prediction.py"
LAYER = f"{FILE}:MultiTokenPredictionLayer"
THROUGH = "packed_seq_params=packed_seq_params"
PARAMETER = "packed_seq_params: Optional[PackedSeqParams] = None"
ROLLED_MASK = f"""\
padding_mask, _ = roll_tensor(
    padding_mask, shifts=-1, dims=-1, cp_group=self.cp_group, {THROUGH}
)
"""

PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=f"{FILE}:roll_tensor",
            pins={
                "0.16.1": "387c8572e4cc68f9",
                "0.17.1": "387c8572e4cc68f9",
                "0.18.2": "387c8572e4cc68f9",
                "0.19.2": "3ad190f2594f2bae",
                "main-d98e8a64": "12a38b7e595861fb",
            },
            edit=ONE_EXCHANGE,
            helpers=(_cppmega_roll_documents,),
        ),
        Edit(
            target=f"{FILE}:_roll_tensor_packed_seq",
            pins={
                "0.16.1": "08becdabef99f062",
                "0.17.1": "8c63ad2a905a227a",
                "0.18.2": "8c63ad2a905a227a",
                "0.19.2": "8c63ad2a905a227a",
                "main-d98e8a64": "ff01aa649ac849ff",
            },
            edit=replacing_run("assert (", "for i in range(", PACKED),
        ),
        Edit(  # True means padding there, and roll_tensor now fills padding with zeros
            target=f"{LAYER}._get_embeddings",
            pins={
                "0.18.2": "a9a604c68eb9e732",
                "0.19.2": "41664a509d6f2b38",
                "main-d98e8a64": "490ea53af1461d49",
            },
            edit=in_order(
                inserting("unrolled_mask = padding_mask", before=ROLLED_MASK),
                inserting(
                    """
                    if packed_seq_params is not None:
                        # The roll leaves zeros in padding, and zero here is a real token.
                        padding_mask = padding_mask.logical_or(unrolled_mask)
                    """,
                    after=ROLLED_MASK,
                ),
            ),
        ),
        Edit(  # no padding mask yet
            target=f"{LAYER}._get_embeddings",
            pins={"0.16.1": "3481911cc4e0f5ee", "0.17.1": "3481911cc4e0f5ee"},
            edit=left_alone,
        ),
        # The dev branch, which rolls several tensors at once, and is correct without context
        # parallelism. It passes only the padded boundaries: the loss mask hides the padding.
        Edit(
            target=f"{FILE}:_roll_tensors_unpacked",
            pins={"dev-d48bd6be": "2da0fd4dba660732"},
            edit=replacing(
                """
                return [
                    _roll_tensor_unpacked_zigzag_cp(
                        tensor, shifts, dims, cp_group, fill_value=fill_value
                    )
                    for tensor, fill_value in zip(tensors, fill_values)
                ]
                """,
                UNPACKED_ON_DEV,
            ),
            helpers=(_cppmega_roll_documents,),
        ),
        Edit(
            target=f"{FILE}:_roll_tensors_packed_seq",
            pins={"dev-d48bd6be": "6397fccf5b598146"},
            edit=replacing(
                """
                return [
                    _roll_tensor_packed_seq_zigzag_cp(
                        tensor, shifts, dims, cu_seqlens, cp_group, fill_value=fill_value
                    )
                    for tensor, fill_value in zip(tensors, fill_values)
                ]
                """,
                PACKED_ON_DEV,
            ),
        ),
        # The backport: 0.15 has neither the packed roll nor the arguments for it.
        Edit(
            target=f"{FILE}:roll_tensor",
            pins={"0.15.3": "2c1afec1041a6aeb"},
            edit=in_order(
                ONE_EXCHANGE,
                inserting(
                    f"if packed_seq_params is not None:\n{indent(PACKED, ' ' * 4)}"
                    "    return rolled_tensor, rolled_tensor.sum()",
                    before="""
                    if cp_group is None or cp_group.size() == 1:
                        rolled_tensor = torch.roll(tensor, shifts=shifts, dims=dims)
                        rolled_tensor.select(dims, shifts).fill_(0)
                        return rolled_tensor, rolled_tensor.sum()
                    """,
                ),
                adding_parameter("packed_seq_params=None"),
            ),
            helpers=(_cppmega_roll_documents,),
        ),
        Edit(
            target=f"{LAYER}._get_embeddings",
            pins={"0.15.3": "691fbf08ba1e3c1e"},
            edit=in_order(
                adding_parameter(PARAMETER), adding_argument("roll_tensor", THROUGH, times=2)
            ),
        ),
        Edit(
            target=f"{LAYER}.forward",
            pins={"0.15.3": "55fe47cbf21ba1a0"},
            edit=in_order(
                replacing_run("assert (", "assert (", ""),
                adding_argument("self._get_embeddings", THROUGH),
            ),
        ),
        Edit(
            target="megatron/core/models/gpt/gpt_model.py:GPTModel._postprocess",
            pins={"0.15.3": "3cfcd42a1b39659e"},
            edit=adding_argument("roll_tensor", THROUGH, times=2),
        ),
    ),
    reached="forward",
    when=has_mtp,
    # With documents padded inside the pack, stock rolls labels at the wrong boundaries.
    wanted_by=lambda recipe: (
        recipe.document_multiple > 1 and recipe.layout.depths > 0 and recipe.kind != "loop"
    ),
)


def fixed_upstream(source: Source) -> bool:
    text = source.file(FILE)
    loops = "range(len(cu_seqlens) - 1)" in text
    sends_to_the_world = "torch.distributed.isend(tensor=" in text
    return "cu_seqlens_q_padded" in text and not loops and not sends_to_the_world


def verify() -> None:
    import inspect
    from types import MethodType, SimpleNamespace
    from unittest import mock

    import torch
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import multi_token_prediction as mtp
    from torch._subclasses.fake_tensor import FakeTensorMode

    from cppmega.proof import cpu_shims
    from cppmega.proof.stand_ins import Arguments

    cpu_shims.shim()

    def pack() -> PackedSeqParams:
        real, padded = torch.tensor([0, 3, 5]), torch.tensor([0, 4, 8])
        return PackedSeqParams(cu_seqlens_q=real, cu_seqlens_q_padded=padded)

    on_dev = "tensors" in inspect.signature(mtp.roll_tensor).parameters

    def roll(tensor, **given):
        return mtp.roll_tensor([tensor] if on_dev else tensor, **given)[0]

    tokens = torch.tensor([[1, 2, 3, 9, 4, 5, 9, 9, 7]])  # 9 is padding, 7 the tail
    shifted = [[2, 3, 9, 0, 5, 9, 9, 0, 0]] if on_dev else [[2, 3, 0, 0, 5, 0, 0, 0, 0]]
    rolled, *total = mtp.roll_tensor([tokens] if on_dev else tokens, packed_seq_params=pack())
    assert rolled.tolist() == shifted and all(t.item() == 10 for t in total), (rolled, total)
    with FakeTensorMode():  # raises if the host reads a value
        roll(torch.ones(1, 9), packed_seq_params=pack())

    # Rank 0 of 2, with one token of a document, and with the ends of two documents: the other rank
    # of the group sends all successors in one message.
    group, messages = SimpleNamespace(size=lambda: 2), []

    def exchange(ops):
        messages.extend((op.kind, op.peer, op.group) for op in ops)
        for op in ops:
            if op.kind is torch.distributed.irecv:
                op.tensor.fill_(2)
        return []

    with mock.patch.multiple(
        torch.distributed,
        get_rank=lambda group: 0,
        get_process_group_ranks=lambda group: [4, 6],
        P2POp=lambda kind, tensor, peer, group: SimpleNamespace(**locals()),
        batch_isend_irecv=exchange,
    ):
        rolled = roll(torch.tensor([[1]]), cp_group=group)
        ends = roll(torch.tensor([[1, 9, 4, 9]]), cp_group=group, packed_seq_params=pack())
    assert (rolled.tolist(), ends.tolist()) == ([[2]], [[2, 0, 2, 0]]), (rolled, ends)
    kinds = (torch.distributed.isend, torch.distributed.irecv)
    assert messages == [(kind, 6, group) for kind in kinds] * 2, messages
    if on_dev:
        return  # the page does not change its layer and its loss

    # The inputs of the layer and of the loss.
    config = Arguments(mtp_num_layers=1, mtp_loss_scaling_factor=1.0, config_logger_dir="")
    layer = mock.MagicMock(config=config, cp_group=None)
    layer._get_embeddings = MethodType(mtp.MultiTokenPredictionLayer._get_embeddings, layer)
    forward = mtp.MultiTokenPredictionLayer.forward
    arguments = {
        "input_ids": tokens,
        "position_ids": tokens,
        "hidden_states": torch.zeros(9, 1, 1),
        "attention_mask": None,
        "padding_mask": tokens == 9,  # rolled since 0.18
        "packed_seq_params": pack(),
        "embedding": lambda input_ids, position_ids: input_ids,
    }
    known = inspect.signature(forward).parameters
    _, ids, positions, *masks = forward(layer, **{k: arguments[k] for k in known if k in arguments})
    assert ids.tolist() == positions.tolist() == shifted, (ids, positions)
    for mask in masks:
        assert mask[:, :8].equal(tokens[:, :8] == 9), mask

    model = mock.MagicMock(config=config, cp_group=None, training=False)
    model.pg_collection.cp = None
    model.share_embeddings_and_output_weights = False
    model.output_layer.side_effect = lambda hidden_states, **_: (hidden_states, None)
    model.compute_language_model_loss.side_effect = lambda labels, logits: labels.float()
    rest = dict.fromkeys(("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin"))
    states = torch.zeros(18, 1, 1)
    GPTModel._postprocess(model, states, tokens, tokens, tokens, packed_seq_params=pack(), **rest)
    labels = model.compute_language_model_loss.call_args_list[0].args[0]
    assert labels.tolist() == shifted, labels
