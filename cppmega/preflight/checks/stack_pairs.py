"""No two installed packages of the stack are known to be incompatible.

The requirements of each package on the others are compared: mamba-ssm pins one tilelang.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from cppmega.errors import CppmegaError
from cppmega.host import env
from cppmega.host import packages as stack
from cppmega.preflight.context import Context
from cppmega.preflight.findings import Remark, refuse


def check(context: Context) -> str:
    """Read the metadata.

    Raises:
        CppmegaError: `stack-pair-broken`.
    """
    refuse([*_conflicts(), *_broken(), *_old_liger(context.environ)])
    versions = [f"{name} {stack.version(name)}" for name in stack.NAMES if stack.version(name)]
    text = ", ".join(versions) or "none of the packages is installed"
    untested = [
        f"{name} {stack.version(name)}"
        for name, range_ in TESTED.items()
        if not _is_in(name, range_)
    ]
    if untested:
        return Remark(
            f"{text}; the kernels were never tested with {' and '.join(untested)}: "
            "`cppmega verify --deep` tests them here"
        )
    return text


TESTED = {"torch": ">=2.7,<2.16", "triton": ">=3.3,<3.10"}
"""What benchmarks/stacks.py tests: the oldest, a middle and the newest of these."""

_BROKEN = (("tilelang", "<0.1.9", "apache-tvm-ffi", ">=0.1.12", "<=0.1.9"),)
"""Package, its versions, another package, those of its versions that break it; and others."""


def _is_in(name: str, range_: str) -> bool:
    """Whether an installed version is in a range; what is not installed is not judged."""
    version = stack.version(name)
    return version is None or SpecifierSet(range_).contains(Version(version).base_version)


def _broken() -> Iterator[CppmegaError]:
    for name, versions, other, wrong, right in _BROKEN:
        installed = stack.version(name) and stack.version(other)
        if installed and _is_in(name, versions) and _is_in(other, wrong):
            yield CppmegaError(
                "stack-pair-broken",
                f"{name} {stack.version(name)} cannot be imported with {other} "
                f"{stack.version(other)}.",
                "Its own metadata allow the pair, so that pip installs it.",
                f"pip install '{other}{right}'",
            )


def _conflicts() -> Iterator[CppmegaError]:
    for name, wanted, installed in stack.demands():
        yield CppmegaError(
            "stack-pair-broken",
            f"{name} {stack.version(name)} demands {wanted.name}{wanted.specifier}; installed is "
            f"{installed}.",
            "Kernels built for one do not compile, or compute something else, with the other.",
            f"pip install {stack.to_install(wanted.name, str(wanted.specifier))}, or uninstall "
            f"{name} if the run does not need it",
        )


def _old_liger(environ: Mapping[str, str]) -> Iterator[CppmegaError]:
    if env.LINEAR_CE_KERNEL.read(environ) == "liger" and not _is_in("liger-kernel", ">=0.8.5"):
        yield CppmegaError(
            "stack-pair-broken",
            f"{env.LINEAR_CE_KERNEL.name} is liger, and liger-kernel is "
            f"{stack.version('liger-kernel')}.",
            "Before 0.8.5 it scaled every row's gradient by the first one's, so that the loss "
            "curve looked normal.",
            f"pip install 'liger-kernel>=0.8.5', or export {env.LINEAR_CE_KERNEL.name}=triton",
        )
