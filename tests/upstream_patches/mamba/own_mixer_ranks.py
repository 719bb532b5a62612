"""Hybrid models with Mamba-3 layers on forked ranks: trained, saved, loaded, packed, refused.

Imported in the process that runs a tree, never by pytest itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state

from cppmega.sizes import mixers as mixer_sizes
from cppmega.sizes import stated as environment_sizes
from tests.configurations import models, training
from tests.configurations.batches import Batch, boundaries, micro_batch
from tests.configurations.late import is_same_late
from tests.configurations.settings import Configuration
from tests.upstream_patches import forked_ranks
from tests.upstream_patches.forked_ranks import (
    assert_same,
    on_ranks,
    refusal,
    without_dropout,
)
from tests.upstream_patches.optimizer.distributed_optimizer import on_cpu

MAMBA3 = mixer_sizes.Mamba3(head_dim=8, state_dim=8, groups=2, rank=2, chunk=8, out_norm=True)
SISO = replace(MAMBA3, rank=1, out_norm=False)
STATED = {"CPPMEGA_MAMBA3": environment_sizes.text(MAMBA3)}
M2RNN = "CPPMEGA_M2RNN"
WITH_M2RNN = {M2RNN: environment_sizes.text(mixer_sizes.M2RNN(key_dim=4, value_dim=2))}
"""Five heads, which two ranks cannot share out equally."""
LAYERS = ["M*R", "M-"]
"""By pipeline stage, with R where its sizes are stated; an MTP depth has `M-`."""
HYBRID = Configuration(model="hybrid", mtp=1, optimizer="distributed")
MAMBA3_FP32 = ("dt_bias", "D", "B_bias", "C_bias", "rank_x", "rank_z", "rank_out")


def with_them(**changed: str) -> Any:
    """The variables that state the mixers' sizes."""
    return mock.patch.dict(os.environ, {**STATED, **changed})


def of_mixers(setting: Configuration, work: Callable[..., Any], *given: Any) -> Any:
    """What `work(setting, *given)` returns for models with mixers in trunk and depths."""
    layers = LAYERS if M2RNN in os.environ else [stage.replace("R", "") for stage in LAYERS]
    with mock.patch.object(models, "LAYERS", layers), mock.patch.object(models, "MTP", "M-"):
        return work(setting, *given)


def in_fp32(setting: Configuration, seed: int = 1) -> training.Run:
    """A model that layouts can be compared by."""
    with mock.patch.object(models, "configured", forked_ranks.comparable):
        return training.Run(setting, seed)


def trained(setting: Configuration, *given: Any) -> tuple[Any, ...]:
    """What `forked_ranks.trained` returns of a model that layouts can be compared by."""
    with mock.patch.object(training, "_loss", forked_ranks.summed):
        return forked_ranks.trained(in_fp32, setting, *given)


def check_layouts_train_as_one_rank(folder: Path) -> None:
    """From the checkpoint of one rank, to which the checkpoint of each is equal."""
    tensor = replace(HYBRID, tensor=2), replace(HYBRID, tensor=2, sequence_parallel=True)
    others = replace(HYBRID, pipeline=2), replace(HYBRID, recompute="uniform")
    context = replace(HYBRID, context=2)
    packed = replace(HYBRID, packing="padded")
    runs = (
        ({"CPPMEGA_MAMBA3": environment_sizes.text(SISO)}, HYBRID, tensor[1:]),
        (WITH_M2RNN, HYBRID, (*tensor, *others, context)),
        (WITH_M2RNN, packed, (replace(packed, context=2),)),
    )
    for number, (changed, single, layouts) in enumerate(runs):
        with with_them(**changed):
            saved = folder / f"one{number}"
            ((_, _, still),) = on_ranks(folder, single, _trained, range(1, 3), None, saved)
            assert not still, f"no gradient in the second step: {still}"
            reference = folder / f"reference{number}"
            one = on_ranks(folder, single, _trained, range(3, 5), saved, reference)
            (theirs,) = on_ranks(folder, HYBRID, _looked_at, reference)
            for at, layout in enumerate(layouts):
                after = folder / f"after{number}{at}"
                many = on_ranks(folder, layout, _trained, range(3, 5), saved, after)
                assert_same(one, many, layout.name)
                (ours,) = on_ranks(folder, HYBRID, _looked_at, after)
                for name, value in theirs.items():
                    close = torch.dist(ours[name], value) < 1e-3 * value.norm()
                    assert close, f"{layout.name}: {name}"


def _trained(setting: Configuration, *given: Any) -> Any:
    return of_mixers(setting, trained, *given)


def _looked_at(setting: Configuration, folder: Path) -> dict[str, torch.Tensor]:
    """The parameters of a checkpoint, and the moments of their gradients."""

    def loaded(setting: Configuration) -> dict[str, torch.Tensor]:
        with on_cpu():
            run = in_fp32(setting)
            run.load(folder)
        (optimizer,) = run.optimizer.chained_optimizers
        return {
            f"{name} {kind}": tensor.detach().clone()
            for name, parameter in run.model.named_parameters()
            for kind, tensor in optimizer._get_main_param_and_optimizer_states(parameter).items()
        }

    return of_mixers(setting, loaded)  # type: ignore[no-any-return]


def check_small_parameters_stay_fp32_and_resume_to_the_bit(folder: Path) -> None:
    """Of a bf16 model, under the distributed optimizer on two replicas and without it."""
    with with_them(**WITH_M2RNN):
        for setting in (replace(HYBRID, data=2), replace(HYBRID, optimizer="float16")):
            saved = folder / setting.optimizer
            saved.mkdir()
            for rows, types in on_ranks(folder, setting, _resumed, saved):
                assert rows["continued"] == rows["resumed"], setting.name
                kept = {name for name, dtype in types.items() if dtype == torch.float32}
                wanted = {name for name in types if _is_fp32(name, types)}
                assert kept == wanted and len(kept) == 3 * len(MAMBA3_FP32) + 2, kept ^ wanted


