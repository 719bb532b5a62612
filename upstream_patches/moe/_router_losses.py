"""The auxiliary losses of MoE routers, for the pages that are about them."""

from typing import Any

from cppmega.catalogue.megatron_args import has_experts


def balancing_losses(args: Any) -> list[str]:
    """Return the auxiliary losses that a run's routers compute: those with a weight."""
    if not has_experts(args):
        return []
    kinds = getattr(args, "moe_router_load_balancing_type", None) or []
    weights = getattr(args, "moe_aux_loss_coeff", None) or 0.0
    kinds = [kinds] if isinstance(kinds, str) else kinds
    weights = weights if isinstance(weights, (list, tuple)) else [weights] * len(kinds)
    pairs = zip(kinds, weights, strict=False)
    return [kind for kind, weight in pairs if kind.endswith("aux_loss") and weight > 0]
