"""What Megatron's models add to the embedding of tokens: that of n-grams, and that of structure.

The ids that are looked up come from the whole sequence, before any shift: an MTP depth embeds a
token as the trunk does, with the same n-grams, one place earlier. What is past the end of a
document there has id 0, which adds nothing.

Parameters are replicated over tensor-parallel ranks. With sequence parallelism a rank embeds its
own part of the sequence, and Megatron sums the gradients. The MTP stage of a pipeline holds copies
of the first stage's parameters, as of the word embedding: drawn alike, summed gradients, one entry
in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cppmega.errors import CppmegaError
from cppmega.modules import input_embedding_sizes as sizes
from cppmega.modules.ngram_hash import HASHING, NgramHashEmbedding
from cppmega.modules.structure_embedding import StructureEmbedding
from cppmega.ops.ngram_hash import table_rows

_FED = "cppmega_fed"


@dataclass(frozen=True, slots=True)
class Fed:
    """What a batch has beside its tokens."""

    end: int
    """Id of the token that ends a document."""
    kinds: Tensor | None
    depths: Tensor | None


def feeding(
    tokens: Tensor, end: int, kinds: Tensor | None = None, depths: Tensor | None = None
) -> Tensor:
    """Attach to a batch's tokens what the embeddings need besides.

    Args:
        tokens: int64 [b, s], as they are given to the model.
        end: id of the token that ends a document.
        kinds: int64 [b, s], the kind of the construct that a token is in.
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
            "N-grams would cross the ends of documents, and structure ids be lost.",
            "tokens = cppmega.modules.input_embeddings.feeding(tokens, end, kinds, depths) before "
            "the model's call, with the tensor that the model gets",
        )
    return found


class InputEmbeddings(nn.Module):
    """The embeddings that a model adds to that of its tokens."""

    def __init__(self, embedding: Any) -> None:
        """Create them for a stage's LanguageModelEmbedding.

        Raises:
            CppmegaError: `input-embeddings-not-supported`, `sizes-misstated`.
        """
        super().__init__()
        config = embedding.config
        for obstacle in sizes.obstacles(config):
            raise obstacle
        self.group = embedding.tp_group
        self.splits: bool = embedding.reduce_scatter_embeddings
        """Whether a rank embeds its own part of the sequence."""
        self.is_copy = False
        """Whether the parameters are those of another pipeline stage."""
        weight = embedding.word_embeddings.weight
        of_model = (config.hidden_size, config.init_method_std, config.params_dtype, weight.device)
        ngrams = sizes.ngram_hash()
        self.ngram_hash = None if ngrams is None else NgramHashEmbedding(ngrams, *of_model)
        structure = sizes.structure()
        self.structure = None if structure is None else StructureEmbedding(structure, *of_model)
        for parameter in self.parameters():
            parameter.sequence_parallel = self.splits  # type: ignore[attr-defined]

    def ids(self, tokens: Tensor, position_ids: Tensor | None, packed_seq_params: Any) -> Tensor:
        """Find what to look up for every token.

        Args:
            tokens: int64 [b, s], with what `feeding` attaches.
            position_ids: int64 [b, s]; None where the model has none.
            packed_seq_params: Megatron's, where the batch is a pack.

        Returns:
            int64 [ids, b, s] of all parts, one after the other.

        Raises:
            CppmegaError: `input-embeddings-not-fed`, `structure-not-fed`, `structure-ids-wrong`.
        """
        fed = _fed(tokens)
        found = []
        if self.ngram_hash is not None:
            starts = document_starts(tokens, fed.end, position_ids, packed_seq_params)
            found.append(table_rows(tokens, starts, self.ngram_hash.hashing))
        if self.structure is not None:
            found.append(self.structure.table_rows(fed.kinds, fed.depths, tokens))
        return torch.cat(found)

    def forward(self, ids: Tensor | None) -> Tensor:
        """Sum the embeddings of what `ids` has found.

        Args:
            ids: int64 [ids, b, s].

        Returns:
            [s, b, hidden]; with sequence parallelism, this rank's part of s.

        Raises:
            CppmegaError: `input-embeddings-not-fed`.
        """
        if ids is None:
            raise CppmegaError(
                "input-embeddings-not-fed",
                "An embedding that adds those of n-grams or structure was called by itself.",
                "It adds what stands beside and before a token, which a token alone does not tell.",
                "call the model; inference and speculative decoding are not supported",
            )
        if self.splits:
            ids = ids.chunk(self.group.size(), dim=-1)[self.group.rank()]
        parts = [part for part in (self.ngram_hash, self.structure) if part is not None]
        own = ids.split([part.ids for part in parts])
        embedded: list[Tensor] = [part(ids) for part, ids in zip(parts, own, strict=True)]
        return torch.stack(embedded).sum(0) if len(embedded) > 1 else embedded[0]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Megatron's entries of a checkpoint: replicated tensors; a copy is never saved."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        state = self.state_dict(keep_vars=True)
        for name in state:
            if name.endswith(HASHING):
                # A load fills the tensors of these entries in place, and would fill the buffer
                # that it has to be compared with.
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
    """Where documents begin, by everything that a batch says about it.

    Args:
        tokens: int64 [b, s].
        end: id of the token that ends a document.
        position_ids: int64 [b, s]; a document begins where they do not count on.
        packed_seq_params: Megatron's, with the boundaries of a pack [1, s].

    Returns:
        bool [b, s].
    """
    starts = torch.ones_like(tokens, dtype=torch.bool)
    starts[:, 1:] = tokens[:, :-1] == end
    if position_ids is not None:
        starts[:, 1:] |= position_ids.diff(dim=-1) != 1
    if packed_seq_params is not None:
        padded = packed_seq_params.cu_seqlens_q_padded
        bounds = packed_seq_params.cu_seqlens_q if padded is None else padded
        begins = torch.zeros(tokens.size(1) + 1, dtype=torch.bool, device=tokens.device)
        starts |= begins.index_fill(0, bounds.long(), True)[:-1]
    return starts


