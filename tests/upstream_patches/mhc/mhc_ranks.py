"""Models with hyper-connections on two ranks, against the same model on one.

Each begins from one checkpoint, which every layout loads, and a layout's last weights go back into
the model of one rank. Imported in the processes that run a tree, never by pytest itself.
"""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core import optimizer as optimizers
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import (
    _allreduce_non_tensor_model_parallel_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module

from cppmega.proof import cpu_shims
from cppmega.proof.cpu_shims import keep_saves_here
from cppmega.proof.small_models import arguments
from tests.upstream_patches.mhc import mhc_models as models
from tests.upstream_patches.mhc.fsdp_ranks import sharded
from tests.upstream_patches.optimizer.distributed_optimizer import on_cpu

STEPS, RATE = 2, 0.05
SEQUENCES = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
STAGES = {
    "pipeline_model_parallel_size": 2,
    "pipeline_dtype": torch.float32,
    "deallocate_pipeline_outputs": True,  # as Megatron's training
}
VIRTUAL = {
    **STAGES,
    "virtual_pipeline_model_parallel_size": 2,
    **{"overlap_p2p_comm": True, "batch_p2p_comm": False, "microbatch_group_size_per_vp_stage": 2},
}
EXPERT_RANKS = {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "allgather"}
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gpt, TP 2 with sequence parallelism": (
        partial(models.gpt, depths=1),
        partial(models.gpt, depths=1),
        SEQUENCES,
    ),
    "hybrid, TP 2 with sequence parallelism": (
        partial(models.hybrid, "M*-/*-"),
        partial(models.hybrid, "M*-/*-"),
        SEQUENCES,
    ),
    "gpt, PP 2": (partial(models.gpt, depths=1), partial(models.gpt, depths=1), STAGES),
    "hybrid, PP 2, recomputed": (
        partial(models.hybrid, "M*-*/*-"),
        partial(models.hybrid, "M*|-*/*-", **models.FULL),
        STAGES,
    ),
    "gpt, PP 2 x VPP 2, recomputed": (
        partial(models.gpt, 4, 1),
        partial(models.gpt, 4, 1, **models.FULL),
        VIRTUAL,
    ),
    "hybrid, PP 2 x VPP 2, recomputed": (
        partial(models.hybrid, "M*-*/*-"),
        partial(models.hybrid, "M|*|-|*/*-", **models.SELECTIVE),
        VIRTUAL,
    ),
    "hybrid, EP 2": (
        partial(models.hybrid, "*E", **models.EXPERTS),
        partial(models.hybrid, "*E", **models.EXPERTS),
        EXPERT_RANKS,
    ),
}


def main(folder: str) -> None:
    """Print the losses of each case on one rank and on two, and how far weights differ."""
    cpu_shims.shim()
    torch.distributed.init_process_group("gloo")
    keep_saves_here()
    parallel_state.initialize_model_parallel()
    models.start()
    found = {}
    for number, (name, (one, two, layout)) in enumerate(CASES.items()):
        found[name] = compared(one, two, layout, Path(folder) / str(number))
    arrange({})
    found["resumed"] = resumed(Path(folder) / "resumed")
    found["overlapped"] = overlapped()
    found["sharded"] = sharded()
    if torch.distributed.get_rank() == 0:
        print(json.dumps(found))


