"""The parser, the datasets and a training step after the trainer's checks, on CPU."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from cppmega.errors import CppmegaError
from cppmega.training.step import check_first_loss, expected_first_loss
from tests.preflight.contexts import SLICE
from tests.support import pristine, python
from tests.training import corpora

pytestmark = pytest.mark.slow


def test_the_first_loss_must_be_that_of_untrained_weights() -> None:
    uniform = math.log(65536)
    low, high = expected_first_loss(SLICE)
    assert low < uniform < high
    assert high - uniform == pytest.approx(1 + 4096 * 0.02**2 / 2)
    check_first_loss(SLICE, uniform + 0.8)
    for bad in (0.1, uniform - 1.5, uniform + 3, float("nan"), float("inf")):
        with pytest.raises(CppmegaError, match="first-loss-implausible"):
            check_first_loss(SLICE, bad)


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
out["value"] = named(lambda: checked(ready(slice_.plus("--attention-backend", "nonsense"))))
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
def after_the_checks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What happened in a process that went as far as it can without a GPU."""
    corpus = tmp_path_factory.mktemp("corpus")
    corpora.paragraphs(corpus)
    done = python(pristine("0.19.2"), STEP, env={"CORPUS": str(corpus)})
    assert "ANSWER" in done.stdout, done.stdout[-500:] + done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.partition("ANSWER")[2])
    return answer


@pytest.mark.megatron
def test_what_the_parser_reads_is_checked_again(stepped: dict[str, Any]) -> None:
    assert stepped["good"] == "accepted"
    assert stepped["unknown"].startswith("argument-refused")
    assert "--no-such-thing" in stepped["unknown"]
    assert stepped["value"].startswith("argument-refused")
    assert "--attention-backend: KeyError: 'nonsense'" in stepped["value"]
    assert stepped["precision"].startswith("recipe-differs")
    assert stepped["context"].startswith("recipe-differs")
    assert stepped["mock"][0].startswith("recipe-differs")
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
    assert stepped["nan loss"].startswith("step-not-finite: The loss is NaN")


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
    assert said.startswith("step-not-finite: found NaN in local grad norm")
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
