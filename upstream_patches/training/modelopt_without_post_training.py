"""Allow training from the wheel when NVIDIA ModelOpt is installed.

What: `get_model` continues if `megatron.post_training`, which the wheel does not ship, cannot be
    imported, and fails only for what needs it: a ModelOpt checkpoint or a distillation teacher.
Why: If `modelopt` can be imported (many images include it), `get_model` imports
    `megatron.post_training.checkpointing`, so that every run from the 0.17 and 0.18 wheels fails
    with ModuleNotFoundError during model setup (seen on CPU with 0.17.1 and 0.18.2).
Upstream: Not sent: 0.19.0 imports both packages under one guard.
Remove: when `get_model` no longer imports `megatron.post_training` without a guard.
Numerics: none (bitwise)
"""

from cppmega.edits import replacing
from cppmega.page import Edit, Patch, Source

TARGET = "megatron/training/training.py:get_model"


def _cppmega_has_modelopt_state(args):
    """Upstream's check of a checkpoint, or one that does without `megatron.post_training`."""
    try:
        from megatron.post_training.checkpointing import has_modelopt_state

        return has_modelopt_state
    except ModuleNotFoundError as missing:
        if not (missing.name or "").startswith("megatron.post_training"):
            raise
    from pathlib import Path

    needs = "needs megatron.post_training, which the megatron-core wheel does not ship"
    if getattr(args, "export_kd_teacher_load", None):
        raise RuntimeError(f"--export-kd-teacher-load {needs}; use a checkout of Megatron-LM")

    def has_modelopt_state(load):
        if any(Path(load).glob("*/modelopt_state")):
            raise RuntimeError(f"The ModelOpt checkpoint {load} {needs}; use a checkout")
        return False

    return has_modelopt_state


PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=TARGET,
            pins={"0.17.1": "a1042bc4c39a9888", "0.18.2": "6d8fcf1e823fc2f2"},
            edit=replacing(
                "from megatron.post_training.checkpointing import has_modelopt_state",
                "has_modelopt_state = _cppmega_has_modelopt_state(args)",
            ),
            helpers=(_cppmega_has_modelopt_state,),
        ),
    ),
    reached="never",  # only a run that builds its model by `get_model` needs it
    feature=("megatron/training/training.py:setup_model_and_optimizer",),
)


def fixed_upstream(source: Source) -> bool:
    text = source.text(TARGET)
    shipped = source.file("megatron/post_training/checkpointing.py")  # a checkout ships it
    return bool(text) and (bool(shipped) or "megatron.post_training" not in text)


def verify() -> None:
    from types import SimpleNamespace
    from unittest import mock

    from megatron.training import training

    class BuiltError(Exception):
        """Raised by the model provider, to show that the run got that far."""

    args = SimpleNamespace(load=None, virtual_pipeline_model_parallel_size=None)
    args.init_model_with_meta_device = False
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    with (
        mock.patch.object(training, "has_nvidia_modelopt", True),
        # Releases with the fix import it together with the flag.
        mock.patch.object(training, "maybe_enable_modelopt", mock.Mock(), create=True),
        mock.patch.object(training, "get_args", return_value=args),
    ):
        try:
            training.get_model(
                mock.Mock(side_effect=BuiltError), pg_collection=SimpleNamespace(pp=group, tp=group)
            )
        except BuiltError:
            return
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("modelopt"):
                return  # a checkout has the module, which imports ModelOpt itself
            raise AssertionError(
                f"imports a module that the wheel does not ship: {error}"
            ) from None
    raise AssertionError("the model provider was never called")
