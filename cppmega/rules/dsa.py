"""Rules of DSA's attention and indexer, beyond the options that they do not support."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cppmega.rules.combinations import DENSE_LOSS, DENSE_STEPS, TILELANG_DSA
from cppmega.rules.rule import Part, Rule, Run, Table, stated
from cppmega.sizes import dsa_loss, dsa_widths
from cppmega.sizes.megatron_args import uses_dsa

DENSE_LOSS_KERNEL = "dsa_dense_indexer_loss"
"""Name under which a page provides the indexer's loss over all keys for every backend but cudnn."""

_OURS = dsa_widths.ATTENTION, DENSE_LOSS_KERNEL
"""Names under which pages provide all of DSA, so that no backend has to be named."""

_MERGES_WRONGLY = ">=0.1.9.dev0,<0.1.11"

_TILE, _BLOCK = 16, 64
"""Fewest heads of a kernel of Megatron's, and the keys that it processes at a time."""


def _states_no_steps(run: Run) -> bool:
    """Read the number of dense steps; what cannot be read is raised."""
    if DENSE_STEPS.used(run):
        dsa_loss.dense_steps(run.cppmega_variables)
    return False


def _every_step_is_alike(run: Run) -> str:
    if not run.dsa_indexer_loss_coeff:
        return "the indexer has no loss, because dsa_indexer_loss_coeff is 0"
    return "" if run.dsa_indexer_use_sparse_loss else "the indexer's loss is dense in every step"


def scores(run: Any) -> str:
    """The memory of one tensor of all scores, for sentences."""
    pairs = (run.micro_batch_size or 1) * run.num_attention_heads * run.seq_length**2
    ranks = run.tensor_model_parallel_size * (run.context_parallel_size or 1)
    return f"{4 * pairs / 2**30 / ranks:.1f} GiB per score tensor"


def runs_own_kernels(run: Run) -> bool:
    """Whether no backend is named and pages provide all of DSA."""
    unnamed = run.dsa_kernel_backend in (None, "none")
    return unnamed and run.pages is not None and all(map(run.pages.inside, _OURS))


def _unfused(run: Run) -> object:
    """Whether a release that has a backend computes without one, and the line does not say so."""
    if run.words is None or "--dsa-kernel-backend" in run.words or runs_own_kernels(run):
        return False
    return run.dsa_kernel_backend == "none" and {"scores": scores(run)}


def _declined(run: Run) -> Iterator[dict[str, str]]:
    """What the backend that is named declines; Megatron then runs unfused, at the debug level."""
    pages, backend = run.pages, run.dsa_kernel_backend
    if pages is None or backend in (None, "none"):
        return
    for parts, name in ((_attention, dsa_widths.ATTENTION), (_indexer, DENSE_LOSS_KERNEL)):
        if backend == "tilelang" and pages.inside(name):
            continue  # a page computes this part in its place
        others = pages.outside(name) if backend == "tilelang" else ()
        for reason, further in parts(run, pages):
            lacking = " or ".join([*further, *others])
            without = f" without the patch {lacking}" if lacking else ""
            yield {"reason": reason + without, "scores": scores(run)}


Reasons = Iterator[tuple[str, list[str]]]
"""What a backend declines, with the pages by which it would not."""


def _attention(run: Run, pages: Any) -> Reasons:
    backend = run.dsa_kernel_backend
    widths = run.kv_lora_rank + run.qk_pos_emb_head_dim, run.kv_lora_rank
    supported = dsa_widths.supported(backend, pages.inside(dsa_widths.TILELANG))
    if widths not in supported:
        known = ", ".join(f"{query} and {value}" for query, value in supported)
        wider = pages.outside(dsa_widths.TILELANG).items()
        lacking = [page for page, more in wider if widths in dsa_widths.supported(backend, more)]
        yield f"query and value widths of {widths[0]} and {widths[1]}; it supports {known}", lacking
    elif run.deterministic_mode and widths not in dsa_widths.RELEASED:
        yield f"values of {widths[1]} in --deterministic-mode, as it sums gradients by atomics", []
    if backend != "tilelang":
        return
    if not run.bf16:
        yield "attention in another type than bf16", []
    heads = run.num_attention_heads // run.tensor_model_parallel_size
    if heads > _TILE and heads & (heads - 1):
        yield f"{heads} heads on a rank; it supports powers of two, and any up to {_TILE}", []
    if run.dsa_indexer_topk % _BLOCK:
        yield f"{run.dsa_indexer_topk} keys per query; it supports multiples of {_BLOCK}", []


def _indexer(run: Run, _: Any) -> Reasons:
    if run.dsa_kernel_backend != "tilelang":
        return
    if not run.bf16:
        yield "an indexer in another type than bf16", []
    if DENSE_LOSS.used(run):
        yield "the indexer's dense loss; it only has the sparse one", []
    heads = run.dsa_indexer_n_heads or 0
    if run.dsa_indexer_loss_coeff and (heads > 64 or heads % 8):
        yield f"gradients of {heads} index heads; it supports multiples of 8 up to 64", []


def _miscompiled(run: Run) -> object:
    if not TILELANG_DSA.used(run):
        return False
    from packaging.specifiers import SpecifierSet  # every command would wait

    from cppmega.host import packages

    installed = packages.version("tilelang")
    wrong = installed and SpecifierSet(_MERGES_WRONGLY).contains(installed, prereleases=True)
    return wrong and {"installed": installed}


_TABLE: Table = {
    DENSE_STEPS: {
        f"{dsa_loss.GATE} is on, and {{how}}.": (
            _every_step_is_alike,
            "It would seem to be on, but no step would differ.",
            "--dsa-indexer-use-sparse-loss, with --dsa-indexer-loss-coeff above 0; or "
            f"{DENSE_STEPS.instead}",
            "argument-without-effect",
        ),
    },
    Part("DSA layers", lambda run: run.pages is not None and uses_dsa(run)): {
        "The model has DSA layers and the command line names no backend: {scores}.": (
            _unfused,
            "Stock's unfused DSA computes all scores and throws most of them away.",
            "--dsa-kernel-backend tilelang at sizes that it supports, or none",
            "dsa-unfused",
        ),
        "The backend {dsa_kernel_backend} declines {reason}. Megatron then runs unfused: "
        "{scores}.": (
            _declined,
            "A run recorded as fused would be stock's unfused one.",
            "--set dsa_kernel_backend=none, or sizes and a loss that it supports",
            "dsa-backend-declines",
        ),
        "tilelang {installed}: from 0.1.9 until it was fixed in 0.1.11, the compiler merges shared "
        "memory that is still in use (https://github.com/tile-ai/tilelang/pull/2204), and Megatron "
        "builds the backward kernel of its sparse attention with that merging.": (
            _miscompiled,
            "Gradients can be wrong without an error.",
            # 0.1.11 and 0.1.12 may repeat a bound atomic addition.
            "pip install 'tilelang>=0.1.13', or tilelang==0.1.8, which mamba-ssm demands",
            "tilelang-miscompiles",
        ),
    },
}

RULES = (Rule(_states_no_steps, concerns=DENSE_STEPS.name), *stated(_TABLE))
