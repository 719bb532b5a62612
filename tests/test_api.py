"""The Python API: what the commands do, as functions."""

from __future__ import annotations

import subprocess
import sys

import pytest

import cppmega
from cppmega.errors import CppmegaError
from tests.support.lab import A, Lab


def test_apply_and_status_are_the_commands(lab: Lab) -> None:
    lab.wheel()
    lab.page()
    assert cppmega.status(lab.root).ok is False
    assert cppmega.apply(lab.root, check=True).changed == [A]
    lab.pristine()
    done = cppmega.apply(lab.root)
    assert done.ok and done.changed == [A] and done.digest == cppmega.status(lab.root).digest
    lab.applied("page")


def test_what_does_not_fit_is_an_error(lab: Lab) -> None:
    lab.wheel()
    lab.page()
    lab.change(A, b"return x + x", b"return 2 * x")
    with pytest.raises(CppmegaError, match="page") as caught:
        cppmega.apply(lab.root)
    assert caught.value.name == "not-applied" and caught.value.next


def test_importing_the_package_is_cheap() -> None:
    text = "import sys, cppmega; print(sorted(n for n in sys.modules if 'cppmega.' in n))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
