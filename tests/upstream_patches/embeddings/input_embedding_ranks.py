"""Models with further input embeddings on forked ranks: trained, saved, loaded, and looked into.

Imported in the process that runs a tree, never by pytest itself. Importing megatron-core takes
longer than all of the checks, so that one process runs them, and every rank is a fork of it.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from torch.utils.flop_counter import FlopCounterMode

from cppmega.features.embeddings.layer import ALIGNED, feeding, of_trunk
from cppmega.sizes import embeddings as sizes
from cppmega.sizes import stated as environment_sizes
from tests.configurations import models, training
from tests.configurations.batches import DOCUMENTS, LENGTH, PADDING, SAMPLES, Batch, micro_batch
from tests.configurations.late import is_same_late
from tests.configurations.settings import Configuration
from tests.upstream_patches import forked_ranks
from tests.upstream_patches.forked_ranks import on_ranks, refusal, without_dropout

END = 5
NGRAMS = sizes.NgramHash((2, 3), 2, (389, 397, 401, 409), dim=8)
"""So large that the replicas of a first stage cut the tables in two, and those of a last do not."""
STRUCTURE = sizes.Structure(bottleneck=6)
STATED = {
    "CPPMEGA_NGRAM_HASH": environment_sizes.text(NGRAMS),
    "CPPMEGA_STRUCTURE": environment_sizes.text(STRUCTURE),
}
ADDED = "embedding.input_embeddings."
GPT = Configuration(model="gpt", mtp=2, packing="padded", optimizer="distributed")
HYBRID = replace(GPT, model="hybrid", packing="none")


def with_them(**changed: str) -> Any:
    """The variables that state what a model adds."""
    return mock.patch.dict(os.environ, {**STATED, **changed})


def fed(batch: Batch) -> Batch:
    """The batch with what a loop attaches to its tokens."""
    feeding(batch.tokens, END, *structure_of(batch.tokens, batch.positions))
    return batch


def structure_of(tokens: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Kinds and depths of which every one occurs, and which no shift leaves as they are."""
    return (tokens + positions) % STRUCTURE.categories, (tokens * 3 + positions) % STRUCTURE.levels


class Run(training.Run):
    """A model in fp32 under the setting's optimizer, whose batches say where documents end."""

    def __init__(self, setting: Configuration) -> None:
        with mock.patch.object(models, "configured", forked_ranks.comparable):
            super().__init__(setting, seed=1)

    def _forward(self, batches: Any, model: Any) -> Any:
        return super()._forward(iter([fed(next(batches))]), model)


def trained(setting: Configuration, *given: Any) -> tuple[Any, ...]:
    """What `forked_ranks.trained` returns, of the parameters only what the embeddings have."""
    with mock.patch.object(training, "_loss", forked_ranks.summed):
        rows, named, still = forked_ranks.trained(Run, setting, *given)
    added = {name.partition(ADDED)[2]: p for name, p in named.items() if ADDED in name}
    return rows, added, still


def rows_without(folder: Path) -> dict[str, Any]:
    """Training without the embeddings, to the bit."""
    return {
        setting.model: on_ranks(folder, setting, trained, range(1, 3))[0][0]
        for setting in (replace(GPT, packing="packed"), HYBRID)
    }


def check_an_untrained_model_is_the_one_without(folder: Path) -> None:
    """In the first step, whose gradient reaches only the projections; all learn in the second."""
    for setting in (GPT, HYBRID):
        ((off, nothing, _),) = on_ranks(folder, setting, trained, range(1, 3))
        with with_them():
            ((on, added, still),) = on_ranks(folder, setting, trained, range(1, 3))
        assert not nothing and added
        assert off[0]["losses"] == on[0]["losses"]
        assert off[1]["losses"] != on[1]["losses"]
        assert not still, f"no gradient in the second step: {still}"