def _is_fp32(name: str, among: Any) -> bool:
    mixer, _, own = name.rpartition(".")
    of_mamba3 = f"{mixer}.B_bias" in among
    return own in (MAMBA3_FP32 if of_mamba3 else ("A_log", "dt_bias"))


def _resumed(setting: Configuration, folder: Path) -> Any:
    rows = dict(of_mixers(setting, lambda *given: list(training.train(*given)), folder))
    with on_cpu():
        run = of_mixers(setting, training.Run, 1)
    return rows, {name: p.dtype for name, p in run.model.module.named_parameters()}


def check_documents_of_a_pack_do_not_see_each_other(folder: Path) -> None:
    """Their outputs change with their own tokens alone, by mixers of either rank."""
    for changed in (WITH_M2RNN, {"CPPMEGA_MAMBA3": environment_sizes.text(SISO)}):
        with with_them(**changed):
            on_ranks(folder, replace(HYBRID, packing="packed", mtp=0), _apart)


def _apart(setting: Configuration) -> None:
    with mock.patch.object(models, "configured", without_dropout):
        _, model = of_mixers(setting, models.build, 1)
    batch = micro_batch(setting, 1, 0, 0, 0, parallel_state.get_context_parallel_group())
    before = _outputs(model, batch)
    bounds = boundaries(setting)
    batch.tokens[:, bounds[1]] += 1
    after = _outputs(model, batch)
    changed = (before != after).flatten().tolist()
    assert changed == [bounds[1] <= place < bounds[2] for place in range(bounds[-1])]
    torch.testing.assert_close(_outputs(model, replace(batch, pack=None))[:, 0], after[:, 0])


def _outputs(model: Any, batch: Batch) -> torch.Tensor:
    out: torch.Tensor = model(
        batch.tokens, batch.positions, None, labels=batch.labels, packed_seq_params=batch.pack
    )
    return out.detach()


def check_parameters_are_read_in_calls_of_their_modules(folder: Path) -> None:
    """Where Megatron waits for those that it still gathers; in packs, too."""
    with with_them(**WITH_M2RNN):
        for setting in (HYBRID, replace(HYBRID, packing="packed", mtp=0)):
            on_ranks(folder, setting, _read_late)


def _read_late(setting: Configuration) -> None:
    with mock.patch.object(models, "configured", without_dropout):
        _, model = of_mixers(setting, models.build, 1)
    batch = micro_batch(setting, 1, 0, 0, 0, parallel_state.get_context_parallel_group())
    assert is_same_late(model, lambda: [_outputs(model, batch)])


def check_what_is_refused_when_a_model_is_built(folder: Path) -> None:
    """By the name of the error, which Megatron's builder of modules passes on."""

    def built(setting: Configuration) -> str:
        return refusal(lambda: of_mixers(setting, models.build, 1))

    plain = replace(HYBRID, mtp=0)
    odd = environment_sizes.text(replace(MAMBA3, groups=1))
    heads = environment_sizes.text(replace(MAMBA3, groups=3))
    key = environment_sizes.text(mixer_sizes.M2RNN(key_dim=5, value_dim=3))
    with with_them(**{M2RNN: key}):
        assert set(on_ranks(folder, replace(plain, tensor=2), built)) == {"arguments-invalid"}
    with with_them(CPPMEGA_MAMBA3=odd):
        assert set(on_ranks(folder, replace(plain, tensor=2), built)) == {"arguments-invalid"}
    with with_them(CPPMEGA_MAMBA3=heads):
        assert on_ranks(folder, plain, built) == ["arguments-invalid"]
    with with_them(CPPMEGA_MAMBA3="{"):
        assert on_ranks(folder, plain, built) == ["sizes-misstated"]
    with with_them():
        assert set(on_ranks(folder, replace(plain, tensor=2, context=2), built)) == {
            "arguments-invalid"
        }
        assert on_ranks(folder, plain, _called_to_infer) == ["no-inference"]


def _called_to_infer(setting: Configuration) -> str:
    _, model = of_mixers(setting, models.build, 1)
    mixer = model.module.decoder.layers[0].mixer
    return refusal(lambda: mixer(torch.zeros(4, 1, 32), inference_context=object()))


def check_a_checkpoint_of_the_other_definition_is_not_loaded(folder: Path) -> None:
    """By Megatron's own loading, which finds no buffer of that name."""
    other = environment_sizes.text(replace(MAMBA3, definition="heavy_tail"))

    def loaded(setting: Configuration, saved: Path) -> str:
        try:
            _looked_at(setting, saved)
        except BaseException as error:  # CheckpointException is not an Exception
            return str(error)
        return "loaded"

    saved = folder / "softplus"
    with with_them():
        on_ranks(folder, HYBRID, _trained, range(1, 2), None, saved)
        assert on_ranks(folder, HYBRID, loaded, saved) == ["loaded"]
    with with_them(CPPMEGA_MAMBA3=other):
        (said,) = on_ranks(folder, HYBRID, loaded, saved)
    assert "decay_heavy_tail from model not in state dict" in said, said[:500]


def rows_without(folder: Path) -> list[Any]:
    """Training of Megatron's own mixer, to the bit."""
    return list(on_ranks(folder, HYBRID, trained, range(1, 3))[0][0])
