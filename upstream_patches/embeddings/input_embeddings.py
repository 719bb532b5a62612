"""Add n-gram and syntax embeddings to the token embedding, in the trunk and in MTP depths.

What: `LanguageModelEmbedding` holds the modules that `cppmega.features.embeddings.layer` builds for
    it, and adds their output to the token embedding before scaling and dropout.
    `CPPMEGA_NGRAM_HASH` and `CPPMEGA_STRUCTURE`, which the trainer sets from the recipe's fields
    `ngram_hash` and `structure`, give the sizes; without them nothing is added. GPT and hybrid
    models do each token's lookups on the complete sequence: no n-gram crosses the start of a
    document, which is known from the end token, the position ids or the boundaries of a pack, and
    an MTP depth embeds a token as the trunk does. A custom training loop attaches the end token and
    the structure ids to the tokens with `cppmega.features.embeddings.layer.feeding`; a model that
    does not receive them, or receives an id for which it has no row, stops. The first stage and the
    MTP stage of a pipeline hold one set of parameters, with summed gradients and one entry in a
    checkpoint; every tensor-parallel rank holds all of it. Context-parallel ranks gather the tokens
    whose n-grams they look up. The n-gram multipliers have a seed of their own, and a checkpoint
    with different multipliers is refused. FSDP, MuP, the overlap of expert communication,
    full-iteration CUDA graphs, pipeline layouts with MTP and inference are refused.
Why: NAM56R has both, and Megatron has no place for them. The earlier overlay drew the multipliers
    from the global random state, so that a resumed run hashed differently, and its n-grams crossed
    documents. Both factors of its structure embedding were initialized to zero, so that neither
    ever received a gradient, and its ids were `tokens % 7`, or absent.
Upstream: Not sent: upstream has no embeddings of n-grams or syntax.
Remove: when Megatron's language models accept additional input embeddings, with copies for MTP.
Numerics: changes results only of models with one of the switches; without them, none (bitwise). An
    untrained model has the same losses as one without the embeddings, because both projections are
    initialized to zero.
"""

from __future__ import annotations

from typing import Any

from cppmega.catalogue.megatron_args import variables
from cppmega.edits import adding_parameter, appending, in_order, inserting, replacing
from cppmega.errors import CppmegaError
from cppmega.page import Edit, Patch, Source
from cppmega.sizes import embeddings as input_embedding_sizes
from cppmega.sizes import stated as environment_sizes

EMBEDDING = (
    "megatron/core/models/common/embeddings/language_model_embedding.py:LanguageModelEmbedding"
)
GPT = "megatron/core/models/gpt/gpt_model.py:GPTModel"
HYBRID = "megatron/core/models/hybrid/hybrid_model.py:HybridModel"
LANGUAGE = "megatron/core/models/common/language_module/language_module.py:LanguageModule"
GRADIENTS = "megatron/core/distributed/finalize_model_grads.py:_allreduce_word_embedding_grads"
ONLY_IN_0_19 = (
    "megatron/core/transformer/multi_token_prediction.py:"
    "MultiTokenPredictionLayer.get_inner_quantization_context"
)

BATCH = "self.embedding, input_ids, position_ids, packed_seq_params"
CALLED = "self.embedding(input_ids=input_ids, position_ids=position_ids)"
CALLED_FOR_A_BATCH = f"_cppmega_of_trunk({BATCH})(input_ids=input_ids, position_ids=position_ids)"
SHAPED = """
if not self.reduce_scatter_embeddings:
    embeddings = embeddings.transpose(0, 1).contiguous()
"""
ADDED = """
if self.input_embeddings is not None:
    embeddings = self.input_embeddings(further_ids, embeddings)
"""
SUMMED = """
from cppmega.features.embeddings.layer import shared_parameters

for found in shared_parameters(config):
    _allreduce_embedding_grad(model, embd_group, pp_group, found, config=config)
"""
DECLARED = """
from cppmega.features.embeddings.layer import declare

declare(self)
"""


def _cppmega_of_trunk(embedding, input_ids, position_ids, packed_seq_params):
    """The embedding as the trunk calls it for a batch."""
    from cppmega.features.embeddings.layer import of_trunk

    return of_trunk(embedding, input_ids, position_ids, packed_seq_params)


def _cppmega_for_depths(mtp):
    """The MTP block as it is called, with the embedding as its depths call it for a batch."""
    from cppmega.features.embeddings.layer import for_depths

    return for_depths(mtp)


