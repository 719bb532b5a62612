"""Hyper-connections in real GPT and hybrid models of 0.19.2, on the CPU."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support import in_a_tree, patched, pristine, python

PAGES = ("mhc_connections", "float16_keep_fp32")
N, C = 4, 16
SITE = {
    "mapping_proj.weight": [N * (N + 2), N * C],
    "alpha_pre": [1],
    "alpha_post": [1],
    "alpha_res": [1],
    "bias": [N * (N + 2)],
}
HEAD = {"hc_head_fn": [N, N * C], "hc_head_base": [N], "hc_head_scale": [1]}


@cache
def asked(root: Path, *parts: str) -> dict[str, Any]:
    """What models on a tree do."""
    functions = ", ".join(f"t.{part}" for part in parts)
    code = f"from tests.upstream_patches.mhc import mhc_checks as t; t.main({functions})"
    done = python(root, code, interprets="fused" in parts)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def mine(part: str) -> Any:
    """What models on the patched tree do."""
    others = ("off", "on", "zeros", "recomputed", "dropout", "memory", "options")
    parts = ("fused",) if part == "fused" else others
    return asked(patched("0.19.2", *PAGES), *parts)[part]


def test_without_the_option_a_model_is_stocks_to_the_bit() -> None:
    assert mine("off") == asked(pristine("0.19.2"), "off")["off"]


@pytest.mark.parametrize(
    ("model", "sites", "heads", "gone"),
    [
        (
            "gpt",
            [
                f"{layer}.{name}_hyper_connection"
                for layer in (
                    *("decoder.layers.0", "decoder.layers.1"),
                    "mtp.layers.0.mtp_model_layer",
                )
                for name in ("self_attention", "mlp")
            ],
            ("decoder", "mtp.layers.0"),
            "mtp.layers.0.eh_proj.weight",
        ),
        (
            "hybrid",
            [
                *(f"decoder.layers.{at}.hyper_connection" for at in range(4)),
                *(f"mtp.layers.0.mtp_model_layer.layers.{at}.hyper_connection" for at in range(2)),
            ],
            ("decoder", "mtp.layers.0"),
            "mtp.layers.0.eh_proj.weight",
        ),
    ],
)
def test_parameters_have_the_names_and_shapes_of_0_20(
    model: str, sites: list[str], heads: tuple[str, ...], gone: str
) -> None:
    found = mine("on")[model]
    stock = set(asked(pristine("0.19.2"), "off")["off"][model][2])
    new = {f"{site}.{name}": shape for site in sites for name, shape in SITE.items()}
    new |= {f"{head}.{name}": shape for head in heads for name, shape in HEAD.items()}
    new |= {f"mtp.layers.0.{name}.weight": [C, C] for name in ("e_proj", "h_proj")}
    shapes = found["shapes"]
    assert {name: shape for name, shape in shapes.items() if name in new} == new
    plain = {name.replace(".inner_layer.", ".") for name in shapes.keys() - new.keys()}
    assert plain == {name for name in stock if "_extra_state" not in name} - {gone}
    assert set(found["saved"]) == set(shapes)
    wrapped = {name for name in shapes if ".inner_layer." in name}
    assert bool(wrapped) == (model == "hybrid")


@pytest.mark.parametrize("model", ["gpt", "hybrid"])
def test_models_learn(model: str) -> None:
    losses = mine("on")[model]["losses"]
    assert losses[-1] < 0.6 * losses[0]


PER_HEAD = 8


@pytest.mark.parametrize("how", ["off", "on"])
@pytest.mark.parametrize("model", ["gpt", "hybrid"])
def test_gradients_of_the_first_step_that_are_exactly_zero_are_those_of_stock(
    model: str, how: str
) -> None:
    places = dict(mine("zeros")[f"{model}, {how}"]["places"])
    rows = places.pop("embedding.word_embeddings.weight")
    unseen = mine("zeros")["unseen"]
    assert rows == [[word, column] for word in unseen for column in range(C)] and unseen
    for name, where in places.items():
        # What all keys have in common changes no attention: such a gradient is all rounding.
        assert name.endswith("linear_qkv.bias"), name
        assert {at % (3 * PER_HEAD) // PER_HEAD for (at,) in where} == {1}, (name, where)


@pytest.mark.parametrize("model", ["gpt", "hybrid"])
def test_of_the_first_site_only_what_streams_have_in_common_learns_in_the_first_step(
    model: str,
) -> None:
    sites = list(mine("zeros")[f"{model}, on"]["sites"].values())
    first, others = sites[0], sites[1:]
    # All streams are equal, and each receives the columns' sum of them, which is 1.
    assert len(others) == 5 and 0 < first["res"] < 1e-5 * min(site["res"] for site in others)
    # A norm follows, which undoes the scale of its input, up to its epsilon.
    assert 0 < first["pre"] < 1e-2 * first["post"]


@pytest.mark.parametrize("model", ["gpt", "hybrid"])
def test_recomputation_changes_nothing_and_keeps_fewer_streams(model: str) -> None:
    found = mine("recomputed")[model]
    assert found["apart"]["full"] == [0, 0]
    for how in ("mhc", "mhc by 2", "in parts"):
        assert max(found["apart"][how]) < 2e-6
    # With what a block begins: the depth's, and one of the decoder's four hybrid layers. The first
    # one begins with copies of the embeddings.
    assert found["kept"] == {
        **{"none": 6, "full": found["kept"]["full"], "mhc": 1},
        "mhc by 2": 2 if model == "hybrid" else 1,
    }


@pytest.mark.parametrize("model", ["gpt", "hybrid"])
def test_recomputation_repeats_the_random_numbers_of_dropout(model: str) -> None:
    found = mine("dropout")[model]
    assert found["full"] == [0, 0] and found["evaluated"] == [0]
    assert max(*found["mhc"], *found["mhc by 2"]) < 2e-6
    assert min(*found["other numbers"], *found["none"]) > 1e-3


@pytest.mark.parametrize(("how", "blocks"), [("mhc", 1), ("mhc by 2", 2)])
def test_recomputed_streams_cost_those_of_each_block_and_the_weights_of_sites(
    how: str, blocks: int
) -> None:
    found, base = mine("memory"), mine("memory")["without"]
    weights = 2 * 4 * (N + N * N)  # of a token, at two sites of four layers
    extra = found[how]["forward"] - base["forward"] - weights
    contracted = 64  # the first block begins with the embeddings, which any model keeps
    assert 0 <= extra - contracted - (blocks - 1) * N * 64 <= 0.1 * N * 64
    assert found["none"]["forward"] - base["forward"] > 10 * N * 64


def test_recomputed_streams_do_not_outlive_the_backward() -> None:
    found = mine("memory")
    kept = {how: found[how]["backward"] - found["none"]["backward"] for how in ("mhc", "mhc by 2")}
    assert max(map(abs, kept.values())) < N, kept


def test_fused_kernels_recompute_and_agree_with_the_reference() -> None:
    found = mine("fused")
    assert max(*found["apart"], *map(max, found["with dropout"])) < 1e-5
    assert found["kept"] == 0  # the only block begins with copies of the embeddings


def test_fused_kernels_are_never_left_out_in_silence() -> None:
    found = mine("options")
    for case, name, why in (
        ("on a CPU", "no-kernel", "on cpu"),
        ("double", "no-kernel", "float64"),
        ("3 streams", "arguments-invalid", "3 streams"),  # the configuration shows it
    ):
        assert found[case].startswith(f"{name}: ") and why in found[case], found[case]


def test_both_spellings_mean_the_same() -> None:
    found = mine("options")
    none = {
        **{"enable_mhc_connections": False, "mhc_num_residual_streams": 4, "use_fused_mhc": False},
        **{"mhc_sinkhorn_iterations": 20, "mhc_init_gating_factor": 0.01},
        **{"mhc_recompute_layer_num": None},
    }
    two = {**none, "enable_mhc_connections": True, "mhc_num_residual_streams": 2}
    assert found["none"] == none
    assert found["ours"] == found["dev"] == two
    assert found["both"] == {**two, "enable_mhc_connections": False}
    assert found["two values"] == "refused"
    assert found["mhc is off"].startswith("argument-without-effect: ")


@cache
def ranks(folder: str) -> dict[str, Any]:
    """What models on two ranks do."""
    code = "from tests.upstream_patches.mhc import mhc_ranks as t; t.main(FOLDER)"
    done = python(patched("0.19.2", *PAGES), f"FOLDER = {folder!r}\n{code}", nproc=2)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("{"))
    return dict(json.loads(line))


@pytest.mark.slow
def test_every_layout_trains_as_one_rank_from_one_checkpoint(tmp_path: Path) -> None:
    found = ranks(str(tmp_path))
    resumed = found.pop("resumed")
    assert found.pop("overlapped") < 1e-6
    for name, (ddp, fsdp, apart) in found.pop("sharded").items():
        assert fsdp == pytest.approx(ddp, rel=1e-6), name
        assert apart < 1e-5, (name, apart)  # of updates of 1e-2
    assert len(found) == 7
    for name, case in found.items():
        assert case["losses"] == pytest.approx(case["expected"], abs=1e-5), name
        assert case["apart"][1] < 1e-6, (name, case["apart"])
    assert (resumed["mapping"], resumed["others"]) == (["torch.float32"], ["torch.bfloat16"])
    assert resumed["unrounded"] and resumed["as if never stopped"]


@pytest.mark.slow
def test_parts_of_sequences_train_as_one_rank() -> None:
    root = patched("0.19.2", *PAGES, "mtp_roll_packed_sequences")
    check = "check_parts_of_sequences_train_as_one_rank"
    answers = in_a_tree.asked(root, "upstream_patches.mhc.context_ranks", [check])
    assert answers[check] is None, answers[check]


def test_offloaded_activations_change_nothing() -> None:
    code = "from tests.upstream_patches.mhc import mhc_checks as t, offload_checks as o\n"
    done = python(patched("0.19.2", *PAGES), f"{code}t.main(o.fine_grained, o.layers)")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for how, (apart, moved) in {**found["fine_grained"], "layers": found["layers"]}.items():
        assert apart < 5e-7 and moved >= 48, how  # sums of copies have another order
