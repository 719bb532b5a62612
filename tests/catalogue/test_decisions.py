"""Everything in the earlier overlay's list leads to code or to a row that says what was decided.

The list is that of its README, its production launch script and the reports about it.
"""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner

from cppmega.catalogue import decisions, gates, loader
from cppmega.cli.main import cli
from cppmega.errors import CppmegaError
from cppmega.host import env
from cppmega.page import Page
from cppmega.preflight.checks import ORDER
from cppmega.recipe.fields import Fields
from tests.support import REPOSITORY

RESULTS = REPOSITORY / "benchmarks" / "results"

sys.path.insert(0, str(REPOSITORY / "scripts"))
decisions_page = importlib.import_module("decisions_page")

VARIABLES = """
    INDEX_CACHE LEMYX_DSA LINEAR_CE_KERNEL LIGER_CE MTP_LIGER_CE SELECTIVE_FP8_MOE MAMBA_RECOMPUTE
    FP8_PARAM_GATHER DUALPIPEV DUALPIPEV_CHUNKS MAMBA3_P1 MAIN_HEAD_LINEAR_CE
    PREFER_NATIVE_HOPPER_CE MTP_NATIVE_HOPPER_CE DSA_INDEXER_FUSED EP_OVERLAP
    HYBRID_SCHEDULE_PLAN MAMBA3_MIMO
    MAMBA_NUM_GROUPS NEM_PATTERN LAYER_DEPTH R_LAYER_INDICES NGRAM_HASH_ENABLED NGRAM_HASH_ORDERS
    NGRAM_HASH_HEADS NGRAM_HASH_TABLE_SIZE NGRAM_HASH_EMBED_DIM STRUCTURE_ENABLED
    STRUCTURE_COMPONENTS DSA_A_LAYER_RANKS DSA_SPARSE_MODE DSA_SKIP_INDEXER_LOSS
    DSA_INDEXER_LOSS_COEFF DSA_FP8_ATTENTION DSA_SPARSE_LOSS DSA_INDEXER_DTYPE MEMORY_DEBUG
    DISPATCHER_OVERRIDE MAMBA3_COMPILE
"""

SCRIPTS_AND_PARTS = """
    apply_dsa_cg_patches.py apply_linear_ce_patch.py apply_mamba3_mimo_p1_patches.py
    apply_mamba3_mimo_tma_layout_fix.py apply_dualpipev_patch.py dualpipev_schedule.py
    hybrid_schedule_plan.py mtp_liger_ce.py mtp_native_hopper_ce.py mamba3_compile_patch.py
    mamba_recompute_patch.py selective_fp8_moe_patch.py index_cache_patch.py lemyx_dsa_warmup.py
    dsa_indexer_fused_patch.py dsa_splitk_indexer_loss.py dsa_sparse_attention.py
    dsa_sparse_absorbed.py dsa_fp8_indexer.py dsa_fp8_patch.py dsa_tilelang_fused_kl.py
    sparse_mla_ops preflight_smem_check.py noconv_mamba_mixer.py custom_mamba_model.py
    nam56r_nemo_recipe.py remote_smoke_h200_dsa_9_4_m.sh install_tilelang_wheel.sh
    expandable_segments EXTRA_FLAGS FP8_FLAGS CG_FLAGS OPTIMIZER_FLAGS VARIANT PP_SIZE VPP_SIZE MBS
    GBS EP_SIZE_OVERRIDE NSYS_PROFILE NO_ROPE_FUSION production_status.md
"""

ARGUMENTS = """
    --mla-down-proj-fusion --fp8-param-gather --overlap-moe-expert-parallel-comm
    --delay-wgrad-compute --cuda-graph-scope --cuda-graph-impl --moe-token-dispatcher-type
    --moe-flex-dispatcher-backend --cross-entropy-fusion-impl --dsa-indexer-dtype
    --no-check-for-nan-in-loss-and-grad
"""

NUMBERS = "289 279 268 253 252 193 9,250"

REPORTED = {
    "182 TFLOP/s": "combined_1f1b_for_hybrid_stacks",
    "-12.5 %": "combined_1f1b_for_hybrid_stacks",
    "out of memory at PP 2 and at MBS 8": "combined_1f1b_for_hybrid_stacks",
    "-2.6 to -5 GiB": "fp8_param_gather_variable",
    "39.5 GiB": "cuda_graph_scope",
    "5.93x": "mamba3_compile",
    "127 GiB": "the_record",
    "6,200 tokens/s": "the_record",
    "94.4 %": "fp8_dsa",
}
"""Numbers that only the row of their subject repeats."""

