"""ROOT, the folder that holds `megatron/`: its distributions and the origin of its files."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import re
import shlex
import sys
import sysconfig
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import unquote, urlsplit

from cppmega.errors import CppmegaError
from cppmega.tree import records

if TYPE_CHECKING:
    from cppmega.tree.checkout import Checkout

Origin = Literal["record", "git", "unverified"]
"""The source that vouches for pristine text: a wheel's RECORD, a checkout's HEAD, or nothing."""


def reinstall(root: Path, version: str, distribution: str = "megatron-core") -> str:
    """The command that restores upstream's files in ROOT, whichever environment pip belongs to.

    It copies all files of the package into the working directory first, as edits would be lost.
    """
    package = PACKAGES[distribution]
    sites = {Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")}
    place = "" if root.resolve() in sites else f"--upgrade --target {shlex.quote(str(root))} "
    return (
        f"cp -r --backup=numbered {shlex.quote(str(root / package))} {package}.edited && "
        f"pip install --force-reinstall --no-deps {place}{distribution}=={version}"
    )


def sha256(data: bytes) -> str:
    """Hex digest of bytes."""
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True, slots=True)
class Distribution:
    """One installed distribution of ROOT."""

    name: str
    version: str
    record: Mapping[str, str]
    """Path relative to ROOT -> SHA-256, for files the wheel lists with a hash."""
    record_hash: str


class Tree:
    """The files below ROOT. Reads each file once; never writes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._bytes: dict[str, bytes | None] = {}

    def read(self, path: str) -> bytes | None:
        """Read the bytes of a file; None if it does not exist.

        Raises:
            CppmegaError: `outside-root`, `unreadable-file`.
        """
        if path not in self._bytes:
            _refuse_outside(self.root, path)
            try:
                self._bytes[path] = (self.root / path).read_bytes()
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                self._bytes[path] = None
            except OSError as error:
                raise CppmegaError(
                    "unreadable-file",
                    f"{self.root / path} cannot be read: {error.strerror}.",
                    "A file that cannot be read cannot be checked.",
                    "correct its permissions, or run as the user who owns the environment",
                ) from None
        return self._bytes[path]

    @cached_property
    def distributions(self) -> dict[str, Distribution]:
        """Installed distributions by normalised name.

        Raises:
            CppmegaError: `two-distributions`, if one name is installed twice.
        """
        by_name: dict[str, Distribution] = {}
        for folder in sorted(self.root.glob("*.dist-info")):
            name, version = named(folder)
            if name not in PACKAGES:
                continue
            if name in by_name:
                raise CppmegaError(
                    "two-distributions",
                    f"{self.root} holds {name} {by_name[name].version} and {version}.",
                    "Files of two versions are mixed, and no RECORD shows which is which.",
                    f"pip uninstall {name} (twice), then install one version",
                )
            data = self.read(f"{folder.name}/RECORD") or b""
            by_name[name] = Distribution(name, version, records.hashes(data), sha256(data))
        return by_name

    @cached_property
    def version(self) -> str:
        """megatron-core's version, for messages only; `unknown` if it cannot be determined."""
        if "megatron-core" in self.distributions:
            return self.distributions["megatron-core"].version
        data = self.read("megatron/core/package_info.py")
        if data is None:
            return "unknown"
        try:
            tree = ast.parse(data)
        except (SyntaxError, ValueError):
            return "unknown"
        values = {
            node.targets[0].id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        }
        numbers = ".".join(str(values.get(part, "?")) for part in ("MAJOR", "MINOR", "PATCH"))
        return numbers + str(values.get("PRE_RELEASE", ""))

    def version_of(self, distribution: str) -> str:
        """The version of a distribution, for messages only; `unknown` if no metadata is here."""
        if distribution == "megatron-core":
            return self.version
        installed = self.distributions.get(distribution)
        return installed.version if installed is not None else "unknown"

    def restore(self, path: str) -> str:
        """The command that restores upstream's file, and keeps a copy of the file as it is."""
        if self.checkout is not None and path in self.checkout.files:
            return f"{self.saving(path)}git -C {self.root} checkout HEAD -- {path}"
        return self.reinstall(path)

    def saving(self, path: str) -> str:
        """The beginning of a command that replaces a file; empty if the file is missing."""
        if self.read(path) is None:
            return ""
        kept = f"{path.replace('/', '.')}.edited"
        return f"cp --backup=numbered {shlex.quote(str(self.root / path))} {kept} && "

    def reinstall(self, path: str) -> str:
        """The command that restores a file, by reinstalling the distribution that lists it."""
        listing = (name for name, d in self.distributions.items() if path in d.record)
        owner = next(listing, "megatron-core")
        return reinstall(self.root, self.version_of(owner), owner)

    @property
    def recorded(self) -> Iterator[str]:
        """Every file that a RECORD or the commit lists, whether it exists or not."""
        for distribution in self.distributions.values():
            yield from distribution.record
        yield from self.checkout.files if self.checkout is not None else ()

    def has(self, distribution: str) -> bool:
        """Whether the distribution's files are below ROOT."""
        folder = PACKAGES[distribution]
        return distribution in self.distributions or (self.root / folder).is_dir()

    def pristine(self, path: str) -> tuple[Origin, str | None]:
        """The source that vouches for a file, and the SHA-256 of its pristine text.

        The hash is None if nothing vouches for the file, or a partial clone never fetched the text.
        """
        listed = self.listed(path)
        if listed is not None:
            return "record", listed[1]
        if self.checkout is None or path not in self.checkout.files:
            return "unverified", None
        if self.vouched(path):
            return "git", sha256(self.read(path) or b"")
        blob = self.git_blob(path)
        return "git", sha256(blob) if blob is not None else None

    def vouched(self, path: str) -> bool:
        """Whether a file is as a wheel's RECORD or the checkout's commit lists it."""
        data = self.read(path)
        if data is None:
            return False
        listed = self.listed(path)
        if listed is not None:
            return listed[1] == sha256(data)
        from cppmega.tree import checkout

        blob = self.checkout.files.get(path) if self.checkout is not None else None
        return blob is not None and checkout.same(data, blob)

    def listed(self, path: str) -> tuple[str, str] | None:
        """The distribution that installed a file, and the SHA-256 that its RECORD lists for it.

        In parts where megatron-core has files, the lists of other distributions are ignored.
        """
        for name, distribution in self.distributions.items():
            if path in distribution.record:
                return f"{name} {distribution.version}", distribution.record[path]
        if path.startswith("megatron/") and part_of(path) in self._core_parts:
            return None
        return self._others.get(path) if self.read(path) is not None else None

    def has_origin(self, path: str) -> bool:
        """Whether any file is vouched for in the part of a package that a path belongs to.

        In such a part, a file that nothing vouches for was added by hand.
        """
        return part_of(path) in self._vouched_parts

    @cached_property
    def _vouched_parts(self) -> frozenset[str]:
        return frozenset(map(part_of, {*self.recorded, *self._others}))

    @cached_property
    def _core_parts(self) -> frozenset[str]:
        core = self.distributions.get("megatron-core")
        return frozenset(map(part_of, core.record)) if core is not None else frozenset()

    @cached_property
    def _others(self) -> dict[str, tuple[str, str]]:
        return records.of_packages(self.root, tuple(PACKAGES.values()))

    def git_blob(self, path: str) -> bytes | None:
        """The committed bytes of a file, with its line endings on disk; None without a checkout."""
        if self.checkout is None or path not in self.checkout.files:
            return None
        from cppmega.tree import checkout

        blob = self.checkout.blob(path)
        return None if blob is None else checkout.as_checked_out(blob, self.read(path))

    @cached_property
    def checkout(self) -> Checkout | None:
        """The commit that tracks ROOT's megatron; None for an installed or unpacked wheel."""
        if "megatron-core" in self.distributions:
            return None
        from cppmega.tree import checkout

        return checkout.find_checkout(self.root, "megatron")

    @cached_property
    def identity(self) -> str:
        """A hash of the installed megatron-core, by which a receipt belongs to this tree.

        An upgrade of another package does not invalidate the receipt, since every file is compared
        with its own hashes anyway.
        """
        core = self.distributions.get("megatron-core")
        record = core.record_hash if core is not None else ""
        return sha256(f"{self.version} {record}".encode())[:16]

    @property
    def packages(self) -> list[Path]:
        """The folders that pages may target."""
        return [self.root / folder for folder in PACKAGES.values()]

    @cached_property
    def python_files(self) -> list[str]:
        """Every Python file of the packages that pages may target, relative to ROOT."""
        paths: list[str] = []
        for package in self.packages:
            for where, folders, files in os.walk(package):
                folders[:] = sorted(name for name in folders if name != "__pycache__")
                base = Path(where).relative_to(self.root).as_posix()
                paths += [f"{base}/{name}" for name in sorted(files) if name.endswith(".py")]
        return paths

    def check(self, written: Mapping[str, Container[str]]) -> None:
        """Refuse a tree that cannot be patched safely, whatever the patches are.

        Args:
            written: path -> SHA-256 hashes of the texts that cppmega wrote.

        Raises:
            CppmegaError: `no-megatron`, `linked-tree`, `mixed-versions`, `two-distributions`.
        """
        package = self.root / "megatron"
        if not (package / "core").is_dir():
            raise CppmegaError(
                "no-megatron",
                f"{self.root} does not contain megatron/core.",
                "There is nothing to patch.",
                "pass the folder that holds megatron/: --megatron ROOT",
            )
        for folder in (package, package / "core"):
            if folder.is_symlink():
                raise CppmegaError(
                    "linked-tree",
                    f"{folder} is a link to {folder.resolve()}.",
                    "Patching through the link would affect everyone else who uses that folder.",
                    "install a copy (uv: --link-mode=copy), or pass the real folder as --megatron",
                )
        self._check_training(written)

    def _check_training(self, written: Mapping[str, Container[str]]) -> None:
        training = self.root / "megatron" / "training"
        core = self.distributions.get("megatron-core")
        if not (core is not None and core.record) and self.checkout is None:
            return  # without a RECORD or a commit, no file can be attributed to a version
        files = sorted(f"megatron/training/{path.name}" for path in training.glob("*.py"))
        strange = [path for path in files if not self.vouched(path)]
        strange = [p for p in strange if sha256(self.read(p) or b"") not in written.get(p, ())]
        if len(strange) * _HAND_EDITED > len(files):
            raise CppmegaError(
                "mixed-versions",
                f"megatron/training in {self.root} does not belong to megatron-core "
                f"{self.version}: {len(strange)} of its {len(files)} files differ.",
                "core and training of different versions call each other with wrong arguments.",
                "move megatron/training out of ROOT, or use a checkout of one version as ROOT",
            )


