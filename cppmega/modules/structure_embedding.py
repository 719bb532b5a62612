"""The embedding of a token's place in the syntax of source code, which is added to the token's own.

The kind of the innermost construct and the depth of its nesting have a row each, of a few columns,
which one matrix widens. That matrix starts from zero, so that an untrained model is the one without
it. The tables and their scales do not: with two factors at zero, neither has a gradient, ever.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cppmega.errors import CppmegaError
from cppmega.modules.input_embedding_sizes import Structure


class StructureEmbedding(nn.Module):
    """Tables of kinds and depths with a learnt scale each, and the matrix that widens their sum."""

    ids = 2
    """How many ids of a token `forward` takes."""

    def __init__(
        self, sizes: Structure, hidden: int, std: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Create tables that every rank draws alike, from a generator of their own.

        Args:
            sizes: of the tables.
            hidden: width of the model.
            std: standard deviation of the tables' first values.
            dtype: of the parameters.
            device: of the parameters.
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
        """Count the rows that `forward` takes from 1, and check that the tables have them.

        Args:
            kinds: int64 [b, s].
            depths: int64 [b, s].
            like: the tokens, [b, s].

        Returns:
            int64 [2, b, s].

        Raises:
            CppmegaError: `structure-not-fed`, `structure-ids-wrong`. On a GPU, which is not waited
                for, an id without a row ends the process by an assertion that names it.
        """
        if kinds is None or depths is None:
            raise CppmegaError(
                "structure-not-fed",
                "A model with a structure embedding was given a batch without structure ids.",
                "It would learn nothing of the syntax, and look as if it did.",
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
            torch._assert_async(fit, f"structure-ids-wrong: {message}")
        return torch.stack((kinds, depths)) + 1

    def forward(self, rows: Tensor) -> Tensor:
        """Embed where tokens are.

        Few rows are read by many tokens. The product that reads them has a gradient that is summed
        in fp32, in an order that does not change.

        Args:
            rows: int64 [2, b, s], as `table_rows` returns them; 0 adds nothing.

        Returns:
            [s, b, hidden].
        """
        tables = torch.cat((self.kinds * self.scales[0], self.depths * self.scales[1]))
        chosen = [
            table_rows.unsqueeze(-1) == torch.arange(1, count + 1, device=rows.device)
            for table_rows, count in zip(rows.transpose(1, 2), self.rows, strict=True)
        ]
        found = torch.cat(chosen, dim=-1).to(tables.dtype) @ tables
        return nn.functional.linear(found, self.widening)


def _wrong(what: str) -> CppmegaError:
    return CppmegaError(
        "structure-ids-wrong",
        what,
        "They are those of other data, or of another definition of the classes.",
        "python -m cppmega.check_data PREFIX, for every --data of the run",
    )