OF_REPORTS = """
    DualPipeV HybridEP #1524 #2043 #2344 #2388 #2445 #2471 #2575 #2634 #2648 #3026 #3071 #3345
    #3674 #3828 #4039 #4070 #4268 #968
"""
"""Pull requests and issues of the launch lines and of the monthly reports."""

BUGS = {
    1: "mtp_roll_packed_sequences",
    2: "mtp_roll_packed_sequences",
    3: "mtp_roll_packed_sequences",
    4: "mamba_packed_seq_idx",
    5: "combined_1f1b_autocast",
    6: "index_cache",
    7: "dsa_unfused_memory",
    8: "dsa_indexer_kernels",
    9: "dsa_indexer_kernels",
    10: "dsa_unfused_memory",
    11: "rules",
    12: "dsa_sparse_mla_widths",
    13: "dsa_host_syncs",
    14: "dsa_host_syncs",
    15: "dsa_host_syncs",
    16: "rope_thd_no_host_sync",
    17: "mamba_packed_seq_idx",
    18: "gated_delta_net_host_syncs",
    19: "fused_cross_entropy_grad_dtype",
    20: "linear_ce_hybrid_head",
    21: "hybrid_mtp_padding_mask",
    22: "dsa_indexer_loss_metric",
    23: "flops_of_mla_and_dsa_layers",
    24: "dsa_all_reduce_of_a_copy",
    25: "smem_merge",
    26: "float16_keep_fp32",
    27: "imported_process",
    28: "dataset_helpers_prebuilt",
    29: "dsa_hadamard_transform",
}
"""The open bugs of 0.19.2 that the reports list -> page, check or row."""


@cache
def pages() -> dict[str, Page]:
    return loader.load()


def declared() -> set[str]:
    return gates.declared(pages().values())


def links() -> set[str]:
    """The numbers of the pull requests that pages cite."""
    text = " ".join(page.labels["Upstream"] for page in pages().values())
    return {f"#{number}" for number in re.findall(r"/(?:pull|issues)/(\d+)", text)}


@pytest.mark.parametrize("name", VARIABLES.split())
def test_every_variable_is_read_or_has_a_row(name: str) -> None:
    variable = f"CPPMEGA_{name}"
    row = decisions.of_variable(variable)
    assert (variable in declared()) != (row is not None), "exactly one of the two"
    assert row is None or row in decisions.find(f"{variable}=1").values()


