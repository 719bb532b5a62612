"""A call that the kernels of a page decline ends training, on a patched copy of Megatron.

Each page whose code asks `served` has such a call here.
"""

from __future__ import annotations

import ast
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from cppmega.host.paths import PACKAGE, shipped
from tests.support import VERSIONS, patched, python

SETTING = """
import importlib, json
from types import SimpleNamespace
from unittest import mock

import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.moe import moe_utils

from cppmega.calls import CallDeclinedError, allowing
from cppmega.catalogue import loader as catalogue
from cppmega.proof import cpu_shims, small_models, stand_ins

cpu_shims.init_distributed()
torch.manual_seed(0)
pages = catalogue.package_of(catalogue.builtin_folder() / "losses").rpartition(".")[0]
linear_ce = importlib.import_module(f"{pages}.losses._linear_ce.proof")
layer = importlib.import_module(f"{pages}._dsa_layer").layer

def with_own_loss(model):
    model.compute_language_model_loss = lambda labels, logits: logits.sum(-1)
    model(**small_models.arguments(model))
"""
DECLINED = {
    "dsa_attention_kernels": """
q, k, v = torch.randn(3, 6, 1, 2, 4)
dsa.unfused_dsa_fn(q, k, v, torch.zeros(1, 6, 2).long(), 0.3, mask=torch.full((1, 6, 6), -1e4))
""",
    "dsa_indexer_kernels": """
q, k, weights = torch.randn(6, 1, 2, 4), torch.randn(6, 1, 4), torch.randn(6, 1, 2)
x, heads = torch.randn(6, 1, 8), torch.randn(6, 1, 3, 4)
layer(q, k, weights, 3)(heads, heads, heads, torch.ones(1, 1, 6, 6).bool().triu(1), x, x)
""",
    "dsa_indexer_prologue": """
with mock.patch.object(dsa, "rotate_activation", lambda x: x):
    hidden, latent = (torch.randn(24, 2, n).bfloat16() for n in (64, 32))
    small_models.dsa_index_inputs(small_models.dsa_indexer(), hidden, latent)
""",
    "dsa_sparse_mla_widths": """
stand_ins.tilelang()
ops = "megatron.core.transformer.experimental_attention_variant.ops"
stand_ins.forget(ops)
hook = importlib.import_module(f"{ops}.tilelang_dsa").fused_sparse_mla_absorbed
q, kv = torch.randn(8, 1, 16, 320).bfloat16(), torch.randn(8, 1, 1, 320).bfloat16()
hook(q, kv, torch.zeros(1, 8, 64).long(), 0.1, 256)
""",
    "embedding_gradient_rows": """
words = small_models.gpt().embedding.word_embeddings.double()
words.config.gradient_accumulation_fusion = True
words.weight.main_grad = torch.zeros_like(words.weight)
with stand_ins.on_gpu("pointwise.embedding_triton"):
    words(torch.zeros(1, 4).long())
""",
    "expert_gelu_kernel": """
from megatron.core.transformer.moe.experts import TEGroupedMLP
off = type("Off", (), {"__getattr__": lambda self, name: False})()
linear = type("Linear", (torch.nn.Module,), {"forward": lambda self, x, splits: (x, None)})
own = TEGroupedMLP.__new__(TEGroupedMLP)
torch.nn.Module.__init__(own)
own.config, own.linear_fc1, own.linear_fc2 = off, linear(), linear()
own.activation_func, own._with_fused_impl = torch.nn.functional.gelu, False
own.offload_expert_fc1 = own.offload_moe_act = own.activation_recompute = False
with stand_ins.on_gpu("pointwise.weighted_gelu_triton"):
    own(torch.randn(5, 8).double(), torch.tensor([2, 3]), torch.rand(5))
""",
    "linear_ce_gpt_head": "with_own_loss(linear_ce.gpt())",
    "linear_ce_hybrid_head": "with_own_loss(linear_ce.hybrid())",
    "mla_query_key_kernel": """
with stand_ins.on_gpu("pointwise.mla_heads_triton"):
    mla = small_models.mla_attention().double()
    mla.get_query_key_value_tensors(torch.randn(5, 2, 32).double())
""",
    "mla_rope_kernel": """
t, angles = torch.randn(3, 2, 2, 8).double(), torch.randn(3, 1, 1, 6)
with stand_ins.on_gpu("pointwise.rope_triton"):
    rope_utils._apply_rotary_pos_emb_bshd(t, angles, False, True, 1.0)
""",
    "mtp_linear_ce": "with_own_loss(linear_ce.gpt(mtp=2))",
    "router_gating_backward": """
x, weight = torch.randn(5, 8).bfloat16(), torch.randn(129, 8).bfloat16().requires_grad_()
with mock.patch.object(moe_utils, "te_general_gemm", None, create=True):
    scores = moe_utils.RouterGatingLinearFunction.apply(x, weight, None, torch.float32)
with stand_ins.on_gpu("pointwise.router_gating_triton"):
    scores.sum().backward()
""",
}
RUN = """
found = {}
for page, call in CALLS.items():
    try:
        exec(call, globals())
    except CallDeclinedError as error:
        found[page] = [error.page, error.shapes]
print(json.dumps(found))
"""
WARNS = {
    "upstream_patches.embeddings.rope_thd_no_host_sync": "Megatron's own deprecation",
    "upstream_patches.graphs.te_graphs_hybrid_mtp": "--mtp-use-repeated-layer",
    "upstream_patches.losses.cross_entropy_fusion_linear": "a head has declined, or makes logits",
    "upstream_patches.mtp.mtp_full_recompute": "--recompute-method block, as in later releases",
    "upstream_patches.optimizer.float16_keep_fp32": "--use-torch-fsdp2",
    "runtime.dsa_index_share_checkpoints": "weights that a model does not have",
    "ops.linear_cross_entropy": "its backend; a head's fourth product",
}
"""Modules that warn of something else than a declined call."""


