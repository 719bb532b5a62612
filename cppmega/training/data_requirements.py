"""Requirements on the data of a training run, checked without torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from msgspec import structs

from cppmega.data import corpus, structure_files, tokenizers
from cppmega.data import reading as data_reading
from cppmega.data import record as data_record
from cppmega.data.corpus import Corpus
from cppmega.data.record import Reading
from cppmega.data.structure import LEVELS, Kind
from cppmega.data.tokenizers import TokenizerRecord
from cppmega.errors import CppmegaError
from cppmega.recipe import Recipe
from cppmega.recipe.run_options import RunOptions
from cppmega.training.batch import DataTokens
from cppmega.training.requirements import Start


def check(
    recipe: Recipe,
    options: RunOptions,
    read: Callable[[Corpus], Reading | None] = data_record.kept,
) -> DataTokens:
    """Check that the data is present, complete, and prepared for this model's vocabulary.

    Args:
        recipe: the run.
        options: name the datasets and their tokenizer, or ask for mock data.
        read: returns what a complete dataset contains; None: unknown, so its ends are inspected.

    Raises:
        CppmegaError: `no-data`, `data-and-mock-data`, `data-too-small`, `tokenizer-unknown`,
            `tokenizer-differs`, `vocabulary-too-small`, `structure-differs`, `no-held-out-data`,
            `argument-without-effect`, `held-out-data-trained-on`, and what `corpus`,
            `data_reading`, `structure_files` and `tokenizers` raise.
    """
    Start(recipe, options).check("data")
    if options.mock_data:
        _check_structure_rows(recipe)
        evaluated = "mock" if recipe.eval_interval else ""
        return DataTokens(recipe.vocab_size, recipe.vocab_size - 1, "mock", evaluated)
    datasets = [corpus.open_(Path(prefix)) for prefix in (*options.data, *options.held_out)]
    described = [_described(one, options.tokenizer, options.eod) for one in datasets]
    for one, other in zip(datasets, described, strict=True):
        if other != described[0]:
            raise _differs(one, other, described[0], f"as {datasets[0].prefix}")
    vocab = described[0].vocab_size
    if vocab > recipe.vocab_size:
        raise CppmegaError(
            "vocabulary-too-small",
            f"The data has {vocab} token ids, recipe {recipe.name} {recipe.vocab_size}.",
            "The embedding has no rows for the highest ones.",
            f"--set vocab_size={vocab}, or data prepared with the model's tokenizer",
        )
    _check_structure_rows(recipe)
    for one in datasets:
        _check_one(one, recipe, vocab, read)
    trained, held_out = datasets[: len(options.data)], datasets[len(options.data) :]
    if held_out:
        _check_held_out(held_out, trained, recipe)
    names = ("+".join(map(data_record.name, part)) for part in (trained, held_out))
    return DataTokens(recipe.vocab_size, described[0].eod, *names)


def _check_held_out(held_out: list[Corpus], trained: list[Corpus], recipe: Recipe) -> None:
    """Check that nothing is evaluated on what is trained on, or twice in one evaluation.

    Raises:
        CppmegaError: `held-out-data-trained-on`, `data-too-small`.
    """
    names = {data_record.name(one): one.prefix for one in trained}
    for one in held_out:
        if data_record.name(one) in names:
            raise CppmegaError(
                "held-out-data-trained-on",
                f"{one.prefix} (--held-out) has the tokens of {names[data_record.name(one)]} "
                "(--data).",
                "Its loss would show how well the model memorizes.",
                "--held-out with data prepared from other sources",
            )
    wanted = recipe.eval_iters * recipe.global_batch_size
    # Megatron draws up to half a percent more from each dataset of a mix.
    drawn = wanted if len(held_out) == 1 else math.ceil(wanted * 1.01)
    there = sum((one.tokens - 1) // recipe.seq_length for one in held_out)
    if there < drawn:
        batch = recipe.global_batch_size * recipe.seq_length
        raise CppmegaError(
            "data-too-small",
            f"The held-out data has {there} samples of {recipe.seq_length} tokens; one evaluation "
            f"takes {wanted}, of eval_tokens={recipe.eval_tokens} in batches of {batch}.",
            "Some would count twice.",
            f"--set eval_tokens={max(there // recipe.global_batch_size, 1) * batch}, or more "
            "held-out data",
        )


def _check_one(
    dataset: Corpus, recipe: Recipe, vocab: int, read: Callable[[Corpus], Reading | None]
) -> None:
    """Check what one dataset contains."""
    corpus.check_width(dataset, vocab)
    reading = read(dataset)
    if reading is not None:
        data_reading.check(dataset, reading, vocab)
    else:
        data_reading.check_unread(dataset, vocab)
    if dataset.tokens <= recipe.seq_length:
        raise CppmegaError(
            "data-too-small",
            f"{dataset.prefix} has {dataset.tokens} tokens; a sample takes "
            f"{recipe.seq_length + 1}.",
            "There would not be a single sample.",
            "prepare more text",
        )
    if recipe.structure is not None:
        structure_files.check(dataset, read)


def _check_structure_rows(recipe: Recipe) -> None:
    """Check that a structure embedding has a row for each kind and depth, and no other.

    Raises:
        CppmegaError: `structure-differs`.
    """
    own = recipe.structure
    if own is not None and (own.categories, own.levels) != (len(Kind), LEVELS):
        raise CppmegaError(
            "structure-differs",
            f"The structure embedding of recipe {recipe.name} has {own.categories} categories and "
            f"{own.levels} levels; tokens have {len(Kind)} kinds and {LEVELS} depths.",
            "Rows would be missing, or never be trained.",
            f"Structure(categories={len(Kind)}, levels={LEVELS}) in the recipe",
        )


def _described(dataset: Corpus, tokenizer: str | None, eod: str | None) -> TokenizerRecord:
    """The tokenizer that produced a dataset.

    Raises:
        CppmegaError: `tokenizer-unknown`, `tokenizer-differs`, and what `tokenizers` raises.
    """
    own = dataset.card.tokenizer if dataset.card is not None else None
    if tokenizer is None:
        if own is None:
            raise CppmegaError(
                "tokenizer-unknown",
                f"{dataset.prefix} has no card: it is not known which tokenizer made it.",
                "The end of a document and the size of the vocabulary are the tokenizer's.",
                "--tokenizer byte, or the path of its tokenizer.json",
            )
        return own
    named = tokenizers.load(tokenizer, eod).describe()
    if own is not None and own != named:
        raise _differs(dataset, own, named, "than --tokenizer")
    return named


def _differs(
    dataset: Corpus, own: TokenizerRecord, other: TokenizerRecord, whose: str
) -> CppmegaError:
    theirs = structs.asdict(other)
    parts = [
        f"{name} {value} and {theirs[name]}"
        for name, value in structs.asdict(own).items()
        if value != theirs[name]
    ]
    return CppmegaError(
        "tokenizer-differs",
        f"{dataset.prefix} was prepared with another tokenizer {whose}: {', '.join(parts)}.",
        "Its ids would mean other tokens.",
        "leave --tokenizer out to use the data's own, or prepare the data again",
    )
