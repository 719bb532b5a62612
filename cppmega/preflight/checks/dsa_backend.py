"""The DSA backend that the launch names supports its sizes.

Megatron's fused backends decline a shape with only a debug message, and the unfused path
then holds `[batch, heads, seq, seq]` scores in fp32.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence

from packaging.specifiers import SpecifierSet

from cppmega.catalogue.megatron_args import uses_dsa
from cppmega.errors import CppmegaError
from cppmega.host import packages as stack
from cppmega.overlay.wanted import provided
from cppmega.page import Page
from cppmega.preflight.context import Context
from cppmega.preflight.findings import NotApplicable, refuse
from cppmega.recipe import dsa_widths
from cppmega.training.requirements import IN_THE_CODE

AFTER: tuple[str, ...] = ("line_parses",)

_DENSE_LOSS = "dsa_dense_indexer_loss"
"""Name under which a page provides the indexer's loss over all keys for every backend but cudnn."""

_OURS = dsa_widths.ATTENTION, _DENSE_LOSS
"""Names under which pages provide all of DSA, so that no backend has to be named."""

_MERGES_WRONGLY = SpecifierSet(">=0.1.9.dev0,<0.1.11")

_TILE, _BLOCK = 16, 64
"""Fewest heads of a kernel of Megatron's, and the keys that it processes at a time."""


def check(context: Context) -> str:
    """Compare sizes and loss with what the backends support.

    Raises:
        CppmegaError: `dsa-backend-declines`, `dsa-unfused`, `tilelang-miscompiles`.
    """
    line, args = context.launch_line, context.megatron_args
    if not uses_dsa(args):
        raise NotApplicable("no layer is DSA")
    unnamed = getattr(args, "dsa_kernel_backend", "none") == "none"
    if unnamed and all(_providers(context, name)[0] for name in _OURS):
        return "no backend is named: cppmega's kernels run"
    if not hasattr(args, "dsa_kernel_backend"):
        return f"unfused, as this release has no other; {_scores(args)}"
    backend = args.dsa_kernel_backend
    if backend == "none":
        if not line.has("--dsa-kernel-backend"):
            raise CppmegaError(
                "dsa-unfused",
                f"The model has DSA layers and the line names no backend: {_scores(args)}.",
                "Stock's unfused DSA computes all scores and throws most of them away.",
                "--dsa-kernel-backend tilelang at sizes that it supports, or none",
            )
        return f"unfused, as the line asks; {_scores(args)}"
    refuse([*_declined(backend, args, context), *_miscompiled(backend)])
    return f"{backend} supports these sizes"


def _providers(context: Context, name: str) -> tuple[list[Page], list[Page]]:
    """Pages that provide something by that name: those in the code, and the others."""
    verdicts = context.plan.verdicts
    inside: list[Page] = []
    outside: list[Page] = []
    for page in context.session.pages.values():
        if name in page.patch.provides:
            verdict = verdicts.get(page.name)
            applied = verdict is not None and verdict.state in IN_THE_CODE
            (inside if applied else outside).append(page)
    return inside, outside


def _declined(backend: str, args: Namespace, context: Context) -> Iterator[CppmegaError]:
    reasons = []
    if str(getattr(args, "attention_backend", None)).endswith("unfused"):
        reasons.append("every call with --attention-backend unfused")
    inside, outside = _providers(context, dsa_widths.ATTENTION)
    if backend != "tilelang" or not inside:
        instead = [page.name for page in outside if backend == "tilelang"]
        reasons += _sizes(backend, args, context, instead)
    dense = args.dsa_indexer_loss_coeff and not args.dsa_indexer_use_sparse_loss
    inside, outside = _providers(context, _DENSE_LOSS)
    if backend == "tilelang" and dense and not inside:
        lacking = [page.name for page in outside]
        reasons.append(f"the indexer's dense loss; it only has the sparse one{_without(lacking)}")
    for reason in reasons:
        yield CppmegaError(
            "dsa-backend-declines",
            f"The backend {backend} declines {reason}. Megatron then runs unfused: "
            f"{_scores(args)}.",
            "A run recorded as fused would be stock's unfused one.",
            "--set dsa_kernel_backend=none, or sizes and a loss that it supports",
        )


def _sizes(
    backend: str, args: Namespace, context: Context, instead: Sequence[str]
) -> Iterator[str]:
    """The attention sizes that a backend declines.

    Args:
        instead: pages that attend at all sizes and are not in the code.
    """
    inside, outside = _providers(context, dsa_widths.TILELANG)
    widths = args.kv_lora_rank + args.qk_pos_emb_head_dim, args.kv_lora_rank
    supported = dsa_widths.supported(backend, provided(inside, dsa_widths.TILELANG))
    if widths not in supported:
        known = ", ".join(f"{query} and {value}" for query, value in supported)
        lacking = [
            page.name
            for page in outside
            if widths in dsa_widths.supported(backend, page.patch.provides[dsa_widths.TILELANG])
        ]
        yield (
            f"query and value widths of {widths[0]} and {widths[1]}; it supports {known}"
            + _without([*lacking, *instead])
        )
    if backend != "tilelang":
        return
    heads = args.num_attention_heads // args.tensor_model_parallel_size
    if heads > _TILE and heads & (heads - 1):
        yield (
            f"{heads} heads on a rank; it supports powers of two, and any number up to {_TILE}"
            + _without(instead)
        )
    if args.dsa_indexer_topk % _BLOCK:
        yield (
            f"{args.dsa_indexer_topk} keys per query; it supports multiples of {_BLOCK}"
            + _without(instead)
        )


def _without(pages: Sequence[str]) -> str:
    return f" without the patch {' or '.join(pages)}" if pages else ""


def _miscompiled(backend: str) -> Iterator[CppmegaError]:
    installed = stack.version("tilelang") if backend == "tilelang" else None
    if installed is not None and _MERGES_WRONGLY.contains(installed, prereleases=True):
        yield CppmegaError(
            "tilelang-miscompiles",
            f"tilelang {installed}: from 0.1.9 until it was fixed in 0.1.11, the compiler merges "
            "shared memory that is still in use (https://github.com/tile-ai/tilelang/pull/2204), "
            "and Megatron builds the backward kernel of its sparse attention with that merging.",
            "Gradients can be wrong without an error.",
            "pip install 'tilelang>=0.1.11', or tilelang==0.1.8, which mamba-ssm demands",
        )


def _scores(args: Namespace) -> str:
    pairs = args.micro_batch_size or 1
    pairs *= args.num_attention_heads * args.seq_length**2
    return f"{4 * pairs / 2**30 / args.tensor_model_parallel_size:.1f} GiB per score tensor"
