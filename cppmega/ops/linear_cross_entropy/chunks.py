"""The loop over chunks of tokens that the reference and the Triton backend share.

One chunk holds `[n, V/tp]` logits, which is the largest tensor unless they are kept. Per chunk:

    logits = scale * hidden @ weight.T                    GEMM 1
    lse, target logit, argmax   (all-gather over TP)      row kernel, first read
    dlogits = row_weight * (softmax - onehot), in place   row kernel, second read
    dX[chunk] = dlogits @ weight                          GEMM 2
    dW += dlogits.T @ hidden[chunk]                       GEMM 3, accumulated in fp32

The backends (`kernels_triton`, `naive`) differ in how one
chunk is computed; each of them is a module with the functions of `ChunkKernels`.

Source: the three-GEMM scheme is that of https://github.com/mgmalek/efficient_cross_entropy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

LOGITS_BYTES = 1 << 30
"""Budget of the logits of one chunk, in bytes.

At V=131072 in bf16 this is a chunk of 4096 tokens. Every chunk reads and writes the entire fp32 dW
once, so small chunks are slow: 32768 tokens on an H200 take 172 ms in chunks of 2048, 167 in chunks
of 4096, 164 in chunks of 8192, which hold 0.75 GiB more.
"""


class RowStatistics(NamedTuple):
    """Statistics from one pass over the rows of a chunk of logits; each is `[n]`.

    Attributes:
        maximum: of the logits; -inf, or fp32's lowest, for a shard that is all padding.
        others: sum of `exp(logit - maximum)` over all columns but the target.
        target_logit: -inf where the target is not in this shard.
        argmax: the lowest column with the maximum; None unless wanted.
    """

    maximum: Tensor
    others: Tensor
    target_logit: Tensor
    argmax: Tensor | None


class Softmax(NamedTuple):
    """Terms of the softmax over the complete vocabulary, for its gradient; each is `[n]`.

    `exp(logit - lse)` and `lse - target_logit` would lose a confident row: with a target of
    probability p, rounding the log-sum-exp loses 1 - p. Kept separate, `p - 1 = -others / total`
    and the loss `log1p(others)` are as precise as `others`.

    Attributes:
        maximum: of the logits.
        others: sum of `exp(logit - maximum)` over all columns but the target.
        total: the same over all columns.
    """

    maximum: Tensor
    others: Tensor
    total: Tensor


def softmax_of(found: RowStatistics) -> Softmax:
    """Return the softmax of rows that hold the complete vocabulary."""
    total = found.others + (found.target_logit - found.maximum).exp()
    return Softmax(found.maximum, found.others, total)


def loss_of(softmax: Softmax, target_logit: Tensor) -> Tensor:
    """`-log softmax[target]`, `[n]`: a sum of two numbers >= 0, so nothing cancels."""
    confident = (target_logit == softmax.maximum) & target_logit.isfinite()
    below = softmax.maximum - target_logit
    return torch.where(confident, softmax.others.log1p(), below + softmax.total.log())


class ChunkKernels(Protocol):
    """The functions of a backend module. `targets` are columns of this shard, -1 for none."""

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Type in which dX is kept between forward and backward, for inputs of `dtype`."""

    def accumulation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Type of the losses and of the dW accumulator, for inputs of `dtype`."""

    def logits_buffer(self, rows: int, columns: int, like: Tensor) -> Tensor:
        """Return an uninitialized `[rows, columns]`, on the device of `like`."""

    def logits(self, hidden: Tensor, weight: Tensor, scale: float, out: Tensor) -> None:
        """out = scale * hidden @ weight.T"""

    def statistics(
        self, logits: Tensor, targets: Tensor, columns: int, want_argmax: bool
    ) -> RowStatistics:
        """Statistics of `logits[:, :columns]`."""

    def gradient_(
        self, logits: Tensor, targets: Tensor, columns: int, softmax: Softmax, row_weights: Tensor
    ) -> None:
        """Overwrite logits by `row_weights * (softmax - onehot)`; 0 from `columns` on."""

    def statistics_and_gradient_(
        self,
        logits: Tensor,
        targets: Tensor,
        columns: int,
        row_weights: Tensor,
        want_argmax: bool,
    ) -> RowStatistics:
        """Both of the above, for a rank that has the complete vocabulary."""

    def hidden_gradient(self, dlogits: Tensor, weight: Tensor, scale: float, out: Tensor) -> None:
        """out = scale * dlogits @ weight"""

    def weight_gradient(
        self, dlogits: Tensor, hidden: Tensor, scale: float, accumulate: bool, out: Tensor
    ) -> None:
        """out = scale * dlogits.T @ hidden, added to the contents of `out` if `accumulate`."""

    def scaled(self, source: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        """factor * source, computed in fp32 at least, rounded once to `dtype`."""


@dataclass(frozen=True)
class Problem:
    """The arguments of a call besides hidden and weight, checked and normalized.

    Attributes:
        targets: `[N]` int64, global token ids.
        columns: number of this rank's `V/tp` rows of the weight that are real tokens, not padding.
        first_column: global token id of this rank's row 0.
        ignored: `[N]` bool, rows whose loss is 0 whatever the logits.
        order: `[R]` int64, the distinct rows to compute; the others have no loss, no arg-max and no
            gradient. None: all rows.
        logit_scale: factor on the logits.
        tp_group: process group over which the vocabulary is split; None if it is not split.
        chunk_tokens: rows per chunk.
        want_argmax: also compute the arg-max token.
        kernels: the backend.
    """

    targets: Tensor
    columns: int
    first_column: int
    ignored: Tensor
    order: Tensor | None
    logit_scale: float
    tp_group: dist.ProcessGroup | None
    chunk_tokens: int
    want_argmax: bool
    kernels: ChunkKernels

    def local_targets(self) -> Tensor:
        """`[R]` int64: the target's column in this shard; -1 if elsewhere or ignored."""
        local = self.targets - self.first_column
        here = (local >= 0) & (local < self.columns) & ~self.ignored
        return self.picked(torch.where(here, local, -1))

    def picked(self, per_row: Tensor, part: slice = slice(None)) -> Tensor:
        """Return the computed rows of `[N, ...]`, or a part of them."""
        return per_row[part] if self.order is None else per_row.index_select(0, self.order[part])

    def spread(self, computed: Tensor, missing: float) -> Tensor:
        """Return `[N]` from `[R]`, with `missing` in the rows that were not computed."""
        if self.order is None:
            return computed
        return computed.new_full(self.targets.shape, missing).index_copy_(0, self.order, computed)


