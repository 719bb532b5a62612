"""A step of a GPT with hyper-connections in Megatron's branch dev, by its kernels and by ours.

The part `dev` of `mhc_training.py`; imported in the process that runs a tree of dev with the page
`mhc_fused_kernels`. A step is forward and backward in bf16, with layers of Transformer Engine,
without an optimizer, which is the same for all. All ways begin from one seed and see one batch.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
from typing import Any
from unittest import mock

import torch
from megatron.core.activations import squared_relu
from megatron.core.fusions import fused_mhc_kernels
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import random
from megatron.core.transformer.transformer_config import TransformerConfig

from benchmarks.harness import gpu as on_gpu
from cppmega.proof import cpu_shims
from cppmega.recipe import Recipe
from cppmega.recipe import index as recipes_index
from cppmega.runtime import mhc_fused_kernels as mhc_in_megatron

RECIPE = recipes_index.load("gpt_mhc_h200")
WAYS = ("without", "dev", "ours")
CLOSE = {"loss": 2e-3, "grad norm": 2e-2}
"""How far two ways in bf16 may be from each other, relative to the value."""


def main() -> None:
    """Measure all ways, and print what was found as JSON on the last line."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    importlib.import_module("transformer_engine.pytorch")
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", 0))
    cpu_shims.init_distributed()
    found = {way: measured(way, RECIPE) for way in WAYS}
    for what, bound in CLOSE.items():
        ours, other = (found[way][what] for way in ("ours", "dev"))
        if not abs(ours - other) <= bound * abs(other):
            raise SystemExit(f"another model: {what} is {ours} by our kernels, {other} by dev's")
    print(json.dumps(found | {"backends": fused_mhc_kernels._mhc_backend_selection()}))


def measured(way: str, recipe: Recipe) -> dict[str, float]:
    """Milliseconds and peak bytes of a step, its loss and its gradient's norm."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    print(f"{way}: the first step compiles its kernels", file=sys.stderr, flush=True)
    model = built(way, recipe)
    given = batch(recipe)

    def step() -> torch.Tensor:
        model.zero_grad()
        loss = model(**given).float().mean()
        loss.backward()
        return loss

    step()
    print(f"{way}: compiled", file=sys.stderr, flush=True)
    milliseconds = on_gpu.median(step)
    peak = torch.cuda.max_memory_allocated()
    loss = step().item()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients).item()
    return {"milliseconds": milliseconds, "peak_bytes": peak, "loss": loss, "grad norm": norm}


def built(way: str, recipe: Recipe) -> Any:
    """The GPT without streams, or with those whose kernels are dev's or ours."""
    streams = way != "without"
    settings = TransformerConfig(
        num_layers=recipe.num_layers,
        hidden_size=recipe.hidden_size,
        ffn_hidden_size=recipe.ffn_hidden_size,
        num_attention_heads=recipe.num_attention_heads,
        activation_func=squared_relu,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        cross_entropy_loss_fusion=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        enable_hyper_connections=streams,
        num_residual_streams=recipe.mhc_num_residual_streams,
        use_fused_mhc=streams,
    )
    torch.manual_seed(1)
    random.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
        enable_hyper_connection=streams
    )
    with contextlib.ExitStack() as stack:
        if way == "dev":  # sites keep the ops that dev has chosen: the page's call does nothing
            use = mock.patch.object(mhc_in_megatron, "use_kernels", lambda module: None)
            stack.enter_context(use)
        model = GPTModel(
            settings,
            transformer_layer_spec=spec,
            vocab_size=recipe.vocab_size,
            max_sequence_length=recipe.seq_length,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        ).cuda()
    if way == "dev":
        settings.use_fused_mhc = False  # read by the page alone, once the sites are built
    return model


def batch(recipe: Recipe) -> dict[str, Any]:
    """One microbatch; the layers make their causal mask themselves."""
    shape = recipe.micro_batch_size, recipe.seq_length + 1
    drawn = torch.Generator("cuda").manual_seed(2)
    tokens = torch.randint(recipe.vocab_size, shape, generator=drawn, device="cuda")
    positions = torch.arange(recipe.seq_length, device="cuda").expand(recipe.micro_batch_size, -1)
    return {
        "input_ids": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "position_ids": positions,
        "attention_mask": None,
    }
