"""The trainer up to the call of Megatron's `pretrain`, which insists on CUDA."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cppmega.errors import CppmegaError
from cppmega.recipe import index as recipes_index
from cppmega.recipe.arithmetic import flops, parameters
from cppmega.runs import metrics
from cppmega.training.log import MOCK, Log
from cppmega.training.packing import Packed, pack
from cppmega.training.step import check_first_loss, expected_first_loss
from tests.recipe.test_arithmetic import BASE, EXPERTS, GPT
from tests.support import REPOSITORY, pristine, python

pytestmark = pytest.mark.slow

SLICE = recipes_index.load("nam56r_h200_slice")
END = 9


def packed(rows: list[list[int]], multiple: int = 1) -> Packed:
    """Pack rows of tokens; the label of a token is the next token of the row."""
    text = torch.tensor(rows)
    mask = torch.ones(text.shape[0], text.shape[1] - 1)
    return pack(text[:, :-1], text[:, 1:], mask, END, multiple)


def documents(pack_: Packed) -> list[tuple[list[int], list[int], list[float], list[int]]]:
    """What stands at each document's place: tokens, labels, mask, positions."""
    tensors = (pack_.tokens, pack_.labels, pack_.loss_mask, pack_.position_ids)
    return [
        tuple(tensor[0, start : start + length].tolist() for tensor in tensors)  # type: ignore[misc]
        for start, length in zip(pack_.starts, pack_.lengths, strict=True)
    ]


def test_documents_end_at_their_end_token() -> None:
    found = packed([[1, 2, END, 3, 4, 5, 6]])
    assert documents(found) == [
        ([1, 2, END], [2, END, 3], [1, 1, 0], [0, 1, 2]),
        ([3, 4, 5], [4, 5, 6], [1, 1, 1], [0, 1, 2]),
    ]
    assert not found.padded and found.starts == [0, 3]


def test_a_document_ends_with_its_sample() -> None:
    found = packed([[1, 2, 3, 4], [5, END, 6, END]])
    assert found.starts == [0, 3, 5]
    assert found.lengths == [3, 2, 1]
    assert documents(found)[2] == ([6], [END], [1], [0])


def test_padding_inside_the_pack() -> None:
    found = packed([[1, END, 2, 3, END, 4, 5, 6, 7]], multiple=4)
    assert found.starts == [0, 4]
    assert found.lengths == [2, 3]
    assert documents(found)[1] == ([2, 3, END], [3, END, 4], [1, 1, 0], [0, 1, 2])
    assert found.tokens.tolist() == [[1, END, END, END, 2, 3, END, END]]
    assert found.loss_mask.tolist() == [[1, 0, 0, 0, 1, 1, 0, 0]]
    assert found.squares == (4 + 9) / 5


def test_a_cut_document_keeps_the_label_of_its_last_token() -> None:
    found = packed([[END, 1, 2, 3, 4]], multiple=2)
    assert documents(found)[1] == ([1, 2], [2, 3], [1, 1], [0, 1])


def test_random_packs_keep_every_label_with_its_token() -> None:
    generator = torch.Generator().manual_seed(0)
    for multiple in (1, 4, 8):
        rows = torch.randint(1, 12, (3, 33), generator=generator)
        rows[rows > END] = END
        found = packed(rows.tolist(), multiple)
        pairs = {(r, int(a)): int(b) for r in range(3) for a, b in enumerate(rows[r, 1:])}
        for (tokens, labels, mask, positions), start in zip(
            documents(found), found.starts, strict=True
        ):
            row = start // 32
            assert start % multiple == 0
            assert positions == list(range(len(tokens)))
            text = rows[row].tolist()
            at = next(
                i for i in range(len(text)) if text[i : i + len(tokens)] == tokens and
                [pairs[row, i + j] for j in range(len(tokens))] == labels
            )  # fmt: skip
            assert at >= 0
            assert mask == [float(token != END) for token in tokens]
        gaps = found.loss_mask.sum() <= sum(found.lengths)
        assert gaps and found.tokens.shape == (1, 96)


def test_the_first_loss_must_be_that_of_untrained_weights() -> None:
    uniform = math.log(65536)
    low, high = expected_first_loss(SLICE)
    assert low < uniform < high
    assert high - uniform == pytest.approx(1 + 4096 * 0.02**2 / 2)
    check_first_loss(SLICE, uniform + 0.8)
    for bad in (0.1, uniform - 1.5, uniform + 3, float("nan"), float("inf")):
        with pytest.raises(CppmegaError, match="first-loss-implausible"):
            check_first_loss(SLICE, bad)


