"""A DSA backend that is named and cannot run is refused when its layer is built, or at the call."""

from __future__ import annotations

import json
from functools import cache

import pytest

from tests.support import patched, pristine, python

LIMITS, ATTENTION, INDEXER = "dsa_backend_limits", "dsa_attention_kernels", "dsa_indexer_kernels"
V32 = {"kv_lora_rank": 512, "qk_pos_emb_head_dim": 64}
NAM56R = {"kv_lora_rank": 64, "qk_pos_emb_head_dim": 64}
TILELANG = {
    "fits": (V32, None),
    "widths": (NAM56R, "queries of 128 with values of 64"),
    "heads": ({**V32, "num_attention_heads": 48, "tensor_model_parallel_size": 2}, "24 heads"),
    "few heads": ({**V32, "num_attention_heads": 8}, None),
    "fp32": ({**V32, "bf16": False}, "bf16"),
    "keys": ({**V32, "dsa_indexer_topk": 200}, "200 keys"),
    "dense loss": ({**V32, "dsa_indexer_use_sparse_loss": False}, "loss over all keys"),
    "no loss": (
        {**V32, "dsa_indexer_use_sparse_loss": False, "dsa_indexer_loss_coeff": 0.0},
        None,
    ),
    "index heads": ({**V32, "dsa_indexer_n_heads": 12}, "12 index heads"),
    "unfused": ({**V32, "attention_backend": "unfused"}, "attention_backend=unfused"),
}
CUDNN = {
    "fits": ({**V32, "dsa_indexer_use_sparse_loss": False}, None),
    "widths": (NAM56R, "queries of 128 with values of 64"),
    "fp16": ({**V32, "bf16": False, "fp16": True}, "bf16"),
    "shared keys": (
        {**V32, "dsa_indexer_use_sparse_loss": False, "dsa_indexer_topk_freq": 2},
        "layers share",
    ),
}

BUILD = """
import json, os
from types import SimpleNamespace
from unittest import mock

from cppmega.proof import stand_ins

stand_ins.tilelang()

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.transformer_config import MLATransformerConfig

GIVEN = dict(
    num_layers=1, hidden_size=64, num_attention_heads=32, q_lora_rank=16, qk_head_dim=16,
    v_head_dim=16, add_bias_linear=False, experimental_attention_variant="dsa",
    dsa_indexer_n_heads=32, dsa_indexer_head_dim=64, dsa_indexer_topk=256, rope_type="rope",
    dsa_indexer_loss_coeff=0.5, dsa_indexer_use_sparse_loss=True, bf16=True,
    params_dtype=torch.bfloat16,
)


def configured(backend, **fields):
    config = MLATransformerConfig(**GIVEN)
    # Afterwards: Megatron asks for a GPU where a backend is named.
    for name, value in {"dsa_kernel_backend": backend, **fields}.items():
        setattr(config, name, value)
    return config


def refused(call, *given, **named):
    try:
        call(*given, **named)
    except Exception as error:
        assert error.name == "dsa-backend-declines", error
        return error.what


def build(config):
    with mock.patch.object(dsa, "build_module"):
        groups = SimpleNamespace(tp=None, cp=None)
        dsa.DSAttention(config, mock.Mock(), 1, AttnMaskType.causal, "self", pg_collection=groups)


def attend(config, type=torch.bfloat16, per_head=False):
    width = config.kv_lora_rank + config.qk_pos_emb_head_dim
    query = torch.randn(3, 1, 16, width, dtype=type)
    key = torch.randn(3, 1, 16 if per_head else 1, width, dtype=type)
    absent = dict.fromkeys(("mask", "varlen_starts", "varlen_ends", "key_positions"))
    dsa._run_sparse_attention(
        absorbed_mla=not per_head, query=query, key=key, value=key if per_head else None,
        up_v_weight=torch.randn(16, 4, config.kv_lora_rank, dtype=type), softmax_scale=1.0,
        topk_indices=torch.zeros(1, 3, 64, dtype=torch.int32), config=config, **absent,
    )


found = {}
for backend, cases in json.loads(os.environ["CASES"]).items():
    found[backend] = {
        name: refused(build, configured(backend, **fields)) for name, (fields, _) in cases.items()
    }
tilelang = configured("tilelang", kv_lora_rank=64, qk_pos_emb_head_dim=64)
found["calls"] = {
    "absorbed": refused(attend, tilelang),
    "fp16": refused(attend, tilelang, torch.float16),
    "a key per head": refused(attend, tilelang, per_head=True),
    "no backend": refused(attend, configured("none", kv_lora_rank=64, qk_pos_emb_head_dim=64)),
}
print(json.dumps(found))
"""


@cache
def answers(*pages: str) -> dict[str, dict[str, str | None]]:
    """What a tree with some pages says of every case."""
    cases = {"tilelang": TILELANG, "cudnn": CUDNN, "none": {"widths": (NAM56R, None)}}
    root = patched("0.19.2", *pages) if pages else pristine("0.19.2")
    done = python(root, BUILD, env={"CASES": json.dumps(cases)})
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, str | None]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(("backend", "cases"), [("tilelang", TILELANG), ("cudnn", CUDNN)])
def test_what_a_configuration_shows_is_refused_when_the_layer_is_built(
    backend: str, cases: dict[str, tuple[dict[str, object], str | None]]
) -> None:
    said = answers(LIMITS)[backend]
    for name, (_, limit) in cases.items():
        if limit is None:
            assert said[name] is None, name
        else:
            assert limit in str(said[name]) and backend in str(said[name]), name
    assert not any(answers()[backend].values()), "stock builds them all"
    assert answers(LIMITS)["none"] == {"widths": None}


def test_what_only_a_call_shows_is_refused_at_the_call() -> None:
    said = answers(LIMITS)["calls"]
    assert "queries (3, 1, 16, 128) in bfloat16" in str(said["absorbed"])
    assert "float16" in str(said["fp16"]) and "values" in str(said["a key per head"])
    assert said["no backend"] is None
    assert not any(answers()["calls"].values())


def test_what_other_pages_serve_has_no_limit() -> None:
    alone, attention = answers(LIMITS), answers(LIMITS, ATTENTION)
    both = answers(LIMITS, ATTENTION, INDEXER)
    lifted = {"widths", "heads", "keys"}
    for name, said in alone["tilelang"].items():
        assert attention["tilelang"][name] == (None if name in lifted else said), name
    left = {name for name, said in both["tilelang"].items() if said}
    assert left == {"fp32", "unfused"}
    assert not any(attention["calls"].values())
    for served in (attention, both):  # the backend cudnn keeps its own kernels
        assert served["cudnn"] == alone["cudnn"]