def check_layouts_train_as_one_rank(folder: Path) -> None:
    """From the checkpoint of one rank: tensor and sequence parallel, pipeline, and recompute."""
    layouts = (
        replace(GPT, tensor=2, sequence_parallel=True),
        replace(GPT, recompute="uniform"),
        replace(HYBRID, tensor=2),
        replace(HYBRID, pipeline=2),
        replace(GPT, context=2),
        replace(HYBRID, context=2),
    )
    with with_them():
        for alone in (GPT, HYBRID):
            saved = folder / alone.model
            on_ranks(folder, alone, trained, range(1, 3), None, saved)
            one = on_ranks(folder, alone, trained, range(3, 5), saved)
            for layout in layouts:
                if layout.model == alone.model:
                    many = on_ranks(folder, layout, trained, range(3, 5), saved)
                    assert_same(one, many, layout.name)


def check_sharded_states_and_a_checkpoint_of_two_stages(folder: Path) -> None:
    """Two replicas cut the optimizer's states of both stages alike; one rank loads the result."""
    replicas = replace(HYBRID, data=2)
    stages = replace(replicas, pipeline=2)
    first, last = folder / "replicas", folder / "stages"
    with with_them():
        on_ranks(folder, replicas, trained, range(1, 3), None, first)
        one = on_ranks(folder, replicas, trained, range(3, 5), first)
        many = on_ranks(folder, stages, trained, range(3, 5), first, last)
        assert_same(one, many, stages.name)
        ((_, loaded, _),) = on_ranks(folder, HYBRID, looked_at, last)
    for name, value in loaded.items():
        assert value.equal(many[0][1][name]), name


def looked_at(setting: Configuration, folder: Path) -> tuple[Any, ...]:
    """What a checkpoint has, without a step."""
    return trained(setting, range(0), folder)


def assert_same(one: list[Any], many: list[Any], name: str) -> None:
    """The losses and the norms of two layouts, and the embeddings on every rank that has them."""
    forked_ranks.assert_same(one, many, name)
    wanted = one[0][1]
    assert all(value.any() for value in wanted.values())
    for _, added, _ in many:
        assert added.keys() == wanted.keys()
        for part, value in added.items():
            assert value.equal(many[0][1][part]), f"{name}: {part} differs among the ranks"
            torch.testing.assert_close(value, wanted[part], rtol=0, atol=1e-6, msg=f"{name} {part}")


def check_a_checkpoint_of_other_multipliers_is_refused(folder: Path) -> None:
    """By Megatron's own loading, which fills tensors in place."""
    saved = folder / "hashed"
    with with_them():
        on_ranks(folder, GPT, trained, range(1, 2), None, saved)
        on_ranks(folder, GPT, looked_at, saved)

    def refused(setting: Configuration) -> str:
        return refusal(partial(looked_at, setting, saved))

    with with_them(
        CPPMEGA_NGRAM_HASH=environment_sizes.text(replace(NGRAMS, seed=NGRAMS.seed + 1))
    ):
        assert on_ranks(folder, GPT, refused) == ["checkpoint-of-another-model"]


def check_what_a_token_is_embedded_as(folder: Path) -> None:
    """In a pack as in its document alone, and in a depth as in the trunk."""
    with with_them():
        for setting in (GPT, HYBRID):
            on_ranks(folder, setting, embedded_alike)


def embedded_alike(setting: Configuration) -> None:
    """Compare what the embedding returns in one forward pass."""
    model, outputs = filled(setting), []
    batch = micro_batch(setting, 1, 0, 0, 0, parallel_state.get_context_parallel_group())
    batch.tokens[:, [4, 20]] = END
    model.embedding.register_forward_hook(lambda *call: outputs.append(call[-1].detach()))
    forward(model, fed(batch))
    trunk, *depths = outputs
    structure = structure_of(batch.tokens, batch.positions)
    assert len(depths) == setting.mtp
    for row in range(len(batch.tokens)):
        for begin, end in documents(setting, batch.tokens[row].tolist()):
            tokens, *own = (x[row : row + 1, begin:end].clone() for x in (batch.tokens, *structure))
            alone = feeding(tokens, END, *own)
            places = torch.arange(end - begin)[None]
            found = of_trunk(model.embedding, alone, places, None)(
                input_ids=alone, position_ids=places
            )
            torch.testing.assert_close(found[:, 0], trunk[begin:end, row], rtol=0, atol=1e-5)
    for number, depth in enumerate(depths, start=1):
        for begin, end in shifted_within(setting):
            ours, theirs = depth[begin : end - number], trunk[begin + number : end]
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def check_parameters_are_read_in_calls_of_their_modules(folder: Path) -> None:
    """Where Megatron waits for those that it still gathers."""
    with with_them():
        for setting in (GPT, HYBRID):
            on_ranks(folder, setting, read_late)


