"""Small models with hyper-connections: a GPT, and a hybrid of the letters M, *, - and E.

They are built on the GPU where there is one, which only a benchmark asks for.

Imported in the process that runs a tree, never by pytest itself.
"""

from __future__ import annotations

import hashlib
import inspect
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.fusions import fused_softmax
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid import hybrid_block as block
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, random
from megatron.core.transformer import multi_token_prediction as mtp
from megatron.core.transformer import transformer_block
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from cppmega.proof import cpu_shims
from cppmega.proof.small_models import arguments

LENGTH, BATCH, WORDS, WIDTH = 12, 2, 32, 16
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MHC = {
    **{"enable_mhc_connections": True, "mhc_num_residual_streams": 4},
    **{"mhc_init_gating_factor": 0.3, "mhc_sinkhorn_iterations": 4},
}
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["mhc"]}
OF_DEV = {
    "enable_mhc_connections": "enable_hyper_connections",
    "mhc_num_residual_streams": "num_residual_streams",
}
"""Fields of the configuration that upstream's branch dev has under another name."""
OF_SPEC = "enable_hyper_connection"
"""What dev's specs of GPT layers take, where a layer with sites is a class of its own."""
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "add_bias_linear": False}


def start(**parallel: int) -> None:
    """Replace what these layers need from a GPU, where there is none, and norms."""
    cpu_shims.init_distributed(**parallel)
    WrappedTorchNorm.__new__ = lambda cls, *given, **named: Norm(*given, **named)
    if DEVICE.type == "cuda":
        random.model_parallel_cuda_manual_seed(1)
        vars(transformer_block)["LayerNormImpl"] = WrappedTorchNorm  # as the shims do on a CPU
        return
    mock.patch.object(random, "_get_cuda_rng_state", lambda *device, **named: None).start()
    mock.patch.object(random, "_set_cuda_rng_state", lambda *state, **named: None).start()
    fused_softmax.get_default_causal_mask = lambda n: torch.ones(n, n).triu(1).bool()
    tensor = torch.tensor
    torch.tensor = lambda *data, pin_memory=False, **named: tensor(*data, **named)
    torch.Tensor.cuda = lambda self, **named: self


class Norm(torch.nn.LayerNorm):
    """Replaces torch's norm of Megatron, which refuses sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **ignored: Any) -> None:
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


class Mixer(torch.nn.Linear):
    """Replaces the selective scan."""

    def __init__(self, config: Any, d_model: int, **ignored: Any) -> None:
        super().__init__(d_model, d_model)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, x: Any, inference_context: Any = None, packed_seq_params: Any = None) -> Any:
        return super().forward(x).tanh(), None


def config(**options: Any) -> Any:
    """A configuration without dropout."""
    fields = TransformerConfig.__dataclass_fields__
    options = {OF_DEV[k] if k in OF_DEV and k not in fields else k: v for k, v in options.items()}
    return TransformerConfig(
        **{
            **{"hidden_size": WIDTH, "num_attention_heads": 2, "ffn_hidden_size": WIDTH},
            **{"use_cpu_initialization": True, "bias_dropout_fusion": False},
            **{"hidden_dropout": 0.0, "attention_dropout": 0.0, "init_method_std": 0.3},
        }
        | options
    )


def _model(settings: Any, stage: int | None) -> dict[str, Any]:
    """Arguments of either kind of model, and the seed of its weights."""
    torch.manual_seed(0)
    place = {"ignore_virtual": stage is None, "vp_stage": stage}
    return {
        "config": settings,
        "vocab_size": WORDS,
        "max_sequence_length": LENGTH,
        "position_embedding_type": "none",
        "share_embeddings_and_output_weights": False,
        "pre_process": parallel_state.is_pipeline_first_stage(**place),
        "post_process": parallel_state.is_pipeline_last_stage(**place),
        "vp_stage": stage,
    }


def gpt(layers: int = 2, depths: int = 0, stage: int | None = None, **options: Any) -> Any:
    """A GPT with MTP depths, or one of a pipeline rank's virtual stages."""
    settings = config(num_layers=layers, mtp_num_layers=depths or None, **options)
    experts = options.get("num_moe_experts")
    spec_of = gpt_layer_specs.get_gpt_layer_local_spec
    of_dev = OF_SPEC in inspect.signature(spec_of).parameters
    sites = {OF_SPEC: True} if of_dev and options.get("enable_mhc_connections") else {}
    spec = spec_of(num_experts=experts, moe_grouped_gemm=False, **sites)
    heads = {}
    if depths:
        heads["mtp_block_spec"] = gpt_layer_specs.get_gpt_mtp_block_spec(
            settings, spec, use_transformer_engine=False, vp_stage=stage
        )
    return GPTModel(transformer_layer_spec=spec, **_model(settings, stage), **heads).to(DEVICE)


