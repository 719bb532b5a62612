"""Load catalogues, which are folders of pages, by path, and check the headers of their pages.

The name of a page is the name of its file (or of its folder, if it consists of several files). A
catalogue may put its pages into folders by subject, which its file `subjects.toml` lists.
`upstream_patches` is too common a name to import, so pages are loaded by path under a private one.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from cppmega.catalogue import revision
from cppmega.errors import CppmegaError, did_you_mean
from cppmega.host import console, env, load_file, paths
from cppmega.page import KINDS, PURPOSES, REACHED, Page, Patch, left_alone
from cppmega.rewriting.code_text import code_of
from cppmega.tree.installed import PACKAGES

LABELS = ("What", "Why", "Upstream", "Remove", "Numerics")
SUBJECTS = "subjects.toml"
NUMERICS = ("none (bitwise)", "reorders sums", "changes results")
BUILTIN = "builtin"
ENTRY_POINTS = "cppmega.catalogues"
"""The group of entry points by which distributions offer catalogues."""
_HEAVY = {"torch", "megatron", "libcst", "triton", "tilelang", "transformer_engine"}
_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")


def builtin_folder() -> Path:
    """The catalogue that ships with the package."""
    return paths.shipped("upstream_patches")


def located(name: str) -> Path:
    """The folder of a catalogue: a path, or the name of an installed one.

    A distribution offers a catalogue as an entry point of the group `cppmega.catalogues`, whose
    value is the package that holds the pages. That package is found without being imported.
    """
    path = Path(name)
    if len(path.parts) != 1 or (path.is_dir() and page_files(path)):
        return path.resolve()
    return _installed(tuple(sys.path)).get(
        name, path.resolve()
    )  # beside a project there is a folder of its name


def stored(folder: Path) -> str:
    """What a receipt remembers of a catalogue: its name if it is installed, else its path."""
    named = (name for name, at in _installed(tuple(sys.path)).items() if at == folder)
    return next(named, str(folder))


@functools.cache
def _installed(_path: tuple[str, ...]) -> dict[str, Path]:
    """The folders of installed catalogues; to ask every distribution on the path takes a while."""
    from importlib.metadata import entry_points

    catalogues = {}
    for point in entry_points(group=ENTRY_POINTS):
        spec = importlib.util.find_spec(point.value.partition(".")[0])
        homes = spec.submodule_search_locations if spec is not None else None
        if homes:
            catalogues[point.name] = Path(homes[0], *point.value.split(".")[1:]).resolve()
    return catalogues


def load(
    extra: Sequence[Path] = (),
    needed: Collection[str] | None = None,
    say: Callable[[str], None] = console.say,
) -> dict[str, Page]:
    """Load every page of the built-in catalogue and of the extra folders, by name.

    Args:
        needed: the pages that a command is about. Others of the extra folders are left out with a
            remark if they cannot be loaded, since they may be unfinished. None: every page.
        say: prints the remarks.

    Raises:
        CppmegaError: `bad-page` (the header law), `page-failed`, `duplicate-page`,
            `no-catalogue`, `empty-catalogue`, `unknown-page` (in an `after`), `after-cycle`.
    """
    pages: dict[str, Page] = {}
    left_out: dict[str, CppmegaError] = {}

    def leave_out(name: str, label: str, error: CppmegaError) -> None:
        if needed is None or name in needed or label == BUILTIN:
            raise error
        left_out[name] = error
        say(f"{name} is left out, because it cannot be loaded: {error.what}")

    for folder, label in [(builtin_folder(), BUILTIN), *((f, str(f)) for f in extra)]:
        if not folder.is_dir():
            raise CppmegaError(
                "no-catalogue",
                f"{folder} is not a folder.",
                "Its patches would silently be missing.",
                "restore the folder, or pass one that exists as --patches, or leave this one out: "
                f"python -m cppmega.apply_patches --forget {shlex.quote(str(folder))}",
            )
        files = page_files(folder)
        if not files and label != BUILTIN:
            raise _empty(folder)
        packages = {home: package_of(home) for home in folders(folder)}
        for name, path in files:
            if name in pages:
                raise CppmegaError(
                    "duplicate-page",
                    f"{name} is in {pages[name].catalogue} and in {label}.",
                    "One of them would silently win.",
                    "rename one of the two files",
                )
            try:
                pages[name] = load_page(name, path, label, packages.get(path.parent, ""))
            except CppmegaError as error:
                leave_out(name, label, error)
    while dangling := [
        (page, other) for page in pages.values() for other in page.patch.after if other not in pages
    ]:
        page, other = dangling[0]
        missing = unknown(other, pages, f"{page.name} declares after={other!r}")
        leave_out(page.name, page.catalogue, left_out.get(other, missing))
        del pages[page.name]
    _refuse_cycle(pages)
    return pages


def _empty(folder: Path) -> CppmegaError:
    """The error for a folder without pages, which names folders inside it that have some."""
    inside = [entry for entry in sorted(folder.iterdir()) if entry.is_dir() and page_files(entry)]
    return CppmegaError(
        "empty-catalogue",
        f"{folder} contains no pages"
        + (f"; {', '.join(entry.name for entry in inside)} in it does." if inside else "."),
        "The patches of the catalogue that is meant would be missing, and an apply would remove "
        "those that are already in the tree.",
        f"pass --patches {inside[0]}"
        if inside
        else "pass the folder that contains the pages; `cppmega revert` removes every patch",
    )


def _refuse_cycle(pages: Mapping[str, Page]) -> None:
    from graphlib import CycleError, TopologicalSorter

    try:
        TopologicalSorter({name: page.patch.after for name, page in pages.items()}).prepare()
    except CycleError as error:
        raise CppmegaError(
            "after-cycle",
            f"Each of these pages must come after the next: {' -> '.join(error.args[1][::-1])}.",
            "No order satisfies all of them, and the order decides the resulting code.",
            "remove one of them from the other's `after`",
        ) from None


def subjects(folder: Path) -> dict[str, str]:
    """The subjects of a catalogue, which are the names of its folders, with their titles.

    Raises:
        CppmegaError: `bad-catalogue`.
    """
    file = folder / SUBJECTS
    try:
        there = file.stat()
        return _titles(folder, (there.st_ino, there.st_size, there.st_mtime_ns))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise _bad_subjects(file, str(error)) from None


@functools.lru_cache(maxsize=8)
def _titles(folder: Path, _version: tuple[int, ...]) -> dict[str, str]:
    """Read the file of the subjects; several functions ask about every page."""
    data = (folder / SUBJECTS).read_bytes()
    try:
        titles = msgspec.toml.decode(data, type=dict[str, str])
    except msgspec.DecodeError as error:
        raise _bad_subjects(folder / SUBJECTS, str(error)) from None
    missing = [name for name in titles if not (folder / name).is_dir()]
    if missing:
        raise _bad_subjects(folder / SUBJECTS, f"there is no folder {missing[0]}")
    return titles


def _bad_subjects(file: Path, what: str) -> CppmegaError:
    return CppmegaError(
        "bad-catalogue",
        f"{file}: {what}.",
        "The pages in the folders that it lists would silently be missing.",
        'correct the file: each line is `folder = "title"`',
    )


def catalogue_of(page: Path) -> Path:
    """The catalogue that holds a page: the folder of its file, or the one above a subject's."""
    home = _home(page)
    return home.parent if _subject(home) else home


