"""Helpers and imports of an edit: where they stand, and names that upstream has already."""

from __future__ import annotations

from typing import Any

import pytest

from cppmega.edits import replacing
from cppmega.rewriting import rewrite
from tests.rewriting.one_edit import PLAIN, edited, fails, step
from tests.support.lab import A


def helper(x):  # type: ignore[no-untyped-def]
    return math.floor(x)  # noqa: F821


def test_helpers_and_imports_stand_where_they_can_be_used() -> None:
    text = '"""Doc."""\n\nfrom __future__ import annotations\n\nimport os\n\n\n' + PLAIN
    done = edited(
        text, replacing("return x", "return helper(x)"), helpers=(helper,), imports=("import math",)
    )
    assert done.index("import os") < done.index("import math") < done.index("def helper")
    assert done.index("def helper") < done.index("def f")
    assert "import os\nimport math\n" in done and "noqa" not in done
    scope: dict[str, Any] = {}
    exec(done, scope)
    assert scope["f"](1.5) == 1


def test_import_that_is_there_is_not_repeated() -> None:
    text = "import math\n\n\n" + PLAIN
    done = edited(text, replacing("return x", "return math.pi"), imports=("import math",))
    assert done.count("import math") == 1


def test_imports_only_behind_the_target() -> None:
    """The last import may stand below the target, at an end without a line end."""
    text = "if True:\n    def f(x):\n        return x\nimport os"
    done = edited(text, replacing("return x", "return math.pi"), imports=("import math",))
    assert done.startswith("import math\n") and done.endswith("import os")


def test_one_helper_of_two_edits() -> None:
    text = PLAIN + "\n\n@staticmethod\ndef g(x):\n    return x\n"
    steps = [
        step(
            replacing("return x", "return helper(x)"),
            name,
            helpers=(helper,),
            imports=("import math",),
        )
        for name in ("g", "f")
    ]
    done = rewrite.rewrite(text.encode(), A, steps).data.decode()
    assert done.count("def helper") == 1 == done.count("import math")
    assert done.index("def helper") < done.index("def f")


@pytest.mark.parametrize(
    "head",
    [
        "helper = print",
        "def helper():\n    pass",
        "class helper:\n    pass",
        "from os import path as helper",
        "try:\n    import helper\nexcept ImportError:\n    pass",
    ],
)
def test_helper_name_that_upstream_uses(head: str) -> None:
    """Our helper would silently replace upstream's function, or the other way round."""
    text = f"{head}\n\n\n{PLAIN}"
    fails("helper-name-taken", text, replacing("return x", "return helper(x)"), helpers=(helper,))


def test_methods_get_their_helpers_in_front_of_the_class() -> None:
    text = (
        "@object\nclass C:\n    def f(self, x):\n        return x\n"
        "\n    def g(self, x):\n        return x\n"
    )
    steps = [
        step(
            replacing("return x", "return helper(x)"),
            f"C.{name}",
            helpers=(helper,),
            imports=("import math",),
        )
        for name in "fg"
    ]
    done = rewrite.rewrite(text.encode(), A, steps).data.decode()
    assert done.index("def helper") < done.index("@object")
    assert done.count("helper(x)") == 3
