"""The kernels' front door: the examples of its page, and what it imports."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.support import distributions

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


def test_kernels_alone_are_a_wheel(tmp_path: Path) -> None:
    """Where nothing is but what it requires, and no Triton, it runs the page's examples."""
    pytest.importorskip("torch")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    source, built, site = (
        REPOSITORY / "distributions/kernels",
        tmp_path / "built",
        tmp_path / "site",
    )
    make = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", built, source]
    subprocess.run(make, check=True)
    (wheel,) = built.glob("cppmega_kernels-*.whl")
    install = [*pip, "install", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True)
    (given,) = metadata.distributions(name="cppmega-kernels", path=[str(site)])
    assert given.requires == ["packaging>=23", "torch>=2.7"]
    needed = distributions.required("packaging") | distributions.required("torch") - {"triton"}
    distributions.link(needed, site)
    done = subprocess.run(
        [sys.executable, "-S", "-c", "\n".join(code for _, code in EXAMPLES)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(site)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
