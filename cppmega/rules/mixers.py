"""Rules of the sizes of Mamba-3 and M2RNN mixers, which are stated in the environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cppmega.rules.combinations import M2RNN, MAMBA3
from cppmega.rules.rule import Rule, Run
from cppmega.sizes import mixers
from cppmega.sizes.mixers import Mamba3

DECAY = "mixer.decay_"
"""End of the name of a Mamba-3 mixer's buffer in a checkpoint, before the definition."""


def _mamba3(condition: Callable[[Run, Mamba3], object]) -> Callable[[Run], object]:
    """A question about a run with Mamba-3 layers; the sentences may name its sizes."""

    def asked(run: Run) -> object:
        sizes = mixers.mamba3(run.cppmega_variables)
        return sizes is not None and condition(run, sizes) and {"sizes": sizes}

    return asked


def _heads_do_not_divide(run: Run, sizes: Mamba3) -> bool:
    hidden = run.hidden_size
    if hidden is None:
        return False
    return bool(sizes.expand * hidden % sizes.head_dim or sizes.heads(hidden) % sizes.groups)


def _no_head_of_m2rnn(run: Run) -> object:
    sizes = mixers.m2rnn(run.cppmega_variables)
    if sizes is None or run.hidden_size is None:
        return False
    return sizes.heads(run.hidden_size) < 1 and {"sizes": sizes}


def _m2rnn_is_not_shared_out(run: Run) -> object:
    sizes, ranks = mixers.m2rnn(run.cppmega_variables), run.tensor_model_parallel_size or 1
    if sizes is None or run.hidden_size is None:
        return False
    heads = sizes.heads(run.hidden_size)
    return (sizes.key_dim % ranks or 0 < heads < ranks) and {"sizes": sizes, "heads": heads}


def _other_definition(run: Run) -> object:
    """Whether a checkpoint's Mamba-3 layers compute A in another way, and in which ways."""
    definitions = {name.partition(DECAY)[2] for name in run.saved if DECAY in name}
    sizes = mixers.mamba3(run.cppmega_variables)
    wanted = {sizes.definition} if sizes is not None else set()
    if not run.saved or definitions == wanted:
        return False
    names: list[Any] = [", ".join(sorted(each)) or "no Mamba-3" for each in (definitions, wanted)]
    return {"saved": names[0], "wanted": names[1]}


RULES: tuple[Rule, ...] = (
    Rule(
        concerns=MAMBA3.name,
        when=_mamba3(_heads_do_not_divide),
        what="{sizes.expand} x {hidden_size} channels of Mamba-3 cannot be split into heads of "
        "{sizes.head_dim} in {sizes.groups} groups of equal size.",
        why="Every group of keys and queries serves the same number of heads.",
        cure="another head_dim, expand or groups in the recipe's field mamba3",
    ),
    Rule(
        concerns=MAMBA3.name,
        when=_mamba3(lambda run, sizes: sizes.groups % (run.tensor_model_parallel_size or 1)),
        what="{sizes.groups} groups of Mamba-3 cannot be split over {tensor_model_parallel_size} "
        "tensor-parallel ranks.",
        why="A rank holds complete groups, with the heads that they serve.",
        cure="a tensor_model_parallel_size that divides the groups",
    ),
    Rule(
        concerns=M2RNN.name,
        when=_no_head_of_m2rnn,
        what="A width of {hidden_size} is less than an M2RNN key of {sizes.key_dim} and a value "
        "of {sizes.value_dim}.",
        why="The mixer would have no head.",
        cure="a smaller key_dim or value_dim in the recipe's field m2rnn",
    ),
    Rule(
        concerns=M2RNN.name,
        when=_m2rnn_is_not_shared_out,
        what="{heads} heads of M2RNN and a key of {sizes.key_dim} cannot be split over "
        "{tensor_model_parallel_size} tensor-parallel ranks.",
        why="Every rank has at least one head, and an equal part of the key.",
        cure="a tensor_model_parallel_size that divides key_dim and is at most the heads",
    ),
    Rule(
        concerns=MAMBA3.name,
        name="checkpoint-of-another-model",
        when=_other_definition,
        what="The checkpoint's Mamba-3 layers compute A by {saved}; this run's, by {wanted}.",
        why="The parameters have the same names and shapes, but define a different model.",
        cure="give the recipe's field mamba3 the definition of the run that saved it",
    ),
)
