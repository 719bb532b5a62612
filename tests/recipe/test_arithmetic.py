"""Parameters and FLOPs against the models that Megatron builds, and NAM56R's published numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cppmega.recipe import M2RNN, Mamba3, Recipe
from cppmega.recipe import index as recipes_index
from cppmega.recipe.arithmetic import flops, megatron_flops, parameters
from cppmega.recipe.memory import estimate
from cppmega.recipe.render import render
from tests.support import patched, pristine, python

TOKENS = 64

# Transformer Engine's layers have stand-ins; the model, its config and its builder are Megatron's.
BUILD = """
import json, os, sys

import torch
from tests.support.te_stand_ins import install

install()
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import argument_utils, arguments, training
from torch.utils.flop_counter import FlopCounterMode

out = {}
for name, (kind, argv, run) in json.loads(os.environ["CASES"]).items():
    os.environ.update(run["means"])
    sys.argv, sys.stdout = ["train", *argv], open(os.devnull, "w")
    args = arguments.parse_args()
    arguments.validate_args(args)
    args.padded_vocab_size = int(run["rows"])
    args.bf16, args.params_dtype = False, torch.float32
    make = getattr(argument_utils, f"{kind}_config_from_args")
    config = make(args)
    builder = config.get_builder_cls()(config)
    model = builder.build_model(ProcessGroupCollection.use_mpu_process_groups())
    sys.stdout = sys.__stdout__
    row = {"parameters": sum(p.numel() for p in model.parameters())}
    row["megatron"] = training.num_floating_point_operations(args, 1) / args.seq_length
    if run["flops"]:
        tokens = torch.arange(args.seq_length)[None] % 64
        mask = torch.ones(1, 1, args.seq_length, args.seq_length).triu(1).bool()
        with FlopCounterMode(display=False) as counter:
            loss = model(tokens, tokens, mask, labels=tokens, loss_mask=torch.ones(tokens.shape))
            loss.sum().backward()
        row["counted"] = counter.get_total_flops() / args.seq_length
    out[name] = row
print("ANSWER" + json.dumps(out))
"""

FLOPS = """
import json, os, sys
from megatron.training import arguments, training

out = {}
for name, (_, argv, run) in json.loads(os.environ["CASES"]).items():
    sys.argv, sys.stdout = ["train", *argv], open(os.devnull, "w")
    args = arguments.parse_args()
    arguments.validate_args(args)
    args.padded_vocab_size = int(run["rows"])
    sys.stdout = sys.__stdout__
    out[name] = training.num_floating_point_operations(args, 1) / args.seq_length
print("ANSWER" + json.dumps(out))
"""

BASE = Recipe(
    name="base",
    purpose="small and uneven, so that no two factors can be exchanged",
    kind="hybrid",
    precision="bf16",
    gpus=1,
    pattern="-",
    hidden_size=64,
    ffn_hidden_size=96,
    num_attention_heads=4,
    seq_length=TOKENS,
    vocab_size=500,
    q_lora_rank=40,
    kv_lora_rank=24,
    qk_head_dim=16,
    qk_pos_emb_head_dim=8,
    v_head_dim=8,
    dsa_indexer_n_heads=2,
    dsa_indexer_head_dim=16,
    dsa_indexer_topk=TOKENS,
    moe_router_topk=2,
    moe_ffn_hidden_size=48,
    moe_shared_expert_intermediate_size=56,
    moe_grouped_gemm=False,
    moe_token_dispatcher_type="allgather",
    cross_entropy_loss_fusion=False,
)
GPT = BASE.with_(kind="gpt", pattern="", num_layers=2)
EXPERTS = {"num_experts": 4}
CASES: dict[str, tuple[Recipe, bool]] = {
    "mlp": (BASE, True),
    "mlp, gated": (BASE.with_(activation="swiglu"), True),
    "attention": (BASE.with_(pattern="*-*"), True),
    "attention, grouped, own head size": (
        BASE.with_(pattern="*", num_query_groups=2, kv_channels=24),
        True,
    ),
    "attention, tied": (BASE.with_(pattern="*", tied_embeddings=True), True),
    "experts": (BASE.with_(pattern="EE", **EXPERTS), True),
    "experts, gated, none shared": (
        BASE.with_(
            pattern="E",
            activation="swiglu",
            moe_shared_expert_intermediate_size=None,
            moe_router_topk=3,
            **EXPERTS,
        ),
        True,
    ),
    "mla": (BASE.with_(pattern="+"), False),
    "mla, values as wide as keys": (BASE.with_(pattern="+", v_head_dim=24), True),
    "mla, full-rank query": (BASE.with_(pattern="+", v_head_dim=24, q_lora_rank=None), True),
    "mla, norms": (BASE.with_(pattern="+", qk_layernorm=True), False),
    "dsa": (BASE.with_(pattern="D"), False),
    "dsa, full-rank query": (BASE.with_(pattern="D", q_lora_rank=None), False),
    "dsa, norms": (BASE.with_(pattern="D", qk_layernorm=True), False),
    "mtp": (BASE.with_(pattern="*-/*-"), True),
    "the slice's letters": (BASE.with_(pattern="DE+EDE/D-/D-", **EXPERTS), False),
    "the full model's mtp": (BASE.with_(pattern="+E/+-/+-", **EXPERTS), False),
    "gpt": (GPT, True),
    "gpt, grouped": (GPT.with_(num_query_groups=2, mtp_num_layers=1), True),
    "gpt, dense then experts": (
        GPT.with_(first_dense_layers=1, mtp_num_layers=1, activation="swiglu", **EXPERTS),
        True,
    ),
    "as Qwen3": (
        GPT.with_(
            num_query_groups=2,
            kv_channels=24,
            qk_layernorm=True,
            activation="swiglu",
            moe_shared_expert_intermediate_size=None,
            **EXPERTS,
        ),
        False,
    ),
    "gpt, mla, norms": (GPT.with_(attention="mla", qk_layernorm=True, mtp_num_layers=1), False),
    "gpt, dsa": (GPT.with_(attention="dsa", first_dense_layers=1, **EXPERTS), False),
    "as V3.2": (
        BASE.with_(
            pattern="D-DE/DE",
            activation="swiglu",
            qk_layernorm=True,
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
            **EXPERTS,
        ),
        False,
    ),
}


def line(recipe: Recipe) -> list[str]:
    """The recipe's own launch line, with what a machine without a GPU needs."""
    cpu = recipe.plus(
        *("--use-cpu-initialization", "--no-rope-fusion", "--no-persist-layer-norm"),
        "--no-masked-softmax-fusion",
    )
    return list(render(cpu, "0.19.2").argv)


