"""Recompute with the dropout masks of the forward pass under Transformer Engine's RNG tracker.

What: `checkpoint` keeps copies of the generator states from before the forward pass, in both its
    reentrant and its non-reentrant form, unless the pass is captured in a CUDA graph.
Why: With `--te-rng-tracker`, which CUDA graphs turn on, the states that are kept are generators
    that share their state with those in use (from 2.12 on this includes the device's own
    generator). The forward pass advances them, so that "restoring" them before the recomputation
    changes nothing, and dropout draws new masks: the backward pass differentiates a different
    function from the one that produced the loss. No error is raised. Megatron recomputes FP8 and
    FP4 layers through this function, and both of its dropouts are 0.1 unless they are set. With
    Megatron's own tracker, whose states are tensors, the masks are correct. In a captured graph the
    states must remain those that the graph has registered, so the masks still differ there.
Upstream: Not sent: no report of it was found. Megatron fixed its own recomputation in the same way
    (pull request 5841 of Megatron-LM, merged into dev in August 2026).
Remove: when `checkpoint` copies the states that it keeps for the recomputation.
Numerics: changes results of runs that recompute dropout under Transformer Engine's RNG tracker
"""

from typing import Any

from cppmega.catalogue.megatron_args import layer_pattern, recomputes
from cppmega.edits import in_order, inserting, replacing
from cppmega.page import Edit, Patch, Source

FILE = "transformer_engine/pytorch/distributed.py"
FORWARD = f"{FILE}:_CheckpointFunction.forward"
CACHE = f"{FILE}:_CheckpointFrame.cache_rng_states"


def recomputes_quantized(args: Any) -> bool:
    """Whether every layer of a GPT model is recomputed in FP8 or FP4, under that tracker."""
    quantized = bool(getattr(args, "fp8", None) or getattr(args, "fp4", None))
    tracked = bool(getattr(args, "te_rng_tracker", False))
    return quantized and tracked and recomputes(args) and not layer_pattern(args)


def _cppmega_kept(state):  # type: ignore[no-untyped-def]
    """Copy generators, which a pass advances; those of a graph that is captured stay its own."""
    if isinstance(state, dict):
        return {name: _cppmega_kept(one) for name, one in state.items()}
    shared = isinstance(state, torch.Generator)  # noqa: F821
    if shared and not torch.cuda.is_current_stream_capturing():  # noqa: F821
        return state.clone_state()
    return state


def _edit(target: str, pins: dict[str, str], *edits: Any) -> Edit:
    return Edit(
        target=target,
        pins=pins,
        edit=in_order(*edits),
        helpers=(_cppmega_kept,),
        distribution="transformer-engine",
    )


DEVICE = "_get_cuda_rng_state(graph_safe=ctx.graph_safe_rng_state)"
TRACKED = "get_rng_state_tracker().get_states()"
KEEPS_TRACKED = replacing(TRACKED, f"_cppmega_kept({TRACKED})")

PATCH = Patch(
    purpose="fix",
    edits=(
        # Up to 2.11 the state of the device's own generator is a tensor.
        _edit(
            FORWARD,
            {
                "v1.6": "780043539a7801d3",
                "v1.7": "386b001024533098",
                "2.1.0": "16dab59c5f50715f",
                "2.11.0": "f689a3967323627e",
            },
            KEEPS_TRACKED,
        ),
        _edit(
            FORWARD,
            {"2.19.0": "ef89e474e466497e", "2.20.2": "5b20417e08585ab7"},
            KEEPS_TRACKED,
            replacing(DEVICE, f"_cppmega_kept({DEVICE})"),
        ),
        _edit(
            CACHE,
            {
                "v1.6": "cb6b11b0fa69b983",
                "v1.7": "cb6b11b0fa69b983",
                "2.1.0": "3dc989ecd7371d56",
                "2.11.0": "3dc989ecd7371d56",
                "2.19.0": "460cdef8fc5070f0",
                "2.20.2": "460cdef8fc5070f0",
            },
            inserting(
                """
                if forward:
                    rng_states = tuple(map(_cppmega_kept, rng_states))
                """,
                before="""
                if forward:
                    self.fwd_rng_states = rng_states
                else:
                    self.bwd_rng_states = rng_states
                """,
            ),
        ),
    ),
    reached="forward",
    # Up to 1.5 no generator shares its state.
    feature=(f"{FILE}:graph_safe_rng_available",),
    when=recomputes_quantized,
)


def fixed_upstream(source: Source) -> bool:
    return all("clone_state()" in source.text(target) for target in (FORWARD, CACHE))


def verify() -> None:
    import functools

    import torch

    from .._generators import Generator, outcome
    from ._te_modules import load, on_cpu

    te, device = load(), Generator(1, 0)
    tracker = te.CudaRNGStatesTracker()
    with on_cpu(te, device):
        plain = outcome(lambda layer, hidden: layer(hidden), device, tracker)
        for reentrant in (True, False):
            options = {"use_reentrant": reentrant, "get_rng_state_tracker": lambda: tracker}
            recompute = functools.partial(te.checkpoint, **options)
            for ours, wanted in zip(outcome(recompute, device, tracker), plain, strict=True):
                assert torch.equal(ours, wanted), f"{ours} is not {wanted} ({reentrant=})"
