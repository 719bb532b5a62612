"""Record which layers' GEMMs run in FP8, on stock and with `selective_fp8_moe`, on a GPU.

usage: python -m benchmarks.selective_fp8 --megatron ROOT [--out benchmarks/results]

ROOT holds a pristine megatron/ (an unpacked wheel); it is copied, and one copy is patched. Each
side runs in a separate process: a GPT with experts, shared experts and an MTP depth, one forward
and backward per case on Transformer Engine. Recorded per layer: whether its weights are stored in
FP8, the flag that Transformer Engine left on it after each forward, and whether the operands of its
GEMMs, forward and backward, were quantized. Writes selective_fp8_h200.json and .md; exits with 1 if
anything but the routed experts ran in FP8 on the patched side, or the routed experts did not.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.harness import results, runs, trees

PAGE, GATE = "selective_fp8_moe", "CPPMEGA_SELECTIVE_FP8_MOE"
VOCABULARY, SEQUENCE, BATCH = 1024, 256, 2
CASES: dict[str, dict[str, Any]] = {
    "bf16": {"fp8": None},
    "tensorwise": {},
    "tensorwise, FP8 weights": {"fp8_param": True},
    "tensorwise, experts recomputed": {
        "recompute_granularity": "selective",
        "recompute_modules": ["moe"],
    },
    "tensorwise, first and last layer in bf16": {"first_last_layers_bf16": True},
    "blockwise": {"fp8_recipe": "blockwise"},
    "delayed": {"fp8_recipe": "delayed"},
}
IN_BF16 = {"tensorwise, first and last layer in bf16": "decoder.layers.3."}
"""Case -> the layers whose experts stay in bf16 with the page."""
GROUPS = {
    "attention": ".self_attention.",
    "routed experts": ".experts.",
    "shared experts": ".shared_experts.",
    "dense MLP": ".mlp.linear_",
    "MTP projection": ".eh_proj",
}


def build(**given: Any) -> Any:
    import torch
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer.transformer_config import TransformerConfig

    options = {
        "num_layers": 4,
        "mtp_num_layers": 1,
        "hidden_size": 512,
        "ffn_hidden_size": 1024,
        "num_attention_heads": 8,
        "num_moe_experts": 8,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 512,
        "moe_shared_expert_intermediate_size": 512,
        "moe_layer_freq": [0, 1, 1, 1],
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": True,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "bias_activation_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "fp8": "hybrid",
        "fp8_recipe": "tensorwise",
        **given,
    }
    config = TransformerConfig(**options)
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    mtp = gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=True)
    return GPTModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        mtp_block_spec=mtp,
        position_embedding_type="rope",
    )


def quantized(operand: Any) -> bool:
    """Whether a GEMM's operand, or one of a list of them, is stored in FP8."""
    if isinstance(operand, list | tuple):
        return any(quantized(part) for part in operand)
    return any("Quantized" in base.__name__ for base in type(operand).__mro__)


class Watch:
    """Records what Transformer Engine does in every layer with weights."""

    def __init__(self) -> None:
        self.current: tuple[str, str] | None = None
        self.seen: dict[str, dict[str, Any]] = {}

    def model(self, model: Any) -> None:
        from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

        for name, module in model.named_modules():
            weights = [p for n, p in module.named_parameters(recurse=False) if "weight" in n]
            weights = [weight for weight in weights if weight.dim() > 1]
            if isinstance(module, TransformerEngineBaseModule) and weights:
                stored = {"weights": quantized(weights[0]), "context": []}
                self.seen[name] = {**stored, "forward": [0, 0], "backward": [0, 0]}
                module.register_forward_pre_hook(partial(self._before, name))
                module.register_forward_hook(partial(self._after, name))

    def _before(self, name: str, *_: Any) -> None:
        self.current = (name, "forward")

    def _after(self, name: str, module: Any, inputs: Any, output: Any) -> None:
        def enter_backward(grad: Any) -> None:
            self.current = (name, "backward")

        self.current = None
        self.seen[name]["context"].append(bool(module.fp8))
        out = output[0] if isinstance(output, tuple) else output
        if out.requires_grad:
            out.register_hook(enter_backward)  # runs just before the layer's own backward

    def gemms(self) -> None:
        """Count the GEMMs of Transformer Engine's layers, by what their operands are."""
        for name in ("linear", "layernorm_linear", "grouped_linear"):
            module = importlib.import_module(f"transformer_engine.pytorch.module.{name}")
            for function in [n for n in vars(module) if n.startswith("general_") and "gemm" in n]:
                setattr(module, function, partial(self._counted, getattr(module, function)))

    def _counted(self, gemm: Callable[..., Any], *operands: Any, **options: Any) -> Any:
        if self.current is not None:
            layer, phase = self.current
            fp8 = any(quantized(operand) for operand in operands[:2])
            self.seen[layer][phase][0 if fp8 else 1] += 1
        return gemm(*operands, **options)