def compared(one: Any, two: Any, layout: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train a model on one rank and on two from the same weights."""
    arrange({})
    alone = one(**models.MHC)
    save([alone], folder / "begun")
    expected = trained([alone])
    arrange(layout)
    each = layout.get("virtual_pipeline_model_parallel_size")
    split = [two(stage=n, **models.MHC, **layout) for n in (range(each) if each else [None])]
    load(split, folder / "begun")
    losses = trained(split)
    save(split, folder / "ended")
    arrange({})
    back = one(**models.MHC)
    load([back], folder / "ended")
    pairs = zip(alone.named_parameters(), back.parameters(), strict=True)
    apart = {name: (a - b).abs().max().item() for (name, a), b in pairs}
    return {"expected": expected, "losses": losses, "apart": max(apart.items(), key=lambda x: x[1])}


class Run:
    """A bf16 model under DDP with the distributed optimizer, each rank with its own data.

    Args:
        options: of DDP.
    """

    def __init__(self, **options: Any) -> None:
        bf16 = {"bf16": True, "params_dtype": torch.bfloat16}
        self.model = models.hybrid("M*-", **models.MHC, **bf16)
        wrapped = Float16Module(self.model.config, self.model)
        sharded = {"use_distributed_optimizer": True}
        self.ddp = DistributedDataParallel(
            self.model.config, DistributedDataParallelConfig(**sharded, **options), wrapped
        )
        adam = optimizers.OptimizerConfig(optimizer="adam", lr=1e-2, **bf16, **sharded)
        self.optimizer = optimizers.get_megatron_optimizer(adam, [self.ddp])

    def step(self, seed: int) -> None:
        """Run a step."""
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        batch = models.batch(2 * seed + torch.distributed.get_rank())
        self.ddp(**arguments(self.model, **batch)).float().mean().backward()
        self.ddp.finish_grad_sync()
        assert self.optimizer.step()[0]

    def state(self, is_loading: bool = False) -> dict[str, Any]:
        """The content of a checkpoint."""
        model = self.model.sharded_state_dict()
        form = {"distrib_optim_sharding_type": "fully_reshardable"}
        optimizer = self.optimizer.sharded_state_dict(model, is_loading, metadata=form)
        return {"model": model, "optimizer": optimizer}


def resumed(folder: Path) -> dict[str, Any]:
    """Whether a run that is saved and loaded goes on as if it had not been."""
    with on_cpu():
        run = Run()
        run.step(1)
        run.step(2)
        if torch.distributed.get_rank() == 0:
            folder.mkdir(parents=True)
        torch.distributed.barrier()
        dist_checkpointing.save(run.state(), str(folder))
        run.step(3)
        again = Run()
        again.step(9)
        loaded = dist_checkpointing.load(again.state(is_loading=True), str(folder))
        again.model.load_state_dict(loaded["model"])
        again.optimizer.load_state_dict(loaded["optimizer"])
        again.step(3)
    mapping, others = [], []
    for name, p in run.model.named_parameters():
        (mapping if "hyper" in name or "hc_" in name else others).append(p)
    pairs = zip(run.model.parameters(), again.model.parameters(), strict=True)
    return {
        "mapping": sorted({str(p.dtype) for p in mapping}),
        "others": sorted({str(p.dtype) for p in others}),
        "unrounded": all(not torch.equal(p, p.bfloat16().float()) for p in mapping),
        "as if never stopped": all(torch.equal(a, b) for a, b in pairs),
    }


def overlapped() -> float:
    """How far weights are from those of a run whose parameters are not gathered meanwhile.

    Buckets are so small that some have nothing but the parameters of sites.
    """
    weights = []
    small = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 200}
    with on_cpu():
        for options in ({}, small):
            run = Run(**options)
            for seed in (1, 2, 3):
                run.step(seed)
            run.ddp.start_param_sync(force_sync=True)
            weights.append(list(run.model.parameters()))
    assert len(run.ddp.bucket_groups) > 10
    return max((a - b).abs().max().item() for a, b in zip(*weights, strict=True))


def arrange(layout: dict[str, Any]) -> None:
    """Form the groups of a layout."""
    parallel_state.destroy_model_parallel()
    sizes = {name: size for name, size in layout.items() if name.endswith("model_parallel_size")}
    parallel_state.initialize_model_parallel(**sizes)


def trained(chunks: list[Any]) -> list[float]:
    """The losses of a few steps of SGD; every rank reports those of the last stage.

    Args:
        chunks: the model, or the virtual stages of this rank.
    """
    losses = []
    for _ in range(STEPS):
        for model in chunks:
            model.zero_grad()
        losses.append(step(chunks))
        for model in chunks:
            whole = SimpleNamespace(
                ddp_config=SimpleNamespace(use_megatron_fsdp=False),
                named_parameters=model.named_parameters,
            )
            _allreduce_non_tensor_model_parallel_grads(
                [whole], model.config, parallel_state.get_tensor_model_parallel_group()
            )
            _share_gradients(model)
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p -= RATE * p.grad
    return losses


def _share_gradients(model: Any) -> None:
    """Do what Megatron's DDP does: the embedding of MTP depths, and experts of equal batches."""
    both = parallel_state.get_pipeline_model_parallel_world_size() > 1
    for name, p in model.named_parameters():
        if both and name == "embedding.word_embeddings.weight":
            torch.distributed.all_reduce(p.grad)
        if not getattr(p, "allreduce", True):
            p.grad /= parallel_state.get_expert_model_parallel_world_size()


def step(chunks: list[Any]) -> float:
    """The loss of two microbatches, whose gradients are left on the parameters."""
    values: list[torch.Tensor] = []

    def forward(seeds: Any, model: Any) -> Any:
        out = model(**arguments(model, **models.batch(next(seeds))))

        def mean(per_token: torch.Tensor) -> Any:
            values.append(per_token.detach().mean())
            return per_token.mean(), {}

        return out, mean

    with on_cpu():
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter((1, 2)) for _ in chunks] if chunks[1:] else iter((1, 2)),
            model=chunks,
            num_microbatches=2,
            seq_length=models.LENGTH,
            micro_batch_size=models.BATCH,
            forward_only=False,
        )
    total = torch.stack(values).sum() if values else torch.zeros(())
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        torch.distributed.all_reduce(total)
    return total.item()


def save(chunks: list[Any], folder: Path) -> None:
    """Save the weights of a model of any layout."""
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True)
    torch.distributed.barrier()
    dist_checkpointing.save(_weights(chunks), str(folder))


def load(chunks: list[Any], folder: Path) -> None:
    """Load weights that another layout saved."""
    loaded = dist_checkpointing.load(_weights(chunks), str(folder))
    for number, model in enumerate(chunks):
        model.load_state_dict(loaded[f"model{number}"])


def _weights(chunks: list[Any]) -> dict[str, Any]:
    return {f"model{number}": model.sharded_state_dict() for number, model in enumerate(chunks)}


if __name__ == "__main__":
    main(os.environ["FOLDER"])
