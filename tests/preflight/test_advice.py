"""Advice on command lines of models that others train, read by Megatron's real parser, once."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from cppmega.catalogue import loader as catalogue
from cppmega.cli import advice as cli_advice
from cppmega.cli.main import cli
from cppmega.errors import CppmegaError
from cppmega.preflight import context as preflight_context
from cppmega.preflight.advice import Advice, advise
from cppmega.preflight.context import Context
from cppmega.preflight.messages import ParsedLine, RankAnswer, RankOrder
from cppmega.recipe import index as recipes_index
from cppmega.recipe.memory import estimate
from cppmega.recipe.render import render
from cppmega.recipe.run_options import RunOptions
from cppmega.recipe.validate import with_words
from tests.preflight.contexts import launch
from tests.preflight.test_launch_line import BF16, PARSE, RAW, SCRIPTS
from tests.support import pristine, python

pytestmark = [pytest.mark.megatron, pytest.mark.slow]


@dataclass(frozen=True)
class Line:
    """What advice on a command line must say."""

    words: tuple[str, ...]
    serves: tuple[str, ...] = ()
    """Some of the pages."""
    with_linear: tuple[str, ...] = ()
    """Pages that linear cross-entropy would turn on."""
    possible: tuple[str, ...] = ()
    """Beginnings of further possibilities."""
    irrelevant: tuple[str, ...] = ()
    """Subjects of which no page serves the line."""
    recipe: str = ""


def of_recipe(name: str, **more: Any) -> Line:
    argv = render(recipes_index.load(name), "0.19.2", RunOptions(mock_data=True)).argv
    return Line(argv, recipe=name, **more)


LINEAR = "with --cross-entropy-loss-fusion --cross-entropy-fusion-impl linear"
FUSE = "without --no-gradient-accumulation-fusion"
DEPTH = "with --mtp-num-layers 1"
COMMON = ("cross_entropy_fusion_linear", "linear_ce_gpt_head")
OF_HYBRID = ("cross_entropy_fusion_linear", "linear_ce_hybrid_head")
LINES = {
    "Llama-3": of_recipe(
        "llama3_8b_h100_cut",
        serves=("grad_checks_no_host_sync", "optimizer_copies_at_once"),
        with_linear=COMMON,
        possible=(FUSE, DEPTH, "python -m cppmega.apply_patches --kind all"),
        irrelevant=("dsa", "dsa_indexer", "moe", "mtp", "mamba", "mhc"),
    ),
    "Qwen3 MoE": of_recipe(
        "qwen3_30b_a3b_h100_cut",
        serves=("moe_expert_bias_padding_mask",),
        with_linear=COMMON,
        irrelevant=("dsa", "dsa_indexer", "mtp", "mamba"),
    ),
    "DeepSeek-V3": of_recipe(
        "deepseek_v3_h100_cut",
        serves=("moe_expert_bias_counts", "mla_rope_kernel", "mtp_roll_packed_sequences"),
        with_linear=(*COMMON, "mtp_linear_ce"),
        irrelevant=("dsa", "dsa_indexer", "mamba"),
    ),
    "DSA": of_recipe(
        "dsv32_h100_cut",
        serves=("dsa_attention_kernels", "dsa_indexer_kernels", "hybrid_mtp_padding_mask"),
        with_linear=(*OF_HYBRID, "mtp_linear_ce"),
        irrelevant=("mhc", "fsdp"),
    ),
    "Mamba hybrid": of_recipe(
        "nemotron_h_h100_cut",
        serves=("float16_keep_fp32",),
        with_linear=OF_HYBRID,
        possible=("CPPMEGA_MAMBA_RECOMPUTE=1 python -m cppmega.apply_patches",),
        irrelevant=("dsa", "moe", "mtp"),
    ),
    "a loop of one's own": Line(
        (*RAW, *BF16, *SCRIPTS),
        serves=("grad_accumulation_without_apex",),
        with_linear=COMMON,
        possible=(DEPTH, "with --use-distributed-optimizer"),
        irrelevant=("dsa", "moe", "mamba"),
    ),
    "cudnn": Line(
        (
            *(*RAW, *BF16, "--multi-latent-attention", "--experimental-attention-variant", "dsa"),
            *("--dsa-kernel-backend", "cudnn"),
        ),
        with_linear=COMMON,
        possible=("with --dsa-kernel-backend none",),
    ),
}


ONCE = (
    PARSE.replace("from cppmega.preflight.workers.line import parse", "")
    .replace("argv=argv,", "argv=argv, only_parses=True,")
    .replace("parse(order)", "inspect(order).line")
    .replace(
        "te_stand_ins.read_options_once()",
        "from cppmega.preflight.workers.rank import inspect\n"
        "from tests.support import parsed_line\n"
        "parsed_line.build_parser_once()",
    )
)
"""As a rank that only parses, with one parser for all lines."""


@pytest.fixture(scope="module", autouse=True)
def before_megatron_is_imported() -> Iterator[None]:
    """As in the command, whatever other tests have imported into this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "megatron.core", raising=False)
        yield