def read_late(setting: Configuration) -> None:
    """Compare a forward pass with one whose parameters arrive as their modules are called."""
    model = filled(setting)
    batch = fed(micro_batch(setting, 1, 0, 0, 0, parallel_state.get_context_parallel_group()))
    assert is_same_late(model, lambda: [forward(model, batch)])


def documents(setting: Configuration, tokens: list[int]) -> list[tuple[int, int]]:
    """Where documents begin and end: at the boundaries of a pack, and after every end token."""
    ends = {number + 1 for number, token in enumerate(tokens) if token == END}
    if setting.packing == "padded":
        ends |= set(itertools.accumulate(DOCUMENTS))
    return list(itertools.pairwise(sorted({0, *ends, LENGTH})))


def shifted_within(setting: Configuration) -> list[tuple[int, int]]:
    """What MTP shifts as one piece, without padding."""
    if setting.packing == "none":
        return [(0, LENGTH)]
    ends = itertools.accumulate(DOCUMENTS)
    return [
        (end - length, end - padding)
        for end, length, padding in zip(ends, DOCUMENTS, PADDING, strict=True)
    ]


def filled(setting: Configuration) -> Any:
    """A model whose added parameters are all at work."""
    with mock.patch.object(models, "configured", without_dropout):
        _, model = models.build(setting, seed=1)
    for name, parameter in model.named_parameters():
        if ADDED in name:
            torch.nn.init.normal_(parameter)
    return model


def forward(model: Any, batch: Batch) -> torch.Tensor:
    """The model's losses."""
    out: torch.Tensor = model(
        batch.tokens,
        batch.positions,
        None,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        packed_seq_params=batch.pack,
    )
    return out


def check_a_model_that_is_not_fed_stops(folder: Path) -> None:
    """As it does for structure ids that it has no row for; they never count as nothing."""

    def named(setting: Configuration) -> list[str]:
        model = filled(setting)
        batch = micro_batch(setting, 1, 0, 0, 0, parallel_state.get_context_parallel_group())
        kinds, depths = structure_of(batch.tokens, batch.positions)
        given = ((), (kinds,), (kinds + 1, depths), (kinds, depths - 1), (kinds, depths[:1]))
        calls = [
            partial(forward, model, batch),
            partial(model.embedding, batch.tokens, batch.positions),
        ]
        for wrong in given:
            tokens = feeding(batch.tokens.clone(), END, *wrong)
            calls.append(partial(forward, model, replace(batch, tokens=tokens)))
        return [refusal(call) for call in calls]

    with with_them():
        (names,) = on_ranks(folder, HYBRID, named)
    wanted = {"input-embeddings-not-fed": 4, "structure-out-of-range": 3}
    assert names == [name for name, times in wanted.items() for _ in range(times)]


def counted(folder: Path) -> dict[str, float]:
    """Parameters, and operations per token, of what the embeddings add to a hybrid model.

    Without the columns of zeros, and without the product of the structure's factors, which a step
    computes once and not for each token.
    """

    def count(setting: Configuration) -> tuple[int, float]:
        model = filled(setting)
        batch = micro_batch(setting, 1, 0, 0, 0, parallel_state.get_context_parallel_group())
        with FlopCounterMode(display=False) as counter:
            forward(model, fed(batch)).sum().backward()
        total = counter.get_total_flops() / (SAMPLES * LENGTH)
        return sum(p.numel() for p in model.parameters()), total

    (without,) = on_ranks(folder, HYBRID, count)
    with with_them():
        (whole,) = on_ranks(folder, HYBRID, count)
    rows, own = STRUCTURE.categories + STRUCTURE.levels, len(NGRAMS.tables) * NGRAMS.dim
    filled_up = -(rows + own) % ALIGNED
    once = rows * STRUCTURE.bottleneck / (SAMPLES * LENGTH)
    calls = 1 + HYBRID.mtp
    apart = calls * 3 * 2 * models.configured(HYBRID).hidden_size * (filled_up + once)
    return {"parameters": whole[0] - without[0], "flops": whole[1] - without[1] - apart}
