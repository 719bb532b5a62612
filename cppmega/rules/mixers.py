"""Rules of the sizes of Mamba-3 and M2RNN mixers, which are stated in the environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cppmega.rules.combinations import M2RNN, MAMBA3
from cppmega.rules.rule import Table, stated
from cppmega.sizes import mixers

DECAY = "mixer.decay_"
"""End of the name of a Mamba-3 mixer's buffer in a checkpoint, before the definition."""


def _sized(
    sizes: Callable[[Any], Any], wrong: Callable[[Any, Any], object]
) -> Callable[[Any], object]:
    """A question about a mixer's sizes, which the sentences may name, and the run."""

    def asked(run: Any) -> object:
        own, hidden = sizes(run.cppmega_variables), run.hidden_size
        if hidden is None or not wrong(own, run):
            return False
        return {"sizes": own, "heads": own.heads(hidden), "ranks": _ranks(run)}

    return asked


def _heads_do_not_divide(sizes: mixers.Mamba3, run: Any) -> bool:
    channels = sizes.expand * run.hidden_size
    return bool(channels % sizes.head_dim or sizes.heads(run.hidden_size) % sizes.groups)


def _ranks(run: Any) -> int:
    """The number of ranks that share out the heads of a layer."""
    return (run.tensor_model_parallel_size or 1) * (run.context_parallel_size or 1)


def _heads_of_m2rnn_not_shared(sizes: mixers.M2RNN, run: Any) -> bool:
    part_of_key = sizes.key_dim % (run.tensor_model_parallel_size or 1)
    return bool(part_of_key or 0 < sizes.heads(run.hidden_size) < _ranks(run))


def _other_definition(run: Any) -> object:
    """Whether a checkpoint's Mamba-3 layers compute A in another way, and in which ways."""
    definitions = {name.partition(DECAY)[2] for name in run.saved if DECAY in name}
    sizes = mixers.mamba3(run.cppmega_variables)
    wanted = {sizes.definition} if sizes is not None else set()
    if not run.saved or definitions == wanted:
        return False
    saved, own = (", ".join(sorted(each)) or "no Mamba-3" for each in (definitions, wanted))
    return {"saved": saved, "wanted": own}


_TABLE: Table = {
    MAMBA3: {
        "{sizes.expand} x {hidden_size} channels of Mamba-3 cannot be split into heads of "
        "{sizes.head_dim} in {sizes.groups} groups of equal size.": (
            _sized(mixers.mamba3, _heads_do_not_divide),
            "Every group of keys and queries serves the same number of heads.",
            "another head_dim, expand or groups in the recipe's field mamba3",
        ),
        "{sizes.groups} groups of Mamba-3 cannot be split over {ranks} tensor- and "
        "context-parallel ranks.": (
            _sized(mixers.mamba3, lambda own, run: own.groups % _ranks(run)),
            "A rank computes complete groups, with the heads that they serve.",
            "ranks whose number divides the groups",
        ),
    },
    M2RNN: {
        "A width of {hidden_size} is less than an M2RNN key of {sizes.key_dim} and a value of "
        "{sizes.value_dim}.": (
            _sized(mixers.m2rnn, lambda own, run: own.heads(run.hidden_size) < 1),
            "The mixer would have no head.",
            "a smaller key_dim or value_dim in the recipe's field m2rnn",
        ),
        "{heads} heads of M2RNN and a key of {sizes.key_dim} cannot be split over {ranks} tensor- "
        "and context-parallel ranks.": (
            _sized(mixers.m2rnn, _heads_of_m2rnn_not_shared),
            "Every rank has a head, and every tensor-parallel rank an equal part of the key.",
            "a tensor_model_parallel_size that divides key_dim, and not more ranks than heads",
        ),
    },
    MAMBA3.name: {
        "The checkpoint's Mamba-3 layers compute A by {saved}; this run's, by {wanted}.": (
            _other_definition,
            "The parameters have the same names and shapes, but define a different model.",
            "give the recipe's field mamba3 the definition of the run that saved it",
            "checkpoint-of-another-model",
        ),
    },
}

RULES = stated(_TABLE)
