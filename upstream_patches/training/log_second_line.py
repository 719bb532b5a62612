"""Log the second step's own loss and time if the first step ends a log interval.

What: `training_log` also resets its sums and timers after the first line of a run or of a resume if
    that step ends a log interval. Otherwise it keeps them for the interval to which the step
    belongs.
Why: The first line never resets, so with `--log-interval 1` the second is a mean over two steps: on
    an H200 it reported 4.109 for a loss of 4.1297, and 1889 tokens/s instead of 6100, because it
    included half of the first step's compilation (the energy is halved, because its meter does
    reset). The curves of two equal runs, one of them resumed, differed by 2e-2 there
    (benchmarks/results/launch_resume_h200.md). The bug exists since 0.16, whose wheel has no
    training loop to patch.
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/7092 (merged in autumn 2026; not released)
Remove: when `training_log` resets after a first iteration that is a multiple of the log interval.
Numerics: none (bitwise); only the logged values change
"""

from cppmega.edits import replacing
from cppmega.page import Edit, Patch, Source

TARGET = "megatron/training/training.py:training_log"
NEVER_AT_FIRST = "= not is_first_iteration"

PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=TARGET,
            pins={
                "0.17.1": "ffacac9d3b9d8c2c",
                "0.18.2": "87dfa74531ee2682",
                "0.19.2": "78e81ed7583c25e3",
                "main-d98e8a64": "46e0dbada78e672c",
                "dev-d48bd6be": "b127075d4211154c",
            },
            edit=replacing(
                f"should_reset {NEVER_AT_FIRST}",
                f"""
                # The first iteration is always logged. What it added stays for the line at the end
                # of its log interval, unless that line is this one.
                should_reset {NEVER_AT_FIRST} or iteration % args.log_interval == 0
                """,
            ),
        ),
    ),
    reached="log",
    feature=("megatron/training/training.py:train_step",),
    after=("hybrid_moe_metrics",),
)


def fixed_upstream(source: Source) -> bool:
    lines = source.text(TARGET).splitlines()
    return bool(lines) and not any(line.endswith(NEVER_AT_FIRST) for line in lines)


def verify() -> None:
    import re
    from types import SimpleNamespace
    from unittest import mock

    import torch
    from megatron.core import timers as core_timers
    from megatron.training import training

    from cppmega.proof import cpu_shims, stand_ins

    cpu_shims.init_distributed()
    tensor = torch.tensor

    def logged(interval, first, last):  # type: ignore[no-untyped-def]
        """Return step, milliseconds per step and loss of each line.

        Step n has the loss n. The first step takes 100 seconds, the others one.
        """
        args = stand_ins.Arguments(
            0,
            log_interval=interval,
            micro_batch_size=1,
            data_parallel_size=1,
            gtp_weight_remat_size=1,
            world_size=1,
            profile_ranks=[],
            num_experts=None,
            mtp_num_layers=None,
            dsa_indexer_loss_coeff=None,
            log_memory_interval=None,
        )
        timers = core_timers.Timers(0, "max")
        clock = SimpleNamespace(now=0.0)
        lines: list[str] = []
        total: dict[str, object] = {}
        with (
            stand_ins.quiet_training(
                training,
                args,
                get_timers=lambda: timers,
                num_floating_point_operations=lambda *_, **__: 1,
                print_rank_last=lines.append,
            ),
            mock.patch.object(core_timers, "time", SimpleNamespace(time=lambda: clock.now)),
            mock.patch.object(torch, "tensor", lambda *a, **k: tensor(*a, **{**k, "device": None})),
        ):
            timers("interval-time", log_level=0).start()
            for step in range(first, last + 1):
                clock.now += 100 if step == first else 1
                training.training_log(
                    {"lm loss": tensor([float(step)])}, total, 0.1, step, 1.0, False, 0,
                    None, None, None, None, is_first_iteration=step == first,
                )  # fmt: skip
        line = r"iteration +(\d+)/.* iteration \(ms\): ([\d.]+) .* lm loss: (\S+)"
        return [tuple(map(float, re.search(line, text).groups())) for text in lines]  # type: ignore[union-attr]

    everyone = [(1, 100_000, 1), (2, 1000, 2), (3, 1000, 3)]
    assert logged(1, 1, 3) == everyone, "the second line includes the first step"
    assert logged(1, 21, 22) == [(21, 100_000, 21), (22, 1000, 22)]  # resumed
    # Step 21 ends an interval of 3. Step 1 begins one: the line of step 3 is the mean of 1 to 3.
    assert logged(3, 21, 24) == [(21, 100_000, 21), (24, 1000, 23)]
    assert logged(3, 1, 6) == [(1, 100_000, 1), (3, 34_000, 2), (6, 1000, 5)]