STREAMS = {"mhc_num_residual_streams": 4, "use_fused_mhc": False}
OF_STREAMS: dict[str, tuple[Recipe, bool]] = {
    "hybrid with mHC": (BASE.with_(pattern="*-E/*-", **STREAMS, **EXPERTS), True),
    "gpt with mHC": (GPT.with_(mtp_num_layers=1, **STREAMS), True),
}


MIXERS: dict[str, tuple[Recipe, bool]] = {
    "Mamba-3": (BASE.with_(pattern="MM-/M-", mamba3=Mamba3(head_dim=16, state_dim=32)), False),
    "M2RNN": (BASE.with_(pattern="R-R/R-", m2rnn=M2RNN(5, 3, 3)), False),
    "Mamba-3 of rank 1, normed": (
        BASE.with_(pattern="M-", mamba3=Mamba3(3, 16, 32, 4, rank=1, out_norm=True)),
        False,
    ),
}


def cases(chosen: dict[str, tuple[Recipe, bool]]) -> str:
    """The cases for a process: kind, launch line, vocabulary rows, and whether to run it."""
    return json.dumps(
        {
            name: (
                recipe.kind,
                line(recipe),
                {"rows": recipe.padded_vocab_size, "flops": run, "means": recipe.variables},
            )
            for name, (recipe, run) in chosen.items()
        }
    )


def answer(root: Path, code: str, chosen: dict[str, tuple[Recipe, bool]] = CASES) -> dict[str, Any]:
    """What a process with that megatron makes of the cases."""
    done = python(root, code, env={"CASES": cases(chosen)})
    assert "ANSWER" in done.stdout, done.stdout[-500:] + done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.partition("ANSWER")[2])
    return found


@pytest.fixture(scope="module", name="built")
def built_by_megatron() -> dict[str, Any]:
    """Megatron 0.19.2's models of every case."""
    return answer(pristine("0.19.2"), BUILD)


@pytest.mark.slow
@pytest.mark.megatron
@pytest.mark.parametrize("name", CASES)
def test_the_built_model_has_exactly_as_many_parameters(built: dict[str, Any], name: str) -> None:
    assert parameters(CASES[name][0]).total == built[name]["parameters"]


@pytest.mark.megatron
@pytest.mark.parametrize("name", [name for name, (_, run) in CASES.items() if run])
def test_the_built_model_computes_exactly_as_many_products(
    built: dict[str, Any], name: str
) -> None:
    # The attention without kernels computes both halves of the causal square.
    whole = flops(CASES[name][0], squares=2 * TOKENS)
    assert whole == pytest.approx(built[name]["counted"], rel=1e-12)


@pytest.mark.megatron
@pytest.mark.parametrize("name", CASES)
def test_what_stock_megatron_reports_is_known(built: dict[str, Any], name: str) -> None:
    recipe = CASES[name][0]
    assert megatron_flops(recipe) == pytest.approx(built[name]["megatron"], rel=1e-12)


