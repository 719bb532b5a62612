"""Preflight of the launch line: broken lines and good ones through Megatron's real parser, once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import pytest

from cppmega.host import packages
from cppmega.preflight import examine as preflight
from cppmega.preflight.context import Context
from cppmega.preflight.messages import ParsedLine, RankAnswer
from cppmega.recipe import Recipe
from cppmega.recipe import index as recipes_index
from tests.preflight.contexts import FUSED, SLICE, V32, holds, launch, refuses, says_nothing
from tests.support import patched, python

MOCK = "--mock-data"
RAW = (
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--seq-length", "64", "--max-position-embeddings", "64", "--micro-batch-size", "1"),
    *("--train-iters", "4", "--lr", "1e-4", "--tokenizer-type", "NullTokenizer"),
    *("--vocab-size", "128"),
)
BF16 = ("--bf16", MOCK)
MLA = (
    *("--multi-latent-attention", "--experimental-attention-variant", "dsa"),
    *("--kv-lora-rank", "512", "--qk-pos-emb-head-dim", "64"),
)
SCRIPTS = ("--rollout-size", "4", "--gpus=-1")
OLDER = (
    *("--use-rotary-position-embeddings", "--rotary-base", "500000"),
    *("--recompute-activations", "--recompute-modules", "core_attn"),
)
ADDS = "tests.preflight.script_arguments:add"
MORE = tuple(word for word in RAW if word not in ("--micro-batch-size", "1"))
OVERLAP = "--overlap-moe-expert-parallel-comm"
LOCAL = ("--cuda-graph-impl", "local")
PADDED = ("--moe-expert-capacity-factor", "2", "--moe-pad-expert-input-to-capacity")
FULL = SLICE.with_(
    pattern="DE+E" * 13 + "/D-/D-",
    cuda_graph_impl="transformer_engine",
    cuda_graph_modules=("attn",),
    micro_batch_size=4,
    global_batch_size=4,
)


TENSOR = SLICE.with_(gpus=2, tensor_model_parallel_size=2, global_batch_size=1)


WHOLE = [
    name
    for name in recipes_index.shipped()
    if "R" in (recipe := recipes_index.load(name)).layout.letters and recipe.kind == "hybrid"
]
"""Every recipe of NAM56R with all of its letters."""


BAD_VALUES = {
    "words of a table": ("--attention-backend nonsense", "--attention-backend: KeyError"),
    "words after the parser": ("--cuda-graph-impl local --cuda-graph-modules nonsense", "nonsense"),
    "help": ("--help", "The line asks for help."),
    "a list for a number": ("--train-iters 4 5", "no such argument: 5"),
    "a switch of the past": ("--checkpoint-activations", "is no longer valid"),
    "another's file": ("--yaml-cfg nowhere", "nowhere"),
    "text for a number": ("--hidden-size wide", "invalid int value"),
    "a fraction for a number": ("--num-layers 1.5", "invalid int value"),
    "nothing for a number": ("--num-layers ", "invalid int value"),
    "no heads": ("--num-attention-heads 0", "ZeroDivisionError"),
    "a negative width": ("--hidden-size -64", "--hidden-size -64: expected int >= 1"),
    "a width that no machine has": (f"--hidden-size {10**30}", "expected int <="),
    "a rate that is none": ("--lr nan", "args.min_lr <= args.lr"),
    "a decay that is none": ("--weight-decay nan", "--weight-decay nan: expected a finite"),
    "an infinite clip": ("--clip-grad inf", "--clip-grad inf: expected a finite number"),
    "a decay that never forgets": ("--adam-beta2 1.0", "expected float < 1"),
    "a missing file": ("--heterogeneous-layers-config-path nowhere", "FileNotFoundError"),
}


class Case(NamedTuple):
    """One launch line."""

    recipe: Recipe | None
    words: tuple[str, ...]
    more: Mapping[str, Any] = MappingProxyType({})
    """Other fields of the context."""


CASES = {
    "slice": Case(SLICE, (MOCK,)),
    "raw": Case(None, (*RAW, *BF16)),
    "tensor parallel": Case(TENSOR, (MOCK,)),
    "unknown": Case(SLICE, (MOCK, "--log-parms-norm")),
    "bad value": Case(SLICE, (MOCK, "--recompute-granularity", "most")),
    "invalid": Case(None, (*RAW, *BF16, "--max-position-embeddings", "32")),
    "no config": Case(
        SLICE, (MOCK, "--recompute-granularity", "selective", "--recompute-modules", "nonsense")
    ),
    "scope": Case(SLICE, (MOCK, "--cuda-graph-modules", "attn")),
    "groups": Case(None, (*RAW, *BF16, "--num-query-groups", "2")),
    "nan": Case(SLICE, (MOCK, "--no-check-for-nan-in-loss-and-grad")),
    "fp8": Case(SLICE, (MOCK, "--fp8-format", "hybrid")),
    "fp16": Case(SLICE, (MOCK, "--fp16")),
    "no precision": Case(None, (*RAW, MOCK)),
    "no data": Case(None, (*RAW, "--bf16")),
    "data": Case(None, (*RAW, "--bf16", "--data-path", "somewhere")),
    "context": Case(SLICE, (MOCK, "--context-parallel-size", "2")),
    "tilelang": Case(SLICE.with_(dsa_kernel_backend="tilelang"), (MOCK,)),
    "fused": Case(FUSED, (MOCK,)),
    "heads and keys": Case(FUSED.with_(num_attention_heads=24, dsa_indexer_topk=200), (MOCK,)),
    "unfused backend": Case(FUSED, (MOCK, "--attention-backend", "unfused")),
    "dense loss": Case(V32.with_(dsa_indexer_use_sparse_loss=False), (MOCK,)),
    "v3.2": Case(V32, (MOCK,)),
    "recipe without backend": Case(SLICE.with_(dsa_kernel_backend=None), (MOCK,)),
    "no backend": Case(None, (*RAW, *BF16, *MLA)),
    "graphs": Case(FULL, (MOCK,)),
    "graphs of layers": Case(SLICE, (MOCK, *LOCAL)),
    "graphs of experts": Case(SLICE, (MOCK, *LOCAL, "--cuda-graph-modules", "moe")),
    "graphs of padded experts": Case(SLICE, (MOCK, *LOCAL, *PADDED)),
    "graphs of routers": Case(SLICE, (MOCK, *LOCAL, "--cuda-graph-modules", "attn", "moe_router")),
    "graphs of packs": Case(SLICE.with_(packed_documents=True), (MOCK, *LOCAL)),
    "overlap": Case(SLICE, (MOCK, OVERLAP)),
    "overlap of one": Case(SLICE.with_(pattern="DE/D-"), (MOCK, OVERLAP)),
    "overlap of a gpt": Case(None, (*RAW, *BF16, OVERLAP)),
    "fused down projection": Case(SLICE, (MOCK, "--mla-down-proj-fusion")),
    "nothing to fuse": Case(SLICE.with_(pattern="DE/D-"), (MOCK, "--mla-down-proj-fusion")),
    "fp8 heads": Case(None, (*RAW, *BF16, "--fp8-format", "hybrid")),
    "fp8 recipe": Case(SLICE.with_(precision="fp8"), (MOCK,)),
    "only evaluates": Case(None, (*RAW, *BF16, "--train-iters", "0")),
    "profiled": Case(None, (*RAW, *BF16, "--profile", "--profile-step-start", "2")),
    "older spellings": Case(None, (*RAW, *BF16, *OLDER)),
    "of a script": Case(None, (*RAW, *BF16, *SCRIPTS)),
    "of any script": Case(None, (*RAW, *BF16, *SCRIPTS), {"allows_unknown": True}),
    "of this script": Case(None, (*RAW, *BF16, *SCRIPTS), {"arguments_from": (ADDS,)}),
    "of a script that sets more": Case(None, (*MORE, *BF16)),
    "of any script without data": Case(None, (*RAW, "--bf16"), {"allows_unknown": True}),
    "of any script without precision": Case(
        None, (*RAW, MOCK, "--save-interval", "5"), {"allows_unknown": True}
    ),
    "of any script that sets more": Case(None, (*MORE, *BF16), {"allows_unknown": True}),
    "of fields": Case(
        None,
        (
            *("--" + word[2:].replace("-", "_") if word.startswith("--") else word for word in RAW),
            *("--bf16", "true", "--mock_data", "true", "--packing", "true", "--lora_rank", "8"),
            *("--no_rope_fusion", "true", "--finetune", "false", "--window_size", "None"),
        ),
        {"allows_unknown": True},
    ),
    "of a checkpoint": Case(None, (*RAW[2:], *BF16, "--use-checkpoint-args", "--load", "there")),
    **{name: Case(recipes_index.load(name), (MOCK,)) for name in WHOLE},
    **{name: Case(None, (*RAW, *BF16, *word.split(" "))) for name, (word, _) in BAD_VALUES.items()},
}
PARSE = """
import contextlib, json, os, sys, types
import msgspec
from megatron.core.transformer import transformer_config
import megatron.training.arguments
from tests.support import te_stand_ins
# What a machine that trains has, so that the config is made as well.
sys.modules["transformer_engine"] = types.ModuleType("transformer_engine")
transformer_config.is_te_min_version = lambda *a, **k: True
transformer_config._validate_dsa_kernel_backend_dependencies = lambda *a: None
te_stand_ins.kernels_of_experts()
te_stand_ins.read_options_once()
from cppmega.host import allocator
from cppmega.preflight.messages import RankOrder
from cppmega.preflight.workers.line import parse
with contextlib.redirect_stdout(sys.stderr):
    found = {}
    for name, (argv, world, environment, *more) in json.loads(os.environ["CASES"]).items():
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
        os.environ.update(environment)
        allocator.set_in(os.environ)
        more = dict(zip(("arguments_from", "respells"), more))
        order = RankOrder(root="", expected="", argv=argv, world=world, **more)
        found[name] = msgspec.to_builtins(parse(order))
