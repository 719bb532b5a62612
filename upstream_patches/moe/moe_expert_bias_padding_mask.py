"""Support a padding mask together with the MoE expert bias.

What: `TopKRouter._apply_expert_bias` removes the complete row of a padded token from the load
    count.
Why: The mask is a vector over tokens, the routing map has shape tokens by experts, and the two are
    combined as they are. With `--moe-router-enable-expert-bias`, the first forward pass with a mask
    fails ("The size of tensor a (4) must match the size of tensor b (6)"); if both sizes are equal,
    it silently drops experts instead of tokens (tested on 0.16.1 to 0.19.2).
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/6114 (main, August 2026; not released)
Remove: when the mask is unsqueezed there.
Numerics: changes results if the number of local tokens equals that of the experts; other runs used
    to fail
"""

from cppmega.catalogue.megatron_args import has_experts
from cppmega.edits import replacing
from cppmega.page import Edit, Patch, Source

TARGET = "megatron/core/transformer/moe/router.py:TopKRouter._apply_expert_bias"
STOCK = "routing_map & ~padding_mask"

PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=TARGET,
            pins={
                "0.16.1": "0242d947e2113320",
                "0.17.1": "0242d947e2113320",
                "0.18.2": "0242d947e2113320",
                "0.19.2": "0242d947e2113320",
            },
            edit=replacing("routing_map & ~padding_mask", "routing_map & ~padding_mask[:, None]"),
        ),
    ),
    reached="forward",
    # Up to 0.15 the router receives no mask.
    feature=("megatron/core/transformer/moe/moe_layer.py:MoELayer.route",),
    when=has_experts,
)


def fixed_upstream(source: Source) -> bool:
    text = source.text(TARGET)
    return bool(text) and not any(line.strip().endswith(STOCK) for line in text.splitlines())


def verify() -> None:
    from types import SimpleNamespace

    import torch
    from megatron.core.transformer.moe.router import TopKRouter

    def load(tokens, padded):  # type: ignore[no-untyped-def]
        """Return the tokens per expert if token i is routed to experts i and i + 1 of 4."""
        to = torch.arange(tokens)
        routing_map = torch.zeros(tokens, 4, dtype=torch.bool)
        routing_map[to, to % 4] = routing_map[to, (to + 1) % 4] = True
        mask = None if padded is None else (to[:, None] == torch.tensor(padded)).any(1)
        counted = torch.zeros(4)
        router = SimpleNamespace(enable_expert_bias=True, local_tokens_per_expert=counted)
        with torch.compiler.set_stance("force_eager"):
            TopKRouter._apply_expert_bias(router, routing_map, padding_mask=mask)
        return router.local_tokens_per_expert.tolist()

    assert load(6, None) == [3, 4, 3, 2]
    assert load(4, [3]) == [1, 2, 2, 1], "the mask removed experts instead of tokens"
    assert load(6, [4, 5]) == [2, 2, 2, 2]