def _home(page: Path) -> Path:
    return (page.parent if page.stem == "__init__" else page).parent


def _subject(home: Path) -> str:
    """The subject whose pages a folder holds; empty if it is the catalogue itself."""
    return home.name if home.name in subjects(home.parent) else ""


def folders(folder: Path) -> list[Path]:
    """The folders of a catalogue that hold pages: itself, and those of its subjects."""
    return [folder, *(folder / name for name in subjects(folder))]


def by_subject(
    pages: Mapping[str, Page], extra: Sequence[Path] = ()
) -> Iterator[tuple[str, list[Page]]]:
    """Pages in the order of their subjects, with the title of each; those without one come last."""
    titles: dict[str, str] = {}
    for folder in (builtin_folder(), *extra):
        titles = {**subjects(folder), **titles}
    for name, title in {**titles, "": "Without a subject"}.items():
        if members := [page for _, page in sorted(pages.items()) if page.subject == name]:
            yield title, members


def page_files(folder: Path) -> list[tuple[str, Path]]:
    """List the (name, file) of every page of a catalogue, sorted."""
    files = []
    for entry in (entry for home in folders(folder) for entry in home.iterdir()):
        if entry.stem.startswith("_"):  # shared by several pages
            continue
        if entry.is_dir() and (entry / "__init__.py").is_file():
            files.append((entry.name, entry / "__init__.py"))
        elif entry.suffix == ".py":
            files.append((entry.stem, entry))
    return sorted(files)


def get(pages: dict[str, Page], name: str) -> Page:
    """Look up a page by name; the error for a misspelled name suggests the closest ones."""
    if name not in pages:
        raise unknown(name, pages, "requested by name")
    return pages[name]


def unknown(name: str, pages: Iterable[str], who: str) -> CppmegaError:
    """The error for a page that does not exist; it suggests the closest names."""
    return CppmegaError(
        "unknown-page",
        f"There is no page {name} ({who})." + did_you_mean(name, pages, 3),
        "A patch that is requested but not applied must stop the run.",
        "cppmega list",
    )


def load_page(name: str, path: Path, label: str, package: str = "") -> Page:
    """Load one page and check its header.

    Args:
        package: the result of `package_of` for its folder, if its neighbors share it.

    Raises:
        CppmegaError: `bad-page` with every violation, `page-failed` if it cannot be imported.
    """
    module = _load_module(name, path, package or package_of(path.parent))
    patch = getattr(module, "PATCH", None)
    problems = header_problems(name, path, module)
    if problems or not isinstance(patch, Patch):
        raise CppmegaError(
            "bad-page",
            f"{name} ({path}): " + "; ".join(problems or ["it has no PATCH"]) + ".",
            "A page with an incomplete header cannot be checked.",
            "correct the page; `cppmega new NAME` writes a complete one",
        )
    doc = module.__doc__ or ""
    made_of = revision.of_page(path, patch.edits)
    return Page(
        name=name,
        patch=patch,
        doc=doc,
        revision=made_of.code,
        path=str(path),
        catalogue=label,
        subject=_subject(_home(path)),
        fixed_upstream=getattr(module, "fixed_upstream", None),
        verify=getattr(module, "verify", None),
        labels=labels(doc),
        text=made_of.text,
        reached=made_of.reached,
    )


def _load_module(name: str, path: Path, package: str) -> ModuleType:
    qualified = f"{package}.{name}"
    below = [str(path.parent)] if path.stem == "__init__" else None

    def failed(what: str) -> CppmegaError:
        return CppmegaError(
            "page-failed",
            f"{path} cannot be loaded: it {what}.",
            "Its patch would not be applied.",
            "correct the page",
        )

    return load_file.load(qualified, path, failed, below, writes=True)


def package_of(folder: Path) -> str:
    """Create the private package under which the pages of a folder are loaded.

    Pages import what they share relatively, from a module or folder whose name begins with `_`;
    those of a subject also from the catalogue's folder.
    """
    if folder.name in subjects(folder.parent):
        name = f"{package_of(folder.parent)}.{folder.name}"
    else:
        name = f"_cppmega_pages_{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"
    load_file.package(name, folder)
    return name


