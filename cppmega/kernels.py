"""The kernels as a library: no patch, no Megatron, and of this package only `cppmega.ops`.

Importing this needs torch and packaging, and running a kernel Triton. On a CPU, with or without
Triton, the plain torch that defines each result computes it. `docs/kernels.md` has an example of
each, with shapes, types, GPUs and errors.
"""

from cppmega.ops import mhc as hyper_connection
from cppmega.ops import ngram_hash
from cppmega.ops.common.bounds import Bounds
from cppmega.ops.dsa_attention import sparse_attention
from cppmega.ops.dsa_indexer import choose_keys, indexer_loss
from cppmega.ops.dsa_indexer.problem import Loss
from cppmega.ops.linear_cross_entropy import linear_cross_entropy
from cppmega.ops.m2rnn import document_bounds, m2rnn
from cppmega.ops.mamba3 import Inputs as Mamba3Inputs
from cppmega.ops.mamba3 import Parameters as Mamba3Parameters
from cppmega.ops.mamba3 import mixed as mamba3
from cppmega.ops.packed_conv import packed_conv
from cppmega.ops.pointwise.hadamard import walsh_hadamard

__all__ = [
    "Bounds",
    "Loss",
    "Mamba3Inputs",
    "Mamba3Parameters",
    "choose_keys",
    "document_bounds",
    "hyper_connection",
    "indexer_loss",
    "linear_cross_entropy",
    "m2rnn",
    "mamba3",
    "ngram_hash",
    "packed_conv",
    "sparse_attention",
    "walsh_hadamard",
]
