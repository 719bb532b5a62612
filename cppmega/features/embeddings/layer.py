"""N-gram and structure embeddings, which Megatron's models add to the token embedding.

The ids to look up are computed from the full sequence, before any shift: an MTP depth embeds a
token as the trunk does, with the same n-grams, one position earlier. Positions past the end of a
document have id 0 there, which adds nothing. Context-parallel ranks gather the tokens for it, and
look up what their own end.

Parameters are replicated over tensor-parallel ranks. With sequence parallelism, each rank embeds
its own part of the sequence, and Megatron sums the gradients. The MTP stage of a pipeline holds
copies of the first stage's parameters, as it does of the word embedding: they have the same initial
values, their gradients are summed, and a checkpoint has one entry for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from cppmega.errors import CppmegaError
from cppmega.features.arrived import arrived
from cppmega.features.documents import boundaries
from cppmega.features.embeddings.ngram_hash import HASHING, NgramHashEmbedding
from cppmega.features.embeddings.structure import StructureEmbedding
from cppmega.ops.common.balanced_order import balanced_order
from cppmega.ops.ngram_hash import table_rows
from cppmega.rules import check_model, combinations
from cppmega.sizes import embeddings as sizes

ALIGNED = 8
"""Columns of a matrix are a multiple of this, so that tensor cores read their rows unsplit."""
_FED = "cppmega_fed"


@dataclass(frozen=True, slots=True)
class Fed:
    """The data that a batch carries in addition to its tokens."""

    end: int
    """Id of the token that ends a document."""
    kinds: Tensor | None
    depths: Tensor | None


def feeding(
    tokens: Tensor, end: int, kinds: Tensor | None = None, depths: Tensor | None = None
) -> Tensor:
    """Attach to a batch's tokens the other data that the embeddings need.

    Args:
        tokens: int64 [b, s], as they are passed to the model.
        end: id of the token that ends a document.
        kinds: int64 [b, s], the kind of the construct that contains a token.
        depths: int64 [b, s], how deeply the construct is nested.

    Returns:
        The same tensor. Tensors derived from it, including views, do not carry it.
    """
    setattr(tokens, _FED, Fed(end, kinds, depths))
    return tokens


def _fed(tokens: Tensor) -> Fed:
    found: Fed | None = getattr(tokens, _FED, None)
    if found is None:
        raise CppmegaError(
            "input-embeddings-not-fed",
            "A model with n-gram or structure embeddings was given tokens alone.",
            "N-grams would cross the ends of documents, and structure ids would be lost.",
            "tokens = cppmega.features.embeddings.layer.feeding(tokens, end, kinds, depths) before "
            "the model is called, with the tensor that it receives",
        )
    return found


class InputEmbeddings(nn.Module):
    """The embeddings that a model adds to its token embedding."""

    def __init__(self, embedding: Any) -> None:
        """Create them for a stage's LanguageModelEmbedding.

        Raises:
            CppmegaError: `unsupported`, `sizes-misstated`.
        """
        super().__init__()
        config = embedding.config
        check_model(config, combinations.EMBEDDINGS)
        self.group = embedding.tp_group
        self.splits: bool = embedding.reduce_scatter_embeddings
        """Whether each rank embeds its own part of the sequence."""
        self.is_copy = False
        """Whether the parameters are copies of another pipeline stage's."""
        weight = embedding.word_embeddings.weight
        of_model = (config.hidden_size, config.init_method_std, config.params_dtype, weight.device)
        ngrams = sizes.ngram_hash()
        self.ngram_hash = None if ngrams is None else NgramHashEmbedding(ngrams, *of_model)
        structure = sizes.structure()
        self.structure = None if structure is None else StructureEmbedding(structure, *of_model)
        for parameter in self.parameters():
            parameter.sequence_parallel = self.splits  # type: ignore[attr-defined]

    def ids(self, tokens: Tensor, position_ids: Tensor | None, packed_seq_params: Any) -> Tensor:
        """Compute the ids to look up for each token.

        Args:
            tokens: int64 [b, s], with what `feeding` attaches.
            position_ids: int64 [b, s]; None if the model has none.
            packed_seq_params: Megatron's, if the batch is packed.

        Returns:
            int64 [ids, b, s], the ids of all parts, concatenated.

        Raises:
            CppmegaError: `input-embeddings-not-fed`, `structure-out-of-range`.
        """
        fed = _fed(tokens)
        found = []
        if self.ngram_hash is not None:
            found.append(self._ngram_rows(tokens, fed.end, position_ids, packed_seq_params))
        if self.structure is not None:
            found.append(self.structure.table_rows(fed.kinds, fed.depths, tokens))
        return torch.cat(found)

    def _ngram_rows(
        self, tokens: Tensor, end: int, position_ids: Tensor | None, packed_seq_params: Any
    ) -> Tensor:
        """The rows of the n-grams that end at these tokens, of a sequence of all ranks."""
        assert self.ngram_hash is not None
        group, own = parallel_state.get_context_parallel_group(check_initialized=False), None
        if group is not None and group.size() > 1:
            ranks, length = group.size(), tokens.size(1)
            order = balanced_order(boundaries(packed_seq_params), length, ranks, tokens.device)
            own, back = order.view(ranks, length)[group.rank()], order.argsort()
            tokens = _gathered(tokens, group)[:, back]
            if position_ids is not None:
                position_ids = _gathered(position_ids, group)[:, back]
        starts = document_starts(tokens, end, position_ids, packed_seq_params)
        rows = table_rows(tokens, starts, self.ngram_hash.hashing)
        return rows if own is None else rows[..., own]

    def forward(self, ids: Tensor | None, embeddings: Tensor) -> Tensor:
        """Add the embeddings of the ids that the method `ids` returned.

        All parts are one matrix product, which is added before it is rounded.

        Args:
            ids: int64 [ids, b, s].
            embeddings: [s, b, hidden], those of the tokens; with sequence parallelism, this rank's
                part of s.

        Returns:
            The sums, as `embeddings`.

        Raises:
            CppmegaError: `input-embeddings-not-fed`.
        """
        if ids is None:
            raise CppmegaError(
                "input-embeddings-not-fed",
                "An embedding that adds those of n-grams or structure was called by itself.",
                "What it adds depends on a token's context, which a token alone does not show.",
                "call the model; inference and speculative decoding are not supported",
            )
        if self.splits:
            ids = ids.chunk(self.group.size(), dim=-1)[self.group.rank()]
        parts = [part for part in (self.ngram_hash, self.structure) if part is not None]
        own = ids.split([part.ids for part in parts])
        columns = [arrived(part).columns(ids) for part, ids in zip(parts, own, strict=True)]
        matrices = [part.matrix() for part in parts]
        if surplus := -sum(each.size(-1) for each in columns) % ALIGNED:
            columns.append(columns[0].new_zeros(*columns[0].shape[:-1], surplus))
            matrices.append(matrices[0].new_zeros(len(matrices[0]), surplus))
        projected = torch.cat(columns, dim=-1).flatten(0, 1), torch.cat(matrices, dim=-1).t()
        return torch.addmm(embeddings.flatten(0, 1), *projected).view_as(embeddings)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Megatron's checkpoint entries: replicated tensors; a copy is never saved."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        state = self.state_dict(keep_vars=True)
        for name in state:
            if name.endswith(HASHING):
                # A load fills the tensors of these entries in place, and would overwrite the
                # buffer with which the loaded values must be compared.
                state[name] = state[name].clone()
        entries: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state,
            prefix,
            sharded_offsets=sharded_offsets,
            tp_group=self.group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )
        for entry in entries.values():
            entry.replica_id = (int(self.is_copy), *entry.replica_id[1:])
        return entries


