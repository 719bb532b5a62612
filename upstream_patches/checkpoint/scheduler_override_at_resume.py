"""Apply the learning rates of the command line with `--override-opt_param-scheduler`.

What: `OptimizerParamScheduler` remembers the bounds (`max_lr`, `min_lr`, `start_wd`, `end_wd`) that
    each parameter group was created with, and restores them when it loads its state and overrides.
    It sets rates and weight decay after it has loaded everything, and on 0.19 and main the
    optimizers also match a saved group that differs only in its bounds.
Why: The bounds of the groups take precedence over those of the scheduler and come from the
    checkpoint, so that the option is logged and then ignored: a run that was saved with `--lr 1e-3`
    halfway through its decay resumes with `--lr 1e-5` at 5.05e-4 instead of 5.05e-6 (computed on
    CPU, 0.15.3 to 0.18.2). Since 0.19 it does not resume at all, because groups are matched by
    their bounds too ("Could not find parameter group with key"). In addition, the first step after
    a resume with `--use-checkpoint-opt_param-scheduler` uses the weight decay of the command line.
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/5213 (dev, June 2026) and
    https://github.com/NVIDIA/Megatron-LM/pull/3720 (main, August 2026: only the rates, and the same
    for every group); neither is released
Remove: when the scheduler restores its groups, and the optimizers match groups without bounds.
Numerics: changes results of resumed runs that use the option
"""

from typing import Any

from cppmega.edits import in_order, inserting, replacing
from cppmega.page import Edit, Patch, Source, left_alone

SCHEDULER = "megatron/core/optimizer_param_scheduler.py:OptimizerParamScheduler"
MATCH = "megatron/core/optimizer/optimizer.py:MegatronOptimizer._filter_and_reorder_param_groups"
LOAD = "megatron/core/optimizer/distrib_optimizer.py:DistributedOptimizer.load_state_dict"


def _cppmega_match_other_bounds(saved, wanted):  # type: ignore[no-untyped-def]
    """Let a wanted group be found in `saved` under its own key, if bounds are all that differs."""
    bounds = ("max_lr", "min_lr", "start_wd", "end_wd")
    kept = [at for at, name in enumerate(param_group_identifier_keys) if name not in bounds]  # noqa: F821

    def like(key, others):  # type: ignore[no-untyped-def]
        return [other for other in others if all(other[at] == key[at] for at in kept)]

    groups, wanted = dict(saved), set(wanted)
    for key in wanted.difference(groups):
        if len(like(key, wanted)) == len(like(key, groups)) == 1:
            saved[key] = groups[like(key, groups)[0]]
            log_single_rank(  # noqa: F821
                logger,  # noqa: F821
                logging.WARNING,  # noqa: F821
                "The bounds of a parameter group's learning rate or weight decay differ from the "
                "checkpoint's, which count unless --override-opt_param-scheduler is given.",
            )


def then(text: str) -> Any:
    """Append statements to the target."""

    def edit(node: Any) -> Any:
        from cppmega.rewriting import node_edits

        body = node.body.with_changes(body=[*node.body.body, *node_edits.statements(text)])
        return node.with_changes(body=body)

    return edit


PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=f"{SCHEDULER}.__init__",
            pins={
                "0.15.3": "47d81ec12654086d",
                "0.16.1": "6430f8145d2a54f7",
                "0.17.1": "6430f8145d2a54f7",
                "0.18.2": "6430f8145d2a54f7",
                "0.19.2": "6430f8145d2a54f7",
                "main-d98e8a64": "6430f8145d2a54f7",
            },
            edit=inserting(
                """
                # Loading the optimizer gives its groups what the checkpoint has.
                self._cppmega_bounds = [
                    {
                        key: group[key]
                        for key in ('max_lr', 'min_lr', 'start_wd', 'end_wd')
                        if key in group
                    }
                    for group in optimizer.param_groups
                ]
                """,
                after="self.optimizer = optimizer",
            ),
        ),
        Edit(
            target=f"{SCHEDULER}.load_state_dict",
            pins={
                "0.15.3": "5e23ed71d77bdf71",
                "0.16.1": "5e23ed71d77bdf71",
                "0.17.1": "5e23ed71d77bdf71",
                "0.18.2": "5e23ed71d77bdf71",
                "0.19.2": "5e23ed71d77bdf71",
                "main-d98e8a64": "5e23ed71d77bdf71",
            },
            edit=in_order(
                replacing("self.step(increment=num_steps)", ""),
                then(
                    """
if self.override_opt_param_scheduler:
    for group, bounds in zip(self.optimizer.param_groups, self._cppmega_bounds, strict=True):
        group.update(bounds)
self.step(increment=num_steps)
"""
                ),
            ),
            mark="",
        ),
        Edit(
            target=MATCH,
            pins={"0.19.2": "27bea18c7110d576", "main-d98e8a64": "27bea18c7110d576"},
            edit=inserting(
                "_cppmega_match_other_bounds(loaded_groups_map, needed_groups)",
                before="final_groups = []",
            ),
            helpers=(_cppmega_match_other_bounds,),
            mark="",
        ),
        Edit(
            target=LOAD,
            pins={"0.19.2": "d5fc01af38ccc951", "main-d98e8a64": "d5fc01af38ccc951"},
            edit=inserting(
                """
                _cppmega_match_other_bounds(
                    param_groups_map, map(make_needed_groups, inner_state_dict["param_groups"])
                )
                """,
                before="state_dict_param_groups = []",
            ),
            helpers=(_cppmega_match_other_bounds,),
            mark="",
        ),
        Edit(
            MATCH,
            {
                "0.15.3": "7b669b20346e699c",
                "0.16.1": "7b669b20346e699c",
                "0.17.1": "7b669b20346e699c",
                "0.18.2": "7b669b20346e699c",
            },
            left_alone,
        ),
        Edit(
            LOAD,
            {
                "0.15.3": "8dfff489ecadd91d",
                "0.16.1": "9c3575ef0b4fa5c2",
                "0.17.1": "9c3575ef0b4fa5c2",
                "0.18.2": "9c3575ef0b4fa5c2",
            },
            left_alone,
        ),
    ),
    reached="startup",
    when=lambda args: bool(getattr(args, "override_opt_param_scheduler", False)),
)


def fixed_upstream(source: Source) -> bool:
    loading = source.text(f"{SCHEDULER}.load_state_dict")
    keys = source.file(MATCH.partition(":")[0]).partition("\nparam_group_identifier_keys = ")[2]
    return (
        "self._restore_param_group_scheduler_overrides()" in loading
        and bool(keys)
        and "override_keys()" not in keys.partition("\n)")[0]
    )


def verify() -> None:
    from types import SimpleNamespace

    from megatron.core.optimizer.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    def run(lr, wd=0.1, **given):  # type: ignore[no-untyped-def]
        """Return a run whose two groups decay to a hundredth of their rate, halfway at step 5."""
        common = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
        groups = [
            {"params": [0], "wd_mult": 1.0, "max_lr": lr, "min_lr": lr / 100, **common},
            {"params": [1], "wd_mult": 0.0, "max_lr": 2 * lr, "min_lr": lr / 50, **common},
        ]
        steps = {"lr_warmup_steps": 0, "lr_decay_steps": 10, "wd_incr_steps": 10}
        styles = {"lr_decay_style": "linear", "wd_incr_style": "constant"}
        rates = {"init_lr": 0.0, "max_lr": lr, "min_lr": lr / 100, "start_wd": wd, "end_wd": wd}
        given = {"use_checkpoint_opt_param_scheduler": False} | given
        return OptimizerParamScheduler(
            SimpleNamespace(param_groups=groups), **rates, **steps, **styles, **given
        )

    old = run(1e-3)
    old.step(5)

    def resumed(lr, wd, **given):  # type: ignore[no-untyped-def]
        """Return rates and weight decay of the first step after a resume at step 5."""
        new = run(lr, wd, **given)
        groups = new.optimizer.param_groups
        saved = [dict(group) for group in old.optimizer.param_groups]
        loaded = MegatronOptimizer._filter_and_reorder_param_groups(groups, saved)
        new.optimizer.param_groups = [dict(group) for group in loaded]
        new.load_state_dict(old.state_dict())
        found = [(group["lr"], group["weight_decay"]) for group in new.optimizer.param_groups]
        return [(round(rate * 1e6, 6), decay) for rate, decay in found]

    assert resumed(1e-3, 0.1) == [(505.0, 0.1), (1010.0, 0.0)]
    got = resumed(1e-5, 0.2, override_opt_param_scheduler=True)
    assert got == [(5.05, 0.2), (10.1, 0.0)], f"the rates of the checkpoint: {got}"
    got = resumed(1e-5, 0.2, use_checkpoint_opt_param_scheduler=True)
    assert got == [(505.0, 0.1), (1010.0, 0.0)], f"the weight decay of the command line: {got}"
