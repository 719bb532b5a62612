"""What a run may be: each rule once, as data over Megatron's parsed arguments.

A recipe, the preflight, the launcher, every rank before its first step, `cppmega explain` and the
documentation's table of combinations read the same rules. A page adds its own in its header.
"""

from typing import Any

from cppmega.rules import combinations, dsa, dsa_sharing, idle, mhc, mixers, training
from cppmega.rules.rule import Part, Run, check

RULES = (
    *(*training.RULES, *combinations.RULES, *mhc.RULES, *mixers.RULES),
    *(*dsa.RULES, *dsa_sharing.RULES, *idle.RULES),
)
"""The rules of every run. Those of a recipe's own fields are in `recipes`."""


def check_model(config: Any, *parts: Part, **known: Any) -> None:
    """Refuse a model's configuration that one of its parts does not support.

    A model can be built without the arguments of a run, and then nothing else has asked.

    Args:
        config: Megatron's configuration of the model.
        parts: those that are built.
        known: options that the configuration does not show.

    Raises:
        CppmegaError: the first rule about these parts that is broken.
    """
    run, names = Run(config), {part.name for part in parts}
    vars(run).update(known)
    check((rule for rule in RULES if rule.concerns in names), run)