def labels(doc: str) -> dict[str, str]:
    """The labelled paragraphs of a page's docstring, each joined to one line."""
    paragraphs: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in doc.splitlines():
        head, colon, rest = line.partition(":")
        if colon and head in LABELS:
            current = paragraphs.setdefault(head, [])
            current.append(rest.strip())
        elif current is not None and line.strip():
            current.append(line.strip())
    return {label: " ".join(lines).strip() for label, lines in paragraphs.items()}


def header_problems(name: str, path: Path, module: Any) -> list[str]:
    """List every problem of a page's header, one sentence each; empty if there is none."""
    labelled = labels(module.__doc__ or "")
    problems = [f"the docstring lacks {label}:" for label in LABELS if not labelled.get(label)]
    if list(labelled) != [label for label in LABELS if label in labelled]:
        problems.append(f"the labels are not in the order {', '.join(LABELS)}")
    title = (module.__doc__ or "").strip().partition("\n")[0]
    if not title or title.startswith("What:"):
        problems.append("the docstring does not begin with a one-line title")
    upstream = labelled.get("Upstream", "https://")
    if not re.match(r"https://|Not sent: \S", upstream):
        problems.append("Upstream: is neither a link nor `Not sent: reason`")
    if not labelled.get("Numerics", NUMERICS[0]).startswith(NUMERICS):
        problems.append(f"Numerics: does not begin with {' | '.join(NUMERICS)}")
    if not _NAME.match(name):
        problems.append("the file name is not snake_case")
    for heavy in sorted({*code_of(path.read_bytes()).loads} & _HEAVY):
        problems.append(f"it imports {heavy} at top level")
    for function in ("fixed_upstream", "verify"):
        if not callable(getattr(module, function, None)):
            problems.append(f"it has no {function}()")
    patch = getattr(module, "PATCH", None)
    if not isinstance(patch, Patch):
        return [*problems, "it has no PATCH"]
    return problems + _patch_problems(patch)


def _patch_problems(patch: Patch) -> list[str]:
    problems = []
    if not patch.edits:
        problems.append("PATCH has no edits")
    if patch.reached not in REACHED:
        problems.append(f"reached={patch.reached!r} is not one of {', '.join(REACHED)}")
    if patch.purpose not in PURPOSES:
        problems.append(f"purpose={patch.purpose!r} is not one of {', '.join(PURPOSES)}")
    for name in (*filter(None, [patch.gate]), *patch.variables):
        if not name.startswith(env.PREFIX):
            problems.append(f"the variable {name} does not begin with {env.PREFIX}")
    seen: set[tuple[str, str]] = set()
    for edit in patch.edits:
        if not re.match(r"[\w/]+\.py:[A-Za-z_][\w.]*(#\d+)?\Z", edit.target):
            problems.append(f"target {edit.target!r} is not path.py:Symbol")
        package = PACKAGES.get(edit.distribution)
        if package is None:
            known = ", ".join(PACKAGES)
            problems.append(f"distribution {edit.distribution!r} is not one of {known}")
        elif not edit.target.startswith(f"{package}/"):
            problems.append(f"target {edit.target!r} is not below {package}/, {edit.distribution}")
        if edit.kind not in KINDS:
            problems.append(f"kind {edit.kind!r} is not one of {', '.join(KINDS)}")
        if not edit.pins:
            problems.append(f"{edit.target} has no pins")
        for version, pin in edit.pins.items():
            if not re.match(r"[0-9a-f]{16}\Z", pin):
                problems.append(f"pin {version}: {pin!r} is not a fingerprint")
            if (edit.target, version) in seen:
                problems.append(f"two edits pin {edit.target} for {version}")
            seen.add((edit.target, version))
        if edit.mark == "" and edit.kind != "source":
            problems.append(f"mark='' on {edit.target} is allowed for kind source only")
    for version in sorted({version for _, version in seen}):
        done = [e for e in patch.edits if version in e.pins and e.edit is not left_alone]
        if done and patch.reached != "never" and not any(map(patch.marks, done)):
            problems.append(f"a run on {version} must reach it, but no edit carries a mark")
    return problems
