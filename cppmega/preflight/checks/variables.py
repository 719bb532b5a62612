"""Every `CPPMEGA_*` variable that is set is known, as is every page whose calls may be declined.

No variable is left over from another run.

The environment is not that of a rank.
"""

from __future__ import annotations

from cppmega import calls
from cppmega.catalogue import decisions, gates
from cppmega.errors import CppmegaError
from cppmega.host import env, process
from cppmega.preflight.context import Context
from cppmega.preflight.findings import Problems, Remark

AFTER: tuple[str, ...] = ("one_root",)


def check(context: Context) -> Problems:
    """Compare the environment with what pages and package declare.

    Yields:
        `unknown-variable` (with the decision about a switch of the earlier overlay),
        `variable-without-gate`, `leftover-variable` (also a rank's or torchrun's own).

    Raises:
        CppmegaError: `bad-gate-value`, `unknown-page`.
    """
    calls.check_allowed(context.session.pages, context.fallbacks)
    pages = context.session.pages.values()
    judged_elsewhere = {*decisions.breaking_variables(), *env.OF_ONE_RUN}
    rest = {n: v for n, v in context.environ.items() if n not in judged_elsewhere}
    yield from gates.problems(pages, rest)
    gates.values(pages, context.environ)  # raises on a value that is neither on nor off
    for name in env.OF_ONE_RUN:
        if context.environ.get(name):
            yield CppmegaError(
                "leftover-variable",
                f"{name}={context.environ[name]} is left over from another run.",
                "Processes would use the tree, the digest and the gates of that run.",
                f"unset {name}",
            )
    left = process.of_a_rank(context.environ)
    if left and context.recipe is not None:
        yield CppmegaError(
            "leftover-variable",
            f"{', '.join(f'{name}={context.environ[name]}' for name in left)}: this is the "
            "environment of a rank, or of another torchrun.",
            "torchrun reads PET_* as its own options, and the processes before it would wait for "
            "ranks that do not exist.",
            f"unset {' '.join(left)}",
        )
    set_ = sorted(name for name in context.environ if name.startswith(env.PREFIX))
    text = ", ".join(f"{name}={context.environ[name]}" for name in set_) or "none is set"
    if context.fallbacks:
        return Remark(f"{text}; declined calls are allowed: {', '.join(context.fallbacks)}")
    return text