def measure(watch: Watch, **given: Any) -> dict[str, Any]:
    """Run one forward and backward; the record of every layer."""
    import torch
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.manual_seed(0)
    model_parallel_cuda_manual_seed(1)
    model = build(**given).cuda()
    watch.seen, watch.current = {}, None
    watch.model(model)
    generator = torch.Generator(device="cuda").manual_seed(2)
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), device="cuda", generator=generator)
    positions = torch.arange(SEQUENCE, device="cuda").expand(BATCH, -1)
    loss = model(tokens, positions, None, labels=tokens.roll(-1, 1)).float().mean()
    loss.backward()
    torch.cuda.synchronize()
    norms = [p.grad.float().norm().item() for p in model.parameters() if p.grad is not None]
    return {
        "loss": loss.item(),
        "gradient norm": math.sqrt(sum(norm * norm for norm in norms)),
        "layers": watch.seen,
    }


def sides() -> None:
    """Print the outcome of each case on one side as JSON."""
    import torch
    from megatron.core import parallel_state

    torch.distributed.init_process_group("nccl", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    watch = Watch()
    watch.gemms()
    answers: dict[str, Any] = {}
    for case, given in CASES.items():
        try:
            answers[case] = measure(watch, **given)
        except Exception as error:
            said = str(error).strip().partition("\n")[0]
            answers[case] = {"failed": f"{type(error).__name__}: {said}"[:300]}
    print(json.dumps(answers), flush=True)
    os._exit(0)  # NCCL's threads need not be waited for


def problems(case: str, answer: dict[str, Any]) -> list[str]:
    """Deviations from what the page states, on the patched side."""
    if case == "delayed":
        refused = "fp8_recipe=delayed" in answer.get("failed", "")
        return [] if refused else [f"{case}: not refused: {answer.get('failed', 'it ran')}"]
    if "failed" in answer:
        return [f"{case}: {answer['failed']}"]
    wrong = []
    for name, seen in answer["layers"].items():
        expert = ".experts." in name and case != "bf16"
        expert = expert and not name.startswith(IN_BF16.get(case, "no layer"))
        stored = expert and bool(CASES[case].get("fp8_param"))
        phases = [seen["forward"], seen["backward"]]
        counts = all(
            phase[0 if expert else 1] and not phase[1 if expert else 0] for phase in phases
        )
        if set(seen["context"]) != {expert} or seen["weights"] != stored or not counts:
            wrong.append(f"{case}: {name}: {seen}")
    if not math.isfinite(answer["loss"] + answer["gradient norm"]):
        wrong.append(f"{case}: loss {answer['loss']}, gradient norm {answer['gradient norm']}")
    return wrong


def cell(answer: dict[str, Any], part: str) -> str:
    """GEMMs in FP8 of a group of layers, forward and backward."""
    if "failed" in answer:
        return "failed"
    rows = [seen for name, seen in answer["layers"].items() if part in name]
    said = []
    for phase in ("forward", "backward"):
        fp8, other = (sum(row[phase][kind] for row in rows) for kind in (0, 1))
        said.append(f"{fp8}/{fp8 + other}")
    weights = sum(row["weights"] for row in rows)
    return ", ".join(said) + (f"; {weights}/{len(rows)} weights" if weights else "")


def table(result: dict[str, Any]) -> str:

    def cells(case: str, side: str) -> list[str]:
        answer = result["sides"][side].get(case, {"failed": "no answer"})
        numbers = ["", ""]
        if "failed" not in answer:
            numbers = [f"{answer[key]:.4f}" for key in ("loss", "gradient norm")]
        return [case, side, *(cell(answer, part) for part in GROUPS.values()), *numbers]

    failed = (
        f"* {case}, {side}: {answers[case]['failed']}"
        for side, answers in result["sides"].items()
        for case in CASES
        if "failed" in answers.get(case, {})
    )
    of_both = (cells(case, side) for case in CASES for side in ("stock", "patched"))
    return results.page(
        "# FP8 in the routed experts alone (`selective_fp8_moe`)",
        f"{result['gpu']}, torch {result['torch']}, Transformer Engine {result['te']}, "
        f"{results.versions(result, 'megatron-core', 'overlay')}, {result['date']}.",
        "GEMMs whose operands were quantized, of all GEMMs: forward, backward (and layers whose "
        "weights are stored in FP8).",
        results.table(["case", "side", *GROUPS, "loss", "gradient norm"], of_both),
        failed,
        result["problems"] or "Patched: FP8 in the routed experts, and nowhere else.",
    )


@click.command(help=__doc__)
@results.folder_option("--megatron", "a pristine megatron/", required=True)
@results.out_option()
def main(megatron: Path, out: Path) -> None:
    import transformer_engine

    result: dict[str, Any] = {**results.facts("torch"), "sides": {}}
    result["te"] = transformer_engine.__version__
    with trees.stock_and_patched(megatron, [PAGE], {GATE: "1"}) as (roots, overlay):
        result |= overlay
        for side, tree in roots.items():
            code = "from benchmarks import selective_fp8 as s\ns.sides()"
            result["sides"][side] = runs.said(tree, code, {}, tree / "log", timeout=420)
    patched = result["sides"]["patched"]
    result["problems"] = [each for case in CASES for each in problems(case, patched[case])]
    results.write(out, "selective_fp8_h200", result, table(result))
    sys.exit(1 if result["problems"] else 0)


if __name__ == "__main__":
    main()
