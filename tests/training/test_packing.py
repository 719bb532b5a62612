"""Documents of a micro-batch in one pack: where each ends, its labels, its padding."""

from __future__ import annotations

import sys
from dataclasses import make_dataclass
from types import SimpleNamespace

import pytest
import torch

from cppmega.training.packing import Packed, pack

pytestmark = pytest.mark.slow

END = 9


def packed(rows: list[list[int]], multiple: int = 1) -> Packed:
    """Pack rows of tokens; the label of a token is the next token of the row."""
    text = torch.tensor(rows)
    mask = torch.ones(text.shape[0], text.shape[1] - 1)
    return pack(text[:, :-1], text[:, 1:], mask, END, multiple)


def documents(pack_: Packed) -> list[tuple[list[int], list[int], list[float], list[int]]]:
    """What stands at each document's place: tokens, labels, mask, positions."""
    tensors = (pack_.tokens, pack_.labels, pack_.loss_mask, pack_.position_ids)
    return [
        tuple(tensor[0, start : start + length].tolist() for tensor in tensors)  # type: ignore[misc]
        for start, length in zip(pack_.starts, pack_.lengths, strict=True)
    ]


def test_documents_end_at_their_end_token() -> None:
    found = packed([[1, 2, END, 3, 4, 5, 6]])
    assert documents(found) == [
        ([1, 2, END], [2, END, 3], [1, 1, 0], [0, 1, 2]),
        ([3, 4, 5], [4, 5, 6], [1, 1, 1], [0, 1, 2]),
    ]
    assert not found.padded and found.starts == [0, 3]


def test_a_document_ends_with_its_sample() -> None:
    found = packed([[1, 2, 3, 4], [5, END, 6, END]])
    assert found.starts == [0, 3, 5]
    assert found.lengths == [3, 2, 1]
    assert documents(found)[2] == ([6], [END], [1], [0])


def test_padding_inside_the_pack() -> None:
    found = packed([[1, END, 2, 3, END, 4, 5, 6, 7]], multiple=4)
    assert found.starts == [0, 4]
    assert found.lengths == [2, 3]
    assert documents(found)[1] == ([2, 3, END], [3, END, 4], [1, 1, 0], [0, 1, 2])
    assert found.tokens.tolist() == [[1, END, END, END, 2, 3, END, END]]
    assert found.loss_mask.tolist() == [[1, 0, 0, 0, 1, 1, 0, 0]]
    assert found.squares == (4 + 9) / 5


@pytest.mark.parametrize("newer", [(), ("total_tokens", "tokens_per_sample")])
def test_params_have_the_fields_of_the_release(
    monkeypatch: pytest.MonkeyPatch, newer: tuple[str, ...]
) -> None:
    """Megatron 0.16 has no `total_tokens`."""
    old = ("qkv_format", *(f"cu_seqlens_{of}" for of in ("q", "kv", "q_padded", "kv_padded")))
    names = (*old, "max_seqlen_q", "max_seqlen_kv", *newer)
    module = SimpleNamespace(PackedSeqParams=make_dataclass("PackedSeqParams", names))
    monkeypatch.setitem(sys.modules, "megatron.core.packed_seq_params", module)
    found = vars(packed([[1, 2, END, 3, 4, 5, 6]]).params("cpu"))
    assert found["cu_seqlens_q"].tolist() == [0, 3, 6] and set(found) == set(names)
    assert found.get("total_tokens", 6) == found.get("tokens_per_sample", 6) == 6


def test_a_cut_document_keeps_the_label_of_its_last_token() -> None:
    found = packed([[END, 1, 2, 3, 4]], multiple=2)
    assert documents(found)[1] == ([1, 2], [2, 3], [1, 1], [0, 1])


def test_random_packs_keep_every_label_with_its_token() -> None:
    generator = torch.Generator().manual_seed(0)
    for multiple in (1, 4, 8):
        rows = torch.randint(1, 12, (3, 33), generator=generator)
        rows[rows > END] = END
        found = packed(rows.tolist(), multiple)
        pairs = {(r, int(a)): int(b) for r in range(3) for a, b in enumerate(rows[r, 1:])}
        for (tokens, labels, mask, positions), start in zip(
            documents(found), found.starts, strict=True
        ):
            row = start // 32
            assert start % multiple == 0
            assert positions == list(range(len(tokens)))
            text = rows[row].tolist()
            at = next(
                i for i in range(len(text)) if text[i : i + len(tokens)] == tokens and
                [pairs[row, i + j] for j in range(len(tokens))] == labels
            )  # fmt: skip
            assert at >= 0
            assert mask == [float(token != END) for token in tokens]
        gaps = found.loss_mask.sum() <= sum(found.lengths)
        assert gaps and found.tokens.shape == (1, 96)
