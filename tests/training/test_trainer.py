"""The trainer: what it refuses before torch is imported, and what it hands to Megatron."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cppmega.recipe.arithmetic import parameters
from tests.recipe.test_arithmetic import BASE, EXPERTS, GPT
from tests.support import REPOSITORY, pristine, python
from tests.training import corpora

pytestmark = pytest.mark.slow

# Every way to break a launch that files can tell, in one process that must not import torch.
BROKEN = """
import json, os, sys
from pathlib import Path
from cppmega import guard, trainer
from cppmega.errors import CppmegaError

out = {}
for name, (line, environment) in json.loads(os.environ["CASES"]).items():
    os.environ.update(environment)
    try:
        trainer.train.main([*line, "--megatron", os.environ["TREE"]], standalone_mode=False)
        out[name] = "accepted"
    except CppmegaError as error:
        out[name] = error.name
        assert error.what and error.why and error.next
    finally:
        for key in environment:
            os.environ.pop(key)
out["torch imported"] = "torch" in sys.modules
print("ANSWER" + json.dumps(out))
"""


@pytest.fixture(scope="module", name="corpus")
def a_prepared_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A made text as bytes, and as bytes of somebody else without a card."""
    folder = tmp_path_factory.mktemp("corpus")
    corpora.paragraphs(folder)
    unseen = folder / "unseen.txt"
    unseen.write_text("".join(f"{n:08}" for n in range(4608)))  # 9 sequences of 4096
    corpora.prepare(folder / "unseen", unseen)
    for suffix in (".bin", ".idx"):
        (folder / f"foreign{suffix}").write_bytes((folder / f"own{suffix}").read_bytes())
        (folder / f"torn{suffix}").write_bytes((folder / f"own{suffix}").read_bytes()[:-3])
    card = json.loads((folder / "own.json").read_text())
    card["tokenizer"]["sha256"] = "0" * 64
    (folder / "other.json").write_text(json.dumps(card))
    for suffix in (".bin", ".idx"):
        (folder / f"other{suffix}").write_bytes((folder / f"own{suffix}").read_bytes())
    return folder


def broken_launches(folder: Path) -> dict[str, tuple[str, list[str], dict[str, str]]]:
    """Name -> expected error, command line, environment."""
    own = ["nam56r_h200_slice", "--data", str(folder / "own")]
    gate = folder / "gated.py"
    gate.write_text(
        "from cppmega.recipe.index import load\n"
        "RECIPE = load('nam56r_h200_slice').with_(\n"
        "    name='gated', gates=(('CPPMEGA_LINEAR_CE_KERNEL', 'triton'),))\n"
    )
    short = ["--set", "seq_length=1048576", "--set", "dsa_indexer_topk=256"]

    def held_out(prefix: str) -> list[str]:
        return [*own, "--set", "eval_interval=5", "--held-out", prefix]

    return {
        "recipe": ("recipe-unknown", ["nam56r_slice", *own[1:]], {}),
        "path": ("data-not-found", [own[0], "--data", str(folder / "nowhere")], {}),
        "torn data": ("data-broken", [own[0], "--data", str(folder / "torn")], {}),
        "no data": ("no-data", [own[0]], {}),
        "both": ("data-and-mock-data", [*own, "--mock-data"], {}),
        "tokenizer unknown": ("tokenizer-unknown", [own[0], "--data", str(folder / "foreign")], {}),
        "tokenizer file": ("input-not-found", [*own, "--tokenizer", "gone.json"], {}),
        "tokenizer": (
            "tokenizer-differs",
            [own[0], "--data", str(folder / "other"), "--tokenizer", "byte"],
            {},
        ),
        "two tokenizers": ("tokenizer-differs", [*own, "--data", str(folder / "other")], {}),
        "vocabulary": ("vocabulary-too-small", [*own, "--set", "vocab_size=128"], {}),
        "size": ("data-too-small", [*own, *short], {}),
        "pattern": ("bad-pattern", [*own, "--set", "pattern=DX"], {}),
        "width": ("width-not-aligned", [*own, "--set", "hidden_size=4099"], {}),
        "heads": ("recipe-invalid", [*own, "--set", "num_attention_heads=0"], {}),
        "batch": ("recipe-invalid", [*own, "--set", "micro_batch_size=2"], {}),
        "field": ("unknown-field", [*own, "--set", "micro_batch=2"], {}),
        "value": ("recipe-invalid", [*own, "--set", "micro_batch_size=big"], {}),
        "checkpoint": ("no-checkpoint", [*own, "--load", str(folder)], {}),
        "gate": ("gate-not-set", [str(gate), *own[1:]], {}),
        "variable": ("unknown-variable", own, {"CPPMEGA_LINEAR_CE_KERNAL": "triton"}),
        "no structure ids": ("structure-missing", ["nam56r_h200_8gpu_bf16", *own[1:]], {}),
        "mixers": ("recipe-differs", own, {"CPPMEGA_MAMBA3": "{}"}),
        "loop": ("not-supported", ["smoke_cpu", "--mock-data"], {}),
        "unpatched": ("patch-missing", own, {}),
        "profile": ("profile-beyond-run", [*own, "--profile", "41"], {}),
        "none held out": ("no-held-out-data", [*own, "--set", "eval_interval=5"], {}),
        "held out, unused": ("argument-without-effect", [*own, "--held-out", own[2]], {}),
        "held out, trained on": ("held-out-data-trained-on", held_out(own[2]), {}),
        "held out, too small": (
            "data-too-small",
            [*held_out(str(folder / "unseen")), "--set", "eval_tokens=36865"],
            {},
        ),
        "held out, enough": (
            "patch-missing",
            [*held_out(str(folder / "unseen")), "--set", "eval_tokens=36864"],
            {},
        ),
        "held out, mock": (
            "data-and-mock-data",
            [own[0], "--mock-data", "--set", "eval_interval=5", "--held-out", own[2]],
            {},
        ),
    }


