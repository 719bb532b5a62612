"""The code that `mtp_roll_packed_sequences` adds to Megatron, and its edits."""

from __future__ import annotations

from textwrap import indent
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def _cppmega_roll_documents(tensor, cu_seqlens, cu_seqlens_padded, cp_group, fill_value=0):
    """Along the last dimension: each token's successor in its document, or `fill_value`.

    Nothing here waits for the device, so CUDA graphs can capture it. Under context parallelism
    documents lie as Transformer Engine partitions them: rank r of n has the pieces r and 2n-1-r of
    each document's 2n equal pieces.
    """
    starts = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    assert starts.shape == cu_seqlens.shape, "Each document needs a real and a padded boundary."
    documents, tokens = starts.numel() - 1, tensor.size(-1)
    if documents < 1 or tokens == 0:
        return torch.zeros_like(tensor)
    cp_size = cp_group.size() if cp_group is not None else 1
    cp_rank = torch.distributed.get_rank(group=cp_group) if cp_size > 1 else 0

    # The tail behind the last boundary counts as one more document, which has no tokens.
    extend = torch.nn.functional.pad
    real = extend(cu_seqlens.to(tensor.device).long().diff(), (0, 1))
    starts = starts.to(tensor.device).long() // cp_size
    length = extend(starts.diff(), (0, 1))
    front = (length + 1) // 2
    here = torch.arange(tokens, device=tensor.device)
    document = torch.searchsorted(starts[1:], here, right=True)
    offset, half = here - starts[document], front[document]
    in_back = offset >= half
    place = offset + half * (cp_rank + in_back * 2 * (cp_size - 1 - cp_rank))
    has_successor = place + 1 < real[document]

    rolled = torch.roll(tensor, -1, dims=-1)
    if cp_size > 1:
        # Behind piece r comes the front piece of rank r+1, behind piece 2n-1-r the back piece of
        # rank r-1. All documents' first tokens travel together: one message to each neighbour.
        heads = torch.cat((starts[:-1], starts[:-1] + front[:-1])).clamp(max=tokens - 1)
        sent = tensor.detach().index_select(-1, heads).chunk(2, dim=-1)
        to_prev, to_next = (part.contiguous() for part in sent)
        from_next, from_prev = torch.empty_like(to_prev), torch.empty_like(to_next)
        ranks = torch.distributed.get_process_group_ranks(group=cp_group)
        ops = []
        for peer, out, into in (
            (cp_rank - 1, to_prev, from_prev),
            (cp_rank + 1, to_next, from_next),
        ):
            if 0 <= peer < cp_size:
                for op, buffer in ((torch.distributed.isend, out), (torch.distributed.irecv, into)):
                    ops.append(torch.distributed.P2POp(op, buffer, ranks[peer], group=cp_group))
        for request in torch.distributed.batch_isend_irecv(ops):
            request.wait()
        crosses = offset + 1 == length[document]
        if cp_rank < cp_size - 1:  # the last rank's two pieces adjoin
            crosses = crosses | (offset + 1 == half)
        slot = (document + documents * in_back).clamp(max=2 * documents - 1)
        received = torch.cat((from_next, from_prev), dim=-1).index_select(-1, slot)
        rolled = torch.where(crosses, received, rolled)
    return rolled.masked_fill(~has_successor, fill_value)


ONE_TOKEN = 'assert shifts == -1, "Packed sequence roll only supports a single-token left shift."\n'
WHOLE_PIECES = """\
# The boundaries are those of the whole pack, not of this rank's share: a share ends where its
# tokens do. Each document must have been split into 2n equal pieces (or one token per rank); a pack
# that was split as one sequence would be shifted across its documents. The device looks, so that
# the host does not wait.
lengths, ranks, tokens = bounds.diff(), cp_group.size(), {tensor}.size(-1)
whole = ((lengths % (2 * ranks) == 0) | (lengths == ranks)).all()
whole &= (bounds[-1] <= ranks * tokens) & ((bounds[-1] != tokens) | (tokens == 0))
torch._assert_async(
    whole,
    "mtp_roll_packed_sequences: MTP under context parallelism needs the cu_seqlens of the whole "
    "pack, not of a rank's share, with documents padded to multiples of 2 * CP and split one by "
    "one; --dataloader-inter-document-masking splits the whole sequence",
)
"""
PACKED = f"""\
assert dims in (-1, tensor.dim() - 1), "Packed sequence roll only supports the last dimension."
{ONE_TOKEN}cu_seqlens = packed_seq_params.cu_seqlens_q
assert cu_seqlens is not None, "Packed sequence parameters must provide cu_seqlens_q."
padded = packed_seq_params.cu_seqlens_q_padded
if cp_group is not None and cp_group.size() > 1:
    bounds = cu_seqlens if padded is None else padded
{indent(WHOLE_PIECES.format(tensor="tensor"), " " * 4)}\
rolled_tensor = _cppmega_roll_documents(tensor, cu_seqlens, padded, cp_group)
"""
PACKED_ON_DEV = f"""\
bounds = cu_seqlens
{WHOLE_PIECES.format(tensor="tensors[0]")}\
return [
    _cppmega_roll_documents(tensor, bounds, None, cp_group, fill_value)
    for tensor, fill_value in zip(tensors, fill_values)
]
"""
UNPACKED = """\
# One document over all ranks; its boundaries are made on the device, because a copy would wait.
assert shifts == -1, "Context parallel roll only supports a single-token left shift."
cu_seqlens = torch.arange(2, device=tensor.device) * (tensor.size(dims) * cp_group.size())
rolled_tensor = _cppmega_roll_documents(tensor.movedim(dims, -1), cu_seqlens, None, cp_group)
rolled_tensor = rolled_tensor.movedim(-1, dims)
"""
UNPACKED_ON_DEV = """\
# One document over all ranks; its boundaries are made on the device, because a copy would wait.
assert shifts == -1, "Context parallel roll only supports a single-token left shift."
cu_seqlens = torch.arange(2, device=tensors[0].device) * (tensors[0].size(dims) * cp_group.size())
return [
    _cppmega_roll_documents(
        tensor.movedim(dims, -1), cu_seqlens, None, cp_group, fill_value
    ).movedim(-1, dims)
    for tensor, fill_value in zip(tensors, fill_values)
]
"""


def replacing_run(first: str, last: str, new: str) -> Any:
    """Replace consecutive statements, from one that begins with `first` to one with `last`."""

    def edit(node: Any) -> Any:
        import libcst as cst

        from cppmega.rewriting import node_edits

        body = list(node.body.body)
        code = [cst.Module([]).code_for_node(s.with_changes(leading_lines=())) for s in body]
        (start,) = [at for at, text in enumerate(code) if text.startswith(first)]
        (end,) = [at for at, text in enumerate(code) if text.startswith(last)]
        body[start : end + 1] = node_edits.statements(new)
        return node.with_changes(body=node.body.with_changes(body=body))

    return edit


ONE_EXCHANGE = replacing_run("tensor_list = ", "rolled_tensor = torch.cat(", UNPACKED)
