"""The embedding of a token's position in the syntax of source code, added to the token embedding.

The kind of the innermost construct and its nesting depth have a row each, of a few columns, which
one matrix projects to the model's width. That matrix is initialized to zero, so that an untrained
model equals the one without it. The tables and their scales are not: if two factors were zero,
neither would ever have a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cppmega.errors import CppmegaError
from cppmega.sizes.embeddings import Structure


class StructureEmbedding(nn.Module):
    """Tables of kinds and depths with a learned scale each, and the up-projection of their sum."""

    ids = 2
    """The number of ids per token that `columns` takes."""

    def __init__(
        self, sizes: Structure, hidden: int, std: float, dtype: torch.dtype, device: torch.device
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
        self.rows = sizes.categories, sizes.levels
        generator = torch.Generator(device).manual_seed(sizes.seed)
        self.kinds, self.depths = (
            nn.Parameter(
                torch.empty(count, sizes.bottleneck, dtype=dtype, device=device).normal_(
                    std=std, generator=generator
                )
            )
            for count in self.rows
        )
        self.scales = nn.Parameter(torch.ones(2, dtype=dtype, device=device))
        widening = torch.zeros(hidden, sizes.bottleneck, dtype=dtype, device=device)
        self.widening = nn.Parameter(widening)

    def table_rows(self, kinds: Tensor | None, depths: Tensor | None, like: Tensor) -> Tensor:
        """Compute the rows that `columns` takes, numbered from 1, and check that they exist.

        Args:
            kinds: int64 [b, s].
            depths: int64 [b, s].
            like: the tokens, [b, s].

        Returns:
            int64 [2, b, s].

        Raises:
            CppmegaError: `input-embeddings-not-fed`, `structure-out-of-range`. On a GPU, where the
                host does not wait, an id without a row fails a device-side assertion that names
                the error.
        """
        if kinds is None or depths is None:
            raise CppmegaError(
                "input-embeddings-not-fed",
                "A model with a structure embedding was given a batch without structure ids.",
                "It would learn nothing about syntax, but appear to.",
                "train on data prepared with structure ids, or --set structure=None",
            )
        for name, ids, rows in zip(("kinds", "depths"), (kinds, depths), self.rows, strict=True):
            if ids.shape != like.shape or ids.dtype != torch.int64:
                found = f"{ids.dtype} of shape {tuple(ids.shape)}"
                raise _wrong(f"The {name} are {found}, the tokens of shape {tuple(like.shape)}.")
            fit = ((ids >= 0) & (ids < rows)).all()
            message = f"The structure {name} of a batch are not all from 0 to {rows - 1}."
            if ids.device.type == "cpu" and not fit:
                raise _wrong(message)
            torch._assert_async(fit, f"structure-out-of-range: {message}")
        return torch.stack((kinds, depths)) + 1

    def columns(self, rows: Tensor) -> Tensor:
        """Mark the rows of each token by a one among zeros.

        Many tokens read few rows. They are read by a matrix product, whose gradient is summed in
        fp32 in a fixed order.

        Args:
            rows: int64 [2, b, s], as `table_rows` returns them; 0 adds nothing.

        Returns:
            [s, b, columns], which `matrix` projects to the model's width.
        """
        chosen = [
            table_rows.unsqueeze(-1) == torch.arange(1, count + 1, device=rows.device)
            for table_rows, count in zip(rows.transpose(1, 2), self.rows, strict=True)
        ]
        return torch.cat(chosen, dim=-1).to(self.widening.dtype)

    def matrix(self) -> Tensor:
        """The vector that each row adds to a token, [hidden, columns]: both factors multiplied."""
        tables = torch.cat((self.kinds * self.scales[0], self.depths * self.scales[1]))
        return nn.functional.linear(self.widening, tables)


def _wrong(what: str) -> CppmegaError:
    return CppmegaError(
        "structure-out-of-range",
        what,
        "They belong to other data, or to another definition of the classes.",
        "python -m cppmega.check_data PREFIX, for every --data of the run",
    )