@pytest.mark.megatron
def test_every_broken_launch_is_named_before_torch_is_imported(corpus: Path) -> None:
    launches = broken_launches(corpus)
    cases = json.dumps({name: (line, env) for name, (_, line, env) in launches.items()})
    root = pristine("0.19.2")
    done = python(root, BROKEN, env={"CASES": cases, "TREE": str(root)}, fresh=True)
    assert "ANSWER" in done.stdout, done.stderr[-3000:]
    answer = json.loads(done.stdout.partition("ANSWER")[2])
    assert answer.pop("torch imported") is False
    assert answer == {name: expected for name, (expected, _, _) in launches.items()}


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.16.1", "training-not-in-wheel"),
        ("0.17.1", "recipe-not-complete"),
        ("0.18.2", "recipe-not-complete"),
    ],
)
def test_older_releases_say_what_they_lack(version: str, expected: str, corpus: Path) -> None:
    line = ["nam56r_h200_slice", "--data", str(corpus / "own")]
    cases, root = json.dumps({"slice": (line, {})}), pristine(version)
    done = python(root, BROKEN, env={"CASES": cases, "TREE": str(root)}, fresh=True)
    assert "ANSWER" in done.stdout, done.stderr[-3000:]
    assert json.loads(done.stdout.partition("ANSWER")[2])["slice"] == expected


