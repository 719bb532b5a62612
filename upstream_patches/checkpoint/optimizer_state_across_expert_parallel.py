"""Load fully reshardable optimizer states at another expert-parallel size.

What: `ChainedOptimizer.load_state_dict` accepts a `torch_dist` checkpoint that was saved by a
    different number of distributed optimizers: each optimizer takes the loaded tensors of its own
    parameters, and its parameter groups from whichever saved optimizer has them. If no group of
    experts was saved, that of the other parameters with the same settings is used, and vice versa.
Why: Without expert parallelism, one distributed optimizer has every parameter; with it, a second
    one has the experts. `--dist-ckpt-optim-fully-reshardable` stores masters and moments by
    parameter, so they load in either layout. Steps, learning rates and everything else that is not
    a tensor are stored by optimizer, so a run saved at EP 1 fails at EP 2 with "Expected 2 entries
    in state dict, but got 4", and one saved at EP 2 fails at EP 1 with "KeyError: 'optimizer'"
    (both seen on CPU in Megatron's own loop, 0.19.2).
Upstream: https://github.com/NVIDIA/Megatron-LM/issues/1517 (PP 4 to EP 4; closed, presumed
    fixed); main (d98e8a64) and dev (d48bd6be) have the same code as the releases
Remove: when `ChainedOptimizer.load_state_dict` no longer requires as many optimizers as saved the
    checkpoint.
Numerics: none (bitwise) where stock can load. Files are the same with and without the page. Not
    supported: other formats of the distributed optimizer, whose buckets depend on the layout (the
    preflight refuses them), other optimizers (refused when they load), and the legacy
    `--ckpt-format torch`.
"""

from typing import Any

from cppmega.catalogue.megatron_args import has_experts
from cppmega.edits import inserting
from cppmega.page import Edit, Patch, Source
from cppmega.rules.rule import Rule

TARGET = "megatron/core/optimizer/optimizer.py:ChainedOptimizer.load_state_dict"


def _cppmega_moved(optimizers, state_dict):  # type: ignore[no-untyped-def]
    """Whether the state was saved by a different number of optimizers.

    Loaded tensors are where these optimizers asked for them: at the top level for one optimizer,
    under their numbers for several. Everything else is where it was saved.
    """
    if not isinstance(state_dict, dict):
        return False
    if len(optimizers) == 1:
        return any(isinstance(key, int) for key in state_dict)
    return len(state_dict) != len(optimizers) or any(
        isinstance(part, dict) and part.keys() == {"param_state"} for part in state_dict.values()
    )


def _cppmega_regrouped(groups):  # type: ignore[no-untyped-def]
    """Return parameter groups for experts and for the others, whichever of them were saved."""
    # Transformer Engine's Adam does not count the steps of a group that is empty on its rank.
    steps = [group["step"] for group in groups if "step" in group]
    step = {"step": steps[0]} if steps else {}
    found = {}  # type: ignore[var-annotated]
    for expert in (False, True):
        for group in sorted(groups, key=lambda group: group["is_expert_parallel"] != expert):
            group = {**step, **group, "is_expert_parallel": expert}
            key = tuple(
                group.get(name, group.get(f"pre_{name}"))
                for name in param_group_identifier_keys  # noqa: F821
            )
            found.setdefault(key, group)
    return list(found.values())


def _cppmega_in_this_layout(optimizers, state_dict):  # type: ignore[no-untyped-def]
    """Return the state in the form in which these optimizers would have saved it."""
    kind = "param_state_sharding_type"
    saved = [part for part in (state_dict, *state_dict.values()) if isinstance(part, dict)]
    saved = [part for part in saved if kind in part]
    by_parameter = {part[kind] for part in saved} == {"fully_reshardable"}
    # The chain of Muon mixes distributed optimizers with others.
    if not by_parameter or not all(
        hasattr(one, "load_parameter_state_from_fully_reshardable") for one in optimizers
    ):
        from cppmega.errors import CppmegaError

        raise CppmegaError(
            "checkpoint-of-another-layout",
            f"The optimizer states in the checkpoint are not those of {len(optimizers)} "
            "optimizer(s): it was saved with another expert-parallel or expert-tensor size.",
            "With expert parallelism, a second optimizer has the experts; only the distributed "
            "optimizer's fully reshardable states can be loaded in the other layout.",
            "--no-load-optim, or the parallel sizes with which it was saved",
        )
    groups = _cppmega_regrouped(
        [group for part in saved for group in part["optimizer"]["param_groups"]]
    )
    common = {
        **{key: saved[0][key] for key in (kind, "grad_scaler") if key in saved[0]},
        "optimizer": {**saved[0]["optimizer"], "param_groups": groups},
    }
    asked = [state_dict]
    if len(optimizers) > 1:
        asked = [state_dict.get(at, {}) for at in range(len(optimizers))]
    states = [
        {**common, **{key: part[key] for key in ("param_state",) if key in part}} for part in asked
    ]
    return states[0] if len(states) == 1 else dict(enumerate(states))


def _saved_by_bucket_in_another_layout(run: Any) -> object:
    if run.no_load_optim or run.finetune or not run.use_distributed_optimizer:
        return False
    chained = any(name.startswith("chained_0.") for name in run.saved)
    alone = any(name.startswith("optimizer.distributed.") for name in run.saved)
    size = run.expert_model_parallel_size or 1
    one, several = "one distributed optimizer", "several distributed optimizers"
    was, now = (one, several) if alone else (several, one)
    differs = (alone and size > 1) or (chained and size == 1 and not _splits_dense(run))
    return has_experts(run) and differs and {"was": was, "now": now, "size": size}


