"""Hybrid layer patterns: what the letters mean, and which Megatron release supports which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from cppmega.errors import CppmegaError

LETTERS = {
    "D": "DeepSeek sparse attention (DSA)",
    "+": "multi-latent attention (MLA)",
    "*": "attention",
    "E": "mixture of experts",
    "-": "dense MLP",
    "M": "Mamba-3",
    "R": "M2RNN",
}
"""Letter -> its layer. A recipe with sizes of Mamba-2 has Megatron's own M, others our Mamba-3."""

_SINCE = {
    **{"*": (0, 16), "E": (0, 16), "-": (0, 16), "D": (0, 18), "+": (0, 19)},
    **{"M": (0, 19), "R": (0, 19)},
}
"""Letter -> first Megatron release line that can build it; of M, Mamba-3."""

OWN = frozenset("MR")
"""Letters whose mixers are cppmega's, by the page own_mixers."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed pattern."""

    main: str
    """The trunk, with `|` where a pipeline stage begins."""
    mtp: str
    """The layers of one MTP depth; empty: no MTP."""
    depths: int

    @property
    def trunk(self) -> str:
        """Only the trunk's letters."""
        return self.main.replace("|", "")

    @property
    def letters(self) -> str:
        """Every layer that is built: the trunk's and each depth's."""
        return self.trunk + self.mtp * self.depths

    @property
    def stages(self) -> int:
        """Number of pipeline stages that the pattern marks; 1 where it marks none."""
        return self.main.count("|") + 1

    def counts(self) -> Counter[str]:
        """Number of layers of each letter, trunk and MTP together."""
        return Counter(self.letters)

    def divided(self, stages: int) -> Pattern:
        """The same layers divided into that many stages of equal length.

        A pattern that marks its own stages, or cannot be divided evenly, is unchanged.
        """
        width, rest = divmod(len(self.main), stages)
        if self.stages > 1 or rest:
            return self
        parts = (self.main[start : start + width] for start in range(0, len(self.main), width))
        return Pattern("|".join(parts), self.mtp, self.depths)

    def without(self, letters: Iterable[str]) -> Pattern:
        """The same pattern with some letters left out."""
        drop = str.maketrans("", "", "".join(letters))
        mtp = self.mtp.translate(drop)
        return Pattern(self.main.translate(drop), mtp, self.depths if mtp else 0)

    def render(self) -> str:
        """The pattern in Megatron's notation."""
        return "/".join([self.main, *[self.mtp] * self.depths])


def parse(text: str) -> Pattern:
    """Read a pattern such as `DE+EDE/D-/D-`.

    Raises:
        CppmegaError: `bad-pattern`.
    """
    main, *depths = text.split("/")
    if not main.replace("|", ""):
        raise _bad_pattern(text, "it has no trunk layers", "The model would have no layers.")
    if len(set(depths)) > 1:
        raise _bad_pattern(
            text,
            f"its MTP depths differ: {', '.join(dict.fromkeys(depths))}",
            "Megatron builds every depth from one pattern.",
        )
    if depths and not depths[0]:
        raise _bad_pattern(text, "an MTP depth is empty", "Megatron would build no MTP at all.")
    mtp = depths[0] if depths else ""
    if "|" in mtp:
        raise _bad_pattern(text, "an MTP depth holds a |", "MTP runs on the last pipeline stage.")
    for place, letter in enumerate(text):
        if letter not in LETTERS and letter not in "/|":
            known = ", ".join(f"{key} {name}" for key, name in LETTERS.items())
            raise _bad_pattern(
                text,
                f"character {place + 1}, {letter!r}, is not a layer",
                f"The letters are {known}; / starts an MTP depth, | a pipeline stage.",
            )
    if "*" in text and set("D+") & set(text):
        raise _bad_pattern(
            text,
            "it mixes * with D or +",
            "Megatron has one attention configuration for a whole model.",
        )
    return Pattern(main, mtp, len(depths))


def unknown_to(pattern: Pattern, version: tuple[int, int]) -> list[str]:
    """Letters of the pattern that no module of that Megatron release builds, in order."""
    return [letter for letter in dict.fromkeys(pattern.letters) if version < _SINCE[letter]]


def since(letter: str) -> str:
    """The first release line with the letter, for messages."""
    return ".".join(map(str, _SINCE[letter]))


def _bad_pattern(text: str, what: str, why: str) -> CppmegaError:
    return CppmegaError(
        "bad-pattern",
        f"Pattern {text!r}: {what}.",
        why,
        "correct the pattern, for example DE+EDE/D-/D-",
    )