@pytest.mark.slow
@pytest.mark.megatron
def test_a_model_with_hyper_connections_counts_as_it_is_built() -> None:
    built = answer(patched("0.19.2", "mhc_connections"), BUILD, OF_STREAMS)
    for name, (recipe, _) in OF_STREAMS.items():
        assert parameters(recipe).total == built[name]["parameters"], name
        whole = flops(recipe, squares=2 * TOKENS)
        # The backward computes the contractions' products again, which are not the model's.
        contractions = 1 + recipe.layout.depths
        again = 2 * contractions * recipe.mhc_num_residual_streams**2 * recipe.hidden_size
        assert whole + again == pytest.approx(built[name]["counted"], rel=1e-12), name
        whole_stack = recipe.with_(recompute_modules=("mhc",))
        by_layer = whole_stack.with_(mhc_recompute_layer_num=1)
        kept = [estimate(each).activations for each in (whole_stack, by_layer, recipe)]
        assert max(kept[:2]) < kept[2], name


@pytest.mark.megatron
def test_a_model_with_own_mixers_counts_as_it_is_built() -> None:
    built = answer(patched("0.19.2", "own_mixers"), BUILD, MIXERS)
    for name, (recipe, _) in MIXERS.items():
        assert parameters(recipe).total == built[name]["parameters"], name
        assert megatron_flops(recipe) == pytest.approx(built[name]["megatron"], rel=1e-12), name


@pytest.mark.slow
@pytest.mark.megatron
def test_the_overlay_makes_megatron_count_what_we_count() -> None:
    """But for small change: its formulas know no router, hybrid ones no MTP projection."""
    reported = answer(patched("0.19.2", "flops_of_mla_and_dsa_layers"), FLOPS)
    for name, (recipe, _) in CASES.items():
        layout, hidden = recipe.layout, recipe.hidden_size
        ours = flops(recipe) - 6 * layout.counts()["E"] * (recipe.num_experts or 0) * hidden
        if recipe.kind == "hybrid":
            ours -= layout.depths * 12 * hidden**2
        else:  # and the GPT formula takes norms for products
            ours += layout.depths * 18 * hidden
            latent = len(layout.letters) // 2 if recipe.uses_mla else 0
            ours += latent * 6 * ((recipe.q_lora_rank or 0) + (recipe.kv_lora_rank or 0))
        assert reported[name] == pytest.approx(ours, rel=1e-12), name


def test_the_numbers_of_the_full_model() -> None:
    count = parameters(recipes_index.load("nam56r_h200_8gpu_bf16"))
    assert count.layers["D"] + count.layers["+"] == 130_864_256
    assert count.layers["E"] == 2_769_772_544
    assert count.layers["M"] == 13 * (136_151_552 + 4096)
    assert count.layers["R"] == 43_135_192
    assert count.embedding + count.head == 536_870_912
    assert count.extras == {"ngram_hash": 129_030_368, "structure": 263_746}
    assert count.trunk == 5_379_964_538
    assert count.mtp == 438_870_016
    assert count.total == 5_818_834_554


def test_the_slice_reports_what_was_measured_with_upstreams_own_script() -> None:
    """46.5 TFLOP/s at 671 ms a step of 4096 tokens."""
    reported = megatron_flops(recipes_index.load("nam56r_h200_slice"))
    assert reported * 4096 / 0.671 / 1e12 == pytest.approx(46.5, abs=0.1)


def test_packed_documents_cost_less_attention() -> None:
    recipe = CASES["attention"][0]
    short = flops(recipe, squares=TOKENS / 4)
    assert short < flops(recipe)
    assert flops(BASE, squares=TOKENS / 4) == flops(BASE)  # an MLP does not care


def test_a_token_looks_at_no_more_keys_than_the_top_k() -> None:
    recipe = CASES["dsa"][0]
    sparse = recipe.with_(dsa_indexer_topk=16)
    saved = flops(recipe) - flops(sparse)
    per_key = 6 * 4 * (2 * 24 + 8)
    dense_keys, sparse_keys = TOKENS / 2, 16 - 16**2 / (2 * TOKENS)
    assert saved == pytest.approx(per_key * (dense_keys - sparse_keys))


def test_layers_that_share_keys_cost_no_indexer() -> None:
    """3 Full and 6 Shared: exactly six times what an indexer adds to an MLA layer."""
    own = BASE.with_(pattern="-".join("D" * 9), dsa_indexer_loss_coeff=1e-3)
    shared = own.with_(dsa_index_pattern="FSSFSSFSS")
    indexer = parameters(BASE.with_(pattern="D")).trunk - parameters(BASE.with_(pattern="+")).trunk
    assert parameters(own).total - parameters(shared).total == 6 * indexer
    one, none = (own.with_(pattern="DD", dsa_index_pattern=said) for said in ("FF", "FS"))
    assert flops(own) - flops(shared) == pytest.approx(6 * (flops(one) - flops(none)))
    assert flops(one) > flops(none)
    kept = estimate(own).activations - estimate(shared).activations
    assert kept == 6 * 2 * 4 * TOKENS**2