def _splits_dense(args: Any) -> bool:
    """Whether there may be several optimizers even without expert parallelism."""
    tensor = getattr(args, "tensor_model_parallel_size", None) or 1
    expert_tensor = getattr(args, "expert_tensor_parallel_size", None) or tensor
    overlap = getattr(args, "overlap_param_gather_with_optimizer_step", False)
    return bool(overlap) or expert_tensor != tensor


PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=TARGET,
            pins={
                "0.15.3": "a54ab7f2903e2a45",
                "0.16.1": "a54ab7f2903e2a45",
                "0.17.1": "a54ab7f2903e2a45",
                "0.18.2": "a54ab7f2903e2a45",
                "0.19.2": "a54ab7f2903e2a45",
                "main-d98e8a64": "a54ab7f2903e2a45",
                "dev-d48bd6be": "a54ab7f2903e2a45",
            },
            edit=inserting(
                """
                if _cppmega_moved(self.chained_optimizers, state_dict):
                    state_dict = _cppmega_in_this_layout(self.chained_optimizers, state_dict)
                """,
                before="""
                if len(self.chained_optimizers) == 1:
                    self.chained_optimizers[0].load_state_dict(state_dict)
                    return
                """,
            ),
            helpers=(_cppmega_moved, _cppmega_regrouped, _cppmega_in_this_layout),
        ),
    ),
    reached="never",
    rules=(
        Rule(
            concerns="optimizer states by bucket",
            name="checkpoint-of-another-layout",
            when=_saved_by_bucket_in_another_layout,
            what="The checkpoint's optimizer states were saved by {was}, by bucket, and with "
            "--expert-model-parallel-size {size} {now} would have to load them.",
            why="With expert parallelism, a second optimizer has the experts, so the buckets "
            "differ, and every rank would fail because of missing keys.",
            cure="resume once with the expert-parallel size with which it was saved and "
            "--dist-ckpt-optim-fully-reshardable, save, and resume from that; or --no-load-optim",
        ),
    ),
    wanted_by=lambda recipe: (
        recipe.dist_ckpt_optim_fully_reshardable and recipe.num_experts is not None
    ),
)


def fixed_upstream(source: Source) -> bool:
    text = source.text(TARGET)
    return bool(text) and "len(self.chained_optimizers) != len(state_dict)" not in text


def verify() -> None:
    from types import SimpleNamespace

    import torch
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    def chain(count, lr):  # type: ignore[no-untyped-def]
        """One optimizer, or a second one for experts; each has groups with and without decay."""
        optimizers = []
        for expert in (False, True)[:count]:
            weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
            common = {"lr_mult": 1.0, "is_expert_parallel": expert, "is_decoupled_lr": False}
            groups = [
                {"params": [weight], "wd_mult": decay, "max_lr": 1.0, "min_lr": 0.0, **common}
                for weight, decay in zip(weights, (1.0, 0.0), strict=True)
            ]
            optimizer = DistributedOptimizer.__new__(DistributedOptimizer)
            optimizer.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
            optimizer.config = SimpleNamespace(fp16=False)
            optimizer.grad_scaler = None
            optimizer.optimizer = torch.optim.Adam(groups, lr=lr)
            for weight in weights:
                weight.grad = torch.ones(2)
            optimizer.optimizer.step()
            optimizer.loaded = []
            optimizer.load_parameter_state_from_fully_reshardable = optimizer.loaded.append
            optimizers.append(optimizer)
        chained = ChainedOptimizer.__new__(ChainedOptimizer)
        chained.chained_optimizers = optimizers
        return chained

    def saved(expert):  # type: ignore[no-untyped-def]
        """Everything but tensors: step 7, learning rates of 0.5 with decay and 0.25 without."""
        common = {"lr_mult": 1.0, "is_expert_parallel": expert, "is_decoupled_lr": False}
        common |= {"max_lr": 1.0, "min_lr": 0.0, "step": 7, "betas": (0.9, 0.99), "eps": 1e-8}
        groups = [{"wd_mult": 1.0, "lr": 0.5, **common}, {"wd_mult": 0.0, "lr": 0.25, **common}]
        return {
            "optimizer": {"param_groups": groups},
            "param_state_sharding_type": "fully_reshardable",
        }

    def tensors(name):  # type: ignore[no-untyped-def]
        return {"param_state": {0: {"exp_avg": name}}}

    one, two = tensors("all"), {0: tensors("dense"), 1: tensors("experts")}
    pair = {0: saved(False), 1: saved(True)}
    loads = {
        "one, of one": (1, saved(False) | one),
        "one, of two": (1, pair | one),
        "two, of two": (2, {at: pair[at] | two[at] for at in two}),
        "two, of one": (2, saved(False) | two),
    }
    for name, (count, state) in loads.items():
        chained = chain(count, lr=1.0)
        try:
            chained.load_state_dict(state)
        except (KeyError, RuntimeError) as error:
            raise AssertionError(f"{name}: {error!r}") from error
        wanted = [one] if count == 1 else list(two.values())
        for at, optimizer in enumerate(chained.chained_optimizers):
            assert optimizer.loaded == [wanted[at]["param_state"]], name
            rates = [(group["lr"], group["step"]) for group in optimizer.optimizer.param_groups]
            assert rates == [(0.5, 7), (0.25, 7)], f"{name}: {rates}"
            flags = {group["is_expert_parallel"] for group in optimizer.optimizer.param_groups}
            assert flags == {at == 1}, f"{name}: {flags}"