def hybrid(pattern: str = "M*-", stage: int | None = None, **options: Any) -> Any:
    """A hybrid model, with MTP depths after a /, or one of a pipeline rank's virtual stages."""
    main, *depths = pattern.split("/")
    settings = config(
        num_layers=len(main.replace("|", "")),
        mtp_num_layers=len(depths) or None,
        is_hybrid_model=True,
        **options,
    )
    fields = set(mtp.MultiTokenPredictionLayerSubmodules.__dataclass_fields__)
    # Releases after 0.19 have all three, and build those that the configuration asks for.
    projections = {"eh_proj", "e_proj", "h_proj"} & fields
    head = mtp.MultiTokenPredictionLayerSubmodules(
        enorm=WrappedTorchNorm,
        hnorm=WrappedTorchNorm,
        mtp_model_layer=None,
        layer_norm=WrappedTorchNorm,
        **dict.fromkeys(projections, ColumnParallelLinear),
    )
    heads = mtp.MultiTokenPredictionBlockSubmodules(
        layer_specs=[ModuleSpec(mtp.MultiTokenPredictionLayer, submodules=head)]
    )
    whole = gpt_layer_specs.get_gpt_layer_local_spec().submodules
    attention = TransformerLayerSubmodules(
        input_layernorm=whole.input_layernorm,
        self_attention=whole.self_attention,
        self_attn_bda=whole.self_attn_bda,
    )
    ends = {"pre_mlp_layernorm": whole.pre_mlp_layernorm, "mlp_bda": whole.mlp_bda}
    mlp = TransformerLayerSubmodules(mlp=whole.mlp, **ends)
    experts = {}
    if "E" in pattern:
        moe = get_moe_module_spec(
            use_te=False, num_experts=settings.num_moe_experts, moe_grouped_gemm=False
        )
        parts = TransformerLayerSubmodules(mlp=moe, **ends)
        experts["moe_layer"] = ModuleSpec(MoETransformerLayer, submodules=parts)
    mamba = MambaLayerSubmodules(norm=WrappedTorchNorm, mixer=Mixer, mamba_bda=get_bias_dropout_add)
    layers = block.HybridStackSubmodules(
        mamba_layer=ModuleSpec(MambaLayer, submodules=mamba),
        attention_layer=ModuleSpec(TransformerLayer, submodules=attention),
        mlp_layer=ModuleSpec(TransformerLayer, submodules=mlp),
        mtp_block_spec=ModuleSpec(mtp.MultiTokenPredictionBlock, submodules=heads),
        **experts,
    )
    with mock.patch.object(block, "TENorm", WrappedTorchNorm):
        return HybridModel(
            hybrid_stack_spec=ModuleSpec(block.HybridStack, submodules=layers),
            hybrid_layer_pattern=pattern,
            **_model(settings, stage),
        ).to(DEVICE)


def batch(seed: int) -> dict[str, Any]:
    """One microbatch."""
    tokens = torch.randint(
        WORDS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(seed)
    )
    made = {
        "input_ids": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "position_ids": torch.arange(LENGTH).expand(BATCH, LENGTH),
        "attention_mask": torch.ones(LENGTH, LENGTH).triu(1).bool()[None, None],
        "loss_mask": torch.ones(BATCH, LENGTH),
    }
    return {name: value.to(DEVICE) for name, value in made.items()}


def loss(model: Any, seed: int = 1) -> torch.Tensor:
    """The mean loss of a microbatch."""
    return model(**arguments(model, **batch(seed))).float().mean()


def digest(tensors: Any) -> str:
    """A hash of the bits of tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def trained(model: Any, steps: int = 3, lr: float = 0.05) -> list[float]:
    """Losses of a few steps of SGD on one microbatch."""
    losses = []
    for _ in range(steps):
        model.zero_grad()
        value = loss(model)
        value.backward()
        losses.append(value.item())
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= lr * p.grad
    return losses