def document_starts(
    tokens: Tensor, end: int, position_ids: Tensor | None, packed_seq_params: Any
) -> Tensor:
    """Where documents begin, according to everything in a batch that indicates it.

    Args:
        tokens: int64 [b, s].
        end: id of the token that ends a document.
        position_ids: int64 [b, s]; a document begins where they do not increase by one.
        packed_seq_params: Megatron's, with the boundaries of a pack [1, s].

    Returns:
        bool [b, s].
    """
    starts = torch.ones_like(tokens, dtype=torch.bool)
    starts[:, 1:] = tokens[:, :-1] == end
    if position_ids is not None:
        starts[:, 1:] |= position_ids.diff(dim=-1) != 1
    bounds = boundaries(packed_seq_params)
    if bounds is not None:
        begins = torch.zeros(tokens.size(1) + 1, dtype=torch.bool, device=tokens.device)
        starts |= begins.index_fill(0, bounds.long(), True)[:-1]
    return starts


def _gathered(tokens: Tensor, group: Any) -> Tensor:
    """`[b, s]` of each rank, as `[b, ranks * s]`."""
    parts = [torch.empty_like(tokens) for _ in range(group.size())]
    torch.distributed.all_gather(parts, tokens.contiguous(), group)
    return torch.cat(parts, dim=1)


