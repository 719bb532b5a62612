"""Each of our fused kernels agrees with its plain reference on this GPU.

Runs with `--deep`, and always on sm_120 and sm_121, where the shared memory of the compiled kernels
is checked as well, and Mamba-3's TileLang kernel is compiled first in the process: on a GB10 it
returned zeros then, without an error (https://github.com/tile-ai/tilelang/issues/3071).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from cppmega.catalogue.page_rules import provided
from cppmega.errors import CppmegaError
from cppmega.preflight.ask import ask
from cppmega.preflight.context import Context
from cppmega.preflight.devices import Devices, look
from cppmega.preflight.findings import NotApplicable, Problems
from cppmega.preflight.messages import ParityAnswer, ParityOrder, SparseAttention
from cppmega.recipe.render import release_line
from cppmega.sizes import dsa_widths

AFTER: tuple[str, ...] = ("gpus", "kernels")

_ABSORBED = 0, 19
"""Since this release of Megatron, all heads of DSA attend to one latent key."""

_DEEPSEEK = (
    SparseAttention(heads=16, width=576, value_width=512, key_per_head=False),
    SparseAttention(heads=4, width=192, value_width=128, key_per_head=True),
)
"""DSA's attention of DeepSeek-V3.2, by ranks that share its heads, on all releases of Megatron."""

SMALL = {"sm_120", "sm_121"}
"""Architectures that give a block 99 KiB of dynamic shared memory."""


def check(context: Context) -> Problems:
    """Run every kernel and its reference in a separate process.

    Yields:
        `kernel-differs`, `shared-memory-too-large`, `tilelang-first-kernel`.

    Raises:
        NotApplicable: there is no GPU, or `--deep` was not requested.
    """
    devices = context.devices
    if not devices.found:
        raise NotApplicable("there is no GPU")
    if not context.deep and not devices.architectures & SMALL:
        raise NotApplicable("--deep runs every kernel against its reference")
    sizes = attention(context)
    answer = compared(devices, context.environ, () if sizes is None else (sizes,))
    yield from wrong_kernels(answer, devices.architectures)
    return ", ".join(f"{one.kernel} {one.error or 0:.1e}" for one in answer.kernels)


def on_this_machine(environ: Mapping[str, str], root: Path) -> ParityAnswer:
    """Compare every kernel with its reference, without a recipe: at DeepSeek's sizes.

    Raises:
        CppmegaError: `no-gpu`.
    """
    devices = look(None, environ, root, has_gpu=True)
    if not devices.found:
        raise CppmegaError(
            "no-gpu",
            "verify --deep runs the kernels on a GPU, and torch finds none here.",
            "On a CPU, their references would be compared with themselves.",
            "nvidia-smi; cppmega verify without --deep proves the patches",
        )
    return compared(devices, environ, _DEEPSEEK)


def compared(
    devices: Devices, environ: Mapping[str, str], attentions: tuple[SparseAttention, ...]
) -> ParityAnswer:
    """Run every kernel and its reference in a process on the first of these GPUs."""
    order = ParityOrder(
        device="cuda",
        attentions=attentions,
        first_kernel=bool(devices.architectures & SMALL),
    )
    with tempfile.TemporaryDirectory() as folder:
        environ = {**environ, "TILELANG_CACHE_DIR": folder}
        return ask("cppmega.preflight.workers.parity", order, ParityAnswer, environ)


def attention(context: Context) -> SparseAttention | None:
    """The sizes of DSA's attention on a rank; None if the recipe needs no page with kernels for it.

    Raises:
        CppmegaError: `page-failed`, or what reading the version raises.
    """
    recipe = context.recipe
    if recipe is None or not recipe.uses_dsa:
        return None
    pages = context.session.pages
    wanted = [pages[name] for name in context.wanted_patches if name in pages]
    if not provided(wanted, dsa_widths.ATTENTION):
        return None
    heads = recipe.num_attention_heads // recipe.tensor_model_parallel_size
    if release_line(context.session.read_tree().version) >= _ABSORBED:
        return SparseAttention(heads, *recipe.dsa_widths, key_per_head=False)
    width = (recipe.qk_head_dim or 0) + (recipe.qk_pos_emb_head_dim or 0)
    return SparseAttention(heads, width, recipe.v_head_dim or 0, key_per_head=True)


def wrong_kernels(answer: ParityAnswer, architectures: set[str]) -> Iterator[CppmegaError]:
    """Kernels that compute something else, or do not fit on these GPUs."""
    if answer.first:
        yield CppmegaError(
            "tilelang-first-kernel",
            f"Mamba-3's TileLang kernel, compiled first in a process, returns {answer.first}.",
            "A rank that compiles it first would train on that without an error.",
            "update the GPU's driver and empty TileLang's cache (~/.tilelang/cache), then run the "
            "preflight again; cppmega explain tilelang_3071",
        )
    for one in answer.kernels:
        if not one.ok:
            far = "not finite" if one.error is None else f"off by {one.error} of its norm"
            yield CppmegaError(
                "kernel-differs",
                f"{one.kernel}: {one.why or f'compared to the reference, the result is {far}.'}",
                "Training with it would go wrong gradually and without an error.",
                "report it with the GPU, torch and triton; to train without it: "
                "CPPMEGA_LINEAR_CE_KERNEL=reference, or cppmega revert the patch that calls it",
            )
    for compiled in answer.shared if architectures & SMALL else ():
        if not compiled.ok:
            yield CppmegaError(
                "shared-memory-too-large",
                f"{compiled.kernel} was compiled for {compiled.bytes} bytes of shared memory; "
                "a block has 101376 here.",
                "It cannot be launched on this GPU.",
                "report it with the GPU, torch and triton",
            )