@pytest.fixture(scope="module")
def contexts() -> dict[str, Context]:
    """A context of each line, whose process has already answered."""
    found = {n: launch(None, *one.words, root=pristine("0.19.2")) for n, one in LINES.items()}
    order = {name: [one.launch_line.argv, None, {}, ()] for name, one in found.items()}
    done = python(pristine("0.19.2"), ONCE, env={"CASES": json.dumps(order)})
    assert "ANSWER" in done.stdout, done.stderr[-3000:]
    lines = json.loads(done.stdout.partition("ANSWER")[2])
    first = next(iter(found.values()))
    for name, line in msgspec.convert(lines, dict[str, ParsedLine]).items():
        found[name].__dict__["process"] = RankAnswer(problems=[], line=line)
        found[name].__dict__["session"] = first.session
        found[name].__dict__["plan"] = first.plan
        found[name].allows_unknown = True
    return found


@pytest.fixture(scope="module")
def advice(contexts: dict[str, Context]) -> dict[str, Advice]:
    return {name: advise(context) for name, context in contexts.items()}


@pytest.mark.parametrize("name", LINES)
def test_a_line_gets_the_pages_that_serve_it(
    advice: dict[str, Advice], contexts: dict[str, Context], name: str
) -> None:
    line, found, pages = LINES[name], advice[name], contexts[name].session.pages
    assert {*line.serves} <= {*found.serves} and found.pending
    assert not {*line.irrelevant} & {pages[page].subject for page in found.serves}
    hows = {one.how: one for one in found.possible}
    assert {*hows[LINEAR].pages} == {*line.with_linear}
    assert {*line.possible} <= {*hows}
    named = [*found.serves, *found.conditional, *found.irrelevant]
    named += [page for one in found.possible for page in one.pages]
    assert {*named} == {*pages}
    assert (DEPTH in hows and hows[DEPTH].other_model) is (name not in _NOT_ANOTHER_DEPTH)


_NOT_ANOTHER_DEPTH = ("DeepSeek-V3", "DSA", "Mamba hybrid", "cudnn")
"""They have one, take it from their pattern, or cannot be combined with one."""


def test_what_a_page_asks_for_turns_it_on() -> None:
    base: dict[str, Any] = {
        **{"num_experts": 8, "hybrid_layer_pattern": "", "gradient_accumulation_fusion": False},
        **{"experimental_attention_variant": "dsa", "dsa_kernel_backend": "cudnn"},
    }
    pages = [page.patch for page in catalogue.load().values() if page.patch.asked_by]
    assert len(pages) >= 6
    for patch in pages:
        words = [word.replace("--no-", "--") for word in patch.asked_by]
        assert patch.when is not None and not patch.when(Namespace(**base)), patch.asked_by
        assert patch.when(Namespace(**with_words(base, words))), patch.asked_by


