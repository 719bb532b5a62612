"""Questions about Megatron's parsed arguments, for a page's `when`.

Example:
    >>> from cppmega.catalogue.megatron_args import has_mtp, uses_dsa
    >>> Patch(..., when=lambda args: uses_dsa(args) and has_mtp(args))
"""

from cppmega.sizes.megatron_args import absorbs_dsa as absorbs_dsa
from cppmega.sizes.megatron_args import captures as captures
from cppmega.sizes.megatron_args import captures_some_layers as captures_some_layers
from cppmega.sizes.megatron_args import cuda_graphs as cuda_graphs
from cppmega.sizes.megatron_args import fuses_accumulation as fuses_accumulation
from cppmega.sizes.megatron_args import has_experts as has_experts
from cppmega.sizes.megatron_args import has_mla as has_mla
from cppmega.sizes.megatron_args import has_mtp as has_mtp
from cppmega.sizes.megatron_args import has_own_mixers as has_own_mixers
from cppmega.sizes.megatron_args import layer_pattern as layer_pattern
from cppmega.sizes.megatron_args import mtp_depths as mtp_depths
from cppmega.sizes.megatron_args import recomputes as recomputes
from cppmega.sizes.megatron_args import shares_dsa_keys as shares_dsa_keys
from cppmega.sizes.megatron_args import uses_dsa as uses_dsa
from cppmega.sizes.megatron_args import uses_fsdp as uses_fsdp
from cppmega.sizes.megatron_args import variables as variables
