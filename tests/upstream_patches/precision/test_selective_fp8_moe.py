"""The FP8 context in which each layer of a model with experts is built and runs."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support import VERSIONS, patched, pristine, python

NAME = "selective_fp8_moe"
RUN = """
from tests.support import te_recording
te_recording.install()
from tests.upstream_patches.precision import test_selective_fp8_moe as t
t.main()
"""


CASES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one by one": {"moe_grouped_gemm": False},
    "experts twice": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "all twice": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "mtp_num_layers": None,
    },
    "first and last in bf16": {"first_last_layers_bf16": True},
    "bf16": {"fp8": None, "fp8_param": False},
    "hybrid": {"pattern": "*E-E/*E", "first_last_layers_bf16": True},
}
IN_BF16 = {  # experts of the last layer; in MTP, where numbers start again, nothing is in bf16
    "first and last in bf16": "decoder.layers.3.",
    "hybrid": "decoder.layers.3.",
}
REFUSED = {
    "fp8_recipe=delayed": {"fp8_recipe": "delayed"},
    "cuda_graph_impl=transformer_engine": {"cuda_graph_impl": "transformer_engine"},
    "use_grouped_gemm_for_dense_mlp": {"use_grouped_gemm_for_dense_mlp": True},
    "use_grouped_gemm_for_shared_expert": {"use_grouped_gemm_for_shared_expert": True},
}


def main() -> None:
    """Print what every layer of every case did; runs in the process of a tree."""
    from cppmega.proof import cpu_shims

    cpu_shims.init_distributed()
    cases = {name: given for name, given in CASES.items() if name != "hybrid" or _has_hybrid()}
    answers = {name: record(**given) for name, given in cases.items()}
    print(json.dumps([answers, {name: refusal(**given) for name, given in REFUSED.items()}]))


def _has_hybrid() -> bool:
    from importlib.util import find_spec

    return find_spec("megatron.core.models.hybrid") is not None


def record(**given: Any) -> dict[str, Any]:
    """Return layer -> [weights in FP8, GEMMs in FP8 for each run] of a training step."""
    import torch

    from tests.support import te_recording as te

    te.RAN.clear()
    te.WEIGHTS.clear()
    torch.manual_seed(0)
    model = build(config(**given), given.get("pattern"))
    tokens = torch.arange(16).view(2, 8)
    loss = model(tokens, tokens, None, labels=tokens)
    loss.float().sum().backward()
    layers: dict[str, list[Any]] = {}
    for name, module in model.named_modules():
        if module in te.WEIGHTS:
            layers[name] = [te.WEIGHTS[module], [on for ran, on, _ in te.RAN if ran is module]]
    assert all(recipe is not None for _, on, recipe in te.RAN if on)
    grads = [p.grad.double().sum().item() for p in model.parameters() if p.grad is not None]
    return {
        "layers": layers,
        "numbers": [loss.double().sum().item(), *grads],
        "names": sorted(model.state_dict()),
    }


def refusal(**given: Any) -> str:
    """Return the error when a context is built for these options; "" if there is none."""
    from megatron.core.fp8_utils import get_fp8_context

    plain = config()
    for name, value in given.items():
        setattr(plain, name, value)
    try:
        get_fp8_context(plain, 1)
    except ValueError as error:
        return str(error)
    return ""


def config(moe_grouped_gemm: bool = True, pattern: str | None = None, **given: Any) -> Any:
    """Return the configuration of a dense layer and three with experts, or of a hybrid pattern."""
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch.nn.functional import silu

    options = {
        "num_layers": 4,
        "mtp_num_layers": 1,
        "mtp_loss_scaling_factor": 0.1,
        "hidden_size": 16,
        "ffn_hidden_size": 32,
        "num_attention_heads": 2,
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 16,
        "moe_shared_expert_intermediate_size": 16,
        "moe_layer_freq": [0, 1, 1, 1],
        "moe_token_dispatcher_type": "allgather",
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": moe_grouped_gemm,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": silu,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "fp8": "hybrid",
        "fp8_recipe": "tensorwise",
        "fp8_param": True,
        **given,
    }
    return TransformerConfig(**options)


def build(config: Any, pattern: str | None) -> Any:
    """Build a GPT model with an MTP depth, or a hybrid model."""
    common = {"vocab_size": 64, "max_sequence_length": 8, "position_embedding_type": "none"}
    if pattern is not None:
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        return HybridModel(config, hybrid_stack_spec, hybrid_layer_pattern=pattern, **common)
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs

    spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    if config.mtp_num_layers:
        common["mtp_block_spec"] = gpt_layer_specs.get_gpt_mtp_block_spec(
            config, spec, use_transformer_engine=True
        )
    return GPTModel(config, spec, **common)


@cache
def _answers(root: Path) -> Any:
    done = python(root, RUN)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.megatron
@pytest.mark.parametrize("version", ("0.15.3", *VERSIONS))
def test_only_routed_experts_see_fp8(version: str) -> None:
    cases, refused = _answers(patched(version, NAME))
    assert ("hybrid" in cases) == (version in ("0.18.2", "0.19.2"))
    for case, found in cases.items():
        kept = IN_BF16.get(case, "no layer")
        for name, (weights, gemms) in found["layers"].items():
            wanted = ".experts." in name and not name.startswith(kept) and case != "bf16"
            again = case == "all twice" or (case == "experts twice" and ".mlp." in name)
            dense = "decoder.layers.0" in name and case == "experts twice"
            assert (weights, gemms) == (wanted, [wanted] * (1 + (again and not dense))), name
        inside = {name.split(".mlp.")[-1].split(".")[0] for name in found["layers"]}
        assert {"experts", "shared_experts", "linear_fc1"} <= inside
    for option, said in refused.items():
        assert option in said


@pytest.mark.megatron
def test_stock_runs_whole_layers_in_fp8_and_nothing_else_differs() -> None:
    """The recording detects FP8; results and parameter names of a model are unchanged."""
    version = VERSIONS[-1]
    stock, refused = _answers(pristine(version))
    ours, _ = _answers(patched(version, NAME))
    for name, (weights, gemms) in stock["grouped"]["layers"].items():
        assert weights and all(gemms), name
    assert not any(refused.values())
    for case, found in stock.items():
        assert found["numbers"] == ours[case]["numbers"] and found["names"] == ours[case]["names"]
        assert all(map(math.isfinite, found["numbers"])) and len(found["numbers"]) > 20
