"""N-gram and structure embeddings on one GPU, against a layer of kind E of the same model.

    python -m benchmarks.input_embeddings [--out benchmarks/results]

Needs megatron-core and transformer-engine, and no pages. Both have NAM56R's widths and get 8
sequences of 4096 tokens in bf16. The tokens are drawn log-uniformly, so that frequent n-grams
repeat as they do in text; documents end after 512 tokens on average. Timed is forward plus backward
of all that the embeddings add: ids, lookups, projections, and the sum with the token embedding,
whose gradient is the one that arrives. Times are medians of 10, of work that is launched while the
GPU is busy, as in training; beside them those on an idle GPU, where short kernels cost what the
host takes to launch them. Writes input_embeddings_DEVICE.json and .md.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from benchmarks.harness import results
from benchmarks.harness.gpu import by_kernel, card, median, upstream_of
from cppmega.features.embeddings import layer as input_embeddings
from cppmega.host import env
from cppmega.proof import cpu_shims
from cppmega.recipe import Recipe
from cppmega.recipe import index as recipes_index
from cppmega.sizes import stated as environment_sizes

RECIPE = recipes_index.load("nam56r_h200_8gpu_bf16")
SIZES = (
    *("hidden_size", "ffn_hidden_size", "num_attention_heads", "moe_router_topk"),
    *("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_aux_loss_coeff"),
    *("moe_router_score_function", "moe_router_enable_expert_bias"),
)
"""Arguments of the layer that are fields of the recipe."""
BATCH = 8
DOCUMENT = 512
"""Mean length of a document, in tokens."""


def model_of(recipe: Recipe) -> Any:
    """A token embedding and one layer of kind E, as the recipe has them."""
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.transformer_config import TransformerConfig

    random.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1,
        **{name: getattr(recipe, name) for name in SIZES},
        num_moe_experts=recipe.num_experts,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="aux_loss",
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=True,
    )
    return HybridModel(
        config,
        hybrid_stack_spec=hybrid_stack_spec,
        vocab_size=recipe.vocab_size,
        max_sequence_length=recipe.seq_length,
        hybrid_layer_pattern="E",
        post_process=False,
    ).cuda()


def fed_tokens(recipe: Recipe) -> Tensor:
    """Tokens [b, s] with what the embeddings need beside them."""
    drawn = torch.Generator("cuda").manual_seed(3)
    shape = (BATCH, recipe.seq_length)

    def uniform() -> Tensor:
        return torch.rand(shape, generator=drawn, device="cuda")

    tokens = (recipe.vocab_size ** uniform()).long() - 1
    tokens = tokens.masked_fill(uniform() < 1 / DOCUMENT, recipe.vocab_size - 1)
    assert recipe.structure is not None
    kinds = (uniform() * recipe.structure.categories).long()
    depths = (uniform() * recipe.structure.levels).long()
    return input_embeddings.feeding(tokens, recipe.vocab_size - 1, kinds, depths)


def added(module: Any, tokens: Tensor, hidden: Tensor) -> None:
    """Add both embeddings to those of the tokens, forward and backward."""
    out = module(module.ids(tokens, None, None), hidden)
    out.backward(upstream_of(out.shape, out.dtype))
    module.zero_grad()


def through(layer: Any, hidden: Tensor) -> None:
    out = layer(hidden_states=hidden, attention_mask=None)
    out = out[0] if isinstance(out, tuple) else out
    out.backward(upstream_of(out.shape, out.dtype))
    layer.zero_grad()
    hidden.grad = None  # or the next one would be added to it


@click.command(help=__doc__)
@results.out_option()
def main(out: Path) -> None:
    os.environ[env.NGRAM_HASH.name] = environment_sizes.text(RECIPE.ngram_hash)
    os.environ[env.STRUCTURE.name] = environment_sizes.text(RECIPE.structure)
    one = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("nccl", store=one, rank=0, world_size=1)
    cpu_shims.init_distributed()
    model = model_of(RECIPE)
    module = input_embeddings.InputEmbeddings(model.embedding)
    assert module.ngram_hash is not None and module.structure is not None
    with torch.no_grad():  # trained projections are not zero
        module.ngram_hash.projection.normal_(std=0.02)
        module.structure.widening.normal_(std=0.02)
    tokens = fed_tokens(RECIPE)
    size = (RECIPE.seq_length, BATCH, RECIPE.hidden_size)
    hidden = torch.randn(size, device="cuda").bfloat16()
    layer = model.decoder.layers[0]
    ways: dict[str, tuple[Any, ...]] = {
        "both embeddings": (added, module, tokens, hidden),
        "layer E": (through, layer, hidden.clone().requires_grad_()),
    }
    times = {name: median(*way, queued=True) for name, way in ways.items()}
    report = {
        "stack": results.stack("triton", "megatron-core", "transformer-engine"),
        "milliseconds": times,
        "milliseconds on an idle GPU": {name: median(*way) for name, way in ways.items()},
        "share": times["both embeddings"] / times["layer E"],
        "parameters": sum(each.numel() for each in module.parameters()),
        "kernels": {
            name: {k[:80]: ms for k, ms in by_kernel(*way).items() if ms >= 0.05}
            for name, way in ways.items()
        },
    }
    results.write(out, f"input_embeddings_{card()}", report, table(report))


def table(report: dict[str, Any]) -> str:
    idle = report["milliseconds on an idle GPU"]
    rows = ((name, time, idle[name]) for name, time in report["milliseconds"].items())
    blocks: list[results.Page] = [
        "# N-gram and structure embeddings against a layer of kind E",
        f"Written by `benchmarks/input_embeddings.py`: {results.versions(report['stack'])}. "
        f"NAM56R's widths, {BATCH} x {RECIPE.seq_length} tokens, bf16, forward plus backward.",
        results.table(["", ("milliseconds", ".2f"), ("on an idle GPU", ".2f")], rows),
        f"The embeddings, of {report['parameters']:,} parameters, take {report['share']:.1%} of "
        "the layer's time.",
    ]
    for name, kernels in report["kernels"].items():
        cells = [(f"`{kernel}`", time) for kernel, time in kernels.items()]
        blocks += [f"## {name}, by kernel", results.table(["kernel", ("ms", ".3f")], cells)]
    return results.page(*blocks)


if __name__ == "__main__":
    main()
