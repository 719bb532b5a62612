"""The installed packages match the recipe's stack, and none is known to be incompatible.

The requirements of each package on the others are compared: mamba-ssm pins one tilelang.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from cppmega.errors import CppmegaError
from cppmega.host import env
from cppmega.host import packages as installed
from cppmega.preflight.context import Context
from cppmega.preflight.findings import Problems, Remark

TESTED = {"torch": ">=2.7,<2.16", "triton": ">=3.3,<3.10"}
"""What benchmarks/stacks.py tests: the oldest, a middle and the newest of these."""

_BROKEN = (("tilelang", "<0.1.9", "apache-tvm-ffi", ">=0.1.12", "<=0.1.9"),)
"""Package, its versions, another package, those of its versions that break it; and others."""


def check(context: Context) -> Problems:
    """Compare versions by the packages' metadata.

    Yields:
        `stack-differs`, `stack-pair-broken`.
    """
    recipe = context.recipe
    if recipe is not None:
        yield from _wrong_versions(recipe.name, recipe.stack)
    for name, wanted, version in installed.demands():
        yield CppmegaError(
            "stack-pair-broken",
            f"{name} {installed.version(name)} demands {wanted.name}{wanted.specifier}; installed "
            f"is {version}.",
            "Kernels built for one do not compile, or compute something else, with the other.",
            f"pip install {installed.to_install(wanted.name, str(wanted.specifier))}, or uninstall "
            f"{name} if the run does not need it",
        )
    for name, versions, other, wrong, right in _BROKEN:
        both = installed.version(name) and installed.version(other)
        if both and _is_in(name, versions) and _is_in(other, wrong):
            yield CppmegaError(
                "stack-pair-broken",
                f"{name} {installed.version(name)} cannot be imported with {other} "
                f"{installed.version(other)}.",
                "Its own metadata allow the pair, so that pip installs it.",
                f"pip install '{other}{right}'",
            )
    backend = env.LINEAR_CE_KERNEL
    if backend.read(context.environ) == "liger" and not _is_in("liger-kernel", ">=0.8.5"):
        yield CppmegaError(
            "stack-pair-broken",
            f"{backend.name} is liger, and liger-kernel is {installed.version('liger-kernel')}.",
            "Before 0.8.5 it scaled every row's gradient by the first one's, so that the loss "
            "curve looked normal.",
            f"pip install 'liger-kernel>=0.8.5', or export {backend.name}=triton",
        )
    here = [f"{name} {one}" for name in installed.NAMES if (one := installed.version(name))]
    text = ", ".join(here) or "none of the packages is installed"
    untested = [
        f"{name} {installed.version(name)}"
        for name, range_ in TESTED.items()
        if not _is_in(name, range_)
    ]
    if untested:
        return Remark(
            f"{text}; the kernels were never tested with {' and '.join(untested)}: "
            "`cppmega verify --deep` tests them here"
        )
    return text


def _is_in(name: str, range_: str) -> bool:
    """Whether an installed version is in a range; what is not installed is not judged."""
    version = installed.version(name)
    return version is None or SpecifierSet(range_).contains(Version(version).base_version)


def _wrong_versions(recipe: str, stack: Iterable[tuple[str, str]]) -> Iterator[CppmegaError]:
    for name, versions in stack:
        version = installed.version(name)
        pip = installed.to_install(*(("torch",) if name == "cuda" else (name, versions)))
        if version is None:
            yield CppmegaError(
                "stack-differs",
                f"Recipe {recipe} requires {name} {versions}, which is not installed.",
                "The run would end late, or fall back to something slower.",
                f"pip install {pip}",
            )
        elif not SpecifierSet(versions).contains(version, prereleases=True):
            yield CppmegaError(
                "stack-differs",
                f"Recipe {recipe} requires {name} {versions}; installed is {version}.",
                "The recipe was proved and measured with another stack.",
                f"pip install {pip}, or a recipe with another stack",
            )
