"""Every parameter is read in a call of its module, where DDP waits for those that it still gathers.

With `--overlap-param-gather`, Megatron gathers parameters during the forward pass, and waits for
them in a hook before the call of their module. A module whose parameters are read without a call
has them as of the step before, for what other data-parallel ranks own, and nothing shows it: the
losses are hardly different. So in the first steps of a start, a module that was not called must not
have a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cppmega.errors import CppmegaError
from cppmega.host.wording import counted, listed
from cppmega.training.completeness import STEPS
from cppmega.training.nonfinite import gradient, short_name


@dataclass(slots=True)
class ModuleCalls:
    """The check of one start on this rank."""

    is_needed: bool
    """Whether parameters are gathered during the forward pass, by modules that may have hooks."""
    _steps: int = 0
    _uncalled: dict[str, list[Any]] = field(default_factory=dict)
    """The parameters of the modules that were not called so far, by the module's name."""
    _hooks: list[Any] = field(default_factory=list)

    def before_step(self, models: Sequence[Any]) -> None:
        """Before the first step, begin to watch the modules that have parameters of their own."""
        if self._steps or not self.is_needed:
            return
        for model in models:
            for name, module in model.named_modules():
                self._watch(short_name(name), module)

    def _watch(self, name: str, module: Any) -> None:
        own = [each for each in module.parameters(recurse=False) if each.requires_grad]
        if not own:
            return
        self._uncalled[name] = own

        def called(*_: Any) -> None:
            self._uncalled.pop(name, None)

        self._hooks.append(module.register_forward_pre_hook(called))

    def after_step(self) -> None:
        """Look for gradients of modules that were not called.

        Raises:
            CppmegaError: `module-not-called`; on each rank that has such a module.
        """
        self._steps += 1
        if not self.is_needed or self._steps > STEPS:
            return
        read = [name for name, own in self._uncalled.items() if _any_gradient(own)]
        if read:
            raise _error(read)
        if self._steps == STEPS or not self._uncalled:
            self.is_needed = False
            for hook in self._hooks:
                hook.remove()


def _any_gradient(parameters: Iterable[Any]) -> bool:
    gradients = (gradient(each) for each in parameters)
    return any(each is not None and bool(each.any()) for each in gradients)


def _error(read: Sequence[str]) -> CppmegaError:
    return CppmegaError(
        "module-not-called",
        f"The parameters of {counted(len(read), 'module')} have gradients, but no call: "
        f"{listed(read)}.",
        "With --overlap-param-gather, Megatron waits for parameters before the call of their "
        "module: these may be read as they were a step before.",
        "cppmega status shows which patches are applied; in code of yours, call the module or ask "
        "for it with cppmega.features.arrived; --set overlap_param_gather=False is slower",
    )