LINE = (
    " [2026-01-02 03:04:05.678901] iteration        7/      50 | consumed samples:            7 |"
    " elapsed time per iteration (ms): 671.0 | throughput per GPU (TFLOP/s/GPU): 46.5 |"
    " learning rate: 6.000000E-06 | global batch size:     1 | lm loss: 1.112345E+01 |"
    " mtp_1 loss: 1.122345E+01 | loss scale: 1.0 | grad norm: 4.310 |"
    " number of skipped iterations:   0 | number of nan iterations:   0 |"
)


def log(
    tmp_path: Path, mock: bool = False, recipe: Any = SLICE, **options: Any
) -> tuple[list[str], Any]:
    """A log around a list, and the function that Megatron would print with."""
    said: list[str] = []
    file = tmp_path / "m.jsonl"
    given = {"squares": lambda: None, "peak": lambda: 61.5, "metrics": file, **options}
    own = Log(recipe, 1, mock=mock, **given)
    return said, own.around(said.append, lambda: True)


def test_a_log_line_says_both_throughputs(tmp_path: Path) -> None:
    said, say = log(tmp_path)
    say(LINE)
    assert said[0].startswith(LINE)
    ours = flops(SLICE) * 4096 / 0.671 / 1e12
    assert f"with every layer counted (TFLOP/s/GPU): {ours:.1f} |" in said[0]
    assert "tokens/s: 6104 |" in said[0] and "peak memory (GiB): 61.5 |" in said[0]
    assert MOCK not in said[0]
    row = json.loads((tmp_path / "m.jsonl").read_text())
    assert (row["step"], row["loss"], row["grad_norm"]) == (7, 11.12345, 4.31)
    assert row["tflops_per_gpu_by_megatron"] == 46.5
    assert row["losses"] == {"lm loss": 11.12345, "mtp_1 loss": 11.22345}
    assert row["tokens_per_second"] == pytest.approx(4096 / 0.671)


def test_mock_data_marks_every_line_with_a_throughput(tmp_path: Path) -> None:
    said, say = log(tmp_path, mock=True)
    say(LINE)
    say("saving checkpoint")
    assert said[0].count(MOCK) == 2 and said[0].strip().startswith(MOCK)
    assert said[1] == "saving checkpoint"
    assert json.loads((tmp_path / "m.jsonl").read_text())["mock_data"] is True


def test_every_line_of_a_part_of_a_model_says_so(tmp_path: Path) -> None:
    said, say = log(tmp_path, recipe=recipes_index.load("nam56r_h100_1gpu_cut"))
    say(LINE)
    say("saving checkpoint")
    assert all(line.startswith(" CUT MODEL: 24 of 52 layers |") for line in said)
    assert said[0].count("lm loss") == 1 and said[1].endswith("saving checkpoint")


def test_a_profiled_step_is_marked(tmp_path: Path) -> None:
    disturbed = iter([True, False])
    said, say = log(tmp_path, profiled=lambda: next(disturbed))
    say(LINE)
    say(LINE)
    assert [line.endswith(" PROFILED |") for line in said] == [True, False]
    rows = map(json.loads, (tmp_path / "m.jsonl").read_text().splitlines())
    assert [row["profiled"] for row in rows] == [True, False]


def test_a_line_ends_with_the_pools_of_cuda_graphs_where_there_are_any(tmp_path: Path) -> None:
    pools = iter([None, 3.2109375])
    said, say = log(tmp_path, graph_pools=lambda: next(pools))
    say(LINE)
    say(LINE)
    assert said[0].endswith(" peak memory (GiB): 61.5 |")
    assert said[1].endswith(" peak memory (GiB): 61.5 | CUDA graphs (GiB): 3.2 |")
    rows = metrics.steps(tmp_path / "m.jsonl")
    assert [row.graph_pool_gib for row in rows] == [None, 3.2109375]


def test_a_line_has_the_load_of_the_experts_and_its_row_that_of_each_layer(tmp_path: Path) -> None:
    said, say = log(tmp_path, expert_load=lambda: ((0.31, 1.4), (0.62, 1.926)))
    say(LINE)
    assert said[0].endswith(" | experts' load: 0.31 to 1.93 of the mean |")
    (row,) = metrics.steps(tmp_path / "m.jsonl")
    assert row.expert_load == ((0.31, 1.4), (0.62, 1.926))


