"""The mark of a patched target: where it stands, and what it says when the target is reached."""

from __future__ import annotations

import pytest

from cppmega.edits import replacing
from cppmega.errors import CppmegaError
from cppmega.page import Edit
from cppmega.rewriting import marks, rewrite
from cppmega.rewriting.rewrite import Step
from tests.rewriting.one_edit import PLAIN, step
from tests.support.lab import FILES, A, Lab
from tests.support.made import edit_text


@pytest.mark.parametrize(
    ("head", "traced"),
    [
        ("import torch\n", True),
        ("import torch.nn as nn\n", False),
        ("import torch.nn\n", True),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n", False),
    ],
)
def test_mark_uses_torch_only_where_it_is_there_at_run_time(head: str, traced: bool) -> None:
    """`import torch` below TYPE_CHECKING would be a NameError when the file is imported."""
    marked = Step("page", Edit(f"{A}:f", {}, replacing("return x", "return -x")), marked=True)
    done = rewrite.rewrite((head + PLAIN).encode(), A, [marked]).data.decode()
    assert ("assume_constant_result" in done) == traced
    assert '    _cppmega_reached("page")\n    return -x' in done


def test_mark_stands_behind_the_docstring_and_in_the_named_function() -> None:
    text = (
        'class C:\n    def __init__(self):\n        """Doc."""\n        self.x = 1\n'
        "\n    def f(self): return 1\n"
    )
    for mark, after in (
        (None, '"""Doc."""\n        _cppmega'),
        ("f", "f(self):\n        _cppmega"),
    ):
        edit = Edit(f"{A}:C", {}, replacing("self.x = 1", "self.x = 2"), mark=mark)
        done = rewrite.rewrite(text.encode(), A, [Step("page", edit, marked=True)]).data.decode()
        assert after in done
    edit = Edit(f"{A}:C", {}, replacing("self.x = 1", "self.x = 2"), mark="nowhere")
    with pytest.raises(CppmegaError) as caught:
        rewrite.rewrite(text.encode(), A, [Step("page", edit, marked=True)])
    assert caught.value.name == "mark-has-no-place"


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    return x\n",
        "def f(x):  # said\n    return x\n",
        "def f(x): return x  # said\n",
    ],
)
def test_unmarked_target_names_its_page(text: str) -> None:
    """Whoever reads the file, and whoever lost the receipt, can see whose text it is."""
    done = rewrite.rewrite(text.encode(), A, [step(replacing("x", "-x"), "f")])
    assert done.data.decode().count(f"{marks.COMMENT}page\n") == 1
    assert ("# said; patched" in done.data.decode()) == ("said" in text)


def test_installed_are_flags(lab: Lab) -> None:
    lab.wheel()
    lab.page()
    lab.apply()
    assert lab.value("_CPPMEGA_REACHED") == set()
    assert lab.value("(double(1), double(2), _CPPMEGA_REACHED)[2]") == {"page"}


def test_an_edit_without_a_mark_leaves_it_to_the_others_of_its_page(lab: Lab) -> None:
    """A hook that declines a call has not sent it through the patch."""
    lab.wheel()
    pair = (("double", "x + x", "2 * x", ""), ("tail", "str(x)", "repr(x)", None))
    lab.page(
        edits=", ".join(
            edit_text(f"{A}:{name}", f"replacing({old!r}, {new!r})", FILES[A], mark=repr(mark))
            for name, old, new, mark in pair
        )
    )
    assert lab.apply().ok
    assert lab.value("(double(2), _CPPMEGA_REACHED)[1]") == set()
    assert lab.value("(tail('x'), _CPPMEGA_REACHED)") == ("'x'/1", {"page"})
    assert lab.text().count(f"  # {marks.COMMENT}page") == 1
    lab.revert()
    lab.pristine()
