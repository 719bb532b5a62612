"""Apply autocast to the combined forward and backward pass of 1F1B when it is enabled.

What: `combined_forward_backward_step` enters both the autocast context and the FP8 context, not
    only the latter.
Why: `with a and b` enters only `b`, because `a` is truthy. With `enable_autocast` and overlapped
    expert communication, the layers ran in the dtype of their weights: a float32 product stayed
    float32 where bfloat16 was requested (tested on 0.16.1 to 0.19.2).
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/5761 (merged after 0.19.2)
Remove: when none of its `with` statements contains `and`.
Numerics: changes results with `enable_autocast`; no change without it
"""

from cppmega.edits import replacing
from cppmega.page import Edit, Patch, Source

TARGET = "megatron/core/pipeline_parallel/combined_1f1b.py:combined_forward_backward_step"
STOCK = "with context_manager and outer_fp8_context:"

PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=TARGET,
            pins={
                "0.15.3": "5899fce845a819ed",
                "0.16.1": "5899fce845a819ed",
                "0.17.1": "5eb5566444e1fd41",
                "0.18.2": "051353dc51c08dbc",
                "0.19.2": "6edb21ec8dda6e41",
                "dev-d48bd6be": "eeda02d97d224d59",
            },
            edit=replacing(STOCK, "with context_manager, outer_fp8_context:"),
        ),
    ),
    reached="forward",
    when=lambda args: bool(getattr(args, "overlap_moe_expert_parallel_comm", False)),
)


def fixed_upstream(source: Source) -> bool:
    text = source.text(TARGET)
    return bool(text) and STOCK not in text


def verify() -> None:
    import contextlib
    from types import SimpleNamespace
    from unittest import mock

    import torch
    from megatron.core.enums import Fp8Recipe
    from megatron.core.pipeline_parallel import combined_1f1b

    inside: list[str] = []

    @contextlib.contextmanager
    def fp8_context(*_, **__):  # type: ignore[no-untyped-def]
        inside.append("fp8")
        yield
        inside.remove("fp8")

    class Plan:
        seen: tuple[torch.dtype, list[str]]

        @classmethod
        def run(cls, *_, **__):  # type: ignore[no-untyped-def]
            cls.seen = (torch.ones(2, 2) @ torch.ones(2, 2)).dtype, list(inside)

    def ran_under(autocast, fp8):  # type: ignore[no-untyped-def]
        output = torch.ones(1)
        output.schedule_plan, output.loss_func = Plan(), None
        config = SimpleNamespace(
            enable_autocast=autocast,
            autocast_dtype=torch.bfloat16,
            timers=None,
            grad_scale_func=None,
            fp8=fp8,
            fp8_recipe=Fp8Recipe.delayed,
        )
        backward_only = dict.fromkeys(("forward_step_func", "data_iterator", "f_model"))
        combined_1f1b.combined_forward_backward_step(
            **backward_only,
            num_microbatches=1,
            input_tensor=None,
            forward_data_store=[],
            b_model=object(),
            b_input_tensor=None,
            b_output_tensor=output,
            b_output_tensor_grad=torch.ones(1),
            config=config,
        )
        return Plan.seen

    on_cpu = torch.autocast
    with (
        mock.patch.object(torch, "autocast", lambda device, **given: on_cpu("cpu", **given)),
        mock.patch.object(combined_1f1b, "get_fp8_context", fp8_context),
    ):
        assert ran_under(True, None) == (torch.bfloat16, []), "the layers ran without autocast"
        assert ran_under(True, "hybrid") == (torch.bfloat16, ["fp8"])
        assert ran_under(False, "hybrid") == (torch.float32, ["fp8"])
        assert ran_under(False, None) == (torch.float32, [])