def test_a_spike_is_marked_in_its_line(tmp_path: Path) -> None:
    said, say = log(tmp_path)
    for _ in range(20):
        say(LINE)
    say(LINE.replace("4.310", "43.10"))
    say(LINE)
    assert [at for at, line in enumerate(said) if "SPIKE" in line] == [20]
    assert "| SPIKE: grad norm 43.1 (median of the last 20: 4.31) |" in said[20]


@pytest.mark.parametrize("number", ["1.112345E+01", "4.310"])
def test_a_logged_nan_is_kept_and_stops_the_run(number: str, tmp_path: Path) -> None:
    said, say = log(tmp_path)
    with pytest.raises(CppmegaError, match="step-not-finite"):
        say(LINE.replace(number, "nan"))
    row = json.loads((tmp_path / "m.jsonl").read_text())
    assert math.isnan(row["loss"]) or math.isnan(row["grad_norm"])
    assert len(said) == 1


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
    command = [sys.executable, "-W", "ignore", str(REPOSITORY / "scripts" / "prepare_data.py")]
    environment = {"PYTHONPATH": str(REPOSITORY), "PATH": "", "OMP_NUM_THREADS": "1"}
    source = folder / "text.txt"
    source.write_text("\n\n".join(f"Paragraph {n} of {n * n} in all." for n in range(800)))
    subprocess.run(
        [*command, "--out", str(folder / "own"), str(source)],
        check=True,
        env=environment,
        capture_output=True,
    )
    unseen = folder / "unseen.txt"
    unseen.write_text("".join(f"{n:08}" for n in range(4608)))  # 9 sequences of 4096
    subprocess.run(
        [*command, "--out", str(folder / "unseen"), str(unseen)],
        check=True,
        env=environment,
        capture_output=True,
    )
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
        "tokenizer file": ("tokenizer-not-found", [*own, "--tokenizer", "gone.json"], {}),
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
        "mixers": ("variable-differs", own, {"CPPMEGA_MAMBA3": "{}"}),
        "loop": ("not-supported", ["smoke_cpu", "--mock-data"], {}),
        "unpatched": ("patch-missing", own, {}),
        "profile": ("profile-beyond-run", [*own, "--profile", "41"], {}),
        "none held out": ("no-held-out-data", [*own, "--set", "eval_interval=5"], {}),
        "held out, unused": ("held-out-data-unused", [*own, "--held-out", own[2]], {}),
        "held out, trained on": ("held-out-data-trained-on", held_out(own[2]), {}),
        "held out, too small": (
            "held-out-data-too-small",
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


# What comes after the checks, on CPU: parser, datasets, forward step, loss, and the GPU that is
# not there.
STEP = """
import json, math, os, sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from tests.support.te_stand_ins import install

install()
from cppmega.overlay import record as overlay_record
from cppmega.recipe import index as recipes_index
from cppmega.training import nonfinite
from cppmega.recipe.render import render
from cppmega.recipe.run_options import RunOptions
from cppmega.errors import CppmegaError
from cppmega.training import pretrain, requirements
from cppmega.training.batch import DataTokens, dataset_provider, next_batch
from cppmega.training.plan import TrainingPlan
from cppmega.training.step import ForwardStep
from megatron.core.fusions import fused_softmax
from megatron.core.models.gpt import gpt_layer_specs as specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.rerun_state_machine import initialize_rerun_state_machine
from megatron.core.timers import Timers
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training import arguments, global_vars, training

out = {}
folder = Path(os.environ["CORPUS"])


def named(call):
    try:
        call()
        return "accepted"
    except CppmegaError as error:
        return error.name + ": " + error.what


slice_ = recipes_index.load("nam56r_h200_slice")
tokens = DataTokens(slice_.vocab_size, 256, "abc")


def ready(recipe, options=RunOptions(data=("own",))):
    line = render(recipe, "0.19.2", options)
    return TrainingPlan(recipe, options, line, tokens, None, "d1g3st")


def checked(plan):
    sys.argv = ["train", *plan.rendered.argv]
    requirements.check_arguments(plan.recipe, plan.options, pretrain.parse(arguments, plan))


out["good"] = named(lambda: checked(ready(slice_)))
out["unknown"] = named(lambda: checked(ready(slice_.plus("--no-such-thing"))))
out["precision"] = named(lambda: checked(ready(slice_.plus("--fp8-format", "hybrid"))))
out["context"] = named(lambda: checked(ready(slice_.plus("--context-parallel-size", "2"))))
lying = replace(
    ready(slice_, RunOptions(mock_data=True)), options=RunOptions(data=("own",)))
out["mock"] = named(lambda: checked(lying))
off = ready(slice_)
off = replace(off, rendered=replace(
    off.rendered, argv=(*off.rendered.argv, "--no-check-for-nan-in-loss-and-grad")))
out["nan"] = named(lambda: checked(off))
sys.argv = ["train", *ready(slice_).rendered.argv]
args = pretrain.parse(arguments, ready(slice_))
out["in the checkpoint"] = [args.cppmega_recipe, args.cppmega_overlay, args.cppmega_data]
out["patches"] = overlay_record.parse(args.cppmega_patches).digest
out["gpu"] = named(lambda: pretrain.pretrain(ready(slice_)))

# Real data through Megatron's datasets.
small = recipes_index.load("smoke_cpu")
small = small.with_(seq_length=64, micro_batch_size=2, global_batch_size=2)
plain = small.with_(packed_documents=False, document_multiple=1)
prefix = str(folder / "own")
train, valid, test = dataset_provider(small, tokens, [prefix], str(folder / "cache"))([8, 0, 0])
out["datasets"] = [len(train) >= 8, valid is None, test is None]
text = (folder / "own.bin").read_bytes()
ids = torch.frombuffer(bytearray(text), dtype=torch.uint16).long().tolist()
one = train[0]
window = one["tokens"].tolist()
out["real tokens"] = any(ids[i : i + 64] == window for i in range(len(ids)))
out["labels follow"] = one["labels"][:-1].tolist() == window[1:]
mock_set = dataset_provider(small, tokens, [], None)([8, 0, 0])[0]
out["mock"] = [out["mock"], type(mock_set).__name__]

# A forward and backward pass of a real model on it, and on packed documents of known tokens.
config = TransformerConfig(
    num_layers=1, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True,
    mtp_num_layers=1, normalization="RMSNorm", add_bias_linear=False)
spec = specs.get_gpt_layer_local_spec(normalization="RMSNorm")
model = GPTModel(
    config, spec, vocab_size=257, max_sequence_length=64, position_embedding_type="rope",
    mtp_block_spec=specs.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False))
# The default mask is made on "cuda".
fused_softmax.get_default_causal_mask = lambda sq: torch.ones(sq, sq).triu(1).bool()
initialize_rerun_state_machine()
global_vars._GLOBAL_TIMERS = Timers(0, "max")
loader = torch.utils.data.DataLoader([train[i] for i in range(4)], batch_size=2)
step = ForwardStep(plain, 256, "cpu", fresh=True)
output, loss = step(iter(loader), model)
total, count, report = loss(output)
total.backward()
out["loss"] = [float(total / count), int(count), report["lm loss"].tolist()]
out["gradients"] = all(p.grad is not None for p in model.parameters())
out["squares"] = [step.taken_squares(), step.taken_squares()]
again = ForwardStep(plain, 256, "cpu", fresh=True)
out["first loss"] = named(lambda: again.loss(torch.ones(2, 64), torch.full((2, 64), 1.0)))
resumed = ForwardStep(plain, 256, "cpu", fresh=False)
out["resumed"] = named(lambda: resumed.loss(torch.ones(2, 64), torch.full((2, 64), 1.0)))
bad = torch.full((2, 64), 1.0)
bad[0, 3] = float("nan")
out["nan loss"] = named(lambda: resumed.loss(torch.ones(2, 64), bad))


def broken_step():
    output, loss = resumed(iter(loader), model)
    loss(output)


# Which layer first: an output that is not finite, a weight, a gradient; then all is well again.
poison = float("nan")
hook = model.decoder.layers[0].register_forward_hook(lambda m, i, o: (o[0] * poison, *o[1:]))
out["nan layer"] = named(broken_step)
hook.remove()
weight = model.decoder.layers[0].mlp.linear_fc1.weight
kept = weight.detach().clone()
weight.data[3, 3] = float("inf")
out["inf weight"] = named(broken_step)
weight.data.copy_(kept)
out["healthy again"] = named(broken_step)
# Nothing is kept of a pass: not of one whose loss is fine, not of a stage that has no loss, not
# of layers that run again in the backward pass; and modules that become CUDA graphs get no hook.
watch = resumed._watch
out["kept"] = [len(watch._outputs)]
model.post_process, kept_output = False, model.post_process
watch.begin(model)
model.decoder.layers[0](torch.ones(4, 1, 64), attention_mask=None)
out["kept"].append(len(watch._outputs))
watch.passed(model)
out["kept"].append(len(watch._outputs))
model.post_process = kept_output
watch.begin(model)
watch.passed(model)
model.decoder.layers[0](torch.ones(4, 1, 64), attention_mask=None)
out["kept"].append(len(watch._outputs))
graphs = nonfinite.Watch()
hooks = len(model.decoder.layers[0]._forward_hooks)
config.cuda_graph_impl = "transformer_engine"
graphs.begin(model)
config.cuda_graph_impl = "none"
out["kept"].append(len(model.decoder.layers[0]._forward_hooks) - hooks)
out["unseen"] = graphs.origin()
model.zero_grad()
spoil = lambda gradient: gradient * poison
hook = model.decoder.layers[0].register_forward_hook(
    lambda m, i, o: o[0].register_hook(spoil) and None)
output, loss = resumed(iter(loader), model)
loss(output)[0].backward()
hook.remove()


def train_step(forward_step, data_iterator, model):  # what Megatron's raises with --rerun-mode
    raise RuntimeError("Rank 0: Unexpected result nan (message='found NaN in local grad norm')")


out["nan gradient"] = named(lambda: nonfinite.around_train_step(train_step)(step, None, [model]))
# An MTP depth that is lost leaves the main loss as it was.
model.zero_grad()
hook = model.mtp.layers[0].register_forward_hook(lambda m, i, o: (o[0] * poison, *o[1:]))
output, loss = resumed(iter(loader), model)
loss(output)[0].backward()
hook.remove()
out["nan mtp"] = named(lambda: nonfinite.around_train_step(train_step)(step, None, [model]))
model.zero_grad()

rows = torch.tensor([[1, 2, 256, 3, 4, 5, 6, 256, 7], [8, 9, 10, 11, 256, 12, 13, 14, 15]])
batch = {"tokens": rows[:, :-1], "labels": rows[:, 1:], "loss_mask": torch.ones(2, 8),
         "position_ids": torch.zeros(2, 8, dtype=torch.long)}
short = small.with_(seq_length=8, document_multiple=4)
packed = next_batch(short, iter([batch]), 256, "cpu")
params = packed.packed_seq_params
out["packed"] = {
    "tokens": packed.tokens.tolist(), "positions": packed.position_ids.tolist(),
    "real": params.cu_seqlens_q.tolist(), "padded": params.cu_seqlens_q_padded.tolist(),
    "total": params.total_tokens, "longest": params.max_seqlen_q,
    "seq_idx": params.seq_idx.tolist(), "sample": params.tokens_per_sample,
    "between": params.pad_between_seqs, "real rows": int(params.real_token_mask_q.sum())}


def model_of_even_odds(tokens, position_ids, attention_mask, **given):
    out["given to the model"] = [
        attention_mask is None, given["labels"].tolist() == packed.labels.tolist(),
        given["packed_seq_params"].cu_seqlens_q.tolist()]
    return torch.full(tokens.shape, math.log(257))


model_of_even_odds.named_modules = lambda: iter(())
step = ForwardStep(short, 256, "cpu", fresh=True)
output, loss = step(iter([batch]), model_of_even_odds)
total, count, _ = loss(output)
out["packed step"] = [float(total / count), int(count), step.taken_squares()]
out["counted by megatron"] = training._seqlen_stats_in_iteration.tolist()
unpadded = next_batch(short.with_(document_multiple=1), iter([batch]), 256, "cpu")
out["unpadded"] = [unpadded.packed_seq_params.cu_seqlens_q.tolist(),
                   unpadded.packed_seq_params.cu_seqlens_q_padded is None]
# A tensor on the meta device has no values: reading one back, as a host sync does, raises.
meta = next_batch(short, iter([batch]), 256, "meta")
out["no value read back"] = [meta.tokens.device.type, meta.packed_seq_params.seq_idx.device.type]
print("ANSWER" + json.dumps(out))
"""


@pytest.fixture(scope="module", name="stepped")
def after_the_checks(corpus: Path) -> dict[str, Any]:
    """What happened in a process that went as far as it can without a GPU."""
    done = python(pristine("0.19.2"), STEP, env={"CORPUS": str(corpus)})
    assert "ANSWER" in done.stdout, done.stdout[-500:] + done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.partition("ANSWER")[2])
    return answer


