"""Where a pin is added to the text of a page."""

from __future__ import annotations

from pathlib import Path

import pytest

from cppmega.authoring import pin_source
from cppmega.catalogue import loader as catalogue
from cppmega.page import Page

pytestmark = pytest.mark.slow


def pins_of(page: Page) -> dict[tuple[int, str], str]:
    """Every pin of a page."""
    return {
        (index, version): pin
        for index, edit in enumerate(page.patch.edits)
        for version, pin in edit.pins.items()
    }


A, B, C = "a" * 16, "b" * 16, "c" * 16
OTHER = {0: C}
SPELLINGS = {
    "dict": (OTHER, f'{{"1.0": "{A}"}}', f'{{"1.0": "{A}", "3.0": "{C}"}}'),
    "long dict": (
        OTHER,
        f'{{\n                "1.0": "{A}",\n                "2.0": "{B}",\n            }}',
        f'{{\n                "1.0": "{A}",\n                "2.0": "{B}",\n'
        f'                "3.0": "{C}",\n            }}',
    ),
    "dict that gets too long": (
        OTHER,
        f'{{"1.0": "{A}", "2.0": "{B}", "2.1": "{B}"}}',
        f'{{\n                "1.0": "{A}",\n                "2.0": "{B}",\n'
        f'                "2.1": "{B}",\n                "3.0": "{C}",\n            }}',
    ),
}
SPELT = '''\
"""A made page.

What: it doubles.
Why: upstream forgot; seen in a test.
Upstream: Not sent: it is made.
Remove: never.
Numerics: changes results: they become right.
"""

from cppmega.edits import replacing
from cppmega.page import Edit, Patch, Source

VERSIONS = ("1.0",  "2.0")  # stays as it is


def edits(target,   pins):
    return Edit(target=target, pins=pins, edit=replacing("x", "2 * x"))


PATCH = Patch(
    edits=(
        Edit(
            target="megatron/core/thing.py:double",
            pins=%s,
            edit=replacing("x", "2 * x"),
        ),
        edits("megatron/core/thing.py:half", {"1.0": "dddddddddddddddd"}),
    ),
    reached="forward",
)


def fixed_upstream(source: Source) -> bool:
    return False


def verify() -> None:
    raise AssertionError
'''


def spelt(folder: Path, pins: str) -> Page:
    folder.mkdir(exist_ok=True)
    (folder / "spelt.py").write_bytes((SPELT % pins).encode())
    return catalogue.load_page("spelt", folder / "spelt.py", "made")


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_pin_is_added_and_every_other_byte_stays(tmp_path: Path, spelling: str) -> None:
    wanted, before, after = SPELLINGS[spelling]
    page = spelt(tmp_path / "pages", before)
    assert pin_source.with_pins(page, wanted, "3.0").decode() == SPELT % after


def test_the_argument_of_a_function_is_a_place_for_a_pin(tmp_path: Path) -> None:
    page = spelt(tmp_path / "pages", f'{{"1.0": "{A}"}}')
    text = pin_source.with_pins(page, {1: C}, "3.0").decode()
    assert text.count("3.0") == 1
    new = pin_source.copy_with(page, text.encode(), tmp_path / "new")
    assert pins_of(new) == pins_of(page) | {(1, "3.0"): C}


def test_edits_with_equal_pins_are_distinguished_by_their_order(tmp_path: Path) -> None:
    page = spelt(tmp_path / "pages", '{"1.0": "dddddddddddddddd"}')
    text = pin_source.with_pins(page, {1: B, 0: A}, "3.0")
    new = pins_of(pin_source.copy_with(page, text, tmp_path / "new"))
    assert new == pins_of(page) | {(0, "3.0"): A, (1, "3.0"): B}


COMPUTED = {
    "fromkeys": f'dict.fromkeys(("1.0", "2.0"), "{A}")',
    "union": f'{{"1.0": "{A}"}} | {{"2.0": "{B}"}}',
    "keys that are names": f'{{VERSIONS[0]: "{A}"}}',
    "the same dict twice": f'{{"1.0": "{A}"}}, **{{"mark": {{"1.0": "{A}"}} and None}}',
}


@pytest.mark.parametrize("spelling", COMPUTED)
def test_pins_that_are_computed_are_refused_with_what_to_write(
    tmp_path: Path, spelling: str
) -> None:
    page = spelt(tmp_path / "pages", COMPUTED[spelling])
    before = Path(page.path).read_bytes()
    with pytest.raises(pin_source.PinsNotFoundError) as caught:
        pin_source.with_pins(page, OTHER, "3.0")
    assert caught.value.name == "pins-not-found" and f'"3.0": "{C}"' in caught.value.next
    assert Path(page.path).read_bytes() == before


def test_pages_of_ours_can_be_pinned_further(tmp_path: Path) -> None:
    """With the text that they have, for a version to come; only pins in a module that a page
    imports are added by hand."""
    refused = []
    for name, page in catalogue.load().items():
        versions = [version for edit in page.patch.edits for version in edit.pins]
        # A page may be for branches alone.
        newest = ([each for each in versions if each[0].isdigit()] or versions)[-1]
        wanted = {i: e.pins[newest] for i, e in enumerate(page.patch.edits) if newest in e.pins}
        try:
            data = pin_source.with_pins(page, wanted, "99.0")
        except pin_source.PinsNotFoundError:
            refused.append(name)
            continue
        new = pins_of(pin_source.copy_with(page, data, tmp_path / name))
        added = {(index, "99.0"): pin for index, pin in wanted.items()}
        assert new == pins_of(page) | added, name
    assert refused == ["float16_keep_fp32", "mhc_connections"]