PACKAGES = {
    "megatron-core": "megatron",
    "mamba-ssm": "mamba_ssm",
    "liger-kernel": "liger_kernel",
    "transformer-engine": "transformer_engine",
}
"""Distributions that pages may target -> their import folder below ROOT."""


def named(folder: Path) -> tuple[str, str]:
    """The normalized name and the version of the distribution whose dist-info a folder is."""
    name, _, version = folder.name.removesuffix(".dist-info").partition("-")
    return re.sub(r"[-_.]+", "-", name).lower(), version


def distribution_of(path: str) -> str:
    """The distribution that a page declares for a file; "" if no page may target it."""
    folders = {folder: name for name, folder in PACKAGES.items()}
    return folders.get(path.partition("/")[0], "")


_HAND_EDITED = 5
"""If more than one file in this many differs, the folder belongs to another version."""


def _refuse_outside(root: Path, path: str) -> None:
    if path.startswith("/") or ".." in path.split("/"):
        raise CppmegaError(
            "outside-root",
            f"{path} is not below {root}.",
            "Pages may only target the packages in ROOT.",
            "write the path below ROOT, with forward slashes: megatron/core/x.py",
        )


def find_root() -> Path:
    """Find the folder of the megatron that Python would import, without importing it.

    Raises:
        CppmegaError: `no-megatron`, `several-megatrons`.
    """
    spec = importlib.util.find_spec("megatron")
    places = [] if spec is None else [*(spec.submodule_search_locations or ())]
    folders = [*map(Path, places), *_mapped(places)]
    portions = list(dict.fromkeys(f.resolve() for f in folders if f.is_dir()))
    holding = [folder for folder in portions if _parts(folder)]
    if not holding:
        raise CppmegaError(
            "no-megatron",
            f"{sys.executable} cannot find a megatron package.",
            "There is nothing to patch.",
            _elsewhere() or "pip install megatron-core==0.19.2, or pass --megatron ROOT",
        )
    if len(holding) > 1:
        parts = [f"megatron.{part} from {folder}" for folder in holding for part in _parts(folder)]
        raise CppmegaError(
            "several-megatrons",
            f"Python would merge {len(holding)} folders into one megatron package: "
            + ", ".join(parts)
            + "; where a name occurs twice, the first one wins.",
            "The patches would go into one tree, while a run also imports parts of the other.",
            "take one of them out of PYTHONPATH and the working directory, or pass --megatron ROOT",
        )
    first = next(f for f in folders if f.resolve() == holding[0])
    return first.parent


