"""Pack the documents of a micro-batch side by side into one sequence, on the host.

Attention, state-space layers and MTP's rolled labels stop at the end of a document. Given a
multiple, every document is padded inside the pack, as FP8 and context parallelism require; the
boundaries of the padded documents and the true lengths are then different lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Packed:
    """A micro-batch of b samples of s tokens as one sequence; tensors are [1, b * s]."""

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    starts: list[int]
    """Where each document begins; the last one ends at b * s."""
    lengths: list[int]
    """Tokens of each document, padding not included."""
    sample: int
    """Tokens of one sample, s."""
    beside: dict[str, torch.Tensor]
    """Further values of the tokens; 0 where there is padding."""

    @property
    def padded(self) -> bool:
        """Whether any document is followed by padding."""
        return sum(self.lengths) != self.tokens.size(1)

    @property
    def squares(self) -> float:
        """Mean over tokens of the length of the token's document."""
        return sum(length**2 for length in self.lengths) / sum(self.lengths)

    def params(self, device: torch.device | str) -> Any:
        """Build Megatron's PackedSeqParams.

        It is built on the host and then moved: its constructor repeats indices by lengths, which
        would make the host wait for a device that holds them.
        """
        import torch
        from megatron.core.packed_seq_params import PackedSeqParams

        total = self.tokens.size(1)
        ends = [*self.starts[1:], total]
        real = torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32)
        padded = torch.tensor([*self.starts, total], dtype=torch.int32) if self.padded else None
        longest = max(end - start for start, end in zip(self.starts, ends, strict=True))
        known = {field.name for field in fields(PackedSeqParams)}
        newer = {
            "total_tokens": total,
            "tokens_per_sample": self.sample,
            "pad_between_seqs": self.padded,
        }
        params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=real,
            cu_seqlens_kv=real,
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            **{name: value for name, value in newer.items() if name in known},
        )
        if padded is not None:
            # With it DSA keeps padding out of its indexer's loss; Megatron itself never sets it.
            params.real_token_mask_q = self._real().to(device, non_blocking=True)
        for field in fields(params):
            value = getattr(params, field.name)
            if isinstance(value, torch.Tensor):
                setattr(params, field.name, value.to(device, non_blocking=True))
        return params

    def _real(self) -> torch.Tensor:
        """A mask of the positions that hold a token of a document, [1, b * s]."""
        import torch

        real = torch.zeros_like(self.tokens, dtype=torch.bool)
        for start, length in zip(self.starts, self.lengths, strict=True):
            real[0, start : start + length] = True
        return real


def pack(
    tokens: torch.Tensor,
    labels: torch.Tensor,
    loss_mask: torch.Tensor,
    eod: int,
    multiple: int = 1,
    beside: Mapping[str, torch.Tensor] | None = None,
) -> Packed:
    """Pack the documents of a micro-batch.

    A sample keeps its length: if padding makes its documents longer, the end of the last one is
    cut off. The label after a document's end belongs to another document and is masked.

    Args:
        tokens: [b, s] on the host, documents closed by `eod`.
        labels: [b, s], the next token of each.
        loss_mask: [b, s].
        eod: id of the token that ends a document.
        multiple: every document begins at a multiple of this; s must be one.
        beside: further values of the tokens by name, each [b, s].
    """
    import torch

    batch, sample = tokens.shape
    out_tokens = torch.full((batch * sample,), eod, dtype=tokens.dtype)
    out_labels = torch.zeros_like(out_tokens)
    out_mask = torch.zeros(batch * sample, dtype=loss_mask.dtype)
    positions = torch.zeros_like(out_tokens)
    beside = beside or {}
    out_beside = {
        name: torch.zeros(batch * sample, dtype=values.dtype) for name, values in beside.items()
    }
    starts: list[int] = []
    lengths: list[int] = []
    for row in range(batch):
        at, stop = row * sample, (row + 1) * sample
        for first, last in _documents(tokens[row], eod):
            length = min(last - first, stop - at)
            if length <= 0:
                break
            to, source = slice(at, at + length), slice(first, first + length)
            out_tokens[to] = tokens[row, source]
            out_labels[to] = labels[row, source]
            out_mask[to] = loss_mask[row, source]
            positions[to] = torch.arange(length)
            for name, values in beside.items():
                out_beside[name][to] = values[row, source]
            starts.append(at)
            lengths.append(length)
            at += -(-length // multiple) * multiple
    out_mask[out_tokens == eod] = 0  # an end has no successor, and padding consists of ends
    return Packed(
        tokens=out_tokens.unsqueeze(0),
        labels=out_labels.unsqueeze(0),
        loss_mask=out_mask.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        starts=starts,
        lengths=lengths,
        sample=sample,
        beside={name: values.unsqueeze(0) for name, values in out_beside.items()},
    )


def _documents(row: torch.Tensor, eod: int) -> list[tuple[int, int]]:
    """The begin and end of each document of a sample; an end token belongs to its document."""
    ends = [int(place) + 1 for place in (row == eod).nonzero()]
    if not ends or ends[-1] != len(row):
        ends.append(len(row))
    return list(zip([0, *ends[:-1]], ends, strict=True))
