"""Set by pattern which DSA layers select keys, and check the pipeline stages against it.

What: With `CPPMEGA_INDEX_CACHE=1` at apply, `CPPMEGA_DSA_INDEX_PATTERN=FSSFSSFSS` (the recipe field
    `dsa_index_pattern`) has one letter per DSA layer of the decoder: F (Full) selects keys, S
    (Shared) uses exactly those of the last F before it and has no indexer. Megatron's own options
    `--dsa-indexer-topk-freq` and `--dsa-indexer-skip-topk-offset` keep their meaning; if they are
    set together with a pattern, they must agree with it. With neither, building a model with DSA
    fails. A pipeline stage, virtual stages included, that has Shared layers without their Full
    layer is refused when it is built, by layer number, in GPT and hybrid models, and so is a
    pattern that does not fit. With a pattern, the DSA layers of MTP depths are Full, because their
    tokens are shifted and their numbers start from 1 again. Only Full layers have an indexer loss,
    on their own attention; the paper's distillation over all the layers that a Full layer serves
    (arXiv 2603.12201) is not implemented. `dsa_index_share_holder` keeps the selected keys for each
    forward pass. Up to 0.18, Megatron shares no keys and has neither option; there,
    `dsa_index_share_backport` makes layers use the selected keys.
Why: Upstream's options count all layers of a model: NAM56R's 9 DSA layers, of 52, share in groups
    of three with frequency 16 and offset 5, and one more layer before them makes different layers
    Full. A hybrid model is not checked when it is built, and fails in the middle of a forward pass.
Upstream: Not sent: upstream's options, new in 0.19, would have to count DSA layers.
Remove: when Megatron accepts a list of the DSA layers that select keys, and checks hybrid models.
Numerics: changes results: Shared layers attend to the keys of a Full layer.
"""

from __future__ import annotations

from textwrap import indent

from cppmega.catalogue.megatron_args import uses_dsa
from cppmega.edits import inserting, replacing
from cppmega.errors import CppmegaError
from cppmega.page import Edit, Patch, Source

LAYER = "megatron/core/transformer/experimental_attention_variant/dsa.py:DSAttention.__init__"
BLOCK = "megatron/core/transformer/transformer_block.py:TransformerBlock.__init__"
HYBRID = "megatron/core/models/hybrid/hybrid_model.py:HybridModel.__init__"

KIND = """
from cppmega.features.dsa import layer_kinds as dsa_layer_kinds

kind = dsa_layer_kinds.kind(self.layer_number)
if kind is not None:  # otherwise Megatron's options have said it
    self.index_share, self.source_layer = kind
    self.skip_topk = self.source_layer != self.layer_number
"""
# Up to 0.18, every DSA layer has an indexer.
INDEXER = """
self.indexer = build_module(submodules.indexer, config=self.config, pg_collection=pg_collection)
"""
INDEXER_OF_FULL = f"""
from cppmega.features.dsa import layer_kinds as dsa_layer_kinds

kind = dsa_layer_kinds.kind(self.layer_number)
self.index_share, self.source_layer = kind or (False, self.layer_number)
self.indexer = None
if self.source_layer == self.layer_number:
    {INDEXER.strip()}
"""
DECODER = """
self.decoder = build_module(
    hybrid_stack_spec,
    self.config,
    pre_process=self.pre_process,
    layer_type_list=layer_type_list,
    pp_layer_offset=layer_offset,
    post_process=self.post_process,
    dtype=config.params_dtype,
    pg_collection=self.pg_collection,
    name="decoder",
)
"""


STACK = """\
with _cppmega_stack(self.config, parsed.main_pattern or "", layer_type_list, layer_offset):"""


def _cppmega_block(block):
    """Around the layers of a GPT model's stage: with DSA, all its layers are DSA layers."""
    from cppmega.features.dsa import layer_kinds as dsa_layer_kinds

    if block.config.experimental_attention_variant != "dsa":
        return dsa_layer_kinds.decoder(block.config, (), ())
    before = get_transformer_layer_offset(  # noqa: F821
        block.config,
        block.vp_stage,
        get_pg_rank(block.pg_collection.pp),  # noqa: F821
    )
    stage = range(before + 1, before + 1 + len(block.submodules.layer_specs))
    return dsa_layer_kinds.decoder(block.config, range(1, block.config.num_layers + 1), stage)


