"""Every combination of the table is refused, and neither of its two halves alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cppmega.recipe import M2RNN, Mamba3, NgramHash
from cppmega.rules import combinations as c
from cppmega.rules.rule import Part, Rule, Run, UnsupportedError, errors, unsupported
from cppmega.sizes import dsa_loss, stated

BASE = {"bf16": True, "cuda_graph_impl": "none", "num_layers": 4}
DSA = {"experimental_attention_variant": "dsa", "dsa_indexer_use_sparse_loss": True}
MAMBA3 = {"CPPMEGA_MAMBA3": stated.text(Mamba3())}
MATRIX = {"CPPMEGA_M2RNN": stated.text(M2RNN(gradient_clipping=None))}
PACKED = SimpleNamespace(packed_documents=True)

PARTS: dict[Part, dict[str, Any]] = {
    c.MHC: {"enable_mhc_connections": True},
    c.MIXERS: MAMBA3,
    c.M2RNN: MATRIX,
    c.CLIPPED_M2RNN: {"CPPMEGA_M2RNN": stated.text(M2RNN())},
    c.EMBEDDINGS: {"CPPMEGA_NGRAM_HASH": stated.text(NgramHash())},
    c.DENSE_STEPS: {**DSA, dsa_loss.GATE: "1"},
    c.EXPERT_OVERLAP: {"overlap_moe_expert_parallel_comm": True},
    c.CUDNN_DSA: {**DSA, "dsa_kernel_backend": "cudnn"},
    c.TILELANG_DSA: {**DSA, "dsa_kernel_backend": "tilelang"},
    c.CUDA_GRAPHS_OF_LAYERS: {"cuda_graph_impl": "local", "cuda_graph_modules": ["attn"]},
    c.CONTEXT_PARALLEL: {"context_parallel_size": 2},
    c.SHARED_KEYS: {**DSA, "dsa_indexer_topk_freq": 4},
    c.LINEAR_LOSS: {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"},
}
"""What has each part: arguments, variables, or a recipe."""

OPTIONS: dict[Part | str, dict[str, Any]] = {
    c.CONTEXT_PARALLEL: {"context_parallel_size": 2},
    c.FSDP: {"use_megatron_fsdp": True},
    c.FUSED_UNDER_FSDP: {
        **{"use_megatron_fsdp": True, "use_fused_mhc": True},
        "gradient_accumulation_fusion": True,
    },
    "--use-torch-fsdp2": {"use_torch_fsdp2": True},
    "--use-mup": {"use_mup": True},
    "--init-model-with-meta-device": {"init_model_with_meta_device": True},
    "--fp32-residual-connection": {"fp32_residual_connection": True},
    "--fp16": {"fp16": True, "bf16": False},
    c.FP32: {"bf16": False},
    c.NOT_BF16: {"fp16": True, "bf16": False},
    "--fp4-format": {"fp4": "e2m1"},
    c.DELAYED_FP8: {"fp8": "hybrid", "fp8_recipe": "delayed"},
    "--use-precision-aware-optimizer": {"use_precision_aware_optimizer": True},
    c.CUDA_GRAPHS: {"cuda_graph_impl": "transformer_engine"},
    c.WHOLE_STEP_GRAPHS: {"cuda_graph_impl": "full_iteration"},
    c.EXPERT_GRAPHS: {
        **{"cuda_graph_impl": "local", "cuda_graph_modules": ["attn", "moe_router"]},
        "num_experts": 8,
    },
    c.GRAPHS_WITH_DROPOUT: {"cuda_graph_impl": "local", "hidden_dropout": 0.1},
    c.GRAPHS_OF_RECOMPUTED_STREAMS: {
        **{"cuda_graph_impl": "local", "recompute_granularity": "selective"},
        "recompute_modules": ["mhc"],
    },
    c.MAMBA_GRAPHS: {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["mamba"]},
    c.GRAPHS_OF_ONE_ATTENTION: {"cuda_graph_impl": "local", "cuda_graph_modules": ["attn"]},
    c.GRAPHS_OF_SOME_LAYERS: {
        **{"cuda_graph_impl": "local", "cuda_graph_modules": ["attn"]},
        **{"num_experts": 8, "moe_layer_freq": [0, 1, 1, 1]},
    },
    c.EXPERT_OVERLAP: {"overlap_moe_expert_parallel_comm": True},
    c.LAYOUT_WITH_MTP: {"mtp_num_layers": 1, "pipeline_model_parallel_layout": "Et|tmL"},
    c.TP_OVERLAP_WITH_MTP: {"mtp_num_layers": 1, "tp_comm_overlap": True},
    c.SEVERAL_DEPTHS: {"mtp_num_layers": 2},
    c.HYBRID: {"hybrid_layer_pattern": "M*-"},
    "--mtp-detach-heads": {"mtp_detach_heads": True},
    "--mtp-hsm": {"mtp_hsm": True},
    c.RECOMPUTED_MLP: {
        "recompute_granularity": "selective",
        "recompute_modules": ["mhc", "mlp"],
    },
    c.OFFLOADED_GRAPHS: {"cpu_offloading": True, "cuda_graph_impl": "local"},
    c.OFFLOADED_NORMS: {
        **{
            "fine_grained_activation_offloading": True,
            "offload_modules": ["core_attn", "mlp_norm"],
        },
        **{"recompute_granularity": "selective", "recompute_modules": ["mhc"]},
    },
    "--inference-fuse-tp-communication": {"inference_fuse_tp_communication": True},
    "--heterogeneous-layers-config-path": {"heterogeneous_layers_config_path": "layers.json"},
    c.SHARED_KEYS: {**DSA, "CPPMEGA_INDEX_CACHE": "1"},
    c.PACKED_DOCUMENTS: {"recipe": PACKED},
    c.TRAINED_GRAPHS: {
        **{"recipe": SimpleNamespace(packed_documents=False), "cuda_graph_impl": "local"},
        "cuda_graph_modules": ["attn"],
    },
    c.DROPLESS_EXPERTS: {
        **{"cuda_graph_impl": "local", "cuda_graph_modules": ["moe"], "num_experts": 8},
    },
    c.DENSE_LOSS_OF_PARTS: {
        **{"dsa_indexer_use_sparse_loss": False, "dsa_indexer_loss_coeff": 0.1},
        "context_parallel_size": 2,
    },
    c.CUDNN_WITHOUT_DENSE_LOSS: {**DSA, "dsa_kernel_backend": "cudnn", "context_parallel_size": 2},
    "--defer-embedding-wgrad-compute": {"defer_embedding_wgrad_compute": True},
    "--logits-save-dir": {"logits_save_dir": "logits"},
    "--logits-load-dir": {"logits_load_dir": "logits"},
    "--config-logger-dir": {"config_logger_dir": "logs"},
    c.UNFUSED_ATTENTION: {"attention_backend": "AttnBackend.unfused"},
}

IN_PAGES = {**c.SHARED_KEYS_OUTSIDE_STACKS, **c.SHARED_KEYS_IN_GRAPHS}
TABLE = {**c.UNSUPPORTED, c.SHARED_KEYS: IN_PAGES}
CELLS = [(part, option) for part, options in TABLE.items() for option in options]


def run(**given: Any) -> Run:
    """A run with these arguments, variables (by their names) and recipe."""
    options = {name: value for name, value in given.items() if not name.startswith("CPPMEGA_")}
    variables = {name: value for name, value in given.items() if name.startswith("CPPMEGA_")}
    recipe = options.pop("recipe", None)
    return Run(SimpleNamespace(**BASE | options), variables, recipe=recipe)


def rule_of(part: Part, option: Part | str) -> Rule:
    (rule,) = unsupported(part, {option: TABLE[part][option]})
    return rule


@pytest.mark.parametrize(
    ("part", "option"), CELLS, ids=lambda each: getattr(each, "name", each).replace(" ", "-")
)
def test_a_combination_is_refused(part: Part, option: Part | str) -> None:
    rule = rule_of(part, option)
    (error,) = errors([rule], run(**PARTS[part] | OPTIONS[option]))
    assert isinstance(error, UnsupportedError) and error.name == "unsupported"
    assert error.part == part.name and "{" not in error.what
    assert error.option.lower() in error.what.lower()
    assert error.why.endswith(".") and part.instead in error.next and "{" not in error.next
    if option is not c.CUDNN_WITHOUT_DENSE_LOSS:  # an option of the very part
        assert not [*errors([rule], run(**PARTS[part]))]
    assert not [*errors([rule], run(**OPTIONS[option]))] or part is c.CUDA_GRAPHS_OF_LAYERS


def test_every_part_and_option_of_the_module_is_in_the_table() -> None:
    stated_there = {each for each in vars(c).values() if isinstance(each, Part)}
    used = {each for cell in CELLS for each in cell}
    helpers = {c.DENSE_LOSS, c.MAMBA3}
    assert stated_there - used <= helpers


@pytest.mark.parametrize(
    ("graphs", "refused"),
    [
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": []}, True),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["mamba"]}, True),
        ({"cuda_graph_impl": "full_iteration"}, True),
        ({"external_cuda_graph": True, "cuda_graph_scope": "full"}, True),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn"]}, False),
        ({"cuda_graph_impl": "local"}, False),
        ({"cuda_graph_impl": "local", "cuda_graph_modules": ["mamba"]}, False),
        ({"enable_cuda_graph": True}, False),
    ],
)
def test_mixers_are_captured_by_megatrons_own_graphs_alone(
    graphs: dict[str, Any], refused: bool
) -> None:
    rule = rule_of(c.MIXERS, c.MAMBA_GRAPHS)
    assert bool([*errors([rule], run(**MAMBA3 | graphs))]) is refused


def test_an_error_survives_the_processes_that_pass_it_on() -> None:
    import pickle

    error = UnsupportedError("hyper-connections", "--fp8-format", "Not tested.", "leave it out")
    again = pickle.loads(pickle.dumps(error))
    assert again.as_json() == error.as_json() and again.option == "--fp8-format"
    try:
        try:
            raise error
        except UnsupportedError as first:  # as Megatron's `build_module` does
            raise type(first)(f"{first} when instantiating Layer") from None
    except UnsupportedError as second:
        assert second.as_json() == error.as_json()