def adds_embeddings(args: Any) -> bool:
    """Whether the run states sizes of embeddings."""
    return input_embedding_sizes.asked_for(variables(args))


PATCH = Patch(
    purpose="feature",
    edits=(
        Edit(
            target=f"{EMBEDDING}.__init__",
            pins={"0.19.2": "a12dcf0224fd3355", "main-d98e8a64": "3177cb58a4813785"},
            edit=appending(
                """
                from cppmega.features.embeddings.layer import for_embedding

                self.input_embeddings = for_embedding(self)
                """
            ),
            mark="",
        ),
        Edit(
            target=f"{EMBEDDING}.forward",
            pins={"0.19.2": "54fc4eee3cabf516", "main-d98e8a64": "54fc4eee3cabf516"},
            edit=in_order(adding_parameter("further_ids=None"), inserting(ADDED, after=SHAPED)),
        ),
        Edit(
            target=f"{GPT}._preprocess",
            pins={"0.19.2": "485076e88365703f", "main-d98e8a64": "485076e88365703f"},
            edit=replacing(CALLED, CALLED_FOR_A_BATCH),
            helpers=(_cppmega_of_trunk,),
            mark="",
        ),
        Edit(
            target=f"{GPT}._postprocess",
            pins={"0.19.2": "7cce493b49072d6a", "main-d98e8a64": "7cce493b49072d6a"},
            edit=replacing("self.mtp", "_cppmega_for_depths(self.mtp)"),
            helpers=(_cppmega_for_depths,),
            mark="",
        ),
        Edit(
            target=f"{HYBRID}.forward",
            pins={"0.19.2": "cc72c3a7ee6033e9", "main-d98e8a64": "11cd0a6566dfd959"},
            edit=in_order(
                replacing(CALLED, CALLED_FOR_A_BATCH),
                replacing("self.mtp", "_cppmega_for_depths(self.mtp)"),
            ),
            helpers=(_cppmega_of_trunk, _cppmega_for_depths),
            mark="",
        ),
        Edit(
            target=f"{LANGUAGE}.setup_embeddings_and_output_layer",
            pins={"0.19.2": "caac0f9558258b4d", "main-d98e8a64": "caac0f9558258b4d"},
            edit=inserting(DECLARED, before="mtp_process = getattr(self, 'mtp_process', False)"),
            mark="",
        ),
        Edit(
            target=GRADIENTS,
            pins={"0.19.2": "c0eb17d8671296c8", "main-d98e8a64": "c0eb17d8671296c8"},
            edit=appending(SUMMED),
            mark="",
        ),
    ),
    reached="forward",
    when=adds_embeddings,
    builds_on=(ONLY_IN_0_19,),
    wanted_by=lambda recipe: recipe.adds_to_embedding,
    after=(
        "grad_accumulation_without_apex",
        "hybrid_mtp_padding_mask",
        "linear_ce_gpt_head",
        "linear_ce_hybrid_head",
    ),
)


def fixed_upstream(source: Source) -> bool:
    return "ngram" in source.text(f"{EMBEDDING}.__init__")


def verify() -> None:
    import os
    from unittest import mock

    import torch

    from cppmega.features.embeddings.layer import feeding
    from cppmega.proof import small_models

    sizes = input_embedding_sizes.NgramHash((2,), 2, (89, 97), 4)
    stated = {"CPPMEGA_NGRAM_HASH": environment_sizes.text(sizes)}

    def loss(model: Any, **given: Any) -> Any:
        given = small_models.arguments(model, **given)
        given["input_ids"] = feeding(given["input_ids"].clone(), end=0)
        return model(**given).sum()

    plain = small_models.gpt(mtp=1)
    with mock.patch.dict(os.environ, stated):
        model = small_models.gpt(mtp=1)
        assert torch.equal(loss(model), loss(plain)), "an untrained model differs"
        weights = dict(model.named_parameters())
        projection = weights["embedding.input_embeddings.ngram_hash.projection"]
        tables = weights["embedding.input_embeddings.ngram_hash.tables"]
        loss(model).backward()
        assert projection.grad is not None and projection.grad.any(), "the embeddings are not added"
        torch.nn.init.normal_(projection)
        loss(model).backward()
        assert tables.grad.any(), "the tables do not learn"
        try:
            model(**small_models.arguments(model))
        except CppmegaError as error:
            assert error.name == "input-embeddings-not-fed", error
        else:
            raise AssertionError("a model trains without knowing where documents end")
