"""Data of a training run: Megatron's datasets, and a micro-batch of them on the device.

Every rank builds its own loader, even where tensor and pipeline parallelism would not need it: the
index is mapped, not read, and nothing whose size depends on the documents has to be sent.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cppmega.errors import CppmegaError
from cppmega.recipe import Recipe, Structure
from cppmega.training.packing import pack

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class DataTokens:
    """The tokenizer that Megatron's datasets query; the data already consists of token ids."""

    vocab_size: int
    eod: int
    fingerprint: str
    """Fingerprint of the data: the cached index of other data under this path must not be used."""
    held_out: str = ""
    """Fingerprint of the held-out data; empty if the run evaluates nothing."""

    @property
    def pad(self) -> int:
        """An id that does not occur in the data: nothing in it is padding."""
        return -1

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        """Part of the name of Megatron's cached sample index."""
        return OrderedDict(vocab_size=self.vocab_size, eod=self.eod, data=self.fingerprint)


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch on the device."""

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    packed_seq_params: Any
    """None if every sample is one causal sequence."""
    squares: float
    """Mean over tokens of the length of their document, for the FLOPs."""
    structure_kinds: torch.Tensor | None = None
    """int64, of the shape of `tokens`; None exactly if the recipe has no structure embedding."""
    structure_depths: torch.Tensor | None = None
    """As `structure_kinds`."""


def dataset_provider(
    recipe: Recipe,
    tokens: DataTokens,
    prefixes: Sequence[str],
    cache: str | None,
    also: Callable[[], None] = lambda: None,
) -> Callable[..., Any]:
    """Build the function that `pretrain` calls for its datasets; without prefixes: mock data.

    Args:
        recipe: the run.
        tokens: end of document and vocabulary of the data.
        prefixes: datasets, mixed by their size.
        cache: folder for sample indices; None: next to the data.
        also: builds further datasets, which Megatron does not see.
    """

    def provide(sizes: Sequence[int], vp_stage: int | None = None) -> Any:
        also()
        return datasets(recipe, tokens, prefixes, cache, sizes, recipe.seed)

    provide.is_distributed = True  # type: ignore[attr-defined]  # Megatron asks the function
    return provide


def datasets(
    recipe: Recipe,
    tokens: DataTokens,
    prefixes: Sequence[str],
    cache: str | None,
    sizes: Sequence[int],
    seed: int,
) -> Any:
    """Build datasets for training, validation and test, of which only the first gets samples.

    Args:
        recipe: the run.
        tokens: end of document and vocabulary of the data.
        prefixes: datasets, mixed by their size; empty: mock data.
        cache: folder for sample indices; None: next to the data.
        sizes: least number of samples in each of the three.
        seed: decides the order of the samples.
    """
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset

    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=recipe.seq_length,
        blend=(list(prefixes), None) if prefixes else None,
        split="1,0,0",
        path_to_cache=cache,
        tokenizer=tokens,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,  # packing masks the ends itself
        create_attention_mask=False,
    )
    kind = GPTDataset if prefixes else MockGPTDataset
    if recipe.structure is not None:
        from cppmega.training import structure_datasets as structured

        real, mock = structured.StructureGPTDataset, structured.MockStructureGPTDataset
        kind = real if prefixes else mock
    return BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, config).build()


def check_batch(
    tokens: torch.Tensor, labels: torch.Tensor, loss_mask: torch.Tensor, vocab_size: int
) -> None:
    """Check that a model with this vocabulary can be trained on a micro-batch.

    Every rank checks the host's tensors before they are copied, which costs no synchronisation. For
    a wrong id the device would report a failed assertion somewhere or, if the vocabulary is padded
    or spread over ranks, nothing.

    Raises:
        CppmegaError: `token-out-of-vocabulary`, `loss-mask-broken`.
    """
    import torch

    for name, ids in (("tokens", tokens), ("labels", labels)):
        lowest, highest = (int(value) for value in torch.aminmax(ids))
        if lowest < 0 or highest >= vocab_size:
            raise CppmegaError(
                "token-out-of-vocabulary",
                f"The {name} of a micro-batch hold id {lowest if lowest < 0 else highest}; the "
                f"vocabulary has the ids 0 to {vocab_size - 1}.",
                "The data changed after it was checked, or was never checked completely.",
                "python -m cppmega.check_data PREFIX, for every --data of the run",
            )
    low, high = (float(value) for value in torch.aminmax(loss_mask))
    if not 0 <= low <= high < math.inf:  # NaN fails both comparisons
        raise CppmegaError(
            "loss-mask-broken",
            f"The loss mask of a micro-batch has weights from {low} to {high}.",
            "The loss would not be a mean over tokens, and not finite if a weight is not.",
            "inspect what produces the loss mask: the dataset, or a patch of it",
        )


_STRUCTURE_IDS = ("structure_kinds", "structure_depths")


def check_structure(sample: Mapping[str, torch.Tensor], structure: Structure) -> None:
    """Check that the structure embedding has a row for every id of a micro-batch.

    Raises:
        CppmegaError: `structure-out-of-range`.
    """
    import torch

    rows = (structure.categories, structure.levels)
    for name, count in zip(_STRUCTURE_IDS, rows, strict=True):
        lowest, highest = (int(value) for value in torch.aminmax(sample[name]))
        if lowest < 0 or highest >= count:
            raise CppmegaError(
                "structure-out-of-range",
                f"The {name} of a micro-batch hold {lowest if lowest < 0 else highest}; the "
                f"embedding has the rows 0 to {count - 1}.",
                "The data changed after it was checked, or was never checked completely.",
                "python -m cppmega.check_data PREFIX, for every --data of the run",
            )


def of_context_rank(
    sample: Mapping[str, torch.Tensor], ranks: int, rank: int
) -> dict[str, torch.Tensor]:
    """The tokens of a micro-batch, `[b, s]` each, that a context-parallel rank has."""
    from cppmega.ops.common.balanced_order import balanced_order

    length = sample["tokens"].size(1) // ranks
    own = balanced_order(None, length, ranks).view(ranks, length)[rank]
    return {name: values[:, own] for name, values in sample.items()}


def next_batch(
    recipe: Recipe,
    iterator: Iterator[dict[str, torch.Tensor]],
    eod: int,
    device: Any,
    context_rank: int = 0,
) -> Batch:
    """Take a micro-batch, check it, pack it if the recipe does, and copy it to the device.

    With context parallelism the rank gets its own tokens of it.

    Nothing is read back from the device: values, sizes and boundaries come from host tensors.

    Raises:
        CppmegaError: `token-out-of-vocabulary`, `loss-mask-broken`, `structure-out-of-range`.
    """
    from cppmega.ops.linear_cross_entropy import counting_tokens

    sample = next(iterator)
    check_batch(sample["tokens"], sample["labels"], sample["loss_mask"], recipe.vocab_size)

    ids = {}
    if recipe.structure is not None:
        check_structure(sample, recipe.structure)
        ids = {name: sample[name] for name in _STRUCTURE_IDS}

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, non_blocking=True)

    def moved_mask(mask: torch.Tensor) -> torch.Tensor:
        # The losses without logits skip masked tokens if the host knows how many there are.
        return counting_tokens(moved(mask), int(mask.count_nonzero()))

    if recipe.context_parallel_size > 1:
        sample = of_context_rank(sample, recipe.context_parallel_size, context_rank)
        ids = {name: sample[name] for name in ids}

    if not recipe.packed_documents:
        return Batch(
            tokens=moved(sample["tokens"]),
            labels=moved(sample["labels"]),
            loss_mask=moved_mask(sample["loss_mask"]),
            position_ids=moved(sample["position_ids"]),
            packed_seq_params=None,
            squares=float(recipe.seq_length),
            **{name: moved(values) for name, values in ids.items()},
        )
    packed = pack(
        sample["tokens"], sample["labels"], sample["loss_mask"], eod, recipe.document_multiple, ids
    )
    return Batch(
        tokens=moved(packed.tokens),
        labels=moved(packed.labels),
        loss_mask=moved_mask(packed.loss_mask),
        position_ids=moved(packed.position_ids),
        packed_seq_params=packed.params(device),
        squares=packed.squares,
        **{name: moved(values) for name, values in packed.beside.items()},
    )