@pytest.mark.megatron
def test_what_the_parser_reads_is_checked_again(stepped: dict[str, Any]) -> None:
    assert stepped["good"] == "accepted"
    assert stepped["unknown"].startswith("argument-refused")
    assert "--no-such-thing" in stepped["unknown"]
    assert stepped["precision"].startswith("precision-differs")
    assert stepped["context"].startswith("not-supported")
    assert stepped["mock"][0].startswith("mock-data-differs")
    assert stepped["nan"].startswith("nan-checks-off")


@pytest.mark.megatron
def test_checkpoints_carry_recipe_overlay_and_data(stepped: dict[str, Any]) -> None:
    assert stepped["in the checkpoint"] == ["nam56r_h200_slice", "d1g3st", "abc"]
    assert stepped["patches"] == "d1g3st"


@pytest.mark.megatron
def test_without_a_gpu_it_says_so(stepped: dict[str, Any]) -> None:
    assert stepped["gpu"].startswith("no-gpu")


@pytest.mark.megatron
def test_the_datasets_hold_the_prepared_text(stepped: dict[str, Any]) -> None:
    assert stepped["datasets"] == [True, True, True]
    assert stepped["real tokens"] and stepped["labels follow"]
    assert stepped["mock"][1] == "MockGPTDataset"


