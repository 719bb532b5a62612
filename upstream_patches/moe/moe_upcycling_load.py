"""Load the dense checkpoint of a run that upcycles it to experts.

What: `setup_model_and_optimizer` passes the dense model to `load_checkpoint` under the name of its
    parameter, `ddp_model`.
Why: It passes `model`, which `load_checkpoint` does not have: every run with
    `--moe-use-upcycling` fails with a TypeError (tested on 0.17.1 to 0.19.2).
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/3646 (open)
Remove: when both use one name.
Numerics: none (bitwise); these runs used to fail
"""

from cppmega.catalogue.megatron_args import has_experts
from cppmega.edits import replacing
from cppmega.page import Edit, Patch, Source

TARGET = "megatron/training/training.py:setup_model_and_optimizer"
GIVEN = "{{'{}': dense_model_for_upcycling, 'optimizer': None, 'opt_param_scheduler': None}}"

PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=TARGET,
            pins={
                "0.17.1": "0f6288230aa493d2",
                "0.18.2": "0b723097b4cc2279",
                "0.19.2": "a9e6bab45e802fa1",
                "main-d98e8a64": "16e50d804898fe14",
                "dev-d48bd6be": "0749b8fb48000df6",
            },
            edit=replacing(GIVEN.format("model"), GIVEN.format("ddp_model")),
        ),
    ),
    reached="startup",
    # The wheels up to 0.16 have no training loop.
    feature=("megatron/training/training.py:train_step",),
    when=lambda args: has_experts(args) and bool(getattr(args, "moe_use_upcycling", False)),
)


def fixed_upstream(source: Source) -> bool:
    text = source.text(TARGET)
    return bool(text) and "'model': dense_model_for_upcycling" not in text


def verify() -> None:
    from unittest import mock

    from megatron.training import training

    from cppmega.proof import cpu_shims, stand_ins

    cpu_shims.init_distributed()
    args = stand_ins.Arguments(
        0,
        num_experts=4,
        skip_train=True,
        moe_use_upcycling=True,
        moe_upcycling_granularity=2,
        ffn_hidden_size=8,
        logits_save_dir=None,
        logits_load_dir=None,
    )

    class LoadedError(Exception):
        """Ends the setup of the run."""

    def load(ddp_model, *_, **__):  # type: ignore[no-untyped-def]
        assert ddp_model == ["dense"]
        raise LoadedError

    models = [["with experts"], ["dense"]]
    replaced = {
        "get_model": lambda *_, **__: models.pop(0),
        "unwrap_model": lambda model: model,
        "checkpoint_exists": lambda _: False,
        "load_checkpoint": mock.create_autospec(training.load_checkpoint, side_effect=load),
    }
    with stand_ins.quiet_training(training, args, **replaced):
        try:
            training.setup_model_and_optimizer(model_provider_func=print, model_type=None)
        except LoadedError:
            return
    raise AssertionError("no model was loaded")