def for_embedding(embedding: Any) -> InputEmbeddings | None:
    """What a stage's LanguageModelEmbedding adds to the tokens; None: nothing."""
    return InputEmbeddings(embedding) if sizes.asked_for() else None


def of_embedding(embedding: Any) -> InputEmbeddings | None:
    """What `for_embedding` has made for it; None for anything else."""
    found = getattr(embedding, "input_embeddings", None)
    return found if isinstance(found, InputEmbeddings) else None


class _Called:
    """A LanguageModelEmbedding that is called as ever, for the tokens of one batch."""

    def __init__(self, embedding: Any, ids: Tensor) -> None:
        self.embedding, self.ids = embedding, ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self.embedding, name)

    def __call__(self, **named: Any) -> Any:
        return self.embedding(**named, further_ids=self.ids)


class _CalledByDepths(_Called):
    """The same for MTP: each depth shifts its tokens by one more place, and calls it once."""

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
    """Megatron's MTP block, whose depths embed shifted tokens with the n-grams of the whole ones.

    Returns:
        A function that takes the block's own keyword arguments.

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
        shifted = partial(roll_tensor, shifts=-1, dims=-1, packed_seq_params=packed)
        return mtp(**{**named, "embedding": _CalledByDepths(embedding, ids, shifted)})

    return call


def declare(model: Any) -> None:
    """Tell Megatron what the parameters are, when a stage of a language model is set up."""
    added = of_embedding(getattr(model, "embedding", None))
    if added is None:
        return
    added.is_copy = not model.pre_process
    in_two_stages = model.config.mtp_num_layers and model.config.pipeline_model_parallel_size > 1
    for parameter in added.parameters():
        said: Any = parameter
        said.is_embedding_or_output_parameter = True  # Muon leaves those to Adam
        if in_two_stages:
            said.shared_embedding = True  # a bucket of its own, cut alike in both stages
            said.shared = added.is_copy  # the norm of the gradient counts it once


def shared_parameters(config: Any) -> Iterator[Callable[[Any], nn.Parameter]]:
    """For every parameter that two pipeline stages hold, a function that finds it in a stage.

    Without MTP no second stage embeds tokens, and nothing may wait for it.
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
    assert added is not None  # as the environment says, on every rank
    return added.get_parameter(name)
