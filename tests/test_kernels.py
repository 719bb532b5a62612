"""The kernels' front door: the examples of its page, and what it imports."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = (REPOSITORY / "docs" / "kernels.md").read_text()
EXAMPLES = re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?```python\n(.*?)```", PAGE, re.DOTALL | re.M)


@pytest.mark.parametrize(("subject", "code"), EXAMPLES, ids=[title for title, _ in EXAMPLES])
def test_examples_of_the_page_run_on_a_cpu(subject: str, code: str) -> None:
    exec(compile(code, f"docs/kernels.md, {subject}", "exec"), {})


def test_the_page_and_the_module_have_the_same_names() -> None:
    kernels = pytest.importorskip("cppmega.kernels")
    missing = [name for name in kernels.__all__ if name not in PAGE and name != "Bounds"]
    assert len(EXAMPLES) == PAGE.count("```python") and missing == []


def test_kernels_need_torch_alone() -> None:
    pytest.importorskip("torch")
    withheld = [
        "click",
        "dulwich",
        "filelock",
        "libcst",
        "msgspec",
        "psutil",
        "pyflakes",
        "rich",
        "triton",
    ]
    lines = ["import sys", f"sys.modules.update(dict.fromkeys({withheld}))"]
    lines += [code for _, code in EXAMPLES]
    lines += ["assert 'megatron' not in sys.modules"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