@pytest.mark.megatron
def test_one_step_of_a_real_model(stepped: dict[str, Any]) -> None:
    loss, count, report = stepped["loss"]
    assert loss == pytest.approx(math.log(257), abs=0.3)
    assert count == 128
    assert report == pytest.approx([loss * count, count])
    assert stepped["gradients"]
    assert stepped["squares"] == [64.0, None]


@pytest.mark.megatron
def test_an_implausible_first_loss_and_nan_stop_the_run(stepped: dict[str, Any]) -> None:
    assert stepped["first loss"].startswith("first-loss-implausible")
    assert stepped["resumed"] == "accepted"
    assert stepped["nan loss"].startswith("loss-not-finite: The loss is NaN")


@pytest.mark.megatron
def test_what_is_not_finite_is_said_with_the_layer_it_began_in(stepped: dict[str, Any]) -> None:
    assert "decoder.layers.0 is the first layer whose output is not finite" in stepped["nan layer"]
    assert "the loss of MTP depth 1 is not finite" in stepped["nan mtp"]
    assert "the weights of decoder.layers.0 are not finite" in stepped["inf weight"]
    assert "mlp.linear_fc1.weight" in stepped["inf weight"]
    assert stepped["healthy again"] == "accepted"
    assert stepped["kept"] == [0, 1, 0, 0, 0]
    assert "cuda_graph_impl=none" in stepped["unseen"]
    said = stepped["nan gradient"]
    assert said.startswith("gradient-not-finite: found NaN in local grad norm")
    assert "the gradient of decoder.layers.0.mlp.linear_fc2.weight [64, 256] is the first" in said