def test_the_script_prints_the_four_parts_and_exits_with_1(corpus: Path) -> None:
    command = [sys.executable, str(REPOSITORY / "scripts" / "train.py"), "nam56r_h200_slice"]
    environment = {"PYTHONPATH": str(REPOSITORY), "PATH": "", "RANK": "3"}
    done = subprocess.run(
        [*command, "--data", str(corpus / "gone")], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 1
    parts = ("rank 3]", "error: data-not-found", "what:", "why:", "next:")
    assert all(part in done.stderr for part in parts)
    done = subprocess.run([*command, "--nonsense"], capture_output=True, text=True, env=environment)
    assert done.returncode == 2


# 0.17 and 0.18 have no builders in the wheel; 0.19 has, and takes a config.
MODEL = """
import json, os, sys
import torch
from tests.support.te_stand_ins import install

install()
from cppmega.recipe import index as recipes_index
from cppmega.recipe import Recipe
from cppmega.training.model import model_config, model_provider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import arguments, global_vars

out = {}
for name, (kind, argv, rows) in json.loads(os.environ["CASES"]).items():
    sys.argv, sys.stdout = ["train", *argv], open(os.devnull, "w")
    args = arguments.parse_args()
    arguments.validate_args(args)
    args.padded_vocab_size, args.bf16, args.params_dtype = rows, False, torch.float32
    global_vars._GLOBAL_ARGS = args
    recipe = recipes_index.load("dsv32_h200_slice")
    if kind == "gpt":
        recipe = recipe.with_(kind="gpt", pattern="", num_layers=1)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    config = model_config(recipe, args)
    if config is not None:
        model = config.get_builder_cls()(config).build_model(groups)
    else:
        model = model_provider(recipe)(pg_collection=groups)
    sys.stdout = sys.__stdout__
    out[name] = [type(model).__name__, sum(p.numel() for p in model.parameters()), config is None]

# The hand-over itself, with Megatron's pretrain replaced by a function of the same signature.
import functools
from dataclasses import replace
from pathlib import Path
from unittest import mock

import megatron.training
from cppmega.errors import CppmegaError
from cppmega.recipe.render import render
from cppmega.recipe.run_options import RunOptions
from cppmega.training import pretrain, profiler
from cppmega.training.batch import DataTokens
from cppmega.training.plan import TrainingPlan
from cppmega.training.step import ForwardStep

seen = {}


@functools.wraps(megatron.training.pretrain)
def stand_in(*args, **kwargs):
    for value in [*args, *kwargs.values()]:
        seen[type(value).__name__] = value
        if getattr(value, "is_distributed", False):
            seen["datasets"] = value.__name__
    seen["positions"] = len(args)
    if "extra_args_provider" in kwargs:  # 0.17 parses itself
        arguments.parse_args(kwargs["extra_args_provider"])


metrics = Path(os.environ["METRICS"])
recipe = recipes_index.load("nam56r_h200_slice").with_(
    pattern="E-/E-", moe_grouped_gemm=False).plus("--no-rope-fusion")
options = RunOptions(data=("own",), metrics=metrics)
line = render(recipe, os.environ["VERSION"], options, 256)
plan = TrainingPlan(recipe, options, line, DataTokens(65536, 256, "abc"), None, "d1g3st")
global_vars.unset_global_variables()
original = megatron.training.training.print_rank_last
stepping = megatron.training.training.train_step
profiled = replace(plan, options=replace(options, profile=1, metrics=None))
with mock.patch.object(pretrain, "_check_gpus", lambda torch: None):
    sys.stdout = open(os.devnull, "w")
    try:
        pretrain.pretrain(profiled)
    except CppmegaError as error:
        without_cuda = error.name
    sys.stdout = sys.__stdout__
plan = replace(plan, options=replace(profiled.options, metrics=metrics,
                                     profile_folder=metrics.parent / "profile"))
with mock.patch.object(megatron.training, "pretrain", stand_in), \
        mock.patch.object(profiler, "check_profiler", lambda: None), \
        mock.patch.object(pretrain, "_check_gpus", lambda torch: None):
    sys.stdout = open(os.devnull, "w")
    pretrain.pretrain(plan)
    sys.stdout = sys.__stdout__
step = seen["ForwardStep"]
out["launch"] = {
    "positions": seen["positions"], "fresh": step._check_first, "device": str(step.device),
    "datasets": seen["datasets"],
    "listens": megatron.training.training.print_rank_last is not original,
    "profiled without CUDA": without_cuda,
    "profiles": megatron.training.training.train_step.__wrapped__.__wrapped__ is stepping,
    "header": json.loads(metrics.read_text())}
if "PretrainConfigContainer" in seen:
    container = seen["PretrainConfigContainer"]
    out["launch"]["model"] = type(container.model).__name__
    out["launch"]["overlay"] = megatron.training.get_args().cppmega_overlay
print("ANSWER" + json.dumps(out))
"""


@pytest.mark.megatron
@pytest.mark.parametrize("version", ["0.17.1", "0.18.2", "0.19.2"])
def test_every_release_builds_the_models_and_is_handed_the_run(
    version: str, tmp_path: Path
) -> None:
    from cppmega.recipe.render import missing, render

    recipes = {
        "hybrid": BASE.with_(pattern="*E-/*-", **EXPERTS),
        "dsa": BASE.with_(pattern="DE-/D-", **EXPERTS),
        "gpt": GPT.with_(first_dense_layers=1, mtp_num_layers=1, activation="swiglu", **EXPERTS),
        "gpt, mla": GPT.with_(attention="mla", mtp_num_layers=1),
        "gpt, dsa": GPT.with_(attention="dsa"),
    }
    recipes = {name: own for name, own in recipes.items() if not missing(own, version)}
    cpu = ("--use-cpu-initialization", "--no-rope-fusion", "--no-persist-layer-norm")
    cases = {
        name: (own.kind, list(render(own.plus(*cpu), version).argv), own.padded_vocab_size)
        for name, own in recipes.items()
    }
    environment = {
        "CASES": json.dumps(cases),
        "VERSION": version,
        "METRICS": str(tmp_path / "metrics.jsonl"),
    }
    done = python(pristine(version), MODEL, env=environment)
    assert "ANSWER" in done.stdout, done.stdout[-500:] + done.stderr[-3000:]
    answer = json.loads(done.stdout.partition("ANSWER")[2])
    launch = answer.pop("launch")
    assert ("dsa" in answer) == (version != "0.17.1")
    for name, (kind, count, own) in answer.items():
        assert count == parameters(recipes[name]).total, name
        wanted = {"0.17.1": "MambaModel"}.get(version, "HybridModel")
        assert kind == ("GPTModel" if name.startswith("gpt") else wanted)
        assert own == (version != "0.19.2")
    assert launch["positions"] == {"0.17.1": 4, "0.18.2": 5, "0.19.2": 4}[version]
    assert launch["datasets"] == "provide"
    assert launch["fresh"] and launch["device"] == "cuda:0" and launch["listens"]
    assert launch["header"]["overlay"] == "d1g3st" and launch["header"]["data"] == "abc"
    assert launch["header"]["mock_data"] is False
    assert launch["profiled without CUDA"] == "package-missing" and launch["profiles"]
    if version != "0.17.1":
        wanted = "NoneType" if version == "0.18.2" else "HybridModelConfig"
        assert (launch["model"], launch["overlay"]) == (wanted, "d1g3st")
