"""Load checkpoints across models whose DSA layers share keys and models whose layers do not.

What: A model with Shared DSA layers, which have no indexer, loads a checkpoint that has indexer
    weights for them: those weights are skipped, and a single warning names the layers. A model
    whose layers have indexers refuses a checkpoint that lacks them, as `dsa-indexer-not-saved`,
    with the names of the layers. Both apply to distributed checkpoints and to `load_state_dict`,
    and with Megatron's own options for shared keys as well as with `dsa_index_share`. Nothing else
    becomes more or less strict: distributed loads that log or ignore mismatches, and
    `load_state_dict` of a state without any indexer, such as that of a dense model, behave as
    before.
Why: A strict `load_state_dict` rejects the surplus weights as unexpected. If weights are missing,
    the result is a KeyError of torch's planner that does not give the reason, or, since Megatron
    repeats a failed strict load without strictness, a model whose indexers have their random
    initial values.
Upstream: Not sent: upstream does not address checkpoints of models with `dsa_indexer_topk_freq`.
Remove: when Megatron's DSA layers load checkpoints of both kinds.
Numerics: none (bitwise): what loads on stock loads as before.
"""

from __future__ import annotations

from cppmega.catalogue.megatron_args import uses_dsa
from cppmega.edits import appending, inserting
from cppmega.errors import CppmegaError
from cppmega.page import Edit, Patch, Source

LOAD = "megatron/core/dist_checkpointing/serialization.py:load"
BLOCK = "megatron/core/transformer/transformer_block.py:TransformerBlock.__init__"
STACK = "megatron/core/models/hybrid/hybrid_block.py:HybridStack.__init__"
LAYER = "megatron/core/transformer/experimental_attention_variant/dsa.py:DSAttention"

COMPARE = """
if strict in (
    StrictHandling.ASSUME_OK_UNEXPECTED,
    StrictHandling.RAISE_UNEXPECTED,
    StrictHandling.RAISE_ALL,
):
    from cppmega.runtime.dsa_index_share_checkpoints import compare
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    compare(
        (asked.key for asked in nested_values(sharded_state_dict)),
        lambda: (held.key for held in load_sharded_metadata(str(checkpoint_dir)).values()),
    )
"""
WATCH = """
from cppmega.runtime.dsa_index_share_checkpoints import watch_loading

watch_loading(self)
"""


PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=LOAD,
            pins={
                "0.16.1": "62245326daad122d",
                "0.17.1": "09e161adbce24c81",
                "0.18.2": "09e161adbce24c81",
                "0.19.2": "9a19ba9991a51efb",
                "main-d98e8a64": "f4287c1a0e537576",
                "dev-d48bd6be": "532e9b0f91dd797b",
                "0.17.0": "03b7a80de64f08b1",
            },
            edit=inserting(COMPARE, after="strict = parse_strict_flag(strict)"),
            mark="",
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
                "0.17.0": "f67b22f7785cc47d",
            },
            edit=appending(WATCH),
        ),
        Edit(
            target=STACK,
            pins={
                "0.18.2": "450663630e153897",
                "0.19.2": "1008fcf6068c752f",
                "main-d98e8a64": "2d7b4b530606eec4",
                "dev-d48bd6be": "24f237b792be2499",
            },
            edit=appending(WATCH),
        ),
    ),
    reached="startup",
    when=uses_dsa,
    feature=(LAYER,),
)


def fixed_upstream(source: Source) -> bool:
    return "indexer" in source.text(LOAD) or "_load_from_state_dict" in source.text(LAYER)


def verify() -> None:
    import warnings

    import torch

    from .._dsa_layer import block

    stack = block(here=2, num_layers=2)
    state = {name: torch.zeros_like(value) for name, value in stack.state_dict().items()}
    of_second = [name for name in state if name.startswith("layers.1.")]
    assert len(of_second) >= 3
    partly = {name: value for name, value in state.items() if name not in of_second}
    try:
        stack.load_state_dict(partly)
    except CppmegaError as error:
        assert error.name == "dsa-indexer-not-saved" and "layers.1." in error.what, error
    else:
        raise AssertionError("a model loads a checkpoint without its indexers")
    shared = stack.layers[1].self_attention.core_attention
    shared.indexer = None  # as a Shared layer has it
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        stack.load_state_dict(state)
    assert sum("layers.1.self_attention are left out" in str(w.message) for w in warned) == 1
    assert not any(value.any() for value in stack.state_dict().values())
