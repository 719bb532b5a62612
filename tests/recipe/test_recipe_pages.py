"""Recipes and pages: which a recipe wants, what pages provide, and pages that cannot say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cppmega.catalogue import loader as catalogue
from cppmega.catalogue.page_rules import provided
from cppmega.errors import CppmegaError
from cppmega.overlay.wanted import wanted_patches
from cppmega.recipe import index as recipes_index
from cppmega.recipe.memory import estimate
from cppmega.sizes import dsa_widths


def test_a_recipe_wants_the_pages_that_its_fields_mean_nothing_without() -> None:
    pages = catalogue.load()
    fused = recipes_index.load("nam56r_h200_slice_fused")
    widths = "dsa_sparse_mla_widths"
    attention = "dsa_attention_kernels"
    assert {widths, attention, "linear_ce_hybrid_head"} <= {*wanted_patches(fused, pages)}
    whole = recipes_index.load("nam56r_h200_8gpu_bf16")
    assert attention in wanted_patches(whole, pages)
    assert attention not in wanted_patches(fused.with_(dsa_kernel_backend="none"), pages)
    for other in (fused.with_(dsa_kernel_backend="none"), fused.with_(dsa_kernel_backend="cudnn")):
        assert widths not in wanted_patches(other, pages)
    warmed = fused.with_(dsa_dense_loss_steps=100)
    warmup = {"dsa_dense_loss_warmup", "dsa_indexer_kernels"}
    assert warmup <= {*wanted_patches(warmed, pages)}
    assert not warmup & {*wanted_patches(fused, pages)}
    assert warmed.variables == ((pages["dsa_dense_loss_warmup"].patch.variables[0], "100"),)
    assert "mhc_connections" in wanted_patches(fused.with_(mhc_num_residual_streams=4), pages)
    assert "mhc_connections" not in wanted_patches(fused, pages)
    counts = "moe_expert_bias_counts"
    for counting in (whole, recipes_index.load("dsv32_h200_slice")):
        assert counts in wanted_patches(counting, pages)
    assert counts not in wanted_patches(whole.with_(moe_router_enable_expert_bias=False), pages)
    padded = fused.with_(packed_documents=True, document_multiple=8)
    assert "mtp_roll_packed_sequences" in wanted_patches(padded, pages)
    assert "mtp_roll_packed_sequences" not in wanted_patches(fused, pages)


def test_unfused_scores_count_in_the_estimate_unless_a_page_provides_the_widths() -> None:
    fused = recipes_index.load("nam56r_h200_slice_fused")
    widened = provided(catalogue.load().values(), dsa_widths.TILELANG)
    for unfused in (
        estimate(fused),
        estimate(fused.with_(dsa_kernel_backend="none"), widened),
        estimate(fused.with_(dsa_kernel_backend="cudnn"), widened),
    ):
        assert unfused.gib > estimate(fused, widened).gib + 100  # all scores, in fp32
    attends = bool(provided(catalogue.load().values(), dsa_widths.ATTENTION))
    unnamed, cudnn = (fused.with_(dsa_kernel_backend=name) for name in ("none", "cudnn"))
    assert estimate(unnamed, attends=attends) == estimate(fused, widened)
    assert estimate(cudnn, attends=attends) == estimate(cudnn)


@pytest.mark.parametrize("answer", ["1 / 0", "None"])
def test_a_page_that_cannot_say_whether_it_is_wanted_stops_the_launch(
    answer: str, tmp_path: Path
) -> None:
    text = (catalogue.builtin_folder() / "training" / "log_second_line.py").read_text()
    text = text.replace("    reached=", f"    wanted_by=lambda recipe: {answer},\n    reached=")
    (tmp_path / "unsure.py").write_text(text)
    page = catalogue.load_page("unsure", tmp_path / "unsure.py", "tests")
    with pytest.raises(CppmegaError) as caught:
        wanted_patches(recipes_index.load("nam56r_h200_slice"), {"unsure": page})
    assert caught.value.name == "page-failed"


def test_the_page_that_changes_the_process_with_its_answer_is_named(tmp_path: Path) -> None:
    """What it changed is found when all have answered, and is not the last one's."""
    text = (catalogue.builtin_folder() / "training" / "log_second_line.py").read_text()
    pages = {}
    for name, answer in (("harmful", "not os.environ.update(CHANGED='1')"), ("last", "True")):
        asked = f"    wanted_by=lambda recipe: {answer},\n    reached="
        path = tmp_path / f"{name}.py"
        imported = text.replace("from cppmega.edits", "import os\n\nfrom cppmega.edits")
        path.write_text(imported.replace("    reached=", asked))
        pages[name] = catalogue.load_page(name, path, "tests")
    with pytest.raises(CppmegaError, match="changes the environment") as caught:
        wanted_patches(recipes_index.load("nam56r_h200_slice"), pages)
    assert "`wanted_by` of harmful " in caught.value.what
    assert "CHANGED" not in os.environ
