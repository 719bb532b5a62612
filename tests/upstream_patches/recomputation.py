"""What the tests of recomputation share: the modules of the proofs, and storages in common."""

from __future__ import annotations

import importlib
from typing import Any

from cppmega.catalogue import loader as catalogue


def beside_pages(name: str, subject: str = "") -> Any:
    """A module in the catalogue's folder, or in that of a subject, which proofs use."""
    package = catalogue.package_of(catalogue.builtin_folder() / subject)
    return importlib.import_module(f"{package}.{name}")


def share(output: Any, recomputed: Any) -> None:
    """Give an output the values that were recomputed, without the compiled extension."""
    storage, other = output.untyped_storage(), recomputed.untyped_storage()
    assert storage._cdata != other._cdata
    storage.resize_(other.nbytes()).copy_(other)