print("ANSWER" + json.dumps(found))
"""


def context(name: str) -> Context:
    return of_tree(CASES[name], patched("0.19.2"))


def of_tree(case: Case, root: Path) -> Context:
    """A launch that shares its plan, which takes a second, with others of the same gates."""
    gates = dict(case.recipe.wanted_gates) if case.recipe is not None else {}
    asked = launch(case.recipe, *case.words, root=root, environ=gates, **case.more)
    shared = PLANNED.setdefault((root, *sorted(gates.items())), asked)
    asked.__dict__["session"], asked.__dict__["plan"] = shared.session, shared.plan
    return asked


PLANNED: dict[tuple[object, ...], Context] = {}


@pytest.fixture(scope="module")
def parsed() -> dict[str, ParsedLine]:
    """What the parser of 0.19.2 makes of each line, all in one process."""
    lines = {name: context(name).launch_line for name in CASES}
    order = {}
    for name, line in lines.items():
        more = CASES[name].more
        added, respells = more.get("arguments_from", ()), more.get("allows_unknown", False)
        order[name] = [line.argv, line.world, line.environment, added, respells]
    order["connections"] = [*order["tensor parallel"][:2], {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}]
    done = python(patched("0.19.2"), PARSE, env={"CASES": json.dumps(order)})
    assert "ANSWER" in done.stdout, done.stderr[-3000:]
    found = json.loads(done.stdout.partition("ANSWER")[2])
    return msgspec.convert(found, dict[str, ParsedLine])


@pytest.fixture
def line(parsed: dict[str, ParsedLine]) -> Any:
    """A launch whose process has already answered."""

    def of(name: str) -> Context:
        asked = context(name)
        asked.__dict__["process"] = RankAnswer(problems=[], line=parsed[name])
        return asked

    return of


pytestmark = [pytest.mark.megatron, pytest.mark.slow]


def test_lines_that_the_parser_takes(line: Any) -> None:
    names = ("slice", "raw", "v3.2", "graphs", "fp8 recipe", "tensor parallel", "only evaluates")
    for name in (*names, "profiled", "of a checkpoint"):
        holds("line_parses", line(name))
        assert holds("unknown_arguments", line(name)).endswith("knows every argument")


@pytest.mark.parametrize("name", WHOLE)
def test_no_recipe_of_the_whole_model_is_refused(line: Any, name: str) -> None:
    for check in ("recipe_complete", "line_parses", "rules"):
        holds(check, line(name))


def test_a_line_that_it_refuses_with_the_nearest_name(line: Any) -> None:
    found = refuses("unknown_arguments", "argument-refused", line("unknown"))
    assert "did you mean --log-params-norm?" in found.what and "plus()" in found.next
    assert "most" in refuses("line_parses", "argument-refused", line("bad value")).what


@pytest.mark.parametrize("name", BAD_VALUES)
def test_a_bad_value_is_a_finding(line: Any, name: str) -> None:
    answers = [
        answer
        for check in ("unknown_arguments", "line_parses")
        for answer in preflight.answers(check, line(name))
    ]
    (found,) = (answer for answer in answers if answer.state == "failed")
    assert found.name in ("argument-refused", "arguments-invalid"), found
    assert BAD_VALUES[name][1] in found.what


def test_arguments_that_a_script_adds(line: Any) -> None:
    found = refuses("unknown_arguments", "argument-refused", line("of a script"))
    assert "--rollout-size 4" in found.what and "--gpus=-1" in found.what
    assert "--arguments-from" in found.next and "--unknown-arguments allow" in found.next
    (left,) = preflight.answers("unknown_arguments", line("of any script"))
    assert left.is_remark and "--rollout-size 4" in left.what and "--gpus=-1" in left.what
    assert "2 from the script" in holds("unknown_arguments", line("of this script"))
    for name in ("of a script", "of any script", "of this script"):
        holds("line_parses", line(name))
    says_nothing("unknown_arguments", line("text for a number"))


def test_fields_that_are_megatrons_arguments_are_inspected(line: Any) -> None:
    (left,) = preflight.answers("unknown_arguments", line("of fields"))
    unknown, _, own = left.what.partition("; read as Megatron's own: ")
    assert all(words in unknown for words in ("--packing true", "--lora_rank 8", "--window_size"))
    assert {"--micro_batch_size", "--bf16", "--no_rope_fusion", "--finetune"} <= {*own.split(", ")}
    holds("line_parses", line("of fields"))
    assert "MOCK" in holds("rules", line("of fields"))


def test_values_that_a_script_sets_later(line: Any) -> None:
    found = refuses("line_parses", "arguments-invalid", line("of a script that sets more"))
    assert found.next.startswith("add --micro-batch-size;")
    (left,) = preflight.answers("line_parses", line("of any script that sets more"))
    assert left.is_remark and "ends at --micro-batch-size" in left.what
    (left,) = preflight.answers("rules", line("of any script without data"))
    assert left.is_remark and "names neither data" in left.what
    (left,) = preflight.answers("rules", line("of any script without precision"))
    assert left.is_remark and "neither --bf16" in left.what
    assert "--save-interval has no effect" in left.what


def test_values_that_megatron_would_refuse_in_every_rank(
    line: Any, parsed: dict[str, ParsedLine]
) -> None:
    refuses("line_parses", "arguments-invalid", line("invalid"))
    refuses("line_parses", "arguments-invalid", line("no config"))
    exported = line("tensor parallel")
    exported.__dict__["process"] = RankAnswer(problems=[], line=parsed["connections"])
    found = refuses("line_parses", "arguments-invalid", exported)
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in found.what


def unpatched(line: Any, name: str) -> Context:
    """A launch on a Megatron without the pages of DSA."""
    asked = of_tree(CASES[name], patched("0.19.2", "dataset_helpers_prebuilt"))
    asked.__dict__["process"] = line(name).process
    return asked


RULES = {
    "slice": (),
    "raw": (),
    "v3.2": (),
    "fp8 recipe": (),
    "fused down projection": (),
    "fused": (),
    "tilelang": (),
    "dense loss": (),
    "heads and keys": (),
    "no backend": (),
    "recipe without backend": (),
    "graphs of padded experts": (),
    "graphs of routers": (),
    "profiled": (),
    "older spellings": (),
    "overlap of a gpt": (),
    "data": (),
    "scope": (("argument-without-effect", "--cuda-graph-modules", "--cuda-graph-impl"),),
    "groups": (("argument-without-effect", "--num-query-groups"),),
    "nothing to fuse": (("argument-without-effect", "--mla-down-proj-fusion"),),
    "nan": (("nan-checks-off",),),
    "fp8": (("recipe-differs", "precision=bf16", "fp8=hybrid"),),
    "no precision": (("precision-not-stated",),),
    "no data": (("no-data",),),
    "context": (("recipe-differs", "context_parallel_size=1", "arguments mean 2"),),
    "unfused backend": (("unsupported", "--attention-backend unfused", "tilelang"),),
    "graphs of layers": (("unsupported", "drop no tokens", "CUDA graphs"),),
    "graphs of experts": (("unsupported", "drop no tokens", "CUDA graphs"),),
    "graphs of packs": (
        ("unsupported", "acked_documents", "CUDA graphs"),
        ("unsupported", "drop no tokens", "CUDA graphs"),
    ),
    "overlap": (("unsupported", "More than one MTP depth"), ("unsupported", "A hybrid model")),
    "overlap of one": (("unsupported", "A hybrid model"),),
    "fp8 heads": (),
}
"""Line -> the errors of the rules that it breaks, each with words of what happened."""


@pytest.mark.parametrize("name", RULES)
def test_rules_of_a_line(line: Any, name: str) -> None:
    found = [one for one in preflight.answers("rules", line(name)) if one.state == "failed"]
    assert [one.name for one in found] == [error for error, *_ in RULES[name]], found
    for one, (_, *words) in zip(found, RULES[name], strict=True):
        assert all(word in one.what for word in words), one.what


def test_what_a_line_without_a_broken_rule_is_told(line: Any) -> None:
    assert "MOCK" in holds("rules", line("slice"))
    assert "MOCK" not in holds("rules", line("data"))
    assert "DSA by cppmega's kernels" in holds("rules", line("no backend"))
    assert "DSA by tilelang" in holds("rules", line("fused"))
    assert "unfused Megatron" in holds("rules", unpatched(line, "slice"))


def test_dsa_backends_that_would_decline(line: Any) -> None:
    found = refuses("rules", "dsa-backend-declines", unpatched(line, "fused"))
    assert "128 and 64" in found.what and "GiB" in found.what
    assert "dsa_sparse_mla_widths or dsa_attention_kernels" in found.what
    sizes = preflight.answers("rules", unpatched(line, "heads and keys"))
    said = " ".join(one.what for one in sizes)
    assert "24 heads" in said and "200 keys" in said
    found = refuses("rules", "dsa-backend-declines", unpatched(line, "dense loss"))
    assert "dense" in found.what and "dsa_indexer_kernels" in found.what
    refuses("rules", "dsa-unfused", unpatched(line, "no backend"))
    refuses("rules", "dsa-unfused", unpatched(line, "recipe without backend"))


@pytest.mark.parametrize(
    ("version", "wrong"),
    [("0.1.8", False), ("0.1.9", True), ("0.1.10+cuda.git0", True), ("0.1.11", False)],
)
def test_compilers_that_merge_shared_memory_in_use(
    line: Any, monkeypatch: pytest.MonkeyPatch, version: str, wrong: bool
) -> None:
    monkeypatch.setattr(packages, "version", {"tilelang": version}.get)
    holds("rules", line("slice"))  # TileLang is installed, and nothing uses it
    if not wrong:
        holds("rules", line("fused"))
        return
    found = refuses("rules", "tilelang-miscompiles", line("fused"))
    assert version in found.what and "tilelang==0.1.8" in found.next