class Walk(NamedTuple):
    """The result of `walk`.

    Attributes:
        loss: `[N]`, unweighted, 0 where ignored or not computed; None if `softmax` was given.
        softmax: `[R]` each, over the complete vocabulary.
        argmax: `[N]` int64 global token ids, -1 where ignored or not computed; None unless wanted.
        hidden_grad: `[N, H]`, only from this rank's part of the vocabulary.
        weight_grad: `[V/tp, H]`, or None if it was added to the caller's accumulator.
        logits: `[R, V/tp]`; None unless they are kept.
    """

    loss: Tensor | None
    softmax: Softmax
    argmax: Tensor | None
    hidden_grad: Tensor | None
    weight_grad: Tensor | None
    logits: Tensor | None


def default_chunk_tokens(tokens: int, columns: int, itemsize: int) -> int:
    """Return the rows per chunk: as many as fit in `LOGITS_BYTES`, balanced over the chunks.

    A multiple of 128, the tile size of the GEMM kernels, so that only the last chunk is padded.
    """
    most = max(128, LOGITS_BYTES // (columns * itemsize) // 128 * 128)
    chunks = max(1, -(-tokens // most))
    even = -(-tokens // chunks)
    return min(most, max(128, -(-even // 128) * 128))


def combine_over_ranks(local: RowStatistics, shard: int, group: dist.ProcessGroup) -> RowStatistics:
    """Combine the statistics of all ranks, with one all-gather of `[4, n]`.

    Every rank computes a bitwise identical result from the gathered numbers. Among equal maxima,
    the lowest token id wins, as in `torch.argmax`. Column numbers are sent as floats, which are
    exact below 2**24.
    """
    columns = torch.zeros_like(local.maximum) if local.argmax is None else local.argmax
    mine = torch.stack([*local[:3], columns.to(local.maximum.dtype)])
    gathered = mine.new_empty(group.size() * mine.numel())
    dist.all_gather_into_tensor(gathered, mine.view(-1), group=group)
    maximum, others, target, column = gathered.view(group.size(), *mine.shape).unbind(1)
    highest, winner = maximum.amax(0), maximum.argmax(0, keepdim=True)
    argmax = None
    if local.argmax is not None:
        argmax = (column.gather(0, winner).long() + winner * shard).squeeze(0)
    others = (others * (maximum - highest).exp()).sum(0)
    return RowStatistics(highest, others, target.amax(0), argmax)


def walk(
    problem: Problem,
    hidden: Tensor,
    weight: Tensor,
    *,
    row_weights: Tensor | None = None,
    gradient_scale: float = 1.0,
    softmax: Softmax | None = None,
    keep_logits: bool = False,
    logits: Tensor | None = None,
    want_hidden_grad: bool = False,
    want_weight_grad: bool = False,
    accumulate_into: Tensor | None = None,
) -> Walk:
    """Process all chunks of the R computed rows once.

    Args:
        problem: the call.
        hidden: `[N, H]`.
        weight: `[V/tp, H]`, this rank's rows of the output matrix.
        row_weights: `[N]` fp32, factor on each row's gradient; required for any gradient.
        gradient_scale: factor on both gradients, applied inside the GEMM in fp32.
        softmax: the result of an earlier call; skips the statistics, the loss and their
            communication.
        keep_logits: return the logits of all rows, for a later call.
        logits: those of an earlier call, which are overwritten; skips their GEMM.
        want_hidden_grad: compute dX.
        want_weight_grad: compute dW.
        accumulate_into: `[V/tp, H]` fp32 to which dW is added instead of being returned.

    Returns:
        See `Walk`. Deterministic: the order of every sum depends on the shapes alone.
    """
    kernels = problem.kernels
    targets = problem.local_targets()
    weights = None if row_weights is None else problem.picked(row_weights)
    tokens, shard = targets.shape[0], weight.shape[0]
    wide = kernels.accumulation_dtype(hidden.dtype)
    fresh = softmax is None
    # Maximum, sum of the others and target logit of every row, chunk by chunk.
    numbers = hidden.new_empty(3 if fresh else 0, tokens, dtype=wide)
    argmax = torch.empty_like(targets) if problem.want_argmax and fresh else None
    hidden_grad = _hidden_grad(problem, hidden) if want_hidden_grad else None
    weight_grad = accumulate_into
    if want_weight_grad and weight_grad is None:
        # The first chunk overwrites it; zeros are needed only in a call without tokens.
        allocate = torch.empty_like if tokens else torch.zeros_like
        weight_grad = allocate(weight, dtype=wide)
    scale = gradient_scale * problem.logit_scale
    step = problem.chunk_tokens
    known_logits = logits is not None
    if logits is None:
        held = tokens if keep_logits else min(step, tokens)
        logits = kernels.logits_buffer(held, shard, hidden)

    for start in range(0, tokens, step):
        rows = slice(start, min(start + step, tokens))
        some = logits[rows] if logits.shape[0] == tokens else logits[: rows.stop - start]
        inputs = problem.picked(hidden, rows)
        if not known_logits:
            kernels.logits(inputs, weight, problem.logit_scale, some)
        chunk = (some, targets[rows], problem.columns)
        known = None if softmax is None else Softmax(*(each[rows] for each in softmax))
        if fresh:
            if weights is not None and problem.tp_group is None:
                found = kernels.statistics_and_gradient_(*chunk, weights[rows], problem.want_argmax)
            else:
                found = kernels.statistics(*chunk, problem.want_argmax)
            if problem.tp_group is not None:
                found = combine_over_ranks(found, shard, problem.tp_group)
                known = softmax_of(found)
            torch.stack(found[:3], out=numbers[:, rows])
            if argmax is not None and found.argmax is not None:
                argmax[rows] = found.argmax
        if weights is None:
            continue
        if known is not None:
            kernels.gradient_(*chunk, known, weights[rows])
        if hidden_grad is not None:
            _add_hidden_grad(problem, some, weight, scale, rows, hidden_grad)
        if want_weight_grad and weight_grad is not None:
            adding = start > 0 or accumulate_into is not None
            kernels.weight_gradient(some, inputs, scale, adding, weight_grad)

    loss = None
    if softmax is None:
        maximum, others, target_logit = numbers
        softmax = softmax_of(RowStatistics(maximum, others, target_logit, None))
        loss = problem.spread(loss_of(softmax, target_logit), 0).masked_fill_(problem.ignored, 0)
    if argmax is not None:
        argmax = problem.spread(argmax, -1).masked_fill_(problem.ignored, -1)
    returned = weight_grad if accumulate_into is None else None
    kept = logits if keep_logits else None
    return Walk(loss, softmax, argmax, hidden_grad, returned, kept)


def _hidden_grad(problem: Problem, hidden: Tensor) -> Tensor:
    allocate = torch.empty_like if problem.order is None else torch.zeros_like
    return allocate(hidden, dtype=problem.kernels.gradient_dtype(hidden.dtype))


def _add_hidden_grad(
    problem: Problem, dlogits: Tensor, weight: Tensor, scale: float, rows: slice, out: Tensor
) -> None:
    """Write dX of one chunk to its rows of `[N, H]`."""
    if problem.order is None:
        problem.kernels.hidden_gradient(dlogits, weight, scale, out[rows])
        return
    computed = out.new_empty(dlogits.shape[0], out.shape[1])
    problem.kernels.hidden_gradient(dlogits, weight, scale, computed)
    out.index_copy_(0, problem.order[rows], computed)
