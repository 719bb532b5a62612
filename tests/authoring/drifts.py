"""What the tests of drift share: a page of a made text, what is said of it, and the command."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from cppmega.authoring import drift_report
from cppmega.authoring.drift_result import Drift, PageDrift, TargetDrift
from cppmega.catalogue import loader as catalogue
from cppmega.page import Page
from cppmega.rewriting import fingerprint
from tests.support import REPOSITORY, made

FILE = "megatron/core/work.py"
OLD = """\
def work(x, scale=1):
    size = len(x)
    total = sum(x)
    if size > 3:
        total = total * scale
    size -= 1
    other = size + 1
    return total, other
"""
EDIT = 'replacing("total * scale", "total * scale * 2")'


def page(
    folder: Path,
    old: str = OLD,
    *,
    pins: dict[str, str] | None = None,
    target: str = f"{FILE}:work",
    edit: str = EDIT,
    fixed: str = "return False",
    patch: str = 'reached="forward"',
    name: str = "work_works",
    more: str = "",
    verify: str = "pass",
) -> Page:
    """A page that pins `old` for 1.0, and more texts for other versions."""
    path = made.page(
        folder,
        name,
        target=target,
        source=old,
        edit=edit,
        patch=patch,
        fixed=fixed,
        more=more,
        verify=verify,
    )
    texts = {"1.0": old} | (pins or {})
    prints = {version: fingerprint.of_source(text) for version, text in texts.items()}
    text = path.read_text()
    path.write_text(re.sub(r"\{'?\"?0\.19\.2[^}]*\}", repr(prints), text))
    return catalogue.load_page(name, path, str(folder))


def only(found: Drift) -> tuple[PageDrift, TargetDrift]:
    """The one page and its one target."""
    ((one,), (target,)) = found.pages, found.pages[0].targets
    return one, target


def advised(found: Drift) -> tuple[str, str]:
    return drift_report.advice(found.pages[0], found)


RUN = """
import sys
from pathlib import Path
from cppmega.catalogue import loader as catalogue
folder = Path(sys.argv.pop(1))
catalogue.builtin_folder = lambda: folder
from cppmega.cli.main import main
try:
    main()
finally:
    assert "torch" not in sys.modules
"""


def command(pages: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """`cppmega` with a catalogue of its own, in a process."""
    return subprocess.run(
        [sys.executable, "-c", RUN, str(pages), *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        check=False,
    )