@pytest.mark.megatron
def test_packed_documents_as_megatron_gets_them(stepped: dict[str, Any]) -> None:
    found = stepped["packed"]
    assert found["padded"] == [0, 4, 8, 16]
    assert found["real"] == [0, 3, 7, 12]
    assert found["tokens"][0][:8] == [1, 2, 256, 256, 3, 4, 5, 6]
    assert found["positions"][0][8:13] == [0, 1, 2, 3, 4]
    assert (found["total"], found["longest"], found["sample"]) == (16, 8, 8)
    assert found["seq_idx"] == [[0] * 4 + [1] * 4 + [2] * 8]
    assert stepped["given to the model"] == [True, True, found["real"]]
    # Documents of 3, 4 and 5 tokens; the second one is cut before its end.
    assert stepped["packed step"] == [pytest.approx(math.log(257)), 10, (9 + 16 + 25) / 12]
    assert stepped["counted by megatron"] == [12, 9 + 16 + 25]
    assert found["between"] is True and found["real rows"] == 12
    assert stepped["unpadded"] == [[0, 3, 8, 13, 16], True]


@pytest.mark.megatron
def test_nothing_is_read_back_from_the_device(stepped: dict[str, Any]) -> None:
    assert stepped["no value read back"] == ["meta", "meta"]


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
        mock.patch.object(profiler, "check_profiler", lambda on_gpu: None), \
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
    assert launch["profiled without CUDA"] == "profiler-missing" and launch["profiles"]
    if version != "0.17.1":
        wanted = "NoneType" if version == "0.18.2" else "HybridModelConfig"
        assert (launch["model"], launch["overlay"]) == (wanted, "d1g3st")
