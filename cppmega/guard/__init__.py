"""What is checked in every process of a run: the code that runs is the code that was applied.

`python -m cppmega.run SCRIPT` starts the guard. Megatron's `train_step` is watched without the
script's help; a loop of one's own marks its steps, and gives the configurations that it has:

    from cppmega import guard
    for batch in guard.steps(loader, config, ddp_config, optimizer_config):
        ...
"""

from cppmega.guard.session import (
    active,
    after_first_log,
    after_first_save,
    after_first_step,
    before_first_step,
    finish,
    no_step_because,
    recheck,
    refuse,
    start,
    steps,
)
from cppmega.guard.step_log import log_step

__all__ = [
    "active",
    "after_first_log",
    "after_first_save",
    "after_first_step",
    "before_first_step",
    "finish",
    "log_step",
    "no_step_because",
    "recheck",
    "refuse",
    "start",
    "steps",
]
