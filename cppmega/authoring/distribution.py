"""`cppmega new --catalogue`: a distribution whose pages are found by name once it is installed."""

from __future__ import annotations

import re
from pathlib import Path

from cppmega.errors import CppmegaError

GROUP = "cppmega.catalogues"
"""The entry points whose values are packages that hold pages."""


def new(name: str, parent: Path) -> list[Path]:
    """Write a project without pages, and return its files; the last is that of the package.

    Args:
        name: the name of the distribution, and of the catalogue.
        parent: where to create the folder of the project.

    Raises:
        CppmegaError: `bad-name`, `catalogue-exists`.
    """
    if not re.match(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*\Z", name):
        right = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-0123456789") or "my-patches"
        raise CppmegaError(
            "bad-name",
            f"{name!r} is not lower-case words joined by hyphens.",
            "It names a distribution, and with underscores the package that holds the pages.",
            f"cppmega new --catalogue {right}",
        )
    home, package = parent / name, name.replace("-", "_")
    if home.exists():
        raise CppmegaError(
            "catalogue-exists",
            f"{home} exists already.",
            "Its files would be overwritten.",
            "choose another name, or another folder with --dir",
        )
    texts = {
        "pyproject.toml": _PROJECT.format(name=name, package=package, group=GROUP),
        "README.md": _README.format(name=name, package=package),
        f"{package}/__init__.py": f'"""The pages of the catalogue {name}."""\n',
    }
    for path, text in texts.items():
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(text)
    return [home / path for path in texts]


_PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "0.1.0"
description = "Patches of Megatron-LM, applied by cppmega."
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["cppmega"]

# `cppmega apply --patches {name}` finds the pages by this name.
[project.entry-points."{group}"]
{name} = "{package}"

[tool.hatch.build.targets.wheel]
packages = ["{package}"]
"""
_README = """\
# {name}

Patches of Megatron-LM, one page each in `{package}/`, applied by cppmega.

    cppmega new my_fix --dir {package}     # write a page
    pip install -e .                       # or the wheel, on another machine
    cppmega apply --patches {name}
    cppmega verify --patches {name}
"""
