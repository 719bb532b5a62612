"""Add pins to the text of a page, and change nothing else in it.

Pages write their pins in many ways: a dict, `dict.fromkeys(VERSIONS, ...)`, two of those joined by
`|`, or the argument of a function that makes several edits. So this does not read the source for
what it means: it tries every place where a pin could be added, loads the page with it, and keeps
the change after which the page has the wanted pins and no others.
"""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import libcst as cst

from cppmega.catalogue.loader import load_page
from cppmega.errors import CppmegaError
from cppmega.page import Page

_WIDTH = 100
_COPIES = itertools.count()

Pins = dict[tuple[int, str], str]
"""(Index of the edit, version) -> fingerprint."""


def pins_of(page: Page) -> Pins:
    """Every pin of a page."""
    return {
        (index, version): pin
        for index, edit in enumerate(page.patch.edits)
        for version, pin in edit.pins.items()
    }


def copy_with(page: Page, data: bytes, scratch: Path) -> Page:
    """The page as it would be with that text, loaded from a copy.

    Every copy has a folder of its own: Python would otherwise take one's bytecode for another's.

    Raises:
        CppmegaError: what `load_page` raises.
    """
    source = Path(page.path)
    folder = scratch / f"page-{next(_COPIES)}"
    if source.stem == "__init__":
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source.parent, folder / page.name, ignore=ignored)
        place = folder / page.name / source.name
    else:
        folder.mkdir(parents=True)
        place = folder / source.name
    place.write_bytes(data)
    return load_page(page.name, place, page.catalogue)


def with_pins(page: Page, wanted: Mapping[int, str], version: str, scratch: Path) -> bytes:
    """The page's text with a pin of one version for some of its edits.

    Args:
        wanted: index of the edit -> fingerprint.

    Raises:
        CppmegaError: `pins-not-found`, where the pins are made in a way that cannot be extended.
    """
    data = Path(page.path).read_bytes()
    goal = {(index, version): pin for index, pin in wanted.items()}
    missing, have = dict(goal), pins_of(page)
    while missing:
        found = _first_fitting(page, data, missing, have, scratch)
        if found is None:
            raise _not_found(page, missing)
        data, added = found
        have |= added
        missing = {key: pin for key, pin in missing.items() if key not in added}
    return data


def _first_fitting(
    page: Page, data: bytes, missing: Pins, have: Pins, scratch: Path
) -> tuple[bytes, Pins] | None:
    """A text with some of the missing pins and nothing else new, and which pins it adds."""
    for text in _candidates(data, missing, have):
        try:
            pins = pins_of(copy_with(page, text, scratch))
        except CppmegaError:
            continue
        added = {key: pin for key, pin in pins.items() if key not in have}
        if added and added.items() <= missing.items() and pins.items() >= have.items():
            return text, added
    return None


def _not_found(page: Page, missing: Pins) -> CppmegaError:
    lines = [
        f'"{version}": "{pin}" to the pins of {page.patch.edits[index].target}'
        for (index, version), pin in missing.items()
    ]
    return CppmegaError(
        "pins-not-found",
        f"{page.path} makes its pins in a way that this command cannot extend.",
        "Nothing was written.",
        "add by hand " + ", and ".join(lines),
    )


def _candidates(data: bytes, missing: Pins, have: Pins) -> Iterator[bytes]:
    """Texts with one more pin somewhere, likely ones first.

    A sequence of versions comes first: where it serves several edits, one word pins them all.
    """
    module = cst.parse_module(data)
    known = {version for _, version in have}
    places = _Places()
    module.visit(places)

    def changed(old: cst.CSTNode, new: cst.CSTNode) -> bytes:
        tree = module.deep_replace(old, new)
        assert isinstance(tree, cst.Module)
        return _reflowed(data, tree.bytes, module.default_newline)

    for version in dict.fromkeys(version for _, version in missing):
        for sequence in places.sequences:
            starred = any(isinstance(e, cst.StarredElement) for e in sequence.elements)
            if starred or _strings(sequence) & known:
                yield changed(sequence, _appended(sequence, version))
    for (index, version), pin in missing.items():
        keys = {v for i, v in have if i == index}
        displays = [d for d in places.dicts if _keys(d) & known or _is_computed(d)]
        for display in sorted(displays, key=lambda display: _keys(display) != keys):
            yield changed(display, _extended(display, version, pin))
        for value in (*places.values, *places.fromkeys):
            yield changed(value, _joined(value, version, pin))


