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
    purpose="fix",
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
    feature=("megatron/core/transformer/experimental_attention_variant/dsa.py:DSAttention",),
)


def fixed_upstream(source: Source) -> bool:
    return "dsa_indexer_loss_coeff or 0.0" in source.text(TARGET)


def verify() -> None:
    import torch
    from megatron.core.transformer.enums import AttnMaskType

    from .._dsa_layer import layer

    def forward(coefficient):
        torch.manual_seed(0)
        shapes = ((2, 4), (4,), (2,))
        q, k, w = (torch.randn(4, 1, *shape, requires_grad=True) for shape in shapes)
        attention = layer(q, k, w, 2, dsa_indexer_loss_coeff=coefficient)
        query, key, value = (torch.randn(4, 1, 2, 4, requires_grad=True) for _ in range(3))
        x = torch.randn(4, 1, 8)
        output = attention(query, key, value, None, x, x, attn_mask_type=AttnMaskType.causal)
        output.sum().backward()
        return output.detach(), query.grad, key.grad, value.grad, q.grad  # q's is of the loss alone

    *off, of_no_loss = forward(None)
    *zero, of_zero_loss = forward(0.0)
    assert all(torch.equal(one, other) for one, other in zip(off, zero, strict=True))
    assert not any(found is not None and found.any() for found in (of_no_loss, of_zero_loss))
    assert forward(1.0)[-1].any()
