"""The datasets that a Megatron command line names are intact, and read before training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cppmega.data import corpus
from cppmega.data import reading as data_reading
from cppmega.data.reading import Allowance
from cppmega.errors import CppmegaError
from cppmega.host import json_text
from cppmega.preflight.checks.data import how_read
from cppmega.preflight.context import Context
from cppmega.preflight.findings import NotApplicable

AFTER: tuple[str, ...] = ("line_parses",)

_LISTS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
_NO_INDEX = ("sft", "multimodal")
"""Switches that make the paths name files of another kind."""


def check(context: Context) -> str:
    """Read every dataset that the line names.

    Raises:
        CppmegaError: what `corpus` and `data_reading` raise, `data-list-broken`.
        NotApplicable: a recipe is launched, or the line names no indexed dataset.
    """
    if context.recipe is not None:
        raise NotApplicable("the check data covers the data of a recipe")
    args = vars(context.megatron_args)
    named = list(dict.fromkeys(named_in(args)))
    prefixes = [name for name in named if _is_indexed(name, args)]
    if not prefixes:
        raise NotApplicable("the line names no indexed dataset on disk")
    allowance = context.allowance
    highest = max(_highest(Path(name), allowance, _vocab_size(args)) for name in prefixes)
    left = f"; not inspected: {', '.join(n for n in named if n not in prefixes)}"
    return (
        f"{how_read(allowance)}; {len(prefixes)} datasets, highest id {highest}"
        f"{left if len(prefixes) < len(named) else ''}"
    )


def named_in(args: Mapping[str, Any]) -> Iterator[str]:
    """Every prefix that Megatron would open, weights left out.

    Raises:
        CppmegaError: `data-list-broken`.
    """
    for name in _LISTS:
        yield from without_weights(args.get(name) or ())
    try:
        if args.get("data_args_path"):
            yield from without_weights(Path(args["data_args_path"]).read_text().split())
        if args.get("per_split_data_args_path"):
            splits = json_text.read(Path(args["per_split_data_args_path"]))
            for part in splits.values():
                yield from without_weights(part.split() if isinstance(part, str) else part or ())
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise CppmegaError(
            "data-list-broken",
            f"The file with the list of datasets cannot be read: {error}",
            "Every rank would fail when it reads the file.",
            "correct --data-args-path or --per-split-data-args-path",
        ) from error


def without_weights(blend: Sequence[str]) -> list[str]:
    """The prefixes of a blend as Megatron reads it: in pairs, if each begins with a weight."""
    pairs = list(zip(blend[::2], blend[1::2], strict=False))
    if len(blend) % 2 == 0 and all(_is_number(weight) for weight, _ in pairs):
        return [prefix for _, prefix in pairs]
    return list(blend)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _is_indexed(name: str, args: Mapping[str, Any]) -> bool:
    """Whether it names an indexed dataset: not object storage, not another kind of dataset."""
    external = args.get("dataloader_type") == "external"
    if "://" in name or external or any(args.get(switch) for switch in _NO_INDEX):
        return False
    return corpus.with_suffix(Path(name), ".idx").exists() or not Path(name).exists()


def _vocab_size(args: Mapping[str, Any]) -> int | None:
    """The vocabulary that the line names; None: only a rank's tokenizer determines it."""
    size = args.get("vocab_size")
    if not isinstance(size, int):
        return None
    # Releases before 0.19 add an end token.
    return size + (args.get("tokenizer_type") == "NullTokenizer")


def _highest(prefix: Path, allowance: Allowance, vocab_size: int | None) -> int:
    """The highest id of a dataset, checked in passing; -1 where it was not read completely."""
    dataset = corpus.open_(prefix)
    reading = allowance.read(dataset)
    if reading is None:
        if vocab_size is not None:
            corpus.check_ids(dataset, vocab_size)
        return -1
    data_reading.check(dataset, reading, vocab_size or max(reading.highest + 1, 1))
    return reading.highest
