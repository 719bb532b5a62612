"""Rules of DSA's attention and indexer, beyond the options that they do not support."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cppmega.rules.combinations import DENSE_LOSS, DENSE_STEPS, TILELANG_DSA
from cppmega.rules.questions import uses_dsa
from cppmega.rules.rule import Pages, Rule, Run
from cppmega.sizes import dsa_loss, dsa_widths

DENSE_LOSS_KERNEL = "dsa_dense_indexer_loss"
"""Name under which a page provides the indexer's loss over all keys for every backend but cudnn."""

_OURS = dsa_widths.ATTENTION, DENSE_LOSS_KERNEL
"""Names under which pages provide all of DSA, so that no backend has to be named."""

_MERGES_WRONGLY = ">=0.1.9.dev0,<0.1.11"

_TILE, _BLOCK = 16, 64
"""Fewest heads of a kernel of Megatron's, and the keys that it processes at a time."""

_UNSET = f"unset {dsa_loss.GATE} and apply again"


def _states_no_steps(run: Run) -> bool:
    """Read the number of steps; what cannot be read is raised."""
    if DENSE_STEPS.used(run):
        dsa_loss.dense_steps(run.cppmega_variables)
    return False


def scores(run: Any) -> str:
    """The memory of one tensor of all scores, for sentences."""
    pairs = (run.micro_batch_size or 1) * run.num_attention_heads * run.seq_length**2
    return f"{4 * pairs / 2**30 / run.tensor_model_parallel_size:.1f} GiB per score tensor"


def runs_own_kernels(run: Run) -> bool:
    """Whether no backend is named and pages provide all of DSA."""
    unnamed = run.dsa_kernel_backend in (None, "none")
    return unnamed and run.pages is not None and all(map(run.pages.inside, _OURS))


def _unfused(run: Run) -> object:
    """Whether a release that has a backend computes without one, and the line does not say so."""
    asked = "dsa_kernel_backend" in run and run.dsa_kernel_backend == "none"
    unasked = uses_dsa(run) and asked and "--dsa-kernel-backend" not in (run.words or ())
    return unasked and not runs_own_kernels(run) and {"scores": scores(run)}


def _declined(run: Run) -> Iterator[dict[str, str]]:
    """What the backend that is named declines; Megatron then runs unfused, at the debug level."""
    backend = run.dsa_kernel_backend
    if not uses_dsa(run) or backend in (None, "none"):
        return
    assert run.pages is not None
    reasons: list[str] = []
    attention = run.pages.inside(dsa_widths.ATTENTION)
    if backend != "tilelang" or not attention:
        reasons += _sizes(run, run.pages)
    if TILELANG_DSA.used(run) and DENSE_LOSS.used(run) and not run.pages.inside(DENSE_LOSS_KERNEL):
        lacking = _without(run.pages.outside(DENSE_LOSS_KERNEL))
        reasons.append(f"the indexer's dense loss; it only has the sparse one{lacking}")
    for reason in reasons:
        yield {"reason": reason, "scores": scores(run)}


def _sizes(run: Run, pages: Pages) -> Iterator[str]:
    """The attention sizes that a backend declines."""
    backend = run.dsa_kernel_backend
    others = list(pages.outside(dsa_widths.ATTENTION)) if backend == "tilelang" else []
    widths = run.kv_lora_rank + run.qk_pos_emb_head_dim, run.kv_lora_rank
    supported = dsa_widths.supported(backend, pages.inside(dsa_widths.TILELANG))
    if widths not in supported:
        known = ", ".join(f"{query} and {value}" for query, value in supported)
        lacking = [
            page
            for page, widened in pages.outside(dsa_widths.TILELANG).items()
            if widths in dsa_widths.supported(backend, widened)
        ]
        yield (
            f"query and value widths of {widths[0]} and {widths[1]}; it supports {known}"
            + _without([*lacking, *others])
        )
    if backend != "tilelang":
        return
    heads = run.num_attention_heads // run.tensor_model_parallel_size
    if heads > _TILE and heads & (heads - 1):
        yield (
            f"{heads} heads on a rank; it supports powers of two, and any number up to {_TILE}"
            + _without(others)
        )
    if run.dsa_indexer_topk % _BLOCK:
        yield (
            f"{run.dsa_indexer_topk} keys per query; it supports multiples of {_BLOCK}"
            + _without(others)
        )


def _without(pages: Any) -> str:
    return f" without the patch {' or '.join(pages)}" if pages else ""


def _miscompiled(run: Run) -> object:
    if not TILELANG_DSA.used(run):
        return False
    from packaging.specifiers import SpecifierSet  # every command would wait

    from cppmega.host import packages

    installed = packages.version("tilelang")
    wrong = installed and SpecifierSet(_MERGES_WRONGLY).contains(installed, prereleases=True)
    return wrong and {"installed": installed}


RULES: tuple[Rule, ...] = (
    Rule(concerns=DENSE_STEPS.name, when=_states_no_steps),
    Rule(
        concerns=DENSE_STEPS.name,
        name="argument-without-effect",
        when=lambda run: DENSE_STEPS.used(run) and not run.dsa_indexer_loss_coeff,
        what=f"{dsa_loss.GATE} is on. The indexer has no loss: dsa_indexer_loss_coeff is 0.",
        why="It would seem to be on, but no step would differ.",
        cure=f"--dsa-indexer-loss-coeff with a value above 0, or {_UNSET}",
    ),
    Rule(
        concerns=DENSE_STEPS.name,
        name="argument-without-effect",
        when=lambda run: DENSE_STEPS.used(run) and not run.dsa_indexer_use_sparse_loss,
        what=f"{dsa_loss.GATE} is on. The indexer's loss is dense in every step.",
        why="It would seem to be on, but no step would differ.",
        cure=f"--dsa-indexer-use-sparse-loss, or {_UNSET}",
    ),
    Rule(
        concerns="DSA layers",
        name="dsa-unfused",
        needs=("words", "pages"),
        when=_unfused,
        what="The model has DSA layers and the line names no backend: {scores}.",
        why="Stock's unfused DSA computes all scores and throws most of them away.",
        cure="--dsa-kernel-backend tilelang at sizes that it supports, or none",
    ),
    Rule(
        concerns="DSA layers",
        name="dsa-backend-declines",
        needs=("pages",),
        when=_declined,
        what="The backend {dsa_kernel_backend} declines {reason}. Megatron then runs unfused: "
        "{scores}.",
        why="A run recorded as fused would be stock's unfused one.",
        cure="--set dsa_kernel_backend=none, or sizes and a loss that it supports",
    ),
    Rule(
        concerns="DSA layers",
        name="tilelang-miscompiles",
        needs=("pages",),
        when=_miscompiled,
        what="tilelang {installed}: from 0.1.9 until it was fixed in 0.1.11, the compiler merges "
        "shared memory that is still in use (https://github.com/tile-ai/tilelang/pull/2204), "
        "and Megatron builds the backward kernel of its sparse attention with that merging.",
        why="Gradients can be wrong without an error.",
        # 0.1.11 and 0.1.12 may repeat a bound atomic addition.
        cure="pip install 'tilelang>=0.1.13', or tilelang==0.1.8, which mamba-ssm demands",
    ),
)
