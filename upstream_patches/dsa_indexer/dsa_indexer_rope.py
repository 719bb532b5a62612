"""Rotate the DSA indexer's queries and keys as DeepSeek and Megatron 0.19 do.

What: `DSAIndexer._apply_rope` rotates the first `qk_pos_emb_head_dim` channels of a head in halves,
    instead of the last channels in interleaved pairs. Every checkpoint of Megatron's training loop
    records that, and one with indexers that does not is loaded only if `CPPMEGA_DSA_INDEXER_ROWS`
    states `stock`, which permutes the rows, or `page`. The wheel of 0.16 has no training loop, and
    nothing checks what a loop of one's own loads there.
Why: DeepSeek's weights, and those of megatron-core since 0.19.0, store the rotated channels first
    and not interleaved. Releases 0.16 to 0.18 rotate different channels, so an indexer that was
    trained elsewhere selects different keys, and one trained here does so on 0.19 (the proof
    compares with the scores of 0.19.2, within rounding).
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/3026 (in 0.19.0). This is its RoPE part; the
    other part moves the q and k norms, and with them the names of parameters.
Remove: when `_apply_rope` puts the rotated channels first, as 0.19.0 does.
Numerics: changes results: different channels are rotated. An indexer trained without this page must
    either be trained again or have its head channels permuted: the last r = qk_pos_emb_head_dim
    channels come first, the even ones before the odd ones, followed by the rest. This permutes the
    rows of `linear_wq_b.weight` (in every head), `linear_wk.weight`, `k_norm.weight` and
    `k_norm.bias` (`cppmega.runtime.dsa_indexer_rope.permuted`), after which the scores are the
    previous ones.
"""

# ruff: noqa: F821
from cppmega.catalogue.megatron_args import uses_dsa
from cppmega.edits import body_of, inserting
from cppmega.page import Edit, Patch, Source

INDEXER = "megatron/core/transformer/experimental_attention_variant/dsa.py:DSAIndexer"
TARGET = f"{INDEXER}._apply_rope"
CHECKPOINTS = "megatron/training/checkpointing.py"
ROWS = ("from cppmega.runtime import dsa_indexer_rope as _cppmega_rows",)


def _apply_rope(self, x, rotary_pos_emb, mscale):
    # x_pe   [seqlen, batch, *, qk_pos_emb_head_dim], in front as in DeepSeek's implementation
    # x_nope [seqlen, batch, *, index_head_dim - qk_pos_emb_head_dim]
    x_pe, x_nope = torch.split(
        x, [self.qk_pos_emb_head_dim, self.index_head_dim - self.qk_pos_emb_head_dim], dim=-1
    )
    # `apply_rotary_pos_emb` would interleave, because the model's attention is MLA. DSA has neither
    # RoPE fusion nor context parallelism in these versions, so this is what it comes down to.
    x_pe = _apply_rotary_pos_emb_bshd(
        x_pe,
        rotary_pos_emb,
        rotary_interleaved=self.config.rotary_interleaved,
        multi_latent_attention=False,
        mscale=mscale,
    )
    # [seqlen, batch, *, index_head_dim]
    return torch.cat([x_pe, x_nope], dim=-1)


PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=TARGET,
            pins={
                "0.16.1": "b5e039e3423e7693",
                "0.17.1": "b5e039e3423e7693",
                "0.18.2": "b5e039e3423e7693",
            },
            edit=body_of(_apply_rope),
            imports=(
                "from megatron.core.models.common.embeddings.rope_utils import"
                " _apply_rotary_pos_emb_bshd",
            ),
        ),
        # A checkout of 0.16 has these texts, its wheel neither function.
        Edit(
            target=f"{CHECKPOINTS}:generate_state_dict",
            pins={"0.17.1": "d7c4110ba21de08d", "0.18.2": "d7c4110ba21de08d"},
            edit=inserting("_cppmega_rows.record(args)", before="state_dict['args'] = args"),
            imports=ROWS,
            mark="",
        ),
        Edit(
            target=f"{CHECKPOINTS}:load_checkpoint",
            pins={"0.17.1": "6b163a0122004cb5", "0.18.2": "4dc611e16b16e077"},
            edit=inserting(
                "_cppmega_rows.load(args, state_dict)",
                after="set_checkpoint_version(state_dict.get('checkpoint_version', 0))",
            ),
            imports=ROWS,
            mark="",
        ),
    ),
    variables=("CPPMEGA_DSA_INDEXER_ROWS",),
    reached="forward",
    # True also where a hybrid pattern names the layers.
    when=uses_dsa,
    feature=("megatron/core/transformer/experimental_attention_variant/dsa.py:DSAIndexer",),
)


def fixed_upstream(source: Source) -> bool:
    return "x_pe, x_nope = torch.split" in source.text(TARGET)


def verify() -> None:
    from types import SimpleNamespace

    import torch
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexer

    indexer = DSAIndexer.__new__(DSAIndexer)
    torch.nn.Module.__init__(indexer)
    indexer.qk_pos_emb_head_dim, indexer.index_head_dim = 4, 6
    indexer.pg_collection = SimpleNamespace(cp=SimpleNamespace(size=lambda: 1))
    indexer.config = SimpleNamespace(
        apply_rope_fusion=False,
        multi_latent_attention=True,
        rotary_interleaved=False,
        dsa_indexer_rope_interleaved=False,
        mrope_section=None,
    )
    # Position 0 stays, position 1 turns (0, 2) by 90 degrees and (1, 3) by 180.
    angles = torch.tensor([[0, 0, 0, 0], [0.5, 1, 0.5, 1]]).view(2, 1, 1, 4) * torch.pi
    x = torch.tensor([1.0, 2, 3, 4, 5, 6]).expand(2, 1, 1, 6)
    turned = indexer._apply_rope(x, angles, 1.0).flatten(0, 2)
    expected = torch.tensor([[1.0, 2, 3, 4, 5, 6], [-3, -2, 1, -4, 5, 6]])
    assert torch.allclose(turned, expected, atol=1e-6), turned
