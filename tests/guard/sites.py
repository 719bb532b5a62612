"""A small Megatron, which tests of what a rank imports edit, load and have judged."""

from __future__ import annotations

import importlib
import os
import py_compile
from pathlib import Path
from typing import Any

from cppmega.errors import CppmegaError
from cppmega.guard import files, modules
from cppmega.guard.files import Judged
from cppmega.overlay.receipt import Receipt
from tests.support.git import commit_all

A, B = "megatron/core/a.py", "megatron/core/b.py"
FILES = {"megatron/core/__init__.py": b"", A: b"VALUE = 1\n", B: b"from megatron.core import a\n"}


class Site:
    """A small Megatron, which this process imports as a rank would."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, data: bytes) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        return file

    def load(self, *names: str) -> list[Any]:
        """Import from the tree, watched as after `guard.start`."""
        files.watch(self.root, Receipt(), {})
        files.only_from(self.root)
        importlib.invalidate_caches()
        return [importlib.import_module(name) for name in names or ("megatron.core.b",)]

    def look(self, receipt: Receipt | None = None, **accepted: str) -> Judged:
        edits = {path.replace("__", "/"): digest for path, digest in accepted.items()}
        return files.judge(self.root, receipt or Receipt(), edits)

    def problems(self) -> set[str]:
        found = {problem.name for problem in self.look().problems}
        try:
            modules.check()
        except CppmegaError as error:
            found.add(error.name)
        return found

    def bytecode(self, path: str, text: bytes, mode: str = "TIMESTAMP") -> Path:
        """Bytecode of another text, with a header that fits the source."""
        source = self.root / path
        true, stamp = source.read_bytes(), source.stat()
        text += b"#" * (len(true) - len(text))
        source.write_bytes(text)
        os.utime(source, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        invalidation = getattr(py_compile.PycInvalidationMode, mode)
        cached = py_compile.compile(str(source), invalidation_mode=invalidation)
        source.write_bytes(true)
        os.utime(source, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        return Path(str(cached))

    def commit(self) -> None:
        for info in self.root.glob("*.dist-info/*"):
            info.unlink()
        for folder in self.root.glob("*.dist-info"):
            folder.rmdir()
        commit_all(self.root)
