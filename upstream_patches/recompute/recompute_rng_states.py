"""Recompute with the dropout masks of the forward pass under a graph-safe RNG tracker.

What: The states that Megatron keeps for a recomputation also include the contents of their
    generators, and restoring them writes the contents back, unless the pass is captured in a CUDA
    graph.
Why: With `--te-rng-tracker`, which CUDA graphs turn on, and with `use_cudagraphable_rng`, the kept
    states are generators that share their state with those in use. The forward pass advances them,
    so that "restoring" them before the recomputation changes nothing, and dropout draws new masks:
    the backward pass differentiates a different function from the one that produced the loss. No
    error is raised, and both of Megatron's dropouts are 0.1 unless they are set (seen on CPU with
    stand-ins for CUDA's generators, 0.15.3 to 0.19.2; not run on a GPU). Other runs keep tensors,
    and their masks are correct. A capture can neither read nor write the contents: states that are
    kept or restored within one are handled as in stock, where no generator is replaced or rewound.
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/5841 (merged into dev in August 2026)
Remove: when `_get_all_rng_states` copies the contents of the generators.
Numerics: changes results of runs that recompute dropout under a graph-safe RNG tracker
"""

from typing import Any

from cppmega.catalogue.megatron_args import layer_pattern, recomputes
from cppmega.edits import adding_parameter, in_order, inserting, replacing
from cppmega.page import Edit, Patch, Source

FILE = "megatron/core/tensor_parallel/random.py"
KEEP = f"{FILE}:_get_all_rng_states"


def recomputes_tracked(args: Any) -> bool:
    """Whether every layer of a GPT model saves states of that tracker, outside of any graph.

    Full recomputation in FP8 and FP4 is done by Transformer Engine.
    """
    quantized = getattr(args, "fp8", None) or getattr(args, "fp4", None)
    variant = getattr(args, "experimental_attention_variant", None)  # may have no core attention
    in_full = recomputes(args) and not quantized
    return (
        bool(getattr(args, "te_rng_tracker", False))
        and getattr(args, "cuda_graph_impl", None) in (None, "none")
        and not layer_pattern(args)
        and (in_full or (recomputes(args, "core_attn") and not variant))
    )


def _cppmega_contents(*states):  # type: ignore[no-untyped-def]
    """Copy what generators hold, which a pass advances; a capture cannot read it."""
    generators = [state for state in states if isinstance(state, torch.Generator)]  # noqa: F821
    if not generators or torch.cuda.is_current_stream_capturing():  # noqa: F821
        return ()
    return tuple((generator, generator.get_state()) for generator in generators)


def _cppmega_rewind(contents):  # type: ignore[no-untyped-def]
    """Write it back in place, because captured graphs know these generators."""
    if contents and not torch.cuda.is_current_stream_capturing():  # noqa: F821
        for generator, state in contents:
            generator.set_state(state)


PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=KEEP,
            pins={
                "0.15.3": "1b6f84595a8abfd1",
                "0.16.1": "59b2ace9f1e54589",
                "0.17.1": "59b2ace9f1e54589",
                "0.18.2": "59b2ace9f1e54589",
                "0.19.2": "59b2ace9f1e54589",
                "main-d98e8a64": "59b2ace9f1e54589",
            },
            edit=replacing(
                "return cpu_rng_state, cuda_rng_state, cuda_rng_state_tracker",
                """
                contents = _cppmega_contents(cuda_rng_state, *cuda_rng_state_tracker.values())
                return cpu_rng_state, cuda_rng_state, cuda_rng_state_tracker, contents
                """,
            ),
            helpers=(_cppmega_contents,),
        ),
        Edit(
            target=f"{FILE}:_set_all_rng_states",
            pins={
                "0.15.3": "e245ddc6dcd675c6",
                "0.16.1": "d234327055ce55c6",
                "0.17.1": "d234327055ce55c6",
                "0.18.2": "d234327055ce55c6",
                "0.19.2": "d234327055ce55c6",
                "main-d98e8a64": "d234327055ce55c6",
            },
            edit=in_order(
                adding_parameter("contents=()"),
                inserting(
                    "_cppmega_rewind(contents)",
                    after="get_cuda_rng_tracker().set_states(cuda_rng_state_tracker)",
                ),
            ),
            helpers=(_cppmega_rewind,),
        ),
    ),
    reached="forward",
    when=recomputes_tracked,
)


def fixed_upstream(source: Source) -> bool:
    return "clone_state()" in source.text(KEEP)


def verify() -> None:
    from unittest import mock

    import torch
    from megatron.core.tensor_parallel import random

    from .._generators import Generator, on_cpu, outcome

    device, tracker = Generator(1, 0), random.CudaRNGStatesTracker()
    tracker.use_cudagraphable_rng = True  # its constructor requires a torch with CUDA graphs
    current = {"_CUDA_RNG_STATE_TRACKER": tracker, "_CUDA_RNG_STATE_TRACKER_INITIALIZED": True}

    def recompute(layer, hidden):  # type: ignore[no-untyped-def]
        return random.checkpoint(layer, False, hidden)

    with on_cpu(random, device), mock.patch.multiple(random, **current):
        plain = outcome(lambda layer, hidden: layer(hidden), device, tracker)
        for ours, wanted in zip(outcome(recompute, device, tracker), plain, strict=True):
            assert torch.equal(ours, wanted), f"{ours} is not {wanted}"