def for_embedding(embedding: Any) -> InputEmbeddings | None:
    """Build what a stage's LanguageModelEmbedding adds to the tokens; None: nothing."""
    return InputEmbeddings(embedding) if sizes.asked_for() else None


def of_embedding(embedding: Any) -> InputEmbeddings | None:
    """Return what `for_embedding` built for an embedding; None for anything else."""
    found = getattr(embedding, "input_embeddings", None)
    return found if isinstance(found, InputEmbeddings) else None


class _Called:
    """A LanguageModelEmbedding with its usual call signature, for the tokens of one batch."""

    def __init__(self, embedding: Any, ids: Tensor) -> None:
        self.embedding, self.ids = embedding, ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self.embedding, name)

    def __call__(self, **named: Any) -> Any:
        return self.embedding(**named, further_ids=self.ids)


class _CalledByDepths(_Called):
    """A `_Called` for MTP: each depth shifts the ids by one more position, and calls it once."""

    def __init__(self, embedding: Any, ids: Tensor, shifted: Callable[[Tensor], Any]) -> None:
        super().__init__(embedding, ids)
        self.shifted = shifted

    def __call__(self, **named: Any) -> Any:
        self.ids, _ = self.shifted(self.ids)
        return super().__call__(**named)


def of_trunk(embedding: Any, tokens: Tensor, positions: Tensor | None, packed: Any) -> Any:
    """The embedding as the trunk calls it for a batch.

    Raises:
        CppmegaError: `input-embeddings-not-fed`.
    """
    added = of_embedding(embedding)
    return embedding if added is None else _Called(embedding, added.ids(tokens, positions, packed))


def for_depths(mtp: Any) -> Callable[..., Any]:
    """Megatron's MTP block, whose depths embed shifted tokens with the n-grams of unshifted ones.

    Returns:
        A function that takes the keyword arguments of the block.

    Raises:
        CppmegaError: `input-embeddings-not-fed`, when it is called.
    """

    def call(**named: Any) -> Any:
        embedding, packed = named["embedding"], named.get("packed_seq_params")
        added = of_embedding(embedding)
        if added is None:
            return mtp(**named)
        from megatron.core.transformer.multi_token_prediction import roll_tensor

        ids = added.ids(named["input_ids"], named["position_ids"], packed)
        shifted = partial(
            roll_tensor, shifts=-1, dims=-1, cp_group=mtp.cp_group, packed_seq_params=packed
        )
        return mtp(**{**named, "embedding": _CalledByDepths(embedding, ids, shifted)})

    return call


def declare(model: Any) -> None:
    """Mark the parameters for Megatron, when a stage of a language model is set up."""
    added = of_embedding(getattr(model, "embedding", None))
    if added is None:
        return
    added.is_copy = not model.pre_process
    in_two_stages = model.config.mtp_num_layers and model.config.pipeline_model_parallel_size > 1
    for parameter in added.parameters():
        marked: Any = parameter
        marked.is_embedding_or_output_parameter = True  # Muon leaves those to Adam
        if in_two_stages:
            marked.shared_embedding = True  # its own bucket, sharded alike in both stages
            marked.shared = added.is_copy  # the gradient norm counts it once


def shared_parameters(config: Any) -> Iterator[Callable[[Any], nn.Parameter]]:
    """For each parameter that two pipeline stages hold, a function that finds it in a stage.

    Without MTP no second stage embeds tokens, and nothing may wait for one.
    """
    if not (sizes.asked_for() and config.mtp_num_layers):
        return
    if sizes.ngram_hash() is not None:
        for name in ("tables", "projection"):
            yield partial(_parameter, f"ngram_hash.{name}")
    if sizes.structure() is not None:
        for name in ("kinds", "depths", "scales", "widening"):
            yield partial(_parameter, f"structure.{name}")


def _parameter(name: str, model: Any) -> nn.Parameter:
    added = of_embedding(model.embedding)
    assert added is not None  # the environment of every rank states the sizes
    return added.get_parameter(name)