def test_pages_that_an_apply_left_out_can_be_asked_for(contexts: dict[str, Context]) -> None:
    context = copy.copy(contexts["Llama-3"])
    states = {"te_plain_layers": "off", "optimizer_copies_at_once": "off"}
    verdicts = {
        name: dataclasses.replace(one, state=states.get(name, "applied"))
        for name, one in context.plan.verdicts.items()
        if one.state == "pending"
    }
    context.__dict__["plan"] = SimpleNamespace(verdicts={**context.plan.verdicts, **verdicts})
    found = advise(context)
    hows = {one.how: one.pages for one in found.possible}
    assert hows["python -m cppmega.apply_patches --kind all"] == ("te_plain_layers",)
    assert hows["python -m cppmega.apply_patches"] == ("optimizer_copies_at_once",)
    assert "grad_checks_no_host_sync" in found.serves and not found.pending


@pytest.mark.parametrize("name", [name for name, line in LINES.items() if line.recipe])
def test_the_estimate_of_a_line_is_that_of_its_recipe(advice: dict[str, Advice], name: str) -> None:
    recipe = recipes_index.load(LINES[name].recipe).with_(gates=())  # a line has none
    native, linear = (
        estimate(recipe.with_(cross_entropy_fusion_impl=each), attends=True).gib
        for each in ("native", "linear")
    )
    found = advice[name]
    assert found.gib == pytest.approx(native, abs=1e-6)
    (saves,) = (one.saves for one in found.possible if one.how == LINEAR)
    assert saves == pytest.approx(native - linear, abs=1e-6)


def test_the_answer_is_rows_and_one_object(
    contexts: dict[str, Context], advice: dict[str, Advice], capsys: pytest.CaptureFixture[str]
) -> None:
    context, found = contexts["Llama-3"], advice["Llama-3"]
    cli_advice.print_advice(context, found, verbose=False)
    printed = capsys.readouterr()
    assert f"{LINEAR}: " in printed.out and "saves 2.9 GiB of an estimated 54.4" in printed.out
    assert "GiB of an estimated 54.4 per GPU; it is another model" in printed.out
    assert "(-v lists them)" in printed.out and "mamba_packed_seq_idx" not in printed.out
    assert printed.err.startswith("next: python -m cppmega.apply_patches")
    cli_advice.print_advice(context, found, verbose=True)
    assert "mamba_packed_seq_idx" in capsys.readouterr().out
    answer = cli_advice.as_json(context, found)
    assert answer["ok"] and answer["megatron"]["version"] == "0.19.2"
    assert json.loads(json.dumps(answer))["possible"][0]["saves_gib"] == pytest.approx(2.9, abs=0.1)


@pytest.mark.parametrize(
    ("recipe", "words", "unknown", "error"),
    [
        (None, (), {}, "no-arguments"),
        ("smoke_cpu", (), {}, "no-arguments"),
        (None, RAW, {"--hidden-sise 3": "--hidden-size"}, "argument-refused"),
    ],
)
def test_what_cannot_be_read_is_an_error(
    recipe: str | None, words: tuple[str, ...], unknown: dict[str, str], error: str
) -> None:
    chosen = recipes_index.load(recipe) if recipe is not None else None
    context = launch(chosen, *words, root=pristine("0.19.2"))
    context.__dict__["process"] = RankAnswer(problems=[], line=ParsedLine(unknown=unknown))
    with pytest.raises(CppmegaError) as caught:
        cli_advice.asked(context)
    assert caught.value.name == error


def test_the_command_parses_and_applies_nothing(
    contexts: dict[str, Context],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answered(worker: str, order: RankOrder, *ignored: Any, **more: Any) -> RankAnswer:
        assert order.only_parses and order.argv == LINES["cudnn"].words
        return contexts["cudnn"].process

    monkeypatch.setattr(preflight_context, "ask", answered)
    root, words = pristine("0.19.2"), LINES["cudnn"].words
    cli.main(["advise", "--megatron", str(root), "--json", "--", *words], standalone_mode=False)
    answer = json.loads(capsys.readouterr().out)
    assert {one["state"] for one in answer["serves"]} == {"pending"}
    assert "with --dsa-kernel-backend none" in {one["how"] for one in answer["possible"]}
