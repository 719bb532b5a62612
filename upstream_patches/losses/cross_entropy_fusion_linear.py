"""Accept `--cross-entropy-fusion-impl linear`, and always compute a loss for it.

What: `ModelParallelConfig` accepts the value `linear`, from which Megatron's parser derives its
    choices. `compute_language_model_loss`, whose callers already have the logits, computes the
    unfused loss for this value and warns about it.
Why: Command lines written for upstream's dev branch use the flag, and every release rejects it
    (argparse: invalid choice). A configuration built in code is accepted, but its first loss raises
    UnboundLocalError (tested on 0.16.1, 0.17.1, 0.18.2 and 0.19.2).
Upstream: Not sent: dev has the value, but its kernels support only Blackwell.
Remove: when every supported release has `linear`.
Numerics: none (bitwise)
"""

from cppmega.edits import in_order, inserting, replacing
from cppmega.page import Edit, Patch, Source, left_alone

from ._linear_ce.edits import asked_for

CHOICES = "megatron/core/model_parallel_config.py:ModelParallelConfig.cross_entropy_fusion_impl"
LANGUAGE_MODULE = "megatron/core/models/common/language_module/language_module.py:LanguageModule"
LOSS = f"{LANGUAGE_MODULE}.compute_language_model_loss"

LAYER = "megatron/core/tensor_parallel/layers.py:ColumnParallelLinear.backward_dw"
"""Exists from 0.16 on, the releases that cppmega's output layer is written for."""

LINEAR = "Literal['native', 'te', 'linear']"
UNFUSED = """
if self.config.cross_entropy_loss_fusion and self.config.cross_entropy_fusion_impl == 'linear':
    warnings.warn(
        "--cross-entropy-fusion-impl linear: a loss was asked for from logits that exist; "
        "it is computed without fusion"
    )
"""

PATCH = Patch(
    purpose="feature",
    edits=(
        Edit(
            target=CHOICES,
            pins={
                "0.16.1": "125ddd0d272518f1",
                "0.17.1": "125ddd0d272518f1",
                "0.18.0": "125ddd0d272518f1",
                "0.18.2": "125ddd0d272518f1",
                "0.19.2": "125ddd0d272518f1",
            },
            edit=replacing("Literal['native', 'te']", LINEAR),
        ),
        Edit(target=CHOICES, pins={"dev-d48bd6be": "4c37401177418799"}, edit=left_alone),
        Edit(
            target=LOSS,
            pins={
                "0.16.1": "69e98048138e9f18",
                "0.17.1": "69e98048138e9f18",
                "0.18.0": "0de2d24e29d94914",
                "0.18.2": "0de2d24e29d94914",
                "0.19.2": "2431e3551b813424",
                "dev-d48bd6be": "2431e3551b813424",
            },
            edit=in_order(
                replacing(
                    "if self.config.cross_entropy_loss_fusion:",
                    "if self.config.cross_entropy_loss_fusion "
                    "and self.config.cross_entropy_fusion_impl != 'linear':",
                ),
                inserting(UNFUSED, after="labels = labels.transpose(0, 1).contiguous()"),
            ),
            imports=("import warnings",),
        ),
    ),
    reached="never",  # the parser of other code refuses the run, and few losses come from logits
    feature=(LAYER,),
    when=asked_for,
    asked_by=("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "linear"),
    wanted_by=lambda recipe: recipe.uses_linear_cross_entropy,
)


def fixed_upstream(source: Source) -> bool:
    # dev has the value, but its loss raises the same UnboundLocalError.
    return "'linear'" in source.text(CHOICES) and "'linear'" in source.text(LOSS)


def verify() -> None:
    import dataclasses
    import typing
    import warnings
    from types import SimpleNamespace

    import torch
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.models.common.language_module.language_module import LanguageModule

    from cppmega.proof import cpu_shims

    cpu_shims.init_distributed()
    (field,) = (
        f for f in dataclasses.fields(ModelParallelConfig) if f.name == "cross_entropy_fusion_impl"
    )
    assert "linear" in typing.get_args(field.type), "the parser derives its choices from this"
    config = ModelParallelConfig(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="linear")
    model = SimpleNamespace(config=config, pg_collection=SimpleNamespace(tp=None), tp_group=None)
    labels = torch.tensor([[1, 2, 0]])
    logits = torch.randn(3, 1, 4, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        loss = LanguageModule.compute_language_model_loss(model, labels, logits.clone())
    assert any("without fusion" in str(warning.message) for warning in warned)
    expected = torch.nn.functional.cross_entropy(logits[:, 0], labels[0], reduction="none")
    torch.testing.assert_close(loss, expected[None])
