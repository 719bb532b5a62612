"""Allow DSA training with the default indexer loss coefficient.

What: `DSAttention.forward` treats the default `dsa_indexer_loss_coeff=None` as 0.0.
Why: The loss is multiplied by `None`, the default of the configuration: every DSA model that does
    not set the coefficient raises TypeError in its first training forward pass (seen on CPU, 0.16.1
    to 0.18.2). The code reads it with a fallback of 0.0 that never applies, because the field
    exists.
Upstream: Not sent: 0.19.0 rewrote the function and reads `None` as 0.0.
Remove: when `DSAttention.forward` reads `None` as 0.0.
Numerics: none (bitwise)
"""

from cppmega.catalogue.megatron_args import uses_dsa
from cppmega.edits import replacing
from cppmega.page import Edit, Patch, Source

TARGET = "megatron/core/transformer/experimental_attention_variant/dsa.py:DSAttention.forward"

PATCH = Patch(
    edits=(
        Edit(
            target=TARGET,
            pins={
                "0.16.1": "1a94be7b8a955f97",
                "0.17.1": "e97cdc0c18dcc2d5",
                "0.18.2": "e97cdc0c18dcc2d5",
            },
            edit=replacing(
                "indexer_loss_coeff = getattr(self.config, 'dsa_indexer_loss_coeff', 0.0)",
                """
                # The field exists and its default is None, so getattr's default is never used.
                indexer_loss_coeff = self.config.dsa_indexer_loss_coeff or 0.0
                """,
            ),
        ),
    ),
    reached="forward",
    # True also where a hybrid pattern names the layers.
    when=uses_dsa,
    feature=(TARGET,),
)


def fixed_upstream(source: Source) -> bool:
    return "dsa_indexer_loss_coeff or 0.0" in source.text(TARGET)


def verify() -> None:
    from types import SimpleNamespace

    import torch
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention

    def forward(coefficient):
        torch.manual_seed(0)
        layer = DSAttention.__new__(DSAttention)
        torch.nn.Module.__init__(layer)
        tp = SimpleNamespace(size=lambda: 1)
        layer.softmax_scale, layer.layer_number = 1.0, None
        layer.config = SimpleNamespace(
            dsa_indexer_loss_coeff=coefficient, dsa_indexer_use_sparse_loss=False, num_layers=1
        )
        # Further attributes that 0.19 reads.
        layer.index_topk, layer.index_share, layer.skip_topk = 2, False, False
        layer.cp_comm_type, layer.pg_collection = "p2p", SimpleNamespace(tp=None, cp=None)
        layer.config.sequence_parallel = layer.config.calculate_per_token_loss = False
        layer.config.attention_backend, layer.config.dsa_indexer_scoring_relu = "unfused", True
        q, k, w = (torch.randn(4, 1, *shape) for shape in ((2, 4), (4,), (2,)))
        scores = torch.einsum("sbhd,tbd,sbh->bst", q, k, w).tril() - torch.ones(4, 4).triu(1) * 1e9
        layer.indexer = SimpleNamespace(
            index_topk=2,
            pg_collection=SimpleNamespace(tp=tp),
            forward_before_topk=lambda *inputs: (q, k, w),
            forward_with_scores=lambda *inputs, **named: (scores, scores.topk(2)[1]),
        )
        query, key, value = (torch.randn(4, 1, 2, 4, requires_grad=True) for _ in range(3))
        x = torch.randn(4, 1, 8)
        output = layer(query, key, value, None, x, x, attn_mask_type=AttnMaskType.causal)
        return output.detach(), *torch.autograd.grad(output.sum(), (query, key, value))

    for off, zero in zip(forward(None), forward(0.0), strict=True):
        assert torch.equal(off, zero)