def _cppmega_stack(config, pattern, letters, before):
    """Around the layers of a hybrid model's stage."""
    from cppmega.features.dsa import layer_kinds as dsa_layer_kinds

    layers = dsa_layer_kinds.dsa_layers(pattern.replace("|", ""))
    return dsa_layer_kinds.decoder(config, layers, dsa_layer_kinds.dsa_layers(letters, before))


PATCH = Patch(
    purpose="feature",
    edits=(
        Edit(
            target=LAYER,
            pins={
                "0.19.2": "15c0540610558523",
                "main-d98e8a64": "15c0540610558523",
                "dev-d48bd6be": "b85d530644fbffda",
            },
            edit=inserting(KIND, before="self.indexer = None"),
        ),
        Edit(
            target=LAYER,
            pins={
                "0.16.1": "1fa85909abf71d31",
                "0.17.1": "1fa85909abf71d31",
                "0.18.2": "1fa85909abf71d31",
            },
            edit=replacing(INDEXER, INDEXER_OF_FULL),
        ),
        Edit(
            target=BLOCK,
            pins={
                "0.16.1": "6765a936639d1274",
                "0.17.1": "f67b22f7785cc47d",
                "0.18.2": "f67b22f7785cc47d",
                "0.19.2": "f67b22f7785cc47d",
                "main-d98e8a64": "8e4e3ed8f5b6f624",
                "dev-d48bd6be": "6bc08bc4c18fa677",
            },
            edit=replacing(
                "self._build_layers()", "with _cppmega_block(self):\n    self._build_layers()"
            ),
            helpers=(_cppmega_block,),
            mark="",
        ),
        Edit(
            target=HYBRID,
            pins={
                "0.18.2": "b737be12a45fe896",
                "0.19.2": "b7202dcd6e0814cb",
                "main-d98e8a64": "1c3179209e7986b2",
                "dev-d48bd6be": "b7202dcd6e0814cb",
            },
            edit=replacing(DECODER, f"{STACK}\n{indent(DECODER.strip(), '    ')}"),
            helpers=(_cppmega_stack,),
            mark="",
        ),
    ),
    reached="startup",
    when=uses_dsa,
    feature=("megatron/core/transformer/experimental_attention_variant/dsa.py:DSAttention",),
    gate="CPPMEGA_INDEX_CACHE",
    wanted_by=lambda recipe: bool(recipe.dsa_index_pattern),
    after=(
        "dsa_backend_limits",
        "dsa_index_share_checkpoints",
        "linear_ce_hybrid_head",
    ),
)


def fixed_upstream(source: Source) -> bool:
    return "indexer_types" in source.text(LAYER)


def verify() -> None:
    import os
    from unittest import mock

    from megatron.core.transformer import transformer_block

    from .._dsa_layer import block

    def kinds(pattern, before=0):
        variables = {"CPPMEGA_INDEX_CACHE": "1", "CPPMEGA_DSA_INDEX_PATTERN": pattern}
        offset = mock.patch.object(
            transformer_block, "get_transformer_layer_offset", lambda *ignored: before
        )
        with mock.patch.dict(os.environ, variables), offset:
            try:
                layers = block(here=4 - before, before=before, num_layers=4).layers
            except CppmegaError as error:
                return error.name
        cores = [layer.self_attention.core_attention for layer in layers]
        return [(core.indexer is None, getattr(core, "source_layer", None)) for core in cores]

    assert kinds("FSFS") == [(False, 1), (True, 1), (False, 3), (True, 3)], kinds("FSFS")
    assert kinds("FSFS", before=2) == [(False, 3), (True, 3)]
    assert kinds("FSFS", before=1) == kinds("FSSF", before=1) == "dsa-index-sharing"
    assert kinds("SFFF") == kinds("FSF") == "dsa-index-sharing"
    assert kinds("") == "dsa-index-sharing"