@pytest.mark.megatron
def test_each_page_ends_training_at_a_declined_call() -> None:
    done = python(patched(VERSIONS[-1]), f"CALLS = {DECLINED!r}\n{SETTING}{RUN}")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {page: named for page, (named, _) in found.items()} == {p: p for p in DECLINED}
    assert found["dsa_sparse_mla_widths"][1].startswith("query [8, 1, 16, 320] in bfloat16")


def test_each_page_that_can_decline_has_a_call_here() -> None:
    asking = {
        word.value
        for _, node in _calls()
        if _name(node).endswith("served") and len(node.args) + len(node.keywords) > 1
        for word in node.args[:1]
        if isinstance(word, ast.Constant)
    }
    heads = {"linear_ce_gpt_head", "linear_ce_hybrid_head", "mtp_linear_ce"}  # by their caller
    assert asking | heads == set(DECLINED)


def test_no_other_code_falls_back_with_a_warning() -> None:
    warning = {
        module for module, node in _calls() if _name(node) in ("warn", "warning", "say_once")
    }
    assert warning - {"features.linear_cross_entropy.heads"} == set(WARNS)


def _calls() -> Iterator[tuple[str, ast.Call]]:
    """Calls in pages, in the texts that they insert, and in what patched Megatron imports."""
    pages = shipped("upstream_patches")
    imported = [(PACKAGE / name, PACKAGE) for name in ("runtime", "features", "ops")]
    for folder, root in ((pages, pages.parent), *imported):
        for path in sorted(folder.rglob("*.py")):
            module = ".".join(path.relative_to(root).with_suffix("").parts)
            for text in _texts(path):
                for node in ast.walk(text):
                    if isinstance(node, ast.Call):
                        yield module.removesuffix(".__init__"), node


def _texts(path: Path) -> Iterator[ast.AST]:
    tree = ast.parse(path.read_text())
    yield tree
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _parsed(node.value)
        elif isinstance(node, ast.JoinedStr):
            parts = (p.value if isinstance(p, ast.Constant) else "given" for p in node.values)
            yield from _parsed("".join(map(str, parts)))


def _parsed(text: str) -> Iterator[ast.AST]:
    try:
        yield ast.parse(textwrap.dedent(text).strip())
    except SyntaxError:
        return


def _name(node: ast.Call) -> str:
    called = node.func
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
