"""The check of local gradients for NaN and Inf, with one wait for the GPU per step.

As soon as a bucket is complete, in the middle of the backward pass, Megatron compares the norm of
its gradients with NaN and Inf, and reads both results on the host. Here the norms are computed at
the same points and stay on the device; they are compared when the reductions of a model chunk have
ended, still before the optimizer changes a weight. A gradient that is not finite is then passed to
Megatron's own check, with the norm that it had before the reduction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import rerun_state_machine
from torch import Tensor

from cppmega.calls import passed, served

_PAGE = "grad_checks_no_host_sync"
_WITHHELD = "_cppmega_withheld"


@dataclass(frozen=True, slots=True)
class _KnownNorm:
    """A stand-in for a bucket and its gradients, of which Megatron's check reads only the norm."""

    value: Tensor

    @property
    def grad_data(self) -> _KnownNorm:
        return self

    def norm(self, p: int) -> Tensor:
        assert p == 2
        return self.value


@dataclass(frozen=True, slots=True)
class _KnownNorms:
    buckets: Sequence[_KnownNorm]


_noted: dict[Any, list[Tensor]] = {}
"""Unread norms by group of buckets, in the order of Megatron's own checks."""


def note(group: Any, check_for_nan_or_inf: bool, check_for_large: bool) -> None:
    """Compute the norms of a group of buckets before its reduction, in place of `check_grads`.

    Gradients that are checked for their size are checked immediately, as Megatron does.

    Args:
        group: a `_ParamAndGradBucketGroup`.
        check_for_nan_or_inf: whether a norm must be finite.
        check_for_large: whether it must not be far larger than those of earlier steps.

    Raises:
        RuntimeError: Megatron's, if the norms of an earlier reduction were never settled and are
            not finite, or immediately in a check for size.
    """
    if group in _noted:
        _settle()
    if check_for_large:
        passed(_PAGE, "gradients are checked for their size")
        group.check_grads(check_for_nan_or_inf, check_for_large)
    elif check_for_nan_or_inf:
        served(_PAGE)
        _noted[group] = [bucket.grad_data.norm(p=2) for bucket in group.buckets]


def settled(groups: Sequence[Any]) -> Iterator[Any]:
    """Yield the groups one by one; after the last, check all norms so far.

    Raises:
        RuntimeError: Megatron's, if a norm is not finite.
    """
    yield from groups
    _settle()


def _settle() -> None:
    if not _noted:
        return
    noted = list(_noted.items())
    _noted.clear()
    finite = torch.stack([norm for _, norms in noted for norm in norms]).isfinite().all()
    machine = rerun_state_machine.get_rerun_state_machine()
    if finite.item():
        if machine.mode == rerun_state_machine.RerunMode.DISABLED:
            return
        if _only_looks_for_failures(machine):
            _withheld(machine).extend(noted)
            return
    # Megatron numbers its checks, and compares those of one number when it runs a step again: it
    # must be given the finite norms of other model chunks, too.
    withheld = _withheld(machine)
    noted, withheld[:] = withheld + noted, []
    for group, norms in noted:
        known = _KnownNorms([_KnownNorm(norm) for norm in norms])
        type(group).check_grads(known, check_for_nan_or_inf=True, check_for_large=False)


def _only_looks_for_failures(machine: Any) -> bool:
    """Whether Megatron neither reruns this step nor injects errors, which need every norm."""
    modes, states = rerun_state_machine.RerunMode, rerun_state_machine.RerunState
    first = machine.mode == modes.VALIDATE_RESULTS and machine.state == states.INITIAL_RUN
    return bool(first and not machine.error_injector.should_inject_errors)


def _withheld(machine: Any) -> list[tuple[Any, list[Tensor]]]:
    """The finite norms of this pass that were not passed to Megatron."""
    numbers, norms = getattr(machine, _WITHHELD, (None, []))
    if numbers is not machine.validation_counts:  # each pass has new ones
        norms = []
        setattr(machine, _WITHHELD, (machine.validation_counts, norms))
    return norms