class _Places(cst.CSTVisitor):
    """Where a page may hold versions and fingerprints."""

    def __init__(self) -> None:
        super().__init__()
        self.sequences: list[cst.Tuple | cst.List] = []
        self.dicts: list[cst.Dict] = []
        self.values: list[cst.BaseExpression] = []
        self.fromkeys: list[cst.BaseExpression] = []

    def visit_Tuple(self, node: cst.Tuple) -> None:  # noqa: N802
        self.sequences.append(node)

    def visit_List(self, node: cst.List) -> None:  # noqa: N802
        self.sequences.append(node)

    def visit_Dict(self, node: cst.Dict) -> None:  # noqa: N802
        self.dicts.append(node)

    def visit_Call(self, node: cst.Call) -> None:  # noqa: N802
        function = node.func
        if isinstance(function, cst.Attribute) and function.attr.value == "fromkeys":
            self.fromkeys.append(node)

    def visit_Arg(self, node: cst.Arg) -> None:  # noqa: N802
        named = node.keyword is not None and node.keyword.value == "pins"
        if named and not isinstance(node.value, cst.Dict):
            self.values.append(node.value)


def _text(node: cst.BaseExpression) -> str | None:
    if isinstance(node, cst.SimpleString):
        value = node.evaluated_value
        return value if isinstance(value, str) else None
    return None


def _strings(node: cst.Tuple | cst.List) -> set[str]:
    return {text for element in node.elements if (text := _text(element.value)) is not None}


def _keys(node: cst.Dict) -> set[str]:
    keys = [e.key for e in node.elements if isinstance(e, cst.DictElement)]
    return {text for key in keys if (text := _text(key)) is not None}


def _is_computed(node: cst.Dict) -> bool:
    """Whether a key is no string, as in `{RELEASES[-1]: ...}`."""
    return any(not isinstance(e, cst.DictElement) or _text(e.key) is None for e in node.elements)


def _string(text: str) -> cst.SimpleString:
    return cst.SimpleString(f'"{text}"')


def _comma(space: cst.BaseParenthesizableWhitespace) -> cst.Comma:
    return cst.Comma(whitespace_after=space)


def _appended(node: cst.Tuple | cst.List, version: str) -> cst.Tuple | cst.List:
    """The sequence with one more string, set like the others."""
    elements = list(node.elements)
    last = elements[-1]
    between: cst.BaseParenthesizableWhitespace = cst.SimpleWhitespace(" ")
    if len(elements) > 1 and isinstance(elements[-2].comma, cst.Comma):
        between = elements[-2].comma.whitespace_after
    elements[-1] = last.with_changes(comma=_comma(between))
    trailing = last.comma if len(elements) > 1 else cst.MaybeSentinel.DEFAULT
    return node.with_changes(elements=[*elements, cst.Element(_string(version), trailing)])


def _extended(node: cst.Dict, version: str, pin: str) -> cst.Dict:
    """The dict with one more entry, set like the others."""
    elements = list(node.elements)
    last = elements[-1]
    between: cst.BaseParenthesizableWhitespace = cst.SimpleWhitespace(" ")
    if len(elements) > 1 and isinstance(elements[-2].comma, cst.Comma):
        between = elements[-2].comma.whitespace_after
    elif isinstance(node.lbrace.whitespace_after, cst.ParenthesizedWhitespace):
        between = node.lbrace.whitespace_after
    elements[-1] = last.with_changes(comma=_comma(between))
    added = cst.DictElement(_string(version), _string(pin), comma=last.comma)
    return node.with_changes(elements=[*elements, added])


def _joined(node: cst.BaseExpression, version: str, pin: str) -> cst.BinaryOperation:
    """`old | {version: pin}`."""
    added = cst.Dict([cst.DictElement(_string(version), _string(pin))])
    return cst.BinaryOperation(node, cst.BitOr(), added)


def _reflowed(old: bytes, new: bytes, newline: str) -> bytes:
    """Break the new lines that are too long, as the repository's formatter would."""
    before = set(old.decode(errors="surrogateescape").split(newline))
    lines = []
    for line in new.decode(errors="surrogateescape").split(newline):
        joined = line.lstrip().startswith("| ") and line.count(" | ") > 1
        fits = len(line) <= _WIDTH and not joined
        lines += [line] if line in before or fits else _broken(line)
    return newline.join(lines).encode(errors="surrogateescape")


_DICT = re.compile(r"(\s*)([^{}]*\{)([^{}]*)(\}[^{}]*)\Z")
_SEQUENCE = re.compile(r"(\s*)(\w+ = [(\[])([^()\[\]]*)([)\]])\Z")
_CALL = re.compile(r"(\s*)((?:pins=)?dict\.fromkeys\()(.*)(\),?)\Z")
_UNION = re.compile(r"(\s*)(.*?)( \| \{[^{}]*\},?)\Z")


def _broken(line: str) -> list[str]:
    union = _UNION.match(line)
    if union:
        return [union[1] + union[2], union[1] + union[3].lstrip()]
    call = _CALL.match(line)
    if call:
        return [call[1] + call[2], f"{call[1]}    {call[3]}", call[1] + call[4]]
    found = _DICT.match(line) or _SEQUENCE.match(line)
    if found:
        parts = [part for part in found[3].rstrip(", ").split(", ") if part]
        inner = [f"{found[1]}    {part}," for part in parts]
        return [found[1] + found[2], *inner, found[1] + found[4]]
    return [line]