def _mapped(places: list[str]) -> Iterator[Path]:
    """The megatron folders that only a finder knows, as setuptools writes for `pip install -e`.

    It maps `megatron.core` to a folder, and gives `megatron` none: a placeholder is all that the
    namespace's path then holds.
    """
    for part in PARTS:
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = None if find is None else find(f"megatron.{part}", places)
            if spec is not None:
                yield from (Path(p).parent for p in spec.submodule_search_locations or ())
                break


def _elsewhere() -> str:
    """The option that selects the Megatron of the shell's environment; empty if it has none."""
    from cppmega.host import interpreter

    sites = [*interpreter.activated()]
    for root in (*sites, *_editable(sites)):
        if _parts(root / "megatron"):
            return f"the same command with --megatron {shlex.quote(str(root))}"
    return ""


def _editable(sites: Iterable[Path]) -> Iterator[Path]:
    """The folders from which megatron-core was installed with `pip install -e`, by PEP 610."""
    for site in sites:
        for file in site.glob("megatron_core-*.dist-info/direct_url.json"):
            origin = json.loads(file.read_bytes())
            if origin.get("dir_info", {}).get("editable"):
                yield Path(unquote(urlsplit(origin["url"]).path))


def part_of(path: str) -> str:
    """`megatron/core` of `megatron/core/x.py`; the package itself elsewhere."""
    first, *rest = path.split("/")
    return f"{first}/{rest[0]}" if first == "megatron" and len(rest) > 1 else first


def _parts(folder: Path) -> list[str]:
    """Those of PARTS that a megatron folder has."""
    return [name for name in PARTS if (folder / name).is_dir()]


PARTS = ("core", "training", "legacy", "rl")
"""Sub-packages of megatron that patches or its trainer use."""
