"""Recompute with the dropout masks of the forward pass under Transformer Engine's RNG tracker.

What: `checkpoint` keeps copies of the generator states from before the forward pass, in its
    reentrant and in its other form, unless the pass is captured in a CUDA graph.
Why: With `--te-rng-tracker`, which CUDA graphs turn on, the states are generators that share their
    state with the ones in use. The forward pass advances them, so "restoring" them before the
    recomputation changes nothing, and dropout draws new masks: the backward pass differentiates
    another function than the one that gave the loss. Nothing fails. Megatron recomputes FP8 and
    FP4 layers through this function, and both of its dropouts are 0.1 unless they are set. With
    states as tensors (Megatron's own tracker) the masks are right. In a captured graph the states
    must stay those that the graph knows, so the masks still differ there.
Upstream: Not sent: nothing was found that reports it. Megatron repaired its own recomputation in
    the same way (pull request 5841 of Megatron-LM, merged into dev in August 2026).
Remove: when `checkpoint` copies the states that it keeps for the recomputation.
Numerics: changes results of runs that recompute dropout under Transformer Engine's RNG tracker
"""

from typing import Any

from cppmega.catalogue.megatron_args import layer_pattern, recomputes
from cppmega.edits import inserting
from cppmega.page import Edit, Patch, Source

FILE = "transformer_engine/pytorch/distributed.py"
FORWARD = f"{FILE}:_CheckpointFunction.forward"
CACHE = f"{FILE}:_CheckpointFrame.cache_rng_states"


def recomputes_quantized(args: Any) -> bool:
    """Whether every layer of a GPT model is recomputed in FP8 or FP4, under that tracker."""
    quantized = bool(getattr(args, "fp8", None) or getattr(args, "fp4", None))
    tracked = bool(getattr(args, "te_rng_tracker", False))
    return quantized and tracked and recomputes(args) and not layer_pattern(args)


PATCH = Patch(
    edits=(
        Edit(
            target=FORWARD,
            pins={"2.19.0": "ef89e474e466497e", "2.20.2": "5b20417e08585ab7"},
            edit=inserting(
                """
                if ctx.graph_safe_rng_state and not torch.cuda.is_current_stream_capturing():
                    # The forward pass advances these generators, so copies of them are kept.
                    ctx.fwd_cuda_rng_state = ctx.fwd_cuda_rng_state.clone_state()
                    ctx.fwd_cuda_rng_state_tracker = {
                        name: state.clone_state()
                        for name, state in ctx.fwd_cuda_rng_state_tracker.items()
                    }
                """,
                after="ctx.fwd_cuda_rng_state = _get_cuda_rng_state("
                "graph_safe=ctx.graph_safe_rng_state)",
            ),
            distribution="transformer-engine",
        ),
        Edit(
            target=CACHE,
            pins={"2.19.0": "460cdef8fc5070f0", "2.20.2": "460cdef8fc5070f0"},
            edit=inserting(
                """
                keeps = forward and not torch.cuda.is_current_stream_capturing()
                if keeps and self.graph_safe_rng_state:
                    cpu_state, cuda_state, tracked = rng_states
                    copies = {name: state.clone_state() for name, state in tracked.items()}
                    rng_states = (cpu_state, cuda_state.clone_state(), copies)
                """,
                before="""
                if forward:
                    self.fwd_rng_states = rng_states
                else:
                    self.bwd_rng_states = rng_states
                """,
            ),
            distribution="transformer-engine",
        ),
    ),
    reached="forward",
    when=recomputes_quantized,
)


def fixed_upstream(source: Source) -> bool:
    return all("clone_state()" in source.text(target) for target in (FORWARD, CACHE))


def verify() -> None:
    import torch

    from ._te_distributed import Generator, load, on_cpu

    te, device = load(), Generator(1, 0)
    tracker = te.CudaRNGStatesTracker()

    def layer(hidden):  # type: ignore[no-untyped-def]
        """Drop with the device's generator, then with that of the model-parallel ranks."""
        dropped = hidden * device.mask()
        with tracker.fork():
            return dropped * device.mask()

    def outcome(recompute, **options):  # type: ignore[no-untyped-def]
        """Return what two layers compute, its gradient, and what the next masks make of ones."""
        device.manual_seed(1)
        tracker.reset()
        tracker.add("model-parallel-rng", 2)
        mine = tracker.get_states()["model-parallel-rng"]
        given = torch.ones(3, requires_grad=True)
        hidden = given
        for _ in range(2):
            hidden = recompute(layer, hidden, **options)
        hidden.sum().backward()
        assert tracker.get_states()["model-parallel-rng"] is mine, "the tracker lost its generator"
        return hidden.detach(), given.grad, layer(torch.ones(3))

    with on_cpu(te, device):
        plain = outcome(lambda function, hidden: function(hidden))
        for reentrant in (True, False):
            options = {"use_reentrant": reentrant, "get_rng_state_tracker": lambda: tracker}
            for ours, wanted in zip(outcome(te.checkpoint, **options), plain, strict=True):
                assert torch.equal(ours, wanted), f"{ours} is not {wanted} ({reentrant=})"
