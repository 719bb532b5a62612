"""Questions about Megatron's parsed arguments, for a page's `when`.

Example:
    >>> from cppmega.catalogue.megatron_args import has_mtp, uses_dsa
    >>> Patch(..., when=lambda args: uses_dsa(args) and has_mtp(args))
"""

from cppmega.rules.questions import captures as captures
from cppmega.rules.questions import captures_some_layers as captures_some_layers
from cppmega.rules.questions import cuda_graphs as cuda_graphs
from cppmega.rules.questions import has_experts as has_experts
from cppmega.rules.questions import has_mtp as has_mtp
from cppmega.rules.questions import has_own_mixers as has_own_mixers
from cppmega.rules.questions import layer_pattern as layer_pattern
from cppmega.rules.questions import mtp_depths as mtp_depths
from cppmega.rules.questions import recomputes as recomputes
from cppmega.rules.questions import shares_dsa_keys as shares_dsa_keys
from cppmega.rules.questions import uses_dsa as uses_dsa
from cppmega.rules.questions import uses_fsdp as uses_fsdp
from cppmega.rules.questions import variables as variables
