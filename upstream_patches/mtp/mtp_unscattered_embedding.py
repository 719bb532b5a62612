"""Support MTP with sequence parallelism if the embedding does not scatter its output.

What: `MultiTokenPredictionLayer._get_embeddings` scatters the sequence to the ranks if the model's
    embedding was built to return all of it.
Why: A multimodal model inserts images into the complete sequence and scatters it by itself
    (`scatter_embedding_sequence_parallel=False`). MTP calls the same embedding, so that its decoder
    input is as long as the sequence, while the hidden states are one rank's part of it. The first
    forward pass fails ("Sizes of tensors must match except in dimension 2. Expected size 8 but got
    size 4"; seen on two ranks, on 0.16.1 and 0.19.2).
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/6256 (main, August 2026; not released)
Remove: when `_get_embeddings` scatters what the embedding does not.
Numerics: none (bitwise); such runs used to fail
"""

from cppmega.catalogue.megatron_args import has_mtp
from cppmega.edits import inserting
from cppmega.page import Edit, Patch, Source

TARGET = (
    "megatron/core/transformer/multi_token_prediction.py:MultiTokenPredictionLayer._get_embeddings"
)


PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=TARGET,
            pins={
                "0.15.3": "691fbf08ba1e3c1e",
                "0.16.1": "3481911cc4e0f5ee",
                "0.17.1": "3481911cc4e0f5ee",
                "0.18.2": "a9a604c68eb9e732",
                "0.19.2": "41664a509d6f2b38",
                "dev-d48bd6be": "db62416b9a42510b",
            },
            # Until 0.16 the layer has no group, and None selects the default one.
            edit=inserting(
                """
                if self.config.sequence_parallel and not getattr(
                    embedding, "scatter_to_sequence_parallel", True
                ):
                    # The hidden states are scattered, by whoever asked the embedding not to.
                    decoder_input = scatter_to_sequence_parallel_region(
                        decoder_input, group=getattr(self, "tp_group", None)
                    )
                """,
                after="decoder_input = embedding(input_ids=input_ids, position_ids=position_ids)",
            ),
        ),
    ),
    reached="forward",
    when=has_mtp,
    after=("mtp_roll_packed_sequences",),
)


def fixed_upstream(source: Source) -> bool:
    return "scatter_to_sequence_parallel_region(decoder_input" in source.text(TARGET)


def verify() -> None:
    from types import SimpleNamespace
    from unittest import mock

    import torch
    from megatron.core.transformer import multi_token_prediction as mtp

    class Embedding(SimpleNamespace):
        def __call__(self, input_ids, position_ids):  # type: ignore[no-untyped-def]
            return input_ids.t()[..., None].float()

    def part(sequence_parallel, **embedding):  # type: ignore[no-untyped-def]
        """Return the tokens of the first of two ranks, out of four."""
        config = SimpleNamespace(sequence_parallel=sequence_parallel, mtp_detach_heads=False)
        layer = SimpleNamespace(config=config, cp_group=None, tp_group="the layer's")
        ids = torch.arange(1, 5)[None]
        scatter = mock.Mock(side_effect=lambda whole, group=None: whole.chunk(2)[0])
        with mock.patch.object(mtp, "scatter_to_sequence_parallel_region", scatter):
            got = mtp.MultiTokenPredictionLayer._get_embeddings(
                layer,
                input_ids=ids,
                position_ids=ids,
                hidden_states=torch.zeros(2, 1, 1),
                embedding=Embedding(**embedding),
            )
        return got[-2].flatten().tolist()

    whole = [2.0, 3.0, 4.0, 0.0]  # MTP predicts from the next token
    assert part(True, scatter_to_sequence_parallel=False) == whole[:2], (
        "the rank received the complete sequence"
    )
    assert part(True, scatter_to_sequence_parallel=True) == whole
    assert part(True) == part(False, scatter_to_sequence_parallel=False) == whole
