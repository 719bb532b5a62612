"""Store and gather the parameters of FP8 layers in FP8.

What: With `CPPMEGA_FP8_PARAM_GATHER=1` at apply, `parse_args` enables `--fp8-param-gather` in runs
    that train in FP8, as if it were on the command line. Runs without FP8 are unchanged.
Why: The distributed optimizer of an FP8 run keeps a bf16 copy of each parameter and gathers it,
    although the layers quantize it again. Megatron's own argument avoids the copy; launch scripts
    of an earlier overlay request it with this variable, for which -2.6 to -5 GiB were reported,
    without a log. On one GPU, where nothing is gathered, a slice of NAM56R takes 1.57 GiB less and
    trains 0.891 times as fast; several GPUs were not measured.
Upstream: Not sent: the argument is Megatron's own, in every release since 0.15.
Remove: when the variable is no longer in use; the argument does the same.
Numerics: changes results: in FP8 runs, the weights that layers multiply are those of Megatron's
    `--fp8-param-gather`. The fp32 master parameters remain. Megatron refuses it without the
    distributed optimizer or FSDP, and with optimizer offload unless the recipe is `delayed`; with
    torch's FSDP2 and Transformer Engine 2 Megatron only warns, so the preflight refuses it.
"""

from __future__ import annotations

from cppmega.edits import inserting
from cppmega.page import Edit, Patch, Source
from cppmega.rules.rule import Part, unsupported

TARGET = "megatron/training/arguments.py:parse_args"
GATE = "CPPMEGA_FP8_PARAM_GATHER"


PATCH = Patch(
    purpose="feature",
    edits=(
        Edit(
            target=TARGET,
            pins={
                "0.17.1": "bda7f02f80cf4455",
                "0.18.2": "6ef3d8bc522d365f",
                "0.19.2": "6ef3d8bc522d365f",
                "main-d98e8a64": "6ef3d8bc522d365f",
                "dev-d48bd6be": "cdc7cea2078df76c",
            },
            edit=inserting(
                """
                if getattr(args, 'fp8', None):
                    args.fp8_param_gather = True
                """,
                before="args.rank = int(os.getenv('RANK', '0'))",
            ),
        ),
    ),
    reached="startup",
    when=lambda args: bool(getattr(args, "fp8", None)),
    feature=("megatron/training/arguments.py:validate_args",),
    rules=unsupported(
        Part(GATE, lambda run: True, f"unset {GATE} and apply again"),
        {
            Part(
                "a run without FP8", lambda run: not run.fp8, "--fp8-format hybrid"
            ): "Nothing would be gathered in FP8.",
            "--use-torch-fsdp2": "Megatron warns and gathers in bf16.",
        },
    ),
    gate=GATE,
)


def fixed_upstream(source: Source) -> bool:
    return GATE in source.text(TARGET)


def verify() -> None:
    import sys
    from unittest import mock

    from megatron.training import arguments

    def gathers(*words: str) -> tuple[object, ...]:
        with mock.patch.object(sys, "argv", ["train.py", *words]):
            args = arguments.parse_args()
        # The values that the layers, the buffers and the optimizer are built with.
        return args.fp8, args.fp8_param_gather

    assert gathers("--fp8-format", "hybrid") == ("hybrid", True), gathers("--fp8-format", "hybrid")
    assert gathers("--fp8-format", "hybrid", "--fp8-param-gather") == ("hybrid", True)
    assert gathers("--bf16") == (None, False), gathers("--bf16")
