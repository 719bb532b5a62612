"""The packages that train: where they are and their versions, without importing them."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement

NAMES = (
    *("torch", "transformer-engine", "triton", "tilelang", "liger-kernel", "mamba-ssm"),
    *("megatron-core", "causal-conv1d", "flash-attn", "apache-tvm-ffi", "nvidia-cutlass-dsl"),
    *("transformer-engine-torch", "transformer-engine-cu12", "transformer-engine-cu13"),
)
"""The distributions whose requirements on each other are checked."""


def folder_of(package: str) -> Path | None:
    """The folder of an importable package; None if there is none."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module that was created in memory
        return None
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def version(name: str) -> str | None:
    """The version of a distribution, or of the `cuda` that torch was built with; None if absent."""
    if name == "cuda":
        return _cuda()
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


_SOURCES = {
    "deep-ep": "git+https://github.com/deepseek-ai/DeepEP",
    "hybrid-ep-cpp": "git+https://github.com/deepseek-ai/DeepEP@hybrid-ep",
}
"""Packages that no index has."""


def to_install(name: str, versions: str = "") -> str:
    """The words for `pip install`: Transformer Engine alone comes without its layers for torch."""
    if name in _SOURCES:
        return _SOURCES[name]
    extra = "[pytorch]" * (name == "transformer-engine")
    return f"'{name}{extra}{versions}'" if extra or versions else name


def _cuda() -> str | None:
    """The CUDA version in torch/version.py."""
    folder = folder_of("torch")
    if folder is None:
        return None
    for node in ast.parse((folder / "version.py").read_bytes()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        for target in targets:
            if isinstance(target, ast.Name) and target.id == "cuda":
                literal = value.value if isinstance(value, ast.Constant) else None
                return literal if isinstance(literal, str) else None
    return None


def demands() -> Iterator[tuple[str, Requirement, str]]:
    """Yield each unmet requirement: the package, the requirement, and the version installed."""
    from packaging.requirements import InvalidRequirement, Requirement  # a run starts without it

    for name in NAMES:
        for text in _requires(name):
            try:
                wanted = Requirement(text)
            except InvalidRequirement:
                continue
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            other = wanted.name.lower().replace("_", "-")
            installed = version(other) if other in NAMES else None
            if installed is not None and not wanted.specifier.contains(
                _of(installed), prereleases=True
            ):
                yield name, wanted, installed


def _of(text: str) -> str:
    """The release that a vendor's build is of: NGC's torch 2.6.0a0+nv25 counts as 2.6.0."""
    from packaging.version import Version

    version = Version(text)
    return version.base_version if version.is_prerelease and version.local else text


def _requires(name: str) -> list[str]:
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []
