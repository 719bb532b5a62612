"""Layers that are recomputed attend to the keys of their own forward, and nothing is left of it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import patched, pristine, python
from tests.upstream_patches.dsa_layers import patch_of

PAGE = "dsa_index_share_holder"
HEAD = """
import json, torch
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from cppmega.proof import cpu_shims
from tests.upstream_patches import dsa_models as models
from tests.upstream_patches.dsa_models import ATTENTION, FULL, Sets, gradients, loss, same

cpu_shims.init_distributed()
models.start()


@cache
def one_at_a_time(make, **given):
    # The weights of a model, and the gradients of two microbatches; nothing is recomputed.
    model, found = make(), []
    for number in (1, 2):
        loss(model, number, **given).backward()
        found.append(gradients(model))
    return model.state_dict(), found


def interleaved(make, evaluate=False, options=FULL, **given):
    # Forward 1, forward 2, backward 1, backward 2; against one microbatch at a time.
    weights, wanted = one_at_a_time(make, **given)
    model, sets = make(**options), Sets()
    model.load_state_dict(weights)
    try:
        with sets.of(model):
            sets.doing = "forward 1"
            first = loss(model, 1, **given)
            sets.doing = "forward 2"
            second = loss(model, 2, **given)
            if evaluate:
                sets.doing = "evaluation"
                with torch.no_grad():
                    loss(model.eval(), 3, **given)
                model.train()
            sets.doing = "backward 1"
            with ThreadPoolExecutor() as another_thread:  # as that of autograd on a GPU
                another_thread.submit(first.backward).result()
            found = [gradients(model)]
            sets.doing = "backward 2"
            second.backward()
            found.append(gradients(model))
    except RuntimeError as error:
        return {"error": str(error)}
    del first, second
    return {
        "kept": sets.kept(),
        "same": [same(a, b) for a, b in zip(found, wanted)],
        "left": models.left_over(model),
    }
"""
CASES = """
BLOCK = {**FULL, "recompute_method": "block", "recompute_num_layers": 2}
CHUNKS = {**FULL, "recompute_num_layers": 3}
models_of = {
    "gpt": models.gpt,
    "gpt, MTP": lambda **options: models.gpt(2, **options),
    "hybrid": lambda **options: models.hybrid("D-DD-D", dsa_indexer_topk_freq=3, **options),
    "hybrid, MTP": lambda **options: models.hybrid("DDDD", 2, **options),
}
mask = torch.ones(models.LENGTH, models.LENGTH, dtype=torch.bool).triu(1)[None, None]
found = {
    f"{name}: {how}": interleaved(make, options=options)
    for name, make in models_of.items()
    for how, options in (("full", FULL), ("selective", ATTENTION))
}
repeated = lambda **options: models.gpt(2, mtp_use_repeated_layer=True, **options)
sparse = lambda **options: models.gpt(dsa_indexer_use_sparse_loss=True, **options)
found |= {
    "block": interleaved(models.gpt, options=BLOCK),
    "chunks of layers": interleaved(models.gpt, options=CHUNKS),
    "evaluation": interleaved(models.gpt, evaluate=True),
    "mask": interleaved(models.gpt, mask=mask),
    "packed, MTP": interleaved(models_of["hybrid, MTP"], packed=True),
    "repeated depth": interleaved(repeated),
    "sparse loss": interleaved(sparse),
}
print(json.dumps(found))
"""


@cache
def answers(root: Path) -> dict[str, dict]:
    """What became of every case on a tree."""
    done = python(root, HEAD + CASES)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_layers_keep_to_the_keys_of_their_forward() -> None:
    for name, answer in answers(patched("0.19.2", PAGE)).items():
        assert answer == {"kept": True, "same": [True, True], "left": []}, name


def test_stock_uses_the_keys_of_another_forward() -> None:
    found = answers(pristine("0.19.2"))
    for name, answer in found.items():
        assert "error" in answer or not (answer["kept"] or all(answer["same"])), name
    assert "chosen keys" in found["gpt: full"]["left"] and len(found["gpt: full"]["left"]) > 2


GRAPHS, SCHEDULE = "dsa-index-share-in-graphs", "dsa-index-share-in-combined-schedule"


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({}, []),
        ({"cuda_graph_impl": "local"}, [GRAPHS]),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn"]}, [GRAPHS]),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["moe_router"]}, []),
        ({"cuda_graph_impl": "full_iteration"}, []),
        ({"overlap_moe_expert_parallel_comm": True}, [SCHEDULE]),
        ({"overlap_moe_expert_parallel_comm": True, "dsa_indexer_topk_freq": 1}, []),
    ],
)
def test_what_calls_no_stack_is_refused(
    given: dict[str, object], refused: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = patch_of(PAGE)
    args = SimpleNamespace(
        **{"experimental_attention_variant": "dsa", "dsa_indexer_topk_freq": 2, **given}
    )
    assert [error.name for error in patch.refuses(args, {})] == refused
    if args.dsa_indexer_topk_freq == 1:
        assert not patch.when(args)
        monkeypatch.setenv("CPPMEGA_INDEX_CACHE", "1")
        assert patch.when(args) and list(patch.refuses(args, {}))
