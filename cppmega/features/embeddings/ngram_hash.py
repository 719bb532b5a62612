"""The embedding of hashed n-grams, which is added to the token embedding.

Its projection is initialized to zero, so that an untrained model equals the one without it; its
tables are not, or neither would ever have a gradient. Both are the same on every tensor-parallel
rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cppmega.errors import CppmegaError
from cppmega.ops import ngram_hash as ops
from cppmega.sizes.embeddings import NgramHash

HASHING = "hashing"
"""Name of the buffer with the tables' rows and multipliers, also in a checkpoint."""


class NgramHashEmbedding(nn.Module):
    """Tables of hashed n-grams, and the projection of the rows looked up for a token."""

    hashing: Tensor

    def __init__(
        self, sizes: NgramHash, hidden: int, std: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Create tables with the same values on every rank, drawn from a separate generator.

        Args:
            sizes: the sizes of the tables.
            hidden: width of the model.
            std: standard deviation of the tables' initial values.
            dtype: type of the parameters.
            device: device of the parameters.
        """
        super().__init__()
        self.sizes = sizes
        hashing = ops.hashing(sizes.orders, sizes.heads, sizes.tables, sizes.seed)
        self.register_buffer(HASHING, hashing.to(device))
        generator = torch.Generator(device).manual_seed(sizes.seed)
        drawn = torch.empty(sum(sizes.tables), sizes.dim, dtype=dtype, device=device)
        self.tables = nn.Parameter(drawn.normal_(std=std, generator=generator))
        width = len(sizes.tables) * sizes.dim
        self.projection = nn.Parameter(torch.zeros(hidden, width, dtype=dtype, device=device))

    @property
    def ids(self) -> int:
        """The number of ids per token that `columns` takes."""
        return len(self.sizes.tables)

    def columns(self, rows: Tensor) -> Tensor:
        """Look up the n-grams that end at each token.

        Args:
            rows: int64 [tables, b, s], as `cppmega.ops.ngram_hash.table_rows` returns them.

        Returns:
            [s, b, columns], which `matrix` projects to the model's width.
        """
        return ops.lookup(self.tables, rows.permute(2, 1, 0)).flatten(-2)

    def matrix(self) -> Tensor:
        """The projection, [hidden, columns]."""
        return self.projection

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *rest: Any, **named: Any
    ) -> None:
        """Compare the multipliers with those of the checkpoint before anything is copied.

        Raises:
            CppmegaError: `checkpoint-of-another-model`.
        """
        saved = state_dict.get(prefix + HASHING)
        if f"{prefix}tables" in state_dict and not self._hashes_like(saved):
            raise CppmegaError(
                "checkpoint-of-another-model",
                "The checkpoint's n-gram tables were trained with multipliers other than those of "
                f"seed {self.sizes.seed}, or with none.",
                "Every n-gram would look up the row of another one.",
                "give ngram_hash the seed, orders, heads and tables of the run that saved it",
            )
        super()._load_from_state_dict(state_dict, prefix, *rest, **named)

    def _hashes_like(self, saved: Tensor | None) -> bool:
        own = self.hashing.cpu()
        return saved is not None and saved.shape == own.shape and torch.equal(saved.cpu(), own)