@pytest.mark.parametrize("name", (SCRIPTS_AND_PARTS + ARGUMENTS + NUMBERS).split())
def test_every_script_argument_and_number_has_a_row(name: str) -> None:
    assert decisions.find(name)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("CPPMEGA_DUALPIPEV=1", ("Decision:     declined", "Not measured: DualPipeV", "#1524")),
        ("--mla-down-proj-fusion", ("Decision:     part of Megatron", "hybrid stack")),
        ("289", ("(as reported)", "(nam56r_h200_2gpu_ep2.md)", "237")),
        ("CPPMEGA_SMEM_MERGE", ("is read by smem_merge:", "is read by smem_merge_mamba:")),
        (env.CACHE.name, (env.CACHE.meaning,)),
        ("combined_1f1b_autocast", ("Target:", "Gate:     always on")),
    ],
)
def test_explain(name: str, says: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = pages()
    monkeypatch.setattr(loader, "load", lambda *_: loaded)
    told = CliRunner().invoke(cli, ["explain", name])
    assert told.exit_code == 0, told.output
    assert all(word in told.output for word in says), told.output


@pytest.mark.parametrize("name", OF_REPORTS.split())
def test_everything_of_the_reports_leads_to_a_page_or_a_row(name: str) -> None:
    assert name in links() or decisions.find(name)


@pytest.mark.parametrize(("text", "row"), REPORTED.items())
def test_reported_numbers_are_in_their_row_as_such(text: str, row: str) -> None:
    said = [n for n in decisions.load()[row].numbers if n.source == decisions.AS_REPORTED]
    assert any(text in number.text for number in said)


@pytest.mark.parametrize(("bug", "answer"), BUGS.items())
def test_every_open_bug_has_a_page_a_check_or_a_row(bug: int, answer: str) -> None:
    assert answer in pages() or answer in ORDER or answer in decisions.load()


def rows() -> list[tuple[str, decisions.Decision]]:
    return list(decisions.load().items())


@pytest.mark.parametrize(("name", "row"), rows(), ids=lambda value: str(value)[:40])
def test_a_row_is_complete_and_its_measurements_are_in_the_results(
    name: str, row: decisions.Decision
) -> None:
    assert name not in pages() and re.fullmatch(r"[a-z0-9_]+", name)
    assert row.why.endswith(".") and not row.instead.endswith(".")
    assert not set(row.variables) & declared(), "a variable that is read is not declined"
    for number in row.numbers:
        if number.source == decisions.AS_REPORTED:
            continue
        result = (RESULTS / number.source).read_text()
        measured = re.findall(r"\d+\.\d+", number.text)
        assert measured and all(value in result for value in measured), number


@pytest.mark.parametrize(("name", "row"), rows(), ids=lambda value: str(value)[:40])
def test_what_a_row_names_exists(name: str, row: decisions.Decision) -> None:
    """Names of code in a row are those of pages, checks, errors, fields, or of what it is about."""
    text = f"{row.why} {row.instead}"
    known = {*pages(), *ORDER, *(field.name for field in fields(Fields)), *row.also}
    known |= {"megatron", *(recipe.stem for recipe in (REPOSITORY / "recipes").glob("*.py"))}
    named = set(re.findall(r"(?<![-\w./])[a-z0-9]+(?:_[a-z0-9]+)+(?![\w/])", text))
    assert named <= known | {"mamba_ssm", "linear_cross_entropy", "dsa_indexer"}, named - known


def test_no_word_leads_to_a_page_and_a_row() -> None:
    words = decisions.names()
    assert not set(words) & {*pages(), *declared()}
    variables = [variable for _, row in rows() for variable in row.variables]
    assert len(variables) == len(set(variables))


def test_the_page_is_the_table() -> None:
    written = (REPOSITORY / "upstream_patches" / "NOT.md").read_text()
    assert written == decisions_page.page(), "run python scripts/catalogue_readme.py"
    assert all(f"| `{name}` |" in written for name, _ in rows())


@pytest.mark.parametrize(
    ("variable", "says"),
    [
        (
            "CPPMEGA_EP_OVERLAP",
            ("182 TFLOP/s", "as reported", "Hybrid models"),
        ),
        ("CPPMEGA_HYBRID_SCHEDULE_PLAN", ("hybrid stacks", "declined")),
        ("CPPMEGA_MTP_LIGER_CE", ("in another form", "CPPMEGA_LINEAR_CE_KERNEL=liger")),
        ("CPPMEGA_DUALPIPEV", ("DualPipeV", "Not measured")),
    ],
)
def test_the_refusal_of_a_variable_quotes_its_row(variable: str, says: tuple[str, ...]) -> None:
    with pytest.raises(CppmegaError) as refused:
        gates.check(pages().values(), {variable: "1"})
    error = refused.value
    assert error.name == "unknown-variable"
    assert f"unset {variable}" in error.next and f"cppmega explain {variable}" in error.next
    row = decisions.of_variable(variable)
    assert row is not None and row.why in error.what and row.instead in error.next
    assert all(word in error.what + error.next for word in says)


def test_a_misspelled_variable_is_not_taken_for_a_row() -> None:
    with pytest.raises(CppmegaError) as refused:
        gates.check(pages().values(), {"CPPMEGA_LINEAR_CE_KERNAL": "liger"})
    assert "Did you mean CPPMEGA_LINEAR_CE_KERNEL" in refused.value.what


def test_names_that_lead_nowhere_get_the_closest_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = pages()
    monkeypatch.setattr(loader, "load", lambda *_: loaded)
    told = CliRunner().invoke(cli, ["explain", "dualpipe"])
    assert isinstance(told.exception, CppmegaError) and told.exception.name == "unknown-page"
    assert "dualpipev" in told.exception.what


def test_a_damaged_table_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "not.toml").write_text('[row]\ntitle = "a"\n')
    monkeypatch.setattr(decisions, "builtin_folder", lambda: tmp_path)
    with pytest.raises(CppmegaError) as refused:
        decisions.load.__wrapped__()
    assert refused.value.name == "bad-catalogue"
